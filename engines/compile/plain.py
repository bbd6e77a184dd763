"""Plain TensorRT engines, built on the GPU that will run them, with a timing cache.

For GPUs that TensorRT-RTX does not know, Hopper among them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.compile.network import (
    BuiltEngine,
    Progress,
    allow_float32_attention,
    builder_settings,
    held_signals,
    make_monitor,
    parse,
    require_plan,
    shapes,
    signals,
)
from engines.tensorrt.cache import cache_file
from engines.tensorrt.device import Device
from engines.tensorrt.library import make_logger
from export.stages import AxisRange, StageSpec
from ldlm import files
from ldlm.config import LDLMConfig
from ldlm.errors import EngineBuildError


def build_engine_here(
    path: Path,
    spec: StageSpec,
    config: LDLMConfig,
    *,
    trt: Any,
    device: Device,
    profiles: Mapping[str, Mapping[str, AxisRange]],
    progress: Progress | None = None,
) -> BuiltEngine:
    """Compile one stage for the GPU at hand.

    Args:
        path: the .onnx file, its external data beside it.
        spec, config: the stage that the file holds.
        trt: the library's module.
        device: the GPU.
        profiles: by name, in the engine's order: allowed sizes per dynamic axis.
        progress: told (phase, step, steps) as the build goes on.

    Raises:
        EngineBuildError: the graph or a profile is refused.
    """
    started = time.perf_counter()
    logger = make_logger(trt)
    with held_signals():
        builder = trt.Builder(logger)
        network = parse(trt, builder, path, spec, logger)
    allow_float32_attention(trt, network)
    settings = builder.create_builder_config()
    settings.clear_flag(trt.BuilderFlag.TF32)  # float32 means float32
    for name, ranges in profiles.items():
        _add_profile(builder, settings, spec, config, name, ranges)
    path_of_cache = cache_file("timing", str(trt.__version__), device)
    _use_timing_cache(settings, path_of_cache)
    monitor = make_monitor(trt, progress)
    settings.progress_monitor = monitor
    with signals(monitor):
        plan = builder.build_serialized_network(network, settings)
    plan = require_plan(plan, monitor, logger, spec, device.sm)
    timings = settings.get_timing_cache()
    if timings is not None:
        files.write_if_possible(path_of_cache, bytes(timings.serialize()))
    made_with = builder_settings("tensorrt", trt)
    return BuiltEngine(plan, (device.sm,), {}, made_with, time.perf_counter() - started)


def _use_timing_cache(settings: Any, path: Path) -> None:
    """Take up what earlier builds on this GPU measured; begin anew if it does not fit."""
    known = files.read_if_possible(path)
    if known and settings.set_timing_cache(settings.create_timing_cache(known), False):
        return
    settings.set_timing_cache(settings.create_timing_cache(b""), False)


def _add_profile(
    builder: Any,
    settings: Any,
    spec: StageSpec,
    config: LDLMConfig,
    name: str,
    ranges: Mapping[str, AxisRange],
) -> None:
    profile = builder.create_optimization_profile()
    for tensor, smallest, best, largest in shapes(spec, config, ranges):
        profile.set_shape(tensor, smallest, best, largest)
    # It takes sizes out of order without a word, and then gives no index.
    if settings.add_optimization_profile(profile) < 0:
        raise EngineBuildError(
            f"TensorRT refuses profile '{name}'",
            stage=spec.name,
            got=", ".join(f"{axis} {sizes}" for axis, sizes in ranges.items()),
        )
