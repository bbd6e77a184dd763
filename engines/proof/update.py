"""A folder's proof brought up to date: what has changed since it passed is measured again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.artifacts import folder as folders
from engines.artifacts.manifest import Manifest
from engines.memory import measured
from engines.proof.questions import NOTHING_MORE, ProofOptions
from engines.proof.records import Proof
from engines.proof.saved import current, read, reasons, save

Told = Callable[[str], None]


@dataclass(frozen=True)
class Update:
    """What a folder's proof has become; nothing is written yet.

    Attributes:
        proof: all of it: what was measured now, and what stands from before.
        new: what was measured now; without scopes where nothing has changed.
        run: wall seconds and peak memory of that.
    """

    folder: Path
    proof: Proof
    new: Proof
    run: dict[str, float]

    def save(self) -> None:
        """Write parity.json, and note the run in the manifest.

        Raises:
            DiskSpaceError, OSError: it cannot be written.
        """
        if self.new.scopes:
            with folders.updated(self.folder) as manifest:
                manifest.runs["verify"] = self.run
            save(self.folder, manifest, self.new)


def update(
    folder: Path,
    checkpoint: Path,
    precisions: Sequence[str] | None = None,
    options: ProofOptions = NOTHING_MORE,
    *,
    stages: Sequence[str] | None = None,
    again: bool = False,
    progress: Told = lambda _: None,
    say: Told = lambda _: None,
) -> Update:
    """Verify what has changed since it passed; `Update.save` writes it.

    Args:
        folder: the artifacts.
        checkpoint: what they were made from.
        precisions: which; None is every exported one that is fit for what is asked.
        options, stages: see `engines.proof.verify.verify`.
        again: also measure what has not changed.
        progress: told what is being done.
        say: told what is decided, and why.

    Raises:
        ArtifactError, CheckpointError: the folder or the checkpoint is not usable.
        ConfigError, SamplerError: something is asked that cannot be.
    """
    manifest = folders.load(folder)
    folders.require_origin(manifest, checkpoint)
    saved = read(folder)
    stale = []
    for name in _fit(manifest, options, say) if precisions is None else precisions:
        why = ("asked again",) if again else reasons(saved, manifest, name, options, stages)
        if why:
            stale.append(name)
            say(f"verify {name}: {'; '.join(why)}")
    before = current(saved.content or Proof(), manifest)
    if not stale:
        say("nothing has changed since this was verified (ldlm verify --again measures anew)")
        return Update(folder, before, Proof(), {})
    from engines.proof.verify import verify
    from ldlm.model import LDLM

    with measured() as run:
        model = LDLM.from_checkpoint(checkpoint)
        new = verify(folder, manifest, model, stale, progress, options, stages)
    return Update(folder, before.merged(new), new, run)


def _fit(manifest: Manifest, options: ProofOptions, say: Told) -> list[str]:
    """Every exported precision that is fit for what is asked; who is left out is said."""
    found = manifest.precisions()
    fit = [name for name in found if options.fits(name)]
    if fit and fit != found:
        left_out = ", ".join(name for name in found if name not in fit)
        say(f"left out: {left_out}, which this is not for")
    return fit or found
