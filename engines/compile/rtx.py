"""TensorRT-RTX engines, compiled ahead of time, on any machine, without a GPU.

Polygraphy makes the builder's configuration and serialises the engine. Ours are the decisions:
which targets a stage can have, that float32 means float32 (no TF32), and that a warning about an
unused input is an error.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polygraphy.config

from engines.compile.targets import NO_BFLOAT16, NO_FLOAT32_MATMUL
from export.stages import BATCH, LENGTH, AxisRange, StageSpec
from ldlm.config import LDLMConfig
from ldlm.errors import EngineBuildError

polygraphy.config.USE_TENSORRT_RTX = True  # read when its backend is first imported, below

import tensorrt_rtx as trt  # noqa: E402
from polygraphy.backend.tensorrt_rtx import create_config_rtx  # noqa: E402
from polygraphy.backend.trt import Profile, engine_bytes_from_network  # noqa: E402
from polygraphy.exception import PolygraphyException  # noqa: E402
from polygraphy.logger import G_LOGGER  # noqa: E402

log = logging.getLogger(__name__)

# Told (phase, step, steps) while TensorRT builds.
Progress = Callable[[str, int, int], None]

BUILDER = {"tensorrt_rtx": trt.__version__, "tf32": "off", "attention": "decomposable in float32"}


@dataclass(frozen=True)
class BuiltEngine:
    """A serialised engine.

    Attributes:
        plan: its bytes.
        sms: the targets it was compiled for.
        refused: targets that were asked for and left out, with the reason.
        seconds: parsing and building.
    """

    plan: bytes
    sms: tuple[str, ...]
    refused: dict[str, str]
    seconds: float


def build_engine(
    path: Path,
    spec: StageSpec,
    config: LDLMConfig,
    *,
    sms: Sequence[str],
    profile: Mapping[str, AxisRange],
    skip_unsupported: bool = False,
    progress: Progress | None = None,
) -> BuiltEngine:
    """Compile one stage for a list of compute capabilities.

    Args:
        path: the .onnx file, its external data beside it.
        spec, config: the stage that the file holds.
        sms: names of `engines.compile.targets.RTX_SMS`.
        profile: allowed sizes per dynamic axis.
        skip_unsupported: leave out targets that TensorRT-RTX cannot compile this stage for, and
            say so in the result; otherwise such a target is an error.
        progress: told (phase, step, steps) as the build goes on.

    Raises:
        EngineBuildError: the graph, the profile or a target is refused.
    """
    started = time.perf_counter()
    logger = _Logger()
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    _parse(path, spec, network, logger)
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
    _allow_float32_attention(network)
    plan = _compile(builder, network, spec, config, chosen, profile, logger, progress)
    return BuiltEngine(plan, chosen, refused, time.perf_counter() - started)


class _Logger(trt.ILogger):  # type: ignore[misc]
    """Keeps TensorRT's warnings and errors for our own messages."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []
        self.warnings: list[str] = []

    def log(self, severity: Any, message: str) -> None:
        if severity <= trt.ILogger.Severity.ERROR:
            self.errors.append(message)
        elif severity == trt.ILogger.Severity.WARNING:
            self.warnings.append(message)
        log.debug("%s", message)


class _Monitor(trt.IProgressMonitor):  # type: ignore[misc]
    """Hands TensorRT's progress to a callback; an exception there stops the build.

    So does a signal: TensorRT discards an exception that is raised inside its callbacks, and a
    build that the user stopped would run on.
    """

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.progress = progress
        self.steps: dict[str, int] = {}
        self.stopped: BaseException | None = None

    def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
        self.steps[phase] = steps

    def step_complete(self, phase: str, step: int) -> bool:
        try:
            self.progress(phase, step + 1, self.steps.get(phase, step + 1))
        except BaseException as error:  # it must not pass through C++; raised again after the build
            self.stopped = error
        return self.stopped is None

    def phase_finish(self, phase: str) -> None:
        self.steps.pop(phase, None)

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Turn SIGINT and SIGTERM into `stopped`; does nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, _frame: object) -> None:
            self.stopped = (
                KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
            )

        numbers = (signal.SIGINT, signal.SIGTERM)
        old = [signal.signal(number, stop) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, old, strict=True):
                signal.signal(number, handler)


