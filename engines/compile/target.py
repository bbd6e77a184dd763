"""What a build is for: a TensorRT, its devices and its settings, as one object.

Imports no TensorRT until something is built.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from engines.tensorrt.library import LIBRARIES
from engines.tensorrt.profiles import Profiles
from engines.tensorrt.targets import RTX, parse_sms
from export.stages import StageSpec
from ldlm import files
from ldlm.config import LDLMConfig
from ldlm.errors import ConfigError

if TYPE_CHECKING:
    from engines.compile.network import BuiltEngine, Progress

Build = Callable[[Path, StageSpec, LDLMConfig, Profiles, "Progress"], "BuiltEngine"]


@dataclass(frozen=True)
class Target:
    """A build target.

    Attributes:
        name: of the folder its engines are in: "rtx", or "trt-sm90".
        library: of `engines.tensorrt.library.LIBRARIES`.
        asked: devices and settings, in words: engines of another wording are built anew.
        modules: the code that builds.
        tools: the packages whose versions matter.
        build: compiles one stage.
    """

    name: str
    library: str
    asked: str
    modules: tuple[str, ...]
    tools: tuple[str, ...]
    build: Build


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
        return rtx_target(parse_sms(sms), skip_unsupported=everything, unfused=unfused)
    if not everything:
        raise ConfigError("plain TensorRT builds for the GPU at hand", expected="no --sm", got=sms)
    return trt_target(unfused=unfused)


def rtx_target(
    sms: Sequence[str], *, skip_unsupported: bool = False, unfused: bool = False
) -> Target:
    """TensorRT-RTX, on any machine, for a list of compute capabilities.

    Args:
        sms: names of `engines.tensorrt.targets.RTX_SMS`.
        skip_unsupported: leave out, and record, what a stage cannot have.
        unfused: build attention from single operators, in float32.
    """

    def build(
        path: Path, spec: StageSpec, config: LDLMConfig, profiles: Profiles, progress: Progress
    ) -> BuiltEngine:
        from engines.compile.rtx import build_engine

        return build_engine(
            path, spec, config, sms=sms, profiles=profiles, skip_unsupported=skip_unsupported,
            progress=progress,
        )  # fmt: skip

    asked = " ".join(sms) + (" where possible" if skip_unsupported else "")
    tools = ("tensorrt-rtx",)
    made = Target(RTX, RTX, asked, ("engines.compile.rtx",), tools, build)
    return _attention(made, unfused=unfused)


def trt_target(*, unfused: bool = False) -> Target:
    """Plain TensorRT, for the GPU at hand.

    Args:
        unfused: as for `rtx_target`.

    Raises:
        ProviderError: no library, no driver or no GPU.
    """
    from engines.tensorrt.device import Cuda
    from engines.tensorrt.library import load_library
    from engines.tensorrt.targets import target_of

    trt, device = load_library("trt"), Cuda()

    def build(
        path: Path, spec: StageSpec, config: LDLMConfig, profiles: Profiles, progress: Progress
    ) -> BuiltEngine:
        from engines.compile.plain import build_engine_here

        return build_engine_here(
            path, spec, config, trt=trt, device=device, profiles=profiles, progress=progress
        )

    name = target_of("trt", device.sm)
    made = Target(name, "trt", device.name, ("engines.compile.plain",), ("tensorrt",), build)
    return _attention(made, unfused=unfused)


def _attention(target: Target, *, unfused: bool) -> Target:
    """The same target, with attention in the form that is asked for."""
    if not unfused:
        return target

    def build(
        path: Path, spec: StageSpec, config: LDLMConfig, profiles: Profiles, progress: Progress
    ) -> BuiltEngine:
        with _unfused(path) as changed:
            built = target.build(changed, spec, config, profiles, progress)
        return replace(built, builder={**built.builder, "attention": "unfused, in float32"})

    modules = (*target.modules, "export.passes.unfuse_attention")
    asked = f"{target.asked}, attention unfused"
    return replace(target, asked=asked, modules=modules, build=build)


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
