"""What a build is for: a TensorRT, its devices and its settings, as one object.

Imports no TensorRT until something is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engines.compile.targets import RTX
from export.stages import AxisRange, StageSpec
from ldlm.config import LDLMConfig

if TYPE_CHECKING:
    from engines.compile.network import BuiltEngine, Progress

Profiles = Mapping[str, Mapping[str, AxisRange]]
Build = Callable[[Path, StageSpec, LDLMConfig, Profiles, "Progress"], "BuiltEngine"]


@dataclass(frozen=True)
class Target:
    """A build target.

    Attributes:
        name: of the folder its engines are in: "rtx", or "trt-sm90".
        asked: devices and settings, in words: engines of another wording are built anew.
        module: the code that builds.
        tools: the packages whose versions matter.
        build: compiles one stage.
    """

    name: str
    asked: str
    module: str
    tools: tuple[str, ...]
    build: Build


def rtx_target(sms: Sequence[str], *, skip_unsupported: bool = False) -> Target:
    """TensorRT-RTX, on any machine, for a list of compute capabilities.

    Args:
        sms: names of `engines.compile.targets.RTX_SMS`.
        skip_unsupported: leave out, and record, what a stage cannot have.
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
    return Target(RTX, asked, "engines.compile.rtx", ("tensorrt-rtx", "polygraphy"), build)


def trt_target() -> Target:
    """Plain TensorRT, for the GPU at hand.

    Raises:
        ProviderError: no library, no driver or no GPU.
    """
    from engines.runtime.cuda import Cuda
    from engines.runtime.engine_file import target_of
    from engines.runtime.libraries import load_library

    trt, device = load_library("trt"), Cuda()

    def build(
        path: Path, spec: StageSpec, config: LDLMConfig, profiles: Profiles, progress: Progress
    ) -> BuiltEngine:
        from engines.compile.plain import build_engine_here

        return build_engine_here(
            path, spec, config, trt=trt, device=device, profiles=profiles, progress=progress
        )

    name = target_of("trt", device.sm)
    return Target(name, device.name, "engines.compile.plain", ("tensorrt",), build)
