"""A benchmark to look at: the table, with a chart of bars."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from engines.bench.measure import Case
from engines.show.table import add_row, table

Document = dict[str, Any]
BAR = 30


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
