"""One way to build, for TensorRT-RTX and plain TensorRT: they are one API.

Everything takes the library's module, so that neither is imported here.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.tensorrt.library import make_logger
from engines.tensorrt.profiles import Profiles
from export.stages import DYNAMIC, AxisRange, StageSpec
from ldlm.config import LDLMConfig
from ldlm.errors import EngineBuildError

# Told (phase, step, steps) while TensorRT builds.
Progress = Callable[[str, int, int], None]


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


class StageBuild:
    """A stage on its way to an engine: its network, its settings, its bytes.

    Args:
        trt: the library's module.
        path: the .onnx file, its external data beside it.
        spec: the stage that the file holds.

    Attributes:
        network: what TensorRT reads in the file.
        version: of the library.

    Raises:
        EngineBuildError: TensorRT cannot read it, or an input is unused or not there.
    """

    def __init__(self, trt: Any, path: Path, spec: StageSpec) -> None:
        self._trt, self._spec, self.version = trt, spec, str(trt.__version__)
        self._started, self._logger = time.perf_counter(), make_logger(trt)
        with held_signals():
            self._builder = trt.Builder(self._logger)
            self.network = self._parsed(path)
            _allow_float32_attention(trt, self.network)

    def _parsed(self, path: Path) -> Any:
        """The strongly typed network of an ONNX file."""
        network = self._builder.create_network(
            1 << int(self._trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        )
        parser = self._trt.OnnxParser(network, self._logger)
        if not parser.parse_from_file(str(path)):
            problems = [parser.get_error(i).desc() for i in range(parser.num_errors)]
            got = "; ".join(problems)[:1000]
            raise EngineBuildError("TensorRT cannot read the graph", stage=self._spec.name, got=got)
        # A file of noise can parse as an empty network.
        names = [tensor.name for tensor in self._spec.inputs]
        found = [network.get_input(i).name for i in range(network.num_inputs)]
        if found != names:
            problem = "TensorRT cannot read the graph: other inputs"
            raise EngineBuildError(problem, stage=self._spec.name, expected=names, got=found)
        unused = [text for text in self._logger.warnings if "unused" in text.lower()]
        if unused:
            problem = "an input of the graph is unused"
            raise EngineBuildError(problem, stage=self._spec.name, got=unused[0])
        return network

    def settings(self, config: LDLMConfig, profiles: Profiles) -> Any:
        """The builder's configuration, with all that both libraries share.

        Raises:
            EngineBuildError: TensorRT refuses a profile.
        """
        with held_signals():
            settings = self._builder.create_builder_config()
            settings.clear_flag(self._trt.BuilderFlag.TF32)  # float32 means float32
            # Layers in the engine keep their dtypes, for whoever inspects it.
            settings.profiling_verbosity = self._trt.ProfilingVerbosity.DETAILED
            for name, ranges in profiles.items():
                self._add_profile(settings, config, name, ranges)
        return settings

    def compile(
        self,
        settings: Any,
        library: str,
        sms: Sequence[str],
        refused: Mapping[str, str] | None = None,
        progress: Progress | None = None,
    ) -> BuiltEngine:
        """The engine.

        Args:
            settings: of `settings`, and what the caller has added.
            library: the package that builds.
            sms: the targets.
            refused: targets that were left out, with the reason.
            progress: told (phase, step, steps) as the build goes on.

        Raises:
            EngineBuildError: there is none, with what TensorRT said.
            BaseException: what stopped the build: a signal, or an exception of `progress`.
        """
        with held_signals() as stop:
            monitor = _make_monitor(self._trt, progress, stop)
            settings.progress_monitor = monitor
            plan = self._builder.build_serialized_network(self.network, settings)
        if plan is None:
            raise EngineBuildError(
                "TensorRT could not build the engine",
                stage=self._spec.name,
                expected=f"targets {', '.join(sms)}",
                got="; ".join(dict.fromkeys(self._logger.errors))[:1000],
            )
        builder = {
            "library": library,
            "version": self.version,
            "tf32": "off",
            "attention": "decomposable in float32",
        }
        seconds = time.perf_counter() - self._started
        return BuiltEngine(bytes(plan), tuple(sms), dict(refused or {}), builder, seconds)

    def _add_profile(
        self, settings: Any, config: LDLMConfig, name: str, ranges: Mapping[str, AxisRange]
    ) -> None:
        profile = self._builder.create_optimization_profile()
        for tensor in self._spec.inputs:
            sizes = ({a: getattr(ranges[a], p) for a in DYNAMIC} for p in ("min", "opt", "max"))
            profile.set_shape(tensor.name, *(tensor.shape(config, at) for at in sizes))
        # It takes sizes out of order without a word, and then gives no index.
        if settings.add_optimization_profile(profile) < 0:
            raise EngineBuildError(
                f"TensorRT refuses profile '{name}'",
                stage=self._spec.name,
                got=", ".join(f"{axis} {sizes}" for axis, sizes in ranges.items()),
            )


class Stop:
    """What shall stop a build, or nothing."""

    reason: BaseException | None = None


@contextlib.contextmanager
def held_signals() -> Iterator[Stop]:
    """SIGINT and SIGTERM, and what else stops a build, are raised at the end.

    TensorRT discards an exception that is raised inside its callbacks, and a build that the user
    stopped would run on. Outside the main thread there are no signals to hold.
    """
    stop = Stop()

    def note(number: int, _frame: object) -> None:
        stop.reason = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)

    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if main else ()
    old = {number: signal.signal(number, note) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    if stop.reason is not None:
        raise stop.reason


def _make_monitor(trt: Any, progress: Progress | None, stop: Stop) -> Any:
    """Hands TensorRT's progress to a callback; an exception there stops the build."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.steps: dict[str, int] = {}

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            self.steps[phase] = steps

        def step_complete(self, phase: str, step: int) -> bool:
            try:
                if progress:
                    progress(phase, step + 1, self.steps.get(phase, step + 1))
            except BaseException as error:  # must not pass through C++; raised after the build
                stop.reason = error
            return stop.reason is None

        def phase_finish(self, phase: str) -> None:
            self.steps.pop(phase, None)

    return Monitor()


def layers(network: Any) -> Iterator[Any]:
    """Every layer of a network."""
    return (network.get_layer(i) for i in range(network.num_layers))


def _allow_float32_attention(trt: Any, network: Any) -> None:
    """Let float32 attention be built from single operators: it has no fused kernel."""
    for layer in layers(network):
        if (
            layer.type == trt.LayerType.ATTENTION_INPUT
            and layer.get_output(0).dtype == trt.DataType.FLOAT
        ):
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True
