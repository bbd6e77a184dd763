"""What every runtime implements: one stage, named tensors in, named tensors out."""

import abc
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from engines.artifacts.manifest import Manifest
from export.stages import DYNAMIC, AxisRange, StageSpec, graph_ranges, stage
from ldlm.config import LDLMConfig
from ldlm.errors import ArtifactError, StageInputError

Array = NDArray[Any]

OTHER_INPUTS = "other inputs than the stage takes"


class Shaped(NamedTuple):
    """What is checked of an input: of an array, or of a tensor that is nowhere yet."""

    dtype: str
    shape: tuple[int, ...]


class RuntimeStage(abc.ABC):
    """One stage on one runtime, and a context manager that closes it.

    Threads may share it: a call has no state but its own.

    Attributes:
        spec, config: what its tensors look like.
        device: where it runs, such as "cpu".
        ranges: the allowed sizes of its dynamic axes; by default the graph's.
    """

    def __init__(
        self,
        spec: StageSpec,
        config: LDLMConfig,
        device: str = "cpu",
        ranges: Mapping[str, AxisRange] | None = None,
    ) -> None:
        self.spec, self.config, self.device = spec, config, device
        self.ranges = dict(graph_ranges(config) if ranges is None else ranges)

    def __call__(self, *inputs: Any) -> Array:
        """Tensors in, in the spec's order; the stage's first output out; see `run`."""
        name = self.spec.outputs[0].name
        return self.run(named(self.spec, inputs), [name])[name]

    def run(
        self, feeds: Mapping[str, Any], outputs: Sequence[str] | None = None
    ) -> dict[str, Array]:
        """The named outputs, by default all of the spec, of inputs that are `checked`."""
        names = [t.name for t in self.spec.outputs] if outputs is None else list(outputs)
        return self._run(self.checked(feeds), names)

    @abc.abstractmethod
    def _run(self, feeds: dict[str, Any], outputs: Sequence[str]) -> dict[str, Array]:
        """Compute the outputs of feeds that were checked."""

    def checked(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Inputs by name, as the runtime reads them.

        Raises:
            StageInputError: an input is no array, has the wrong dtype or shape, or a size outside
                the ranges.
        """
        found = {name: self._readable(name, value) for name, value in feeds.items()}
        self.check({name: Shaped(str(value.dtype), value.shape) for name, value in found.items()})
        return found

    def _readable(self, name: str, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            raise StageInputError(
                "an input is no NumPy array",
                stage=self.spec.name,
                tensor=name,
                expected="numpy.ndarray",
                got=f"{type(value).__module__}.{type(value).__qualname__}",
                remedy="numpy.asarray(x, numpy.float32); of a torch tensor, x.numpy(force=True)",
            )
        return value

    def check(self, found: Mapping[str, Shaped]) -> dict[str, int]:
        """Hold every input to the spec and the ranges; the dynamic sizes.

        Raises:
            StageInputError: naming the first input that does not fit.
        """
        spec, names = self.spec, [tensor.name for tensor in self.spec.inputs]
        if sorted(found) != sorted(names):
            raise StageInputError(OTHER_INPUTS, stage=spec.name, expected=names, got=list(found))
        sizes: dict[str, int] = {}
        for tensor in spec.inputs:
            dtype, shape = found[tensor.name]
            if len(shape) == len(tensor.axes):
                for axis, size in zip(tensor.axes, shape, strict=True):
                    if axis in DYNAMIC:
                        sizes.setdefault(str(axis), size)
            expected = tensor.shape(self.config, {axis: sizes.get(axis, axis) for axis in DYNAMIC})
            if dtype != tensor.dtype or shape != expected:
                raise StageInputError(
                    "an input has the wrong dtype or shape",
                    stage=spec.name,
                    tensor=tensor.name,
                    expected=f"{tensor.dtype} {list(expected)}",
                    got=f"{dtype} {list(shape)}",
                )
        for axis, allowed in self.ranges.items():
            size = sizes.get(axis, allowed.min)
            if not allowed.min <= size <= allowed.max:
                raise StageInputError(
                    f"the {axis} is outside what was built",
                    stage=spec.name,
                    expected=f"{allowed.min}..{allowed.max}",
                    got=size,
                    remedy=f"use a smaller {axis}, or build with a larger range",
                )
        return sizes

    def close(self) -> None:  # noqa: B027  # most runtimes hold nothing but memory
        """Give back what it holds; it cannot be run any more."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class GraphStage(RuntimeStage):
    """A stage that is made of an .onnx file.

    Args:
        path: the file.
        spec, config, device: see `RuntimeStage`; a derived class may have options after them.
    """

    def __init__(
        self, path: Path, spec: StageSpec, config: LDLMConfig, device: str = "cpu"
    ) -> None:
        super().__init__(spec, config, device)
        self.path = path

    @classmethod
    def from_artifacts(
        cls, folder: Path, manifest: Manifest, stage_name: str, precision: str, **options: Any
    ) -> Self:
        """A stage of an artifacts folder, after its files were compared with the manifest.

        Args:
            folder, manifest: the artifacts.
            stage_name, precision: which graph.
            options: of the class.

        Raises:
            ArtifactError: the graph was not exported, or a file is missing or changed.
            LDLMError: as the constructor.
        """
        entry = manifest.graph(precision, stage_name)
        parts = [folder / entry.graph.path, folder / entry.data.path]
        before = [_identity(path) for path in parts]
        entry.verified(folder)
        made = cls(parts[0], stage(stage_name), manifest.config, **options)
        if [_identity(path) for path in parts] != before:
            raise ArtifactError(
                "the graph was replaced while it was loaded", stage=stage_name, remedy="try again"
            )
        return made


def _identity(path: Path) -> tuple[int, ...]:
    """What changes when a file is replaced or written to; nothing of one that is not there."""
    with contextlib.suppress(FileNotFoundError):
        found = path.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns
    return ()


def named(spec: StageSpec, inputs: Sequence[Any]) -> dict[str, Any]:
    """Inputs in the spec's order by their names.

    Raises:
        StageInputError: there are more or fewer.
    """
    names = [tensor.name for tensor in spec.inputs]
    if len(inputs) != len(names):
        got = f"{len(inputs)} of them"
        raise StageInputError(OTHER_INPUTS, stage=spec.name, expected=names, got=got)
    return dict(zip(names, inputs, strict=True))
