"""A benchmark to look at: the table, with a chart of bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from engines.show.table import RULE, Cell, grouped, table

BAR = 30
FIGURES = ("p50", "p90", "p99", "ratio", "tokens/s", "outside", "of rate", "GB")


def bench_table(document: dict[str, Any]) -> Table:
    """A row per case and peer, with a bar as long as its time.

    Args:
        document: see `engines.bench.measure.bench`.
    """
    machine = document["machine"]
    rows: list[Sequence[Cell]] = []
    for case, peers in grouped(document["rows"], _case).items():
        slowest = max(row["p50_ms"] for row in peers)
        rows += [RULE, *((case if row is peers[0] else "", *_row(row, slowest)) for row in peers)]
    return table(
        f"{document['bench']}: milliseconds per step or call, peers in turn",
        ("what", "peer", *(f">{figure}" for figure in FIGURES), "p50, to scale"),
        rows,
        f"{machine['cpu']}, {machine['threads']} threads, load {machine['load']} before, own "
        f"matmul rate {machine['matmul_gflops']} GFLOP/s. ratio: how much faster than the first; "
        "outside: share of the loop outside the graph; of rate: share of the matmul rate",
    )


def _case(row: dict[str, Any]) -> str:
    return f"{row['what']} {row['batch']} x {row['length']}"


def _row(row: dict[str, Any], slowest: float) -> Iterator[str]:
    outside, of_rate = row["outside"], row["of_matmul_rate"]
    yield row["peer"]
    yield from (f"{row[f'{p}_ms']:,.1f}" for p in ("p50", "p90", "p99"))
    yield f"{row['ratio']:.2f}"
    yield f"{row['tokens_per_second']:,.1f}"
    yield "-" if outside is None else f"{100 * outside:.2f} %"
    yield "-" if of_rate is None else f"{of_rate:.2f}"
    yield f"{row['peak_gb']:.2f}"
    yield "█" * max(1, round(BAR * row["p50_ms"] / slowest))
