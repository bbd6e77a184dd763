"""Every error the three packages raise on purpose.

    LDLMError
    ├── ConfigError          a preset, a field or an option that does not exist or does not fit
    ├── CheckpointError      a checkpoint that is missing, damaged, or holds other tensors
    ├── TokenizerError       a tokenizer that is missing or does not fit the vocabulary
    ├── SamplerError         steps, grid, length or batch outside what the model allows
    ├── ExportError          a stage or a precision policy that cannot be exported as asked
    │   └── GraphCheckError  the ONNX file is not what was asked for
    ├── ArtifactError        an artifacts folder that is missing, incomplete or changed
    ├── DiskSpaceError       the disk is, or would be, full
    ├── StageInputError      a tensor handed to a stage has another name, dtype or shape
    ├── ProviderError        the runtime or the device asked for is not there
    ├── EngineBuildError     TensorRT refuses the graph, the profile or the target
    ├── EngineRunError       TensorRT or CUDA fails while an engine runs
    ├── ParityError          a gate of the proof failed
    └── BenchError           a peer of a benchmark does not run

A message says what is wrong and then, where they apply, which stage and tensor, what was
expected, what was found, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Callable


class LDLMError(Exception):
    """Base of all errors raised on purpose.

    Args:
        problem: one sentence, what is wrong.
        stage: the stage of the model it concerns.
        tensor: the tensor it concerns.
        expected: what should have been there.
        got: what was there.
        remedy: what the user can do.
    """

    def __init__(
        self,
        problem: str,
        *,
        stage: str | None = None,
        tensor: str | None = None,
        expected: object = None,
        got: object = None,
        remedy: str | None = None,
    ) -> None:
        self.problem = problem
        self.details = {
            name: str(value)
            for name, value in (
                ("stage", stage),
                ("tensor", tensor),
                ("expected", expected),
                ("got", got),
                ("remedy", remedy),
            )
            if value is not None
        }
        lines = [f"  {name + ':':<10}{value}" for name, value in self.details.items()]
        super().__init__("\n".join([problem, *lines]))

    def __reduce__(self) -> tuple[Callable[..., LDLMError], tuple[object, ...]]:
        """Pickled by what it was made from, so that a worker's error arrives as itself."""
        return _made_again, (type(self), self.problem, self.details)


def _made_again(kind: type[LDLMError], problem: str, details: dict[str, str]) -> LDLMError:
    return kind(problem, **details)


class ConfigError(LDLMError):
    """A preset, a field or an option that does not exist or does not fit."""


class CheckpointError(LDLMError):
    """A checkpoint that is missing, damaged, or holds other tensors than its config asks for."""


class TokenizerError(LDLMError):
    """A tokenizer that is missing or does not fit the vocabulary."""


class SamplerError(LDLMError):
    """Steps, grid, length or batch outside what the model allows."""


class ExportError(LDLMError):
    """A stage or a precision policy that cannot be exported as asked."""


class GraphCheckError(ExportError):
    """The ONNX file is not what was asked for."""


class ArtifactError(LDLMError):
    """An artifacts folder that is missing, incomplete or changed."""


class DiskSpaceError(LDLMError):
    """The disk is, or would be, full."""


class StageInputError(LDLMError):
    """A tensor handed to a stage has another name, dtype or shape than the stage takes."""


class ProviderError(LDLMError):
    """The runtime or the device asked for is not there. It is never replaced by another."""


class EngineBuildError(LDLMError):
    """TensorRT refuses the graph, the profile or the target."""


class EngineRunError(LDLMError):
    """TensorRT or CUDA fails while an engine runs."""


class ParityError(LDLMError):
    """A gate of the proof failed."""


class BenchError(LDLMError):
    """A peer of a benchmark does not run."""


def installs(extra: str) -> str:
    """The remedy for what an extra of this package brings; see README, Install."""
    return f"pip install 'ldlm-engines[{extra}]' (in a checkout: pip install '.[{extra}]')"
