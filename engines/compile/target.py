"""What a build is for: a TensorRT, its devices and its settings, as one object.

Imports no TensorRT until something is built.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from engines.tensorrt.library import LIBRARIES, load_library
from engines.tensorrt.profiles import Profiles
from engines.tensorrt.targets import RTX, parse_sms, target_of
from export.stages import StageSpec
from ldlm import files
from ldlm.config import LDLMConfig
from ldlm.errors import ConfigError

if TYPE_CHECKING:
    from engines.compile.network import BuiltEngine, Progress
    from engines.tensorrt.device import Cuda


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
        builds = "engines.compile.rtx" if self.library == RTX else "engines.compile.plain"
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

                sms, skip = self.sms, self.skip_unsupported
                built = build_engine(
                    graph,
                    spec,
                    config,
                    sms=sms,
                    profiles=profiles,
                    skip_unsupported=skip,
                    progress=progress,
                )
            else:
                from engines.compile.plain import build_engine_here

                built = build_engine_here(graph, spec, config, self.device, profiles, progress)
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
    from engines.tensorrt.device import Cuda

    load_library(target)
    device = Cuda()
    return Target((device.sm,), unfused=unfused, device=device)


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
