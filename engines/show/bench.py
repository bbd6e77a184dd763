"""A benchmark to look at: the table, with a chart of bars."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from engines.show.table import add_row, table

BAR = 30
FIGURES = ("p50", "p90", "p99", "ratio", "tokens/s", "outside", "of rate", "GB")


def bench_table(document: dict[str, Any]) -> Table:
    """A row per case and peer, with a bar as long as its time.

    Args:
        document: see `engines.bench.measure.bench`.
    """
    machine = document["machine"]
    made = table(
        f"{document['bench']}: milliseconds per step or call, peers in turn",
        ("what", "peer", *(f">{figure}" for figure in FIGURES), "p50, to scale"),
        f"{machine['cpu']}, {machine['threads']} threads, load {machine['load']} before, own "
        f"matmul rate {machine['matmul_gflops']} GFLOP/s. ratio: how much faster than the first; "
        "outside: share of the loop outside the graph; of rate: share of the matmul rate",
    )
    cases: dict[str, list[dict[str, Any]]] = {}
    for row in document["rows"]:
        case = f"{row['what']} {row['batch']} x {row['length']}"
        cases.setdefault(case, []).append(row)
    for case, rows in cases.items():
        made.add_section()
        slowest = max(row["p50_ms"] for row in rows)
        for number, row in enumerate(rows):
            outside, of_rate = row["outside"], row["of_matmul_rate"]
            add_row(
                made,
                "" if number else case,
                row["peer"],
                *(f"{row[f'{p}_ms']:,.1f}" for p in ("p50", "p90", "p99")),
                f"{row['ratio']:.2f}",
                f"{row['tokens_per_second']:,.1f}",
                "-" if outside is None else f"{100 * outside:.2f} %",
                "-" if of_rate is None else f"{of_rate:.2f}",
                f"{row['peak_gb']:.2f}",
                "█" * max(1, round(BAR * row["p50_ms"] / slowest)),
            )
    return made
