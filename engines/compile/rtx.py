"""TensorRT-RTX engines, compiled ahead of time, on any machine, without a GPU.

The decisions: which targets a stage can have, and that its memory is the caller's.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorrt_rtx as trt

from engines.compile.network import BuiltEngine, Progress, StageBuild, layers
from engines.tensorrt.library import make_logger
from engines.tensorrt.profiles import Profiles
from engines.tensorrt.targets import NO_BFLOAT16, NO_FLOAT32_MATMUL
from export.stages import StageSpec
from ldlm.config import LDLMConfig
from ldlm.errors import EngineBuildError


def build_engine(
    path: Path,
    spec: StageSpec,
    config: LDLMConfig,
    *,
    sms: Sequence[str],
    profiles: Profiles,
    skip_unsupported: bool = False,
    progress: Progress | None = None,
) -> BuiltEngine:
    """Compile one stage for a list of compute capabilities.

    Args:
        path: the .onnx file, its external data beside it.
        spec, config: the stage that the file holds.
        sms: names of `engines.tensorrt.targets.RTX_SMS`.
        profiles: by name, in the engine's order: allowed sizes per dynamic axis.
        skip_unsupported: leave out targets that TensorRT-RTX cannot compile this stage for, and
            say so in the result; otherwise such a target is an error.
        progress: told (phase, step, steps) as the build goes on.

    Raises:
        EngineBuildError: the graph, the profile or a target is refused.
    """
    build = StageBuild(trt, path, spec)
    refused = {sm: reason for sm in sms if (reason := _unsupported(build.network, sm))}
    chosen = tuple(sm for sm in sms if sm not in refused)
    if not chosen or (refused and not skip_unsupported):
        sm, reason = next(iter(refused.items()))
        raise EngineBuildError(
            "this stage cannot be built for a target",
            stage=spec.name,
            expected="another target or precision",
            got=f"{sm}: {reason}",
        )
    settings = build.settings(config, profiles)
    _set_targets(settings, chosen)
    # All memory is the caller's: what allocates at run time cannot be captured in a graph.
    settings.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    try:
        return build.compile(settings, "tensorrt-rtx", chosen, refused, progress)
    except BaseException:
        _settle(chosen)
        raise


def layer_dtypes(path: Path, spec: StageSpec) -> list[tuple[str, str]]:
    """(type, dtype of the first output) of every layer of the network that TensorRT parses.

    An activation's type is followed by its function, such as "ACTIVATION TANH".

    Raises:
        EngineBuildError: TensorRT cannot read the graph.
    """
    found = []
    build = StageBuild(trt, path, spec)
    for layer in layers(build.network):
        kind, dtype = layer.type.name, layer.get_output(0).dtype.name
        if layer.type == trt.LayerType.ACTIVATION:
            layer.__class__ = trt.IActivationLayer
            kind = f"{kind} {layer.type.name}"
        found.append((kind, dtype))
    return found


def _unsupported(network: Any, sm: str) -> str | None:
    """Why TensorRT-RTX cannot compile this network for a target, if it cannot."""
    found = [(layer.type, layer.get_output(0).dtype, layer.name) for layer in layers(network)]
    if sm in NO_BFLOAT16 and any(dtype == trt.DataType.BF16 for _, dtype, _ in found):
        return "no bfloat16 there"
    product = (trt.LayerType.MATRIX_MULTIPLY, trt.DataType.FLOAT)
    names = [name for *kind, name in found if tuple(kind) == product]
    if sm in NO_FLOAT32_MATMUL and names:
        return f"no float32 matrix product there; the graph has {len(names)}, first {names[0]}"
    return None


def _set_targets(settings: Any, sms: Sequence[str]) -> None:
    settings.num_compute_capabilities = len(sms)
    for index, sm in enumerate(sms):
        settings.set_compute_capability(getattr(trt.ComputeCapability, sm.upper()), index)


def _settle(sms: Sequence[str]) -> None:
    """Build and discard one layer after a failed build.

    Measured with TensorRT-RTX 1.7.1: the first build after one that failed for SM75 gives another,
    larger engine than the same build in a fresh process; the second is as it should be.
    """
    builder = trt.Builder(make_logger(trt))
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    source = network.add_input("x", trt.DataType.FLOAT, (1,))
    layer = network.add_unary(source, trt.UnaryOperation.ABS)
    network.mark_output(layer.get_output(0))
    settings = builder.create_builder_config()
    _set_targets(settings, sms)
    builder.build_serialized_network(network, settings)
