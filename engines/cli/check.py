"""ldlm check: is every file of an artifacts folder the one that was made?"""

from __future__ import annotations

from engines.cli._shared import ArtifactsFolder, say


def command(folder: ArtifactsFolder) -> None:
    """Compare every file with its sha256; before the first start of a deployment, say."""
    from engines.api import Artifacts

    artifacts = Artifacts(folder)
    say(f"{folder}: {artifacts.check()} files are as they were made")
