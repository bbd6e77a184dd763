"""The command line `ldlm`, one file per command.

Every command fills in what one function of the packages takes, calls it, and prints what it
returns. An error is printed as it is and the exit status is 1; wrong usage gives 2.
"""

import importlib
import logging
import signal
import sys

import typer

from ldlm.errors import LDLMError, installs

# Packages of the [build] extra, by the names they are imported by.
BUILD_EXTRA = ("torch", "onnx", "onnx_ir", "onnxscript", "polygraphy", "tensorrt_rtx")

# Each is the name of its module; `--help` lists them in this order.
COMMANDS = (
    "doctor", "init", "info", "convert", "engines", "export", "verify", "build", "check", "sample",
    "evaluate", "bench", "inspect", "gc",
)  # fmt: skip # the items of a row belong together

app = typer.Typer(
    name="ldlm",
    help="Latent diffusion language models: from a PyTorch checkpoint to verified engines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for name in COMMANDS:
    app.command(name)(importlib.import_module(f"engines.cli.{name}").command)


def main() -> None:
    """Entry point of `ldlm`."""
    logging.basicConfig(level=logging.WARNING)
    terminated: list[int] = []

    def terminate(number: int, _frame: object) -> None:
        """An exception, so that temporary folders are removed on the way out."""
        terminated.append(128 + number)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, terminate)
    try:
        app()
    except Exception as error:
        if terminated:  # the exporter may turn the exception into one of its own
            sys.exit(terminated[0])
        message = _message(error)
        if message is None:
            raise
        sys.stderr.write(f"error: {message}\n")
        sys.exit(1)


def _message(error: Exception) -> str | None:
    """What to say of an error in place of a traceback; None of one that nobody expects."""
    match error:
        case LDLMError():
            return str(error)
        case MemoryError():
            return f"not enough memory\n  got:      {error}"
        case OSError():
            return f"{error.strerror or error}\n  got:      {error.filename or 'no file name'}"
        case ImportError():
            missing = (error.name or str(error)).partition(".")[0].partition(" ")[0]
            if missing in BUILD_EXTRA:
                return (
                    f"this command needs more than the base install\n"
                    f"  got:      {error}\n"
                    f"  remedy:   {installs('build')}"
                )
    return None
