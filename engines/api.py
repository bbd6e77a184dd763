"""An artifacts folder as one object: sample from it, prove it, build it.

The commands are thin over these two classes. Importing this module imports neither torch nor onnx
nor a runtime.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

from engines.artifacts import folder as folders
from engines.artifacts.build import Build
from engines.artifacts.export import Export
from engines.artifacts.ingredients import Decision
from engines.artifacts.manifest import Manifest
from engines.compile.target import chosen_target
from engines.proof.questions import NOTHING_MORE, ProofOptions
from engines.proof.records import Proof
from engines.proof.update import update
from engines.runtime.load import load_stages, load_tokenizer, require_runtime
from engines.tensorrt.profiles import profiles
from engines.tensorrt.targets import RTX
from export.precision import Precision
from ldlm import tokenizer as tokenizers
from ldlm.config import LDLMConfig
from ldlm.errors import ArtifactError, SamplerError
from ldlm.sampler import Ids, Run, SampleRequest, Stages, Step

__all__ = ["Artifacts", "SampleRequest", "Sampler", "SamplerRun", "Samples", "Step"]


@dataclass(frozen=True)
class Samples:
    """What one request gave.

    Attributes:
        texts: each up to its first end-of-text token.
        token_ids: [samples, T] int64, all of them.
        seconds: from the first step of the run to the last text.
    """

    texts: list[str]
    token_ids: Ids
    seconds: float


class SamplerRun(Run):
    """Requests on their way: iterate for the steps, then look at `samples`; see `ldlm.sampler.Run`.

    Leaving the loop, `close` or the end of a `with` cancels it.
    """

    def __init__(
        self,
        stages: Stages,
        requests: SampleRequest | Sequence[SampleRequest],
        decode: Callable[[Ids], list[str]],
    ) -> None:
        super().__init__(stages, requests)
        self._decode = decode

    @property
    def samples(self) -> list[Samples]:
        """One entry per request that is done."""
        return [Samples(self._decode(ids), ids, self.seconds) for ids in self.token_ids]


class Sampler:
    """Stages and tokenizer, loaded once; threads may share it, and every run has its own state.

    It is refused after a fork, which a runtime's threads do not survive, and cannot be pickled; an
    `Artifacts` can, and opens one anywhere.

    Attributes:
        config: of the model.
        runtime, precision: what it runs on and in.
    """

    def __init__(
        self, stages: Stages, tokenizer: Tokenizer, runtime: str, precision: Precision
    ) -> None:
        self.config: LDLMConfig = stages.config
        self.runtime, self.precision = runtime, precision
        self._stages: Stages | None = stages
        self._tokenizer = tokenizer
        self._process = os.getpid()

    def run(self, requests: SampleRequest | Sequence[SampleRequest]) -> SamplerRun:
        """Begin to sample; nothing is computed before the first step is asked for.

        Raises:
            SamplerError: an unusable request, or the sampler is closed or of another process.
        """
        if self._stages is None:
            raise SamplerError("the sampler is closed", remedy="open another one")
        if os.getpid() != self._process:
            raise SamplerError(
                "the sampler was opened in another process",
                expected=f"process {self._process}",
                got=f"process {os.getpid()}",
                remedy="open it after the fork, or start processes by spawn",
            )
        return SamplerRun(self._stages, requests, self.decode)

    def sample(self, samples: int = 1, **fields: Any) -> Samples:
        """Sample one request to its end; `fields` are those of `SampleRequest`."""
        run = self.run(SampleRequest(samples=samples, **fields))
        for _ in run:
            pass
        (found,) = run.samples
        return found

    def decode(self, ids: Ids, *, raw: bool = False) -> list[str]:
        """Texts of token ids [samples, T]; raw shows what comes after the end of the text too."""
        end = self.config.end_of_text
        return [tokenizers.decode(self._tokenizer, row, end, raw=raw) for row in ids.tolist()]

    def close(self) -> None:
        """Let go of the runtime; runs that are on their way end as they would."""
        self._stages = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise SamplerError(
            "a sampler cannot be pickled: it holds a runtime",
            remedy="pass the Artifacts, and open a sampler in the process that uses it",
        )


class Artifacts:
    """The artifacts of one checkpoint: a folder with a manifest, or one that shall be made.

    Args:
        folder: where they are, or will be.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def __repr__(self) -> str:
        return f"Artifacts({str(self.folder)!r})"

    @property
    def manifest(self) -> Manifest:
        """What the folder holds now.

        Raises:
            ArtifactError: there is no manifest, or it is damaged.
        """
        return folders.load(self.folder)

    @property
    def config(self) -> LDLMConfig:
        """Of the model."""
        return self.manifest.config

    def export(
        self,
        checkpoint: str | Path,
        precisions: Sequence[str | Precision] = ("fp32", "fp16"),
        progress: Callable[[str], None] = lambda _: None,
    ) -> list[Decision]:
        """Export what has changed; see `engines.artifacts.export.Export`."""
        return Export(Path(checkpoint), self.folder, _names(precisions)).run(progress)

    def build(
        self,
        precisions: Sequence[str | Precision] | None = None,
        *,
        target: str = RTX,
        sms: str = "all",
        names: Sequence[str] | None = None,
        batch: Sequence[int] | None = None,
        length: Sequence[int] | None = None,
        unfused: bool = False,
        progress: Callable[[str, int, int], None] = lambda *_: None,
    ) -> list[Decision]:
        """Compile the engines that have changed; see `engines.artifacts.build.Build.run`.

        Args:
            precisions: None is every exported one that TensorRT takes.
            target, sms, unfused: see `engines.compile.target.chosen_target`.
            names, batch, length: see `engines.tensorrt.profiles.profiles`.
            progress: told (what, step, steps).
        """
        chosen = None if precisions is None else _names(precisions)
        ranges = profiles(self.config, names, batch, length)
        build = Build(self.folder, chosen_target(target, sms, unfused=unfused), ranges)
        return build.run(chosen, progress)

    def verify(
        self,
        checkpoint: str | Path,
        precisions: Sequence[str | Precision] | None = None,
        *,
        stages: Sequence[str] | None = None,
        options: ProofOptions = NOTHING_MORE,
        again: bool = False,
        progress: Callable[[str], None] = lambda _: None,
        say: Callable[[str], None] = lambda _: None,
    ) -> Proof:
        """Verify what has changed since it passed; parity.json is written, and then judged.

        Args: see `engines.proof.update.update`.

        Returns:
            All of the folder's proof.

        Raises:
            ParityError: a gate does not hold in what was measured now.
        """
        found = update(
            self.folder,
            Path(checkpoint),
            None if precisions is None else _names(precisions),
            options,
            stages=stages,
            again=again,
            progress=progress,
            say=say,
        )
        found.save()
        found.new.require_passed()
        return found.proof

    def check(self) -> int:
        """Compare every file with the manifest's sha256; how many there are.

        Raises:
            ArtifactError: naming the first that is missing, cut or changed.
        """
        with folders.reading(self.folder) as manifest:
            entries = manifest.files()
            for entry in entries:
                entry.verified(self.folder)
        return len(entries)

    def sampler(
        self,
        runtime: str = "ort",
        precision: str | Precision | None = None,
        *,
        provider: str | None = None,
        checkpoint: str | Path | None = None,
        plain: bool = False,
    ) -> Sampler:
        """Load the stages, once.

        Args:
            runtime, provider, checkpoint, plain: see `engines.runtime.load.load_stages`.
            precision: None is float32 or, where that was not exported, the first that this runtime
                runs.

        Raises:
            ConfigError, ArtifactError, TokenizerError, ProviderError: as loading.
        """
        require_runtime(runtime)
        with folders.reading(self.folder) as manifest:
            chosen = default_precision(manifest, runtime) if precision is None else precision
            tokenizer = load_tokenizer(self.folder, manifest)
            stages = load_stages(
                self.folder,
                manifest,
                runtime=runtime,
                precision=chosen,
                provider=provider,
                checkpoint=None if checkpoint is None else Path(checkpoint),
                plain=plain,
            )
        return Sampler(stages, tokenizer, runtime, Precision.of(chosen))

    def sample(
        self,
        samples: int = 1,
        *,
        runtime: str = "ort",
        precision: str | Precision | None = None,
        checkpoint: str | Path | None = None,
        **fields: Any,
    ) -> Samples:
        """Open a sampler, sample, and close it; `fields` are those of `SampleRequest`."""
        with self.sampler(runtime, precision, checkpoint=checkpoint) as sampler:
            return sampler.sample(samples, **fields)


def _names(precisions: Sequence[str | Precision]) -> list[str]:
    return [str(Precision.of(name)) for name in precisions]


def default_precision(manifest: Manifest, runtime: str) -> str:
    """float32, or the first exported precision that a runtime runs.

    Raises:
        ArtifactError: it runs none of them.
    """
    exported = manifest.precisions()
    found = [name for name in exported if Precision.of(name).runs_on(runtime)]
    if runtime == "torch" or "fp32" in found:
        return "fp32"
    if not found:
        raise ArtifactError(
            f"{runtime} runs none of the exported precisions",
            got=", ".join(exported),
            remedy="export another one, or choose another --runtime",
        )
    return found[0]
