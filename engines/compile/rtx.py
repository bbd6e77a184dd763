"""TensorRT-RTX engines, compiled ahead of time, on any machine, without a GPU.

Polygraphy makes the builder's configuration and serialises the engine. Ours are the decisions:
which targets a stage can have, that float32 means float32 (no TF32), and that a warning about an
unused input is an error.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import polygraphy.config

from engines.compile.network import (
    BuiltEngine,
    Progress,
    allow_float32_attention,
    builder_settings,
    held_signals,
    layers,
    make_monitor,
    parse,
    require_plan,
    shapes,
    signals,
)
from engines.tensorrt.library import make_logger
from engines.tensorrt.targets import NO_BFLOAT16, NO_FLOAT32_MATMUL
from export.stages import AxisRange, StageSpec
from ldlm.config import LDLMConfig
from ldlm.errors import EngineBuildError

polygraphy.config.USE_TENSORRT_RTX = True  # read when its backend is first imported, below

import tensorrt_rtx as trt  # noqa: E402
from polygraphy.backend.tensorrt_rtx import create_config_rtx  # noqa: E402
from polygraphy.backend.trt import Profile, engine_bytes_from_network  # noqa: E402
from polygraphy.exception import PolygraphyException  # noqa: E402
from polygraphy.logger import G_LOGGER  # noqa: E402

BUILDER = builder_settings("tensorrt-rtx", trt)


def build_engine(
    path: Path,
    spec: StageSpec,
    config: LDLMConfig,
    *,
    sms: Sequence[str],
    profiles: Mapping[str, Mapping[str, AxisRange]],
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
    started = time.perf_counter()
    logger = make_logger(trt)
    with held_signals():
        builder = trt.Builder(logger)
        network = parse(trt, builder, path, spec, logger)
        refused = {sm: reason for sm in sms if (reason := _unsupported(network, sm))}
    chosen = tuple(sm for sm in sms if sm not in refused)
    if not chosen or (refused and not skip_unsupported):
        sm, reason = next(iter(refused.items()))
        raise EngineBuildError(
            "this stage cannot be built for a target",
            stage=spec.name,
            expected="another target or precision",
            got=f"{sm}: {reason}",
        )
    allow_float32_attention(trt, network)
    plan = _compile(builder, network, spec, config, chosen, profiles, logger, progress)
    return BuiltEngine(plan, chosen, refused, BUILDER, time.perf_counter() - started)


def layer_dtypes(path: Path, spec: StageSpec) -> list[tuple[str, str]]:
    """(type, dtype of the first output) of every layer of the network that TensorRT parses.

    An activation's type is followed by its function, such as "ACTIVATION TANH".

    Raises:
        EngineBuildError: TensorRT cannot read the graph.
    """
    logger = make_logger(trt)
    with held_signals():
        network = parse(trt, trt.Builder(logger), path, spec, logger)
    found = []
    for layer in layers(network):
        kind, dtype = layer.type.name, layer.get_output(0).dtype.name
        if layer.type == trt.LayerType.ACTIVATION:
            layer.__class__ = trt.IActivationLayer
            kind = f"{kind} {layer.type.name}"
        found.append((kind, dtype))
    return found


def _unsupported(network: Any, sm: str) -> str | None:
    """Why TensorRT-RTX cannot compile this network for a target, if it cannot."""
    if sm in NO_BFLOAT16 and any(
        layer.get_output(0).dtype == trt.DataType.BF16 for layer in layers(network)
    ):
        return "no bfloat16 there"
    if sm in NO_FLOAT32_MATMUL:
        found = [
            layer.name
            for layer in layers(network)
            if layer.type == trt.LayerType.MATRIX_MULTIPLY
            and layer.get_output(0).dtype == trt.DataType.FLOAT
        ]
        if found:
            return f"no float32 matrix product there; the graph has {len(found)}, first {found[0]}"
    return None


def _compile(
    builder: Any,
    network: Any,
    spec: StageSpec,
    config: LDLMConfig,
    sms: Sequence[str],
    profiles: Mapping[str, Mapping[str, AxisRange]],
    logger: Any,
    progress: Progress | None,
) -> bytes:
    monitor = make_monitor(trt, progress)
    plan = None
    with _quiet_polygraphy(), signals(monitor):
        try:
            settings = create_config_rtx(
                builder,
                network,
                compute_capabilities=[_major_minor(sm) for sm in sms],
                profiles=[_profile(spec, config, ranges) for ranges in profiles.values()],
            )
            settings.clear_flag(trt.BuilderFlag.TF32)
            # All memory is the caller's: what allocates at run time cannot be captured in a graph.
            settings.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
            settings.progress_monitor = monitor
            plan = engine_bytes_from_network((builder, network), settings)
        except PolygraphyException as error:
            logger.errors.append(str(error))
    if plan is None or monitor.stopped:
        _settle(logger, sms)
    return require_plan(plan, monitor, logger, spec, ", ".join(sms))


def _profile(spec: StageSpec, config: LDLMConfig, ranges: Mapping[str, AxisRange]) -> Profile:
    profile = Profile()
    for name, smallest, best, largest in shapes(spec, config, ranges):
        profile.add(name, smallest, best, largest)
    return profile


@contextlib.contextmanager
def _quiet_polygraphy() -> Iterator[None]:
    """Hold back Polygraphy's own summary and errors; the reasons are in our logger."""
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL + 1), warnings.catch_warnings():
        # Polygraphy sets a timing cache, which TensorRT deprecates.
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _settle(logger: Any, sms: Sequence[str]) -> None:
    """Build and discard one layer after a failed build.

    Measured with TensorRT-RTX 1.7.1: the first build after one that failed for SM75 gives another,
    larger engine than the same build in a fresh process; the second is as it should be.
    """
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    source = network.add_input("x", trt.DataType.FLOAT, (1,))
    layer = network.add_unary(source, trt.UnaryOperation.ABS)
    network.mark_output(layer.get_output(0))
    with _quiet_polygraphy():
        settings = create_config_rtx(
            builder, network, compute_capabilities=[_major_minor(sm) for sm in sms]
        )
        builder.build_serialized_network(network, settings)


def _major_minor(sm: str) -> tuple[int, int]:
    number = int(sm.removeprefix("sm"))
    return number // 10, number % 10
