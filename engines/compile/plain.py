"""Plain TensorRT engines, built on the GPU that will run them, with a timing cache.

For GPUs that TensorRT-RTX does not know, Hopper among them.
"""

from pathlib import Path

from engines.compile.network import BuiltEngine, Progress, StageBuild
from engines.tensorrt.cache import cache_file
from engines.tensorrt.device import Cuda
from engines.tensorrt.library import load_library
from engines.tensorrt.profiles import Profiles
from export.stages import StageSpec
from ldlm import files
from ldlm.config import LDLMConfig


def build_engine_here(
    path: Path,
    spec: StageSpec,
    config: LDLMConfig,
    device: Cuda,
    profiles: Profiles,
    progress: Progress | None = None,
) -> BuiltEngine:
    """Compile one stage for the GPU at hand; see `engines.compile.rtx.build_engine`."""
    trt = load_library("trt")
    build = StageBuild(trt, path, spec)
    settings = build.settings(config, profiles)
    cache = cache_file("timing", str(trt.__version__), device)
    # What earlier builds on this GPU measured; nothing if it does not fit.
    known = files.read_if_possible(cache)
    if not known or not settings.set_timing_cache(settings.create_timing_cache(known), False):
        settings.set_timing_cache(settings.create_timing_cache(b""), False)
    built = build.compile(settings, "tensorrt", [device.sm], progress=progress)
    timings = settings.get_timing_cache()
    if timings is not None:
        files.write_if_possible(cache, bytes(timings.serialize()))
    return built
