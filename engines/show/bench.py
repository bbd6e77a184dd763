"""A benchmark to look at: the table, a chart of bars, and a plot over lengths."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from engines.bench.measure import STEP, Case, flops
from engines.show.table import add_row, table
from ldlm import files
from ldlm.config import LDLMConfig
from ldlm.errors import ConfigError, installs

Document = dict[str, Any]
BAR = 30
SUFFIXES = (".svg", ".png", ".pdf")


def bench_table(document: Document) -> Table:
    """A row per case and peer, with a bar as long as its time."""
    machine = document["machine"]
    made = table(
        f"{document['bench']}: milliseconds per step or call, peers in turn",
        ("what", "peer", ">p50", ">p90", ">p99", ">ratio", ">tokens/s", ">outside", ">of rate",
         ">GB", "p50, to scale"),
        f"{machine['cpu']}, {machine['threads']} threads, load {machine['load']} before, own "
        f"matmul rate {machine['matmul_gflops']} GFLOP/s. ratio: how much faster than the "
        "first; outside: share of the loop outside the graph; of rate: share of the matmul rate",
    )  # fmt: skip
    previous = None
    for row in document["rows"]:
        case = Case(row["what"], row["batch"], row["length"])
        if case != previous:
            made.add_section()
        outside = "-" if row["outside"] is None else f"{100 * row['outside']:.2f} %"
        add_row(
            made,
            "" if case == previous else f"{case.what} {case.batch} x {case.length}",
            row["peer"],
            *(f"{row[f'{p}_ms']:,.1f}" for p in ("p50", "p90", "p99")),
            f"{row['ratio']:.2f}",
            f"{row['tokens_per_second']:,.1f}",
            outside,
            "-" if row["of_matmul_rate"] is None else f"{row['of_matmul_rate']:.2f}",
            f"{row['peak_gb']:.2f}",
            "█" * max(1, round(BAR * row["p50_ms"] / _slowest(document, case))),
        )
        previous = case
    return made


def _slowest(document: Document, case: Case) -> float:
    same = [r for r in document["rows"] if Case(r["what"], r["batch"], r["length"]) == case]
    return float(max(row["p50_ms"] for row in same))


def require_plot(path: Path, what: Sequence[str]) -> None:
    """Refuse, before minutes are spent, a plot that could not be drawn.

    Raises:
        ConfigError: matplotlib is not installed, the file is not one it can write, or no step is
            measured.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("a plot needs matplotlib", remedy=installs("bench"))
    if path.suffix not in SUFFIXES or not path.absolute().parent.is_dir():
        raise ConfigError(
            "the plot cannot be written there",
            expected=f"{', '.join(SUFFIXES)} in a folder that exists",
            got=path,
        )
    if STEP not in what:
        raise ConfigError("no step was measured", remedy="bench with --what step")


def plot(document: Document, config: LDLMConfig, path: Path) -> None:
    """Step time over the length, a line per peer, a panel per batch, and the matmul roof.

    Args:
        document: of `bench`.
        config: of the model.
        path: an .svg, .png or .pdf file.

    Raises:
        ConfigError: as `require_plot`.
    """
    rows = [row for row in document["rows"] if row["what"] == STEP]
    require_plot(path, [row["what"] for row in rows])
    from matplotlib.figure import Figure

    batches = sorted({row["batch"] for row in rows})
    figure = Figure(figsize=(5 * len(batches), 4), layout="constrained")
    for axes, batch in zip(
        figure.subplots(1, len(batches), squeeze=False)[0], batches, strict=True
    ):
        lengths = sorted({row["length"] for row in rows if row["batch"] == batch})
        for number, peer in enumerate(document["peers"]):
            mine = {r["length"]: r for r in rows if r["batch"] == batch and r["peer"] == peer}
            found = [n for n in lengths if n in mine]
            if not found:
                continue
            times = [mine[n]["p50_ms"] for n in found]
            axes.plot(found, times, marker="o", color=f"C{number}", label=peer)
        rate = 1e9 * document["machine"]["matmul_gflops"]
        roof = [1e3 * flops(Case(STEP, batch, n), config) / rate for n in lengths]
        axes.plot(lengths, roof, color="black", linestyle="--", label="matmul rate")
        axes.set(xscale="log", yscale="log", xlabel="length", title=f"batch {batch}")
        axes.set_xticks(lengths, [str(n) for n in lengths])
        axes.set_xticks([], minor=True)
        for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            which("{x:g}")
        axes.set_ylabel("ms per step")
        axes.grid(alpha=0.3, which="both")
        axes.legend()
    with files.disk_errors(path):
        figure.savefig(path)
