"""ldlm check: is every file of an artifacts folder the one that was made?"""

from engines.cli import options as opt
from engines.cli._shared import say


def command(folder: opt.Folder) -> None:
    """Compare every file with its sha256; before the first start of a deployment, say."""
    from engines.api import Artifacts

    say(f"{folder}: {Artifacts(folder).check()} files are as they were made")
