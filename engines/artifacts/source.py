"""What is exported: a checkpoint, looked at without loading it, and the graphs wanted of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from engines.artifacts import ingredients
from engines.artifacts import manifest as manifests
from engines.artifacts.digests import Digests
from engines.artifacts.manifest import FileEntry, Manifest
from ldlm import checkpoint as checkpoints
from ldlm import files
from ldlm import tokenizer as tokenizers
from ldlm.config import LDLMConfig
from ldlm.errors import ArtifactError

# Peak memory of a process that exports one stage: a part for the libraries, and one for each byte
# of the stage's float32 parameters. The line lies above every peak measured at `base` (torch 2.13,
# Linux, GB): denoiser fp32 1.61, fp16 1.45; latent decoder fp32 1.41; token decoder fp32 1.04.
BASE_MEMORY, MEMORY_PER_BYTE = 1_300_000_000, 0.6
WORTH_WORKERS = 100_000_000  # bytes of a checkpoint


@dataclass(frozen=True)
class Source:
    """What is exported: a checkpoint folder, and what identifies it."""

    folder: Path
    digest: str
    config: LDLMConfig
    tokenizer: str | None

    @classmethod
    def of(cls, checkpoint: Path, digests: Digests) -> Source:
        """Look at a checkpoint without loading it.

        Raises:
            CheckpointError, ConfigError: it is not usable.
        """
        config = checkpoints.read_config(checkpoint)
        checkpoints.read_header(checkpoint / checkpoints.WEIGHTS)
        digest = digests.of(checkpoint / checkpoints.WEIGHTS)
        return cls(checkpoint, digest, config, checkpoints.read_tokenizer(checkpoint))

    @property
    def origin(self) -> tuple[str, LDLMConfig]:
        """What artifacts of it have in their manifest."""
        return (self.digest, self.config)

    def is_of(self, manifest: Manifest) -> bool:
        """Whether the artifacts are this checkpoint's."""
        return manifest.origin == self.origin

    def require_of(self, manifest: Manifest | None) -> Manifest:
        """The manifest to add to; two checkpoints are not mixed in one folder.

        Raises:
            ArtifactError: the artifacts are another one's, or gone.
        """
        if manifest is None:
            raise ArtifactError("the artifacts were removed during the export")
        if not self.is_of(manifest):
            raise ArtifactError(
                "the folder was given to another checkpoint during the export",
                expected=f"weights {self.digest}",
                got=f"weights {manifest.checkpoint}",
                remedy="export into a folder of its own",
            )
        return manifest

    def fresh(self) -> Manifest:
        """A manifest without graphs."""
        return Manifest(self.folder.resolve().name, self.digest, self.config)

    def stage_tokenizer(self, staging: Path) -> FileEntry | None:
        """Write tokenizer.json into a folder in `staging`, where there is one.

        Raises:
            TokenizerError: it does not fit the model.
        """
        if self.tokenizer is None:
            return None
        tokenizers.parse(self.tokenizer, self.config)
        path = staging / "tokenizer" / manifests.TOKENIZER
        path.parent.mkdir()
        path.write_text(self.tokenizer, "utf-8")
        files.sync_folder(path.parent)
        return FileEntry.of(path.parent, path)


@dataclass(frozen=True)
class Wanted:
    """A graph that shall be there, and all that it depends on.

    That is looked up before the code in question is imported, so that an edit during a long
    export is not taken for what was exported.
    """

    precision: str
    component: str
    made_from: dict[str, str]

    @classmethod
    def of(cls, source: Source, precision: str, component: str) -> Wanted:
        """What a component of a checkpoint in a precision depends on."""
        made_from = ingredients.graph_ingredients(component, precision, *source.origin)
        return cls(precision, component, made_from)

    def __str__(self) -> str:
        return f"{self.precision} {self.component}"

    def memory(self, source: Source) -> int:
        """Bytes of memory that a process needs to export it, at most."""
        return job_memory(source.folder, self.component, MEMORY_PER_BYTE)


def workers_for(checkpoint: Path) -> int | None:
    """1 for a checkpoint so small that starting workers takes longer than they save."""
    return 1 if (checkpoint / checkpoints.WEIGHTS).stat().st_size < WORTH_WORKERS else None


def job_memory(checkpoint: Path, component: str, per_byte: float) -> int:
    """Bytes of memory that a process needs: for its libraries, and for a component's parameters.

    Args:
        checkpoint: the checkpoint folder.
        component: what the process works on.
        per_byte: bytes for each byte of the component's float32 parameters.
    """
    header = checkpoints.read_header(checkpoint / checkpoints.WEIGHTS)
    own = f"{component}."
    parameters = sum(4 * math.prod(e.shape) for n, e in header.items() if n.startswith(own))
    return BASE_MEMORY + int(per_byte * parameters)
