"""What every runtime implements: one stage, named tensors in, named tensors out."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from export.stages import DYNAMIC, AxisRange, StageSpec
from ldlm.config import LDLMConfig
from ldlm.errors import StageInputError

Array = NDArray[Any]
# (dtype as NumPy names it, shape) of a tensor.
Signature = tuple[str, tuple[int, ...]]

OTHER_INPUTS = "other inputs than the stage takes"


class RuntimeStage(abc.ABC):
    """One stage on one runtime, and a context manager that closes it.

    Threads may share it: a call has no state but its own.

    Attributes:
        spec, config: what its tensors look like.
        ranges: the allowed sizes of its dynamic axes.
        device: where it runs, such as "cpu".
    """

    def __init__(
        self, spec: StageSpec, config: LDLMConfig, ranges: Mapping[str, AxisRange], device: str
    ) -> None:
        self.spec, self.config, self.ranges, self.device = spec, config, dict(ranges), device

    def __call__(self, *inputs: Any) -> Array:
        """Tensors in, in the spec's order; the stage's first output out.

        Raises:
            StageInputError: as `run`.
        """
        name = self.spec.outputs[0].name
        return self.run(named(self.spec, inputs), [name])[name]

    def run(
        self, feeds: Mapping[str, Any], outputs: Sequence[str] | None = None
    ) -> dict[str, Array]:
        """The named outputs; by default all of the spec.

        Raises:
            StageInputError: an input is no array, has the wrong dtype or shape, or a size outside
                the ranges.
        """
        names = [t.name for t in self.spec.outputs] if outputs is None else list(outputs)
        return self._run(self._checked(feeds), names)

    @abc.abstractmethod
    def _run(self, feeds: dict[str, Any], outputs: Sequence[str]) -> dict[str, Array]:
        """Compute the outputs of feeds that were checked."""

    def _checked(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        found = {name: signature(self.spec, name, value) for name, value in feeds.items()}
        check_inputs(self.spec, self.config, self.ranges, found)
        return dict(feeds)

    def close(self) -> None:  # noqa: B027  # most runtimes hold nothing but memory
        """Give back what it holds; it cannot be run any more."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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


def signature(spec: StageSpec, name: str, value: Any) -> Signature:
    """dtype and shape of an input.

    Raises:
        StageInputError: it is no NumPy array.
    """
    if not isinstance(value, np.ndarray):
        raise StageInputError(
            "an input is no NumPy array",
            stage=spec.name,
            tensor=name,
            expected="numpy.ndarray",
            got=f"{type(value).__module__}.{type(value).__qualname__}",
            remedy="numpy.asarray(x, numpy.float32); of a torch tensor, x.numpy(force=True)",
        )
    return (value.dtype.name if value.dtype.isnative else str(value.dtype), value.shape)


def check_inputs(
    spec: StageSpec,
    config: LDLMConfig,
    ranges: Mapping[str, AxisRange],
    found: Mapping[str, Signature],
) -> dict[str, int]:
    """Check every input against the spec and the allowed ranges; the dynamic sizes.

    Raises:
        StageInputError: naming the first input that does not fit.
    """
    names = [tensor.name for tensor in spec.inputs]
    if sorted(found) != sorted(names):
        raise StageInputError(OTHER_INPUTS, stage=spec.name, expected=names, got=list(found))
    sizes: dict[str, int] = {}
    for tensor in spec.inputs:
        dtype, shape = found[tensor.name]
        if len(shape) == len(tensor.axes):
            for axis, size in zip(tensor.axes, shape, strict=True):
                if axis in DYNAMIC:
                    sizes.setdefault(str(axis), size)
        expected = tensor.shape(config, {axis: sizes.get(axis, axis) for axis in DYNAMIC})
        if dtype != tensor.dtype or shape != expected:
            raise StageInputError(
                "an input has the wrong dtype or shape",
                stage=spec.name,
                tensor=tensor.name,
                expected=f"{tensor.dtype} {list(expected)}",
                got=f"{dtype} {list(shape)}",
            )
    for axis, allowed in ranges.items():
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
