"""Tables for people: the account of a model and the summary of an artifacts folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from engines.artifacts.manifest import EngineEntry, Manifest
from engines.proof.gates import AUTOCAST_RATIO
from engines.proof.records import is_current, read
from engines.show.proof import number, share_of_limit
from export.stages import compiled, components, stages_of

if TYPE_CHECKING:
    pass

MB = 1e6


def summary_table(folder: Path, manifest: Manifest) -> Table:
    """Stage, precision, sizes, targets, seconds, error of the graph and the verdict on it."""
    parity = read(folder)
    table = Table(
        title=f"{manifest.name}: {folder}",
        caption="error: the graph's worst relative L2 against "
        f"float32 PyTorch; the limit of all but fp32 is {AUTOCAST_RATIO} times PyTorch's own",
    )
    for column in ("stage", "precision", "ONNX MB", "engine MB", "targets"):
        table.add_column(column, justify="right" if column.endswith("MB") else "left")
    for column in ("seconds", "error", "limit", "graph"):
        table.add_column(column, justify="right")
    precisions = dict.fromkeys(entry.precision for entry in manifest.graphs)
    for precision in precisions:
        for weights in components():
            for row in _summary_rows(manifest, precision, weights, parity):
                table.add_row(*row)
    return table


def _summary_rows(
    manifest: Manifest, precision: str, weights: str, parity: dict[str, Any] | None
) -> Iterator[list[str]]:
    """A row per target of a graph's engines, or one that says that there is none."""
    graph = manifest.find_graph(precision, weights)
    if graph is None:
        return
    graphs = [manifest.find_graph(precision, s.name) for s in stages_of(weights)]
    parts = {f.path: f.bytes for g in graphs if g is not None for f in (g.graph, g.data)}
    size = f"{sum(parts.values()) / MB:,.1f}"
    proof = parity_summary(manifest, precision, weights, parity)
    names = compiled(weights)
    mine = [e for e in manifest.engines if e.precision == precision and e.stage in names]
    if not mine:
        yield [weights, precision, size, "-", "none built", f"{graph.seconds:.1f}", *proof]
    for target in dict.fromkeys(entry.target for entry in mine):
        built = [e for e in mine if e.target == target]
        yield [
            weights, precision, size, f"{sum(e.engine.bytes for e in built) / MB:,.1f}",
            "\n".join(_where(target, names, built)),
            f"{graph.seconds + sum(e.seconds for e in built):.1f}", *proof,
        ]  # fmt: skip


def _where(target: str, names: Sequence[str], built: Sequence[EngineEntry]) -> Iterator[str]:
    """Where the engines of a target run together, and what they lack."""
    sms = [sm for sm in built[0].sms if all(sm in entry.sms for entry in built)]
    yield " ".join((target, *(sm.removeprefix("sm") for sm in sms)))
    refused = {sm: reason for entry in reversed(built) for sm, reason in entry.refused.items()}
    yield from (f"[yellow]not {sm}[/]: {reason}" for sm, reason in refused.items())
    missing = sorted(set(names) - {entry.stage for entry in built})
    yield from (f"[yellow]not built[/]: {name}" for name in missing)


def parity_summary(
    manifest: Manifest, precision: str, weights: str, parity: dict[str, Any] | None
) -> tuple[str, str, str]:
    """(worst error, its limit, verdict) of the parity lines that speak of the present graphs."""
    stages = [spec.name for spec in stages_of(weights)]
    keys = [f"{precision}/{name}" for name in stages]
    if parity is None or not is_current(manifest, parity["graphs"], keys):
        return "-", "-", "[yellow]not verified[/]"
    lines = [ln for ln in parity["lines"] if ln["precision"] == precision and ln["stage"] in stages]
    lines += [i for i in parity["islands"] if i["precision"] == precision and i["stage"] in stages]
    asked = "graph" if precision == "fp32" else "precision"
    distances = [ln for ln in lines if ln.get("question") == asked and ln["weights"] == "given"]
    worst = max(distances, key=share_of_limit)
    failed = [ln for ln in lines if not ln["passed"]]
    verdict = f"[red]{len(failed)} of {len(lines)} fail[/]" if failed else "[green]pass[/]"
    return number(worst["distance"]), number(worst["limit"]), verdict
