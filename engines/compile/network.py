"""What TensorRT-RTX and plain TensorRT have in common when they build: they are one API.

Every function takes the library's module, so that neither is imported here.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export.stages import BATCH, LENGTH, AxisRange, StageSpec
from ldlm.config import LDLMConfig
from ldlm.errors import EngineBuildError

log = logging.getLogger(__name__)

# Told (phase, step, steps) while TensorRT builds.
Progress = Callable[[str, int, int], None]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class BuiltEngine:
    """A serialised engine.

    Attributes:
        plan: its bytes.
        sms: the targets it was compiled for.
        refused: targets that were asked for and left out, with the reason.
        builder: the library, its version and the settings.
        seconds: parsing and building.
    """

    plan: bytes
    sms: tuple[str, ...]
    refused: dict[str, str]
    builder: dict[str, str]
    seconds: float


def make_monitor(trt: Any, progress: Progress | None) -> Any:
    """Hands TensorRT's progress to a callback; an exception there stops the build.

    So does a signal: TensorRT discards an exception that is raised inside its callbacks, and a
    build that the user stopped would run on.
    """
    tell = progress or (lambda *_: None)

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.steps: dict[str, int] = {}
            self.stopped: BaseException | None = None

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            self.steps[phase] = steps

        def step_complete(self, phase: str, step: int) -> bool:
            try:
                tell(phase, step + 1, self.steps.get(phase, step + 1))
            except BaseException as error:  # must not pass through C++; raised after the build
                self.stopped = error
            return self.stopped is None

        def phase_finish(self, phase: str) -> None:
            self.steps.pop(phase, None)

    return Monitor()


def builder_settings(library: str, trt: Any) -> dict[str, str]:
    """What the manifest notes of a library and of the settings that both builds share."""
    return {
        "library": library,
        "version": str(trt.__version__),
        "tf32": "off",
        "attention": "decomposable in float32",
    }


@contextlib.contextmanager
def signals(monitor: Any) -> Iterator[None]:
    """Turn SIGINT and SIGTERM into `monitor.stopped`; does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _frame: object) -> None:
        monitor.stopped = (
            KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
        )

    numbers = (signal.SIGINT, signal.SIGTERM)
    old = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, old, strict=True):
            signal.signal(number, handler)


class _Held:
    """What `signals` found."""

    stopped: BaseException | None = None


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """SIGINT and SIGTERM are raised at the end: inside TensorRT's callbacks they would be lost.

    For what takes moments, such as reading a graph; a build is stopped by `signals`.
    """
    held = _Held()
    with signals(held):
        yield
    if held.stopped is not None:
        raise held.stopped


def parse(trt: Any, builder: Any, path: Path, spec: StageSpec, logger: Any) -> Any:
    """The strongly typed network of an ONNX file.

    Raises:
        EngineBuildError: TensorRT cannot read it, or an input is unused or not there.
    """
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(path)):
        problems = [parser.get_error(i).desc() for i in range(parser.num_errors)]
        raise EngineBuildError(
            "TensorRT cannot read the graph", stage=spec.name, got="; ".join(problems)[:1000]
        )
    # A file of noise can parse as an empty network.
    names = [tensor.name for tensor in spec.inputs]
    found = [network.get_input(i).name for i in range(network.num_inputs)]
    if found != names:
        raise EngineBuildError(
            "TensorRT cannot read the graph: other inputs",
            stage=spec.name,
            expected=names,
            got=found,
        )
    unused = [text for text in logger.warnings if "unused" in text.lower()]
    if unused:
        raise EngineBuildError("an input of the graph is unused", stage=spec.name, got=unused[0])
    return network


def layers(network: Any) -> Iterator[Any]:
    """Every layer of a network."""
    return (network.get_layer(i) for i in range(network.num_layers))


def allow_float32_attention(trt: Any, network: Any) -> None:
    """Let float32 attention be built from single operators: it has no fused kernel."""
    for layer in layers(network):
        if (
            layer.type == trt.LayerType.ATTENTION_INPUT
            and layer.get_output(0).dtype == trt.DataType.FLOAT
        ):
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True


def shapes(
    spec: StageSpec, config: LDLMConfig, ranges: Mapping[str, AxisRange]
) -> Iterator[tuple[str, Shape, Shape, Shape]]:
    """(input, its shape at min, at opt and at max) of a profile."""
    for tensor in spec.inputs:
        smallest, best, largest = (
            tensor.shape(config, {axis: getattr(ranges[axis], point) for axis in (BATCH, LENGTH)})
            for point in ("min", "opt", "max")
        )
        yield tensor.name, smallest, best, largest


def require_plan(plan: Any, monitor: Any, logger: Any, spec: StageSpec, targets: str) -> bytes:
    """The engine's bytes.

    Raises:
        EngineBuildError: there are none, with what TensorRT said.
        BaseException: what stopped the build.
    """
    if monitor.stopped:
        raise monitor.stopped
    if plan is None:
        raise EngineBuildError(
            "TensorRT could not build the engine",
            stage=spec.name,
            expected=f"targets {targets}",
            got="; ".join(dict.fromkeys(logger.errors))[:1000],
        )
    return bytes(plan)
