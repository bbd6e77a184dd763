"""Tables of what is found out about a model, a machine, the speed and the text."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from engines.doctor import Finding
from engines.proof.records import number
from engines.quality.records import QualityReport, Share
from engines.show.table import GOOD, RULE, WARNING, Cell, grouped, table
from ldlm.account import ParameterCount

# The longest bar of a benchmark, and what its rows say in numbers.
BAR = 30
FIGURES = ("p50", "p90", "p99", "ratio", "tokens/s", "outside", "of rate", "GB")


def account_table(lines: Iterable[ParameterCount]) -> Table:
    """Component, calculation, parameters and the published value beside it."""

    def published(line: ParameterCount) -> Cell:
        if line.published is None:
            return ""
        sign, style = ("=", GOOD) if line.published == line.parameters else ("≠", WARNING)
        return Text(f"{line.published:,} {sign}", style)

    return table(
        "Parameters",
        ("component", "calculation", ">parameters", ">published"),
        [(ln.component, ln.calculation, f"{ln.parameters:,}", published(ln)) for ln in lines],
        "published: seeds of the paper's page; the split between the four parts is a\n"
        "reconstruction that meets both published totals",
    )


def findings_table(findings: Iterable[Finding]) -> Table:
    """What was looked at, what was found, what it means, and what to do about it."""
    rows = [
        (Text(f"{each.level:<7}{each.what}", each.level), each.found, each.means, each.remedy)
        for each in findings
    ]
    made = table("This machine", ("", "found", "means", "to change that"), rows)
    made.show_lines = True
    return made


def bench_table(document: dict[str, Any]) -> Table:
    """A row per case and peer, with a bar as long as its time.

    Args:
        document: see `engines.bench.measure.bench`.
    """
    machine = document["machine"]
    rows: list[Sequence[Cell]] = []
    cases = grouped(document["rows"], lambda row: f"{row['what']} {row['batch']} x {row['length']}")
    for case, peers in cases.items():
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


def quality_table(quality: QualityReport) -> Table:
    """The judge's verdict per runtime and precision, with 95 % intervals."""

    def share(value: Share) -> str:
        return f"{100 * value.value:.1f} ({100 * value.low:.1f}..{100 * value.high:.1f})"

    return table(
        "Quality of the text, on the same noise",
        ("runtime", "precision", ">samples", ">accepted %", ">unseen %", ">distinct", ">words",
         ">agreement", ">same texts"),
        [(row.runtime, row.precision, str(row.samples),
          share(row.accepted), share(row.unseen), str(row.distinct),
          f"{row.mean_words:.1f}", number(row.agreement, 4), number(row.same, 3))
         for row in quality.rows],
        f"{quality.steps} steps of {quality.solver}, seed {quality.seed}; "
        "95 % intervals (Wilson); unseen: of the accepted; agreement: with PyTorch fp32",
    )  # fmt: skip # the items of a row belong together