def _parse(path: Path, spec: StageSpec, network: Any, logger: _Logger) -> None:
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


def layer_dtypes(path: Path, spec: StageSpec) -> list[tuple[str, str]]:
    """(type, dtype of the first output) of every layer of the network that TensorRT parses.

    An activation's type is followed by its function, such as "ACTIVATION TANH".

    Raises:
        EngineBuildError: TensorRT cannot read the graph.
    """
    logger = _Logger()
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    _parse(path, spec, network, logger)
    found = []
    for layer in _layers(network):
        kind, dtype = layer.type.name, layer.get_output(0).dtype.name
        if layer.type == trt.LayerType.ACTIVATION:
            layer.__class__ = trt.IActivationLayer
            kind = f"{kind} {layer.type.name}"
        found.append((kind, dtype))
    return found


def _layers(network: Any) -> Iterator[Any]:
    return (network.get_layer(i) for i in range(network.num_layers))


def _unsupported(network: Any, sm: str) -> str | None:
    """Why TensorRT-RTX cannot compile this network for a target, if it cannot."""
    if sm in NO_BFLOAT16 and any(
        layer.get_output(0).dtype == trt.DataType.BF16 for layer in _layers(network)
    ):
        return "no bfloat16 there"
    if sm in NO_FLOAT32_MATMUL:
        found = [
            layer.name
            for layer in _layers(network)
            if layer.type == trt.LayerType.MATRIX_MULTIPLY
            and layer.get_output(0).dtype == trt.DataType.FLOAT
        ]
        if found:
            return f"no float32 matrix product there; the graph has {len(found)}, first {found[0]}"
    return None


def _allow_float32_attention(network: Any) -> None:
    """Let float32 attention be built from single operators: it has no fused kernel."""
    for layer in _layers(network):
        if (
            layer.type == trt.LayerType.ATTENTION_INPUT
            and layer.get_output(0).dtype == trt.DataType.FLOAT
        ):
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True


def _shapes(
    spec: StageSpec, config: LDLMConfig, profile: Mapping[str, AxisRange]
) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
    """(input, its shapes at min, opt and max of the profile)."""
    points = ("min", "opt", "max")
    for tensor in spec.inputs:
        yield (
            tensor.name,
            [
                tensor.shape(config, {a: getattr(profile[a], point) for a in (BATCH, LENGTH)})
                for point in points
            ],
        )


def _compile(
    builder: Any,
    network: Any,
    spec: StageSpec,
    config: LDLMConfig,
    sms: Sequence[str],
    profile: Mapping[str, AxisRange],
    logger: _Logger,
    progress: Progress | None,
) -> bytes:
    shapes = Profile()
    for name, (smallest, best, largest) in _shapes(spec, config, profile):
        shapes.add(name, smallest, best, largest)
    monitor = _Monitor(progress or (lambda *_: None))
    plan = None
    with _quiet_polygraphy(), monitor.signals():
        try:
            settings = create_config_rtx(
                builder,
                network,
                compute_capabilities=[_major_minor(sm) for sm in sms],
                profiles=[shapes],
            )
            settings.clear_flag(trt.BuilderFlag.TF32)
            settings.progress_monitor = monitor
            plan = engine_bytes_from_network((builder, network), settings)
        except PolygraphyException as error:
            logger.errors.append(str(error))
    if plan is None or monitor.stopped:
        _settle(logger, sms)
    if monitor.stopped:
        raise monitor.stopped
    if plan is None:
        raise EngineBuildError(
            "TensorRT could not build the engine",
            stage=spec.name,
            expected=f"targets {', '.join(sms)}",
            got="; ".join(dict.fromkeys(logger.errors))[:1000],
        )
    return bytes(plan)


@contextlib.contextmanager
def _quiet_polygraphy() -> Iterator[None]:
    """Hold back Polygraphy's own summary and errors; the reasons are in our logger."""
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL + 1), warnings.catch_warnings():
        # Polygraphy sets a timing cache, which TensorRT deprecates.
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _settle(logger: _Logger, sms: Sequence[str]) -> None:
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
