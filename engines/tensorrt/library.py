"""TensorRT-RTX and plain TensorRT, imported when they are asked for.

That one is absent is an error with the command that installs it.
"""

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ldlm.errors import ProviderError, installs

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Library:
    """A TensorRT.

    Attributes:
        module: the name it is imported by.
        package: its name in a package index.
        extra: ours that brings it.
        jit: whether it compiles kernels on the device, which a cache on disk then keeps.
    """

    module: str
    package: str
    extra: str
    jit: bool


LIBRARIES: dict[str, Library] = {
    "rtx": Library("tensorrt_rtx", "tensorrt-rtx", "rtx", jit=True),
    "trt": Library("tensorrt", "tensorrt", "tensorrt", jit=False),
}


def load_library(name: str) -> Any:
    """The module of a TensorRT.

    Raises:
        ProviderError: it is not installed, or does not load.
    """
    library = LIBRARIES[name]
    try:
        return importlib.import_module(library.module)
    except (ImportError, OSError) as error:
        problem = f"{library.package} is not usable here"
        raise ProviderError(problem, got=str(error), remedy=installs(library.extra)) from error


def make_logger(trt: Any, warn: Callable[[str], None] = lambda _: None) -> Any:
    """A logger that keeps warnings and errors for our own messages.

    Args:
        trt: the library's module.
        warn: told every warning as it comes.
    """

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []
            self.warnings: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.ERROR:
                self.errors.append(message)
            elif severity == trt.ILogger.Severity.WARNING:
                self.warnings.append(message)
                warn(message)
            log.debug("%s", message)

    return Logger()
