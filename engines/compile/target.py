"""What a build is for: a TensorRT, its devices and its settings, as one object.

Imports no TensorRT until something is built.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engines.compile.network import BuiltEngine, Progress, StageBuild
from engines.tensorrt.cache import cache_file
from engines.tensorrt.device import Cuda
from engines.tensorrt.library import LIBRARIES, load_library
from engines.tensorrt.profiles import Profiles
from engines.tensorrt.targets import RTX, parse_sms, target_of
from export.stages import StageSpec
from ldlm import files
from ldlm.config import LDLMConfig
from ldlm.errors import ConfigError


@dataclass(frozen=True)
class Target:
    """TensorRT-RTX for a list of compute capabilities, or plain TensorRT for the GPU at hand.

    Attributes:
        sms: the compute capabilities.
        skip_unsupported: of TensorRT-RTX, leave out, and record, what a stage cannot have.
        unfused: attention is built from single operators, in float32.
        device: of plain TensorRT, the GPU.
    """

    sms: tuple[str, ...]
    skip_unsupported: bool = False
    unfused: bool = False
    device: Cuda | None = None

    @property
    def library(self) -> str:
        """Of `engines.tensorrt.library.LIBRARIES`."""
        return RTX if self.device is None else "trt"

    @property
    def name(self) -> str:
        """Of the folder its engines are in: "rtx", or "trt-sm90"."""
        return target_of(self.library, self.sms[0])

    @property
    def asked(self) -> str:
        """Devices and settings, in words: engines of another wording are built anew."""
        sms = " ".join(self.sms) + " where possible" * self.skip_unsupported
        devices = sms if self.device is None else self.device.name
        return devices + ", attention unfused" * self.unfused

    @property
    def modules(self) -> tuple[str, ...]:
        """The code that builds."""
        builds = "engines.compile.rtx" if self.library == RTX else "engines.compile.network"
        return (builds, *["export.passes.unfuse_attention"] * self.unfused)

    @property
    def tools(self) -> tuple[str, ...]:
        """The packages whose versions matter."""
        return (LIBRARIES[self.library].package,)

    def build(
        self,
        path: Path,
        spec: StageSpec,
        config: LDLMConfig,
        profiles: Profiles,
        progress: Progress,
    ) -> BuiltEngine:
        """Compile one stage; see `engines.compile.rtx.build_engine`."""
        with _unfused(path) if self.unfused else contextlib.nullcontext(path) as graph:
            if self.device is None:
                from engines.compile.rtx import build_engine

                built = build_engine(
                    graph,
                    spec,
                    config,
                    sms=self.sms,
                    profiles=profiles,
                    skip_unsupported=self.skip_unsupported,
                    progress=progress,
                )
            else:
                build = StageBuild(load_library("trt"), graph, spec)
                built = _built_here(build, build.settings(config, profiles), self.device, progress)
        if not self.unfused:
            return built
        return replace(built, builder={**built.builder, "attention": "unfused, in float32"})


def chosen_target(target: str = RTX, sms: str = "all", *, unfused: bool = False) -> Target:
    """The target of these words.

    Args:
        target: of `engines.tensorrt.library.LIBRARIES`.
        sms: compute capabilities, as `engines.tensorrt.targets.parse_sms` reads them. "all" builds
            every one that a stage can have, and records why it cannot have another; a list must be
            met in full.
        unfused: build attention from single operators, in float32.

    Raises:
        ConfigError: no such target or compute capability.
        ProviderError: plain TensorRT, or the GPU it builds for, is not there.
    """
    if target not in LIBRARIES:
        raise ConfigError("no such build target", expected=" or ".join(LIBRARIES), got=target)
    everything = sms.strip().lower() == "all"
    if target == RTX:
        return Target(parse_sms(sms), skip_unsupported=everything, unfused=unfused)
    if not everything:
        raise ConfigError("plain TensorRT builds for the GPU at hand", expected="no --sm", got=sms)
    load_library(target)
    device = Cuda()
    return Target((device.sm,), unfused=unfused, device=device)


def _built_here(build: StageBuild, settings: Any, device: Cuda, progress: Progress) -> BuiltEngine:
    """A plain TensorRT engine for the GPU at hand, with what earlier builds on it measured."""
    cache = cache_file("timing", build.version, device)
    known = files.read_if_possible(cache)
    if not known or not settings.set_timing_cache(settings.create_timing_cache(known), False):
        settings.set_timing_cache(settings.create_timing_cache(b""), False)
    built = build.compile(settings, "tensorrt", [device.sm], progress=progress)
    timings = settings.get_timing_cache()
    if timings is not None:
        files.write_if_possible(cache, bytes(timings.serialize()))
    return built


@contextlib.contextmanager
def _unfused(path: Path) -> Iterator[Path]:
    """A graph without fused attention, over the same external data, for as long as it is built."""
    import onnx_ir as ir

    from export.passes.unfuse_attention import unfuse_attention

    model = ir.load(path)
    unfuse_attention(model)
    # In the graph's own folder: its readers refuse weights that lie elsewhere, or are links.
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".unfused-", suffix=".onnx") as file:
        changed = Path(file.name)
        with files.disk_errors(changed):
            ir.save(model, changed)
        yield changed
