"""The command line `ldlm`, one file per command.

Every command fills in what one function of the packages takes, calls it, and prints what it
returns. An error is printed as it is and the exit status is 1; wrong usage gives 2.
"""

from __future__ import annotations

import logging
import sys

import typer

from engines.cli import build, convert, export, info, init, sample, verify
from ldlm.errors import LDLMError

# Packages of the [build] extra, by the names they are imported by.
BUILD_EXTRA = (
    "torch",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "safetensors",
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
for module in (init, info, convert, export, build, verify, sample):
    app.command(module.__name__.rpartition(".")[2])(module.command)


def main() -> None:
    """Entry point of `ldlm`."""
    logging.basicConfig(level=logging.WARNING)
    try:
        app()
    except LDLMError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
    except ImportError as error:
        missing = (error.name or str(error)).partition(".")[0].partition(" ")[0]
        if missing not in BUILD_EXTRA:
            raise
        sys.stderr.write(
            f"error: this command needs more than the base install\n"
            f"  got:      {error}\n"
            f"  remedy:   pip install 'ldlm-engines[build]'\n"
        )
        sys.exit(1)
