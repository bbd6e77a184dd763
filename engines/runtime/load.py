"""The stages of generation on the runtime that was asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.artifacts.folder import require_origin
from engines.artifacts.manifest import TOKENIZER, Manifest
from engines.tensorrt.library import LIBRARIES
from export.precision import Precision
from export.stages import LOOP, SAMPLED, stage
from ldlm.errors import ArtifactError, ConfigError, TokenizerError
from ldlm.sampler import DenoiserLoop, Loop, Stages

if TYPE_CHECKING:
    from tokenizers import Tokenizer

RUNTIMES = ("ort", "torch", "evaluator", *LIBRARIES)


def load_stages(
    folder: Path,
    manifest: Manifest,
    *,
    runtime: str = "ort",
    precision: str | Precision = "fp32",
    provider: str | None = None,
    checkpoint: Path | None = None,
    plain: bool = False,
) -> Stages:
    """Load what a sampler needs.

    Args:
        folder, manifest: the artifacts.
        runtime: "ort"; "torch" for the reference, which needs the checkpoint; "evaluator" for the
            graphs with every tensor rounded as a device does, slowly and on any machine; "rtx" or
            "trt" for the engines, on a GPU.
        precision: of the ONNX graphs; the reference is float32.
        provider: of ONNX Runtime, "cpu" unless given; no other runtime has a choice.
        checkpoint: the checkpoint folder that the artifacts should have been made from; checked
            for every runtime where it is given, and what the reference runs.
        plain: with ONNX Runtime, call the denoiser's plain graph step by step.

    Raises:
        ConfigError: no such runtime, or a precision or provider that it does not have.
        ArtifactError: artifacts missing or changed, or made from another checkpoint.
    """
    precision = Precision.of(precision)
    require_runtime(runtime)
    only = "cuda" if runtime in LIBRARIES else "cpu"
    if runtime != "ort" and provider not in (None, only):
        raise ConfigError(f"runtime {runtime} has one device", expected=only, got=provider)
    if plain and runtime != "ort":
        raise ConfigError("plain is for runtime ort", expected="ort", got=runtime)
    precision.require(runtime)
    if precision.is_integer and provider == "cuda":
        raise ConfigError(
            "products in integers are for CPUs", expected="--provider cpu", got=f"{precision}, cuda"
        )
    if checkpoint is not None:
        require_origin(manifest, checkpoint)
    if runtime in LIBRARIES:
        return _tensorrt(runtime, folder, manifest, precision)
    load = _loader(runtime, folder, manifest, precision, provider or "cpu", checkpoint)
    denoiser, latents, tokens = SAMPLED
    conditioning, step = LOOP
    if runtime == "ort" and not plain:
        from engines.runtime.ort_loop import OrtLoop

        loop: Loop = OrtLoop(load(conditioning), load(step, cuda_graphs=True))
    else:
        loop = DenoiserLoop(load(denoiser))
    # One scale holds for all integers of a call: with others in it, a text would change.
    return Stages(manifest.config, loop, load(latents), load(tokens), precision.is_integer)


def require_runtime(name: str) -> None:
    """Refuse a name that is none of RUNTIMES.

    Raises:
        ConfigError: with those that there are.
    """
    if name not in RUNTIMES:
        raise ConfigError("no such runtime", expected=" or ".join(RUNTIMES), got=name)


def load_tokenizer(folder: Path, manifest: Manifest) -> Tokenizer:
    """The tokenizer of an artifacts folder, compared with the manifest.

    Raises:
        TokenizerError: there is none, or it does not fit.
        ArtifactError: it has changed.
    """
    from ldlm import tokenizer as tokenizers

    if manifest.tokenizer is None:
        raise TokenizerError(
            "the artifacts have no tokenizer",
            expected=folder / TOKENIZER,
            got="none",
            remedy="put tokenizer.json into the checkpoint folder and export again",
        )
    text = manifest.tokenizer.verified(folder).read_text("utf-8")
    return tokenizers.parse(text, manifest.config)


def _loader(
    runtime: str,
    folder: Path,
    manifest: Manifest,
    precision: Precision,
    provider: str,
    checkpoint: Path | None,
) -> Callable[..., Any]:
    """What makes a stage of a name, on a runtime without engines."""
    config = manifest.config
    if runtime == "torch":
        if checkpoint is None:
            raise ArtifactError("the reference needs the checkpoint", remedy="give --checkpoint")
        from engines.runtime.torch import TorchStage
        from ldlm.model import LDLM

        model = LDLM.from_checkpoint(checkpoint)
        return lambda name: TorchStage(model, stage(name))
    if runtime == "evaluator":
        from engines.runtime.evaluator import EvaluatorStage

        def evaluated(name: str) -> EvaluatorStage:
            path = manifest.graph(str(precision), name).verified(folder)
            return EvaluatorStage(path, stage(name), config)

        return evaluated
    from engines.runtime.ort import OrtStage

    return lambda name, **options: OrtStage.from_artifacts(
        folder, manifest, name, str(precision), provider=provider, **options
    )


def _tensorrt(runtime: str, folder: Path, manifest: Manifest, precision: Precision) -> Stages:
    """The engines, in one runtime: they share the stream and the scratch memory.

    What goes from the loop to the decoders stays on the device.
    """
    from engines.runtime.trt import TrtRuntime
    from engines.runtime.trt_loop import TrtLoop
    from engines.runtime.trt_stage import TrtStage

    shared = TrtRuntime(runtime)
    conditioning, step, latents, tokens = (
        TrtStage.from_artifacts(shared, folder, manifest, name, str(precision))
        for name in (*LOOP, *SAMPLED[1:])
    )
    return Stages(manifest.config, TrtLoop(conditioning, step), latents.enqueue, tokens)
