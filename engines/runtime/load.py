"""The stages of generation on the runtime that was asked for."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from engines.artifacts.folder import require_origin
from engines.artifacts.manifest import TOKENIZER, Manifest
from engines.tensorrt.library import LIBRARIES
from export.precision import Precision
from export.stages import LOOP, SAMPLED, stage
from ldlm import tokenizer as tokenizers
from ldlm.errors import ArtifactError, ConfigError, TokenizerError
from ldlm.sampler import DenoiserLoop, Loop, Stages

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
    _require(runtime, precision, provider, plain)
    if checkpoint is not None:
        require_origin(manifest, checkpoint)
    load = _loader(runtime, checkpoint, folder, manifest, precision, provider or "cpu")
    denoiser, latents, tokens = SAMPLED
    conditioning, step = LOOP
    if runtime in LIBRARIES:
        from engines.runtime.trt_loop import TrtLoop

        loop: Loop = TrtLoop(load(conditioning), load(step))
        # What goes from the loop to the decoders stays on the device.
        return Stages(manifest.config, loop, load(latents).enqueue, load(tokens))
    if runtime == "ort" and not plain:
        from engines.runtime.ort_loop import OrtLoop

        loop = OrtLoop(load(conditioning), load(step, cuda_graphs=True))
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
    if manifest.tokenizer is None:
        raise TokenizerError(
            "the artifacts have no tokenizer",
            expected=folder / TOKENIZER,
            got="none",
            remedy="put tokenizer.json into the checkpoint folder and export again",
        )
    text = manifest.tokenizer.verified(folder).read_text("utf-8")
    return tokenizers.parse(text, manifest.config)


def _require(runtime: str, precision: Precision, provider: str | None, plain: bool) -> None:
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


def _loader(
    runtime: str,
    checkpoint: Path | None,
    folder: Path,
    manifest: Manifest,
    precision: Precision,
    provider: str,
) -> Callable[..., Any]:
    """What makes a stage of its name."""
    if runtime == "torch":
        if checkpoint is None:
            raise ArtifactError("the reference needs the checkpoint", remedy="give --checkpoint")
        from engines.runtime.torch import TorchStage
        from ldlm.model import LDLM

        model = LDLM.from_checkpoint(checkpoint)
        return lambda name: TorchStage(model, stage(name))
    make: Callable[..., Any]
    if runtime in LIBRARIES:
        from engines.runtime.trt import TrtRuntime
        from engines.runtime.trt_stage import TrtStage

        # The engines share a stream and scratch memory.
        make = functools.partial(TrtStage.from_artifacts, TrtRuntime(runtime))
    elif runtime == "evaluator":
        from engines.runtime.torch import EvaluatorStage

        make = EvaluatorStage.from_artifacts
    else:
        from engines.runtime.ort import OrtStage

        make = functools.partial(OrtStage.from_artifacts, provider=provider)
    return lambda name, **options: make(folder, manifest, name, str(precision), **options)
