"""The command line `ldlm`, one file per command.

Every command fills in what one function of the packages takes, calls it, and prints what it
returns. An error is printed as it is and the exit status is 1; wrong usage gives 2.
"""

from __future__ import annotations

import logging
import signal
import sys

import typer

from engines.cli import (
    bench,
    build,
    check,
    convert,
    doctor,
    engines,
    evaluate,
    export,
    gc,
    info,
    init,
    inspect,
    sample,
    verify,
)
from ldlm.errors import LDLMError, installs

# Packages of the [build] extra, by the names they are imported by.
BUILD_EXTRA = (
    "torch",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "polygraphy",
    "tensorrt_rtx",
)

app = typer.Typer(
    name="ldlm",
    help="Latent diffusion language models: from a PyTorch checkpoint to verified engines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
COMMANDS = (
    doctor, init, info, convert, engines, export, verify, build, check, sample, evaluate, bench,
    inspect, gc,
)  # fmt: skip # the items of a row belong together
for module in COMMANDS:
    app.command(module.__name__.rpartition(".")[2])(module.command)


def main() -> None:
    """Entry point of `ldlm`."""
    logging.basicConfig(level=logging.WARNING)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app()
    except LDLMError as error:
        _stop(str(error))
    except MemoryError as error:
        _stop(f"not enough memory\n  got:      {error}")
    except OSError as error:
        _stop(f"{error.strerror or error}\n  got:      {error.filename or 'no file name'}")
    except ImportError as error:
        missing = (error.name or str(error)).partition(".")[0].partition(" ")[0]
        if missing not in BUILD_EXTRA:
            raise
        _stop(
            f"this command needs more than the base install\n"
            f"  got:      {error}\n"
            f"  remedy:   {installs('build')}"
        )


_terminated: list[int] = []


def _terminate(number: int, _frame: object) -> None:
    """An exception, so that temporary folders are removed on the way out.

    The exporter may turn it into one of its own; the exit status still says what happened.
    """
    _terminated.append(number)
    sys.exit(128 + number)


def _stop(message: str) -> None:
    if _terminated:
        sys.exit(128 + _terminated[0])
    sys.stderr.write(f"error: {message}\n")
    sys.exit(1)
