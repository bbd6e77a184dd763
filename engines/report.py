"""Tables for people: the account of a model and the summary of an artifacts folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from engines.manifest import Manifest
from engines.proof.parity import is_current, read
from export.stages import DEPLOYED, STAGES

if TYPE_CHECKING:
    from engines.proof.selftest import Outcome
    from ldlm.account import Line

MB = 1e6


def account_table(lines: Iterable[Line]) -> Table:
    """Component, calculation, parameters and the published value beside it."""
    table = Table(
        title="Parameters",
        caption=(
            "published: seeds of the paper's page; the split between the four parts is a\n"
            "reconstruction that meets both published totals"
        ),
    )
    table.add_column("component")
    table.add_column("calculation", overflow="fold")
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("published", justify="right", no_wrap=True)
    for line in lines:
        published = "" if line.published is None else f"{line.published:,}"
        if line.published is not None:
            same = line.published == line.parameters
            published = f"[green]{published} =[/]" if same else f"[yellow]{published} ≠[/]"
        table.add_row(line.component, line.calculation, f"{line.parameters:,}", published)
    return table


def summary_table(folder: Path, manifest: Manifest) -> Table:
    """Stage, precision, sizes, targets, seconds, error against PyTorch and the verdict."""
    parity = read(folder)
    table = Table(
        title=f"{manifest.name}: {folder}",
        caption="error: worst relative L2 against "
        "float32 PyTorch; the half precisions' limit is 1.25 times PyTorch autocast's",
    )
    for column in (
        "stage",
        "precision",
        "ONNX MB",
        "engine MB",
        "targets",
        "seconds",
        "error",
        "limit",
        "verdict",
    ):
        table.add_column(column, justify="left" if column in ("stage", "targets") else "right")
    precisions = dict.fromkeys(entry.precision for entry in manifest.graphs)
    for precision in precisions:
        for weights in DEPLOYED:
            table.add_row(*_summary_row(manifest, precision, weights, parity))
    return table


def _summary_row(
    manifest: Manifest, precision: str, weights: str, parity: dict[str, Any] | None
) -> list[str]:
    graph = manifest.graph(precision, weights)
    engine = next(
        (e for e in manifest.engines if (e.precision, e.stage) == (precision, weights)), None
    )
    error, limit, verdict = parity_summary(manifest, precision, weights, parity)
    targets = ["none built"]
    if engine is not None:
        targets = [" ".join(sm.removeprefix("sm") for sm in engine.sms)]
        targets += [f"[yellow]not {sm}[/]: {reason}" for sm, reason in engine.refused.items()]
    return [
        weights,
        precision,
        f"{(graph.graph.bytes + graph.data.bytes) / MB:,.1f}",
        "-" if engine is None else f"{engine.engine.bytes / MB:,.1f}",
        "\n".join(targets),
        f"{graph.seconds + (engine.seconds if engine else 0.0):.1f}",
        error,
        limit,
        verdict,
    ]


def parity_summary(
    manifest: Manifest, precision: str, weights: str, parity: dict[str, Any] | None
) -> tuple[str, str, str]:
    """(worst error, its limit, verdict) of the parity lines that speak of the present graphs."""
    stages = [spec.name for spec in STAGES if spec.weights == weights]
    keys = [f"{precision}/{name}" for name in stages]
    if parity is None or not is_current(manifest, parity["graphs"], keys):
        return "-", "-", "[yellow]not verified[/]"
    lines = [ln for ln in parity["lines"] if ln["precision"] == precision and ln["stage"] in stages]
    lines += [i for i in parity["islands"] if i["precision"] == precision and i["stage"] in stages]
    asked = "graph" if precision == "fp32" else "precision"
    distances = [ln for ln in lines if ln.get("question") == asked and ln["weights"] == "given"]
    worst = max(distances, key=_share_of_limit)
    failed = [ln for ln in lines if not ln["passed"]]
    verdict = f"[red]{len(failed)} of {len(lines)} fail[/]" if failed else "[green]pass[/]"
    return _number(worst["distance"]), _number(worst["limit"]), verdict


def _share_of_limit(line: dict[str, Any]) -> float:
    """How much of its limit a line uses; what is not finite is the worst."""
    if line["distance"] is None or line["limit"] is None:
        return float("inf")
    return float(line["distance"] / line["limit"] if line["limit"] else line["distance"])


def parity_table(parity: dict[str, Any]) -> Table:
    """Every question per stage and precision: its worst case and the verdict."""
    table = Table(
        title="Parity against PyTorch",
        caption=(
            "graph: file = model of the same policy.  formula: file without rounding = model.\n"
            "precision: file against float32, held to 1.25 x autocast.  file: in ONNX Runtime.\n"
            "kl: of the softmax, held to autocast's.  tokens: share that differs and is no near-tie"
        ),
    )
    for column in (
        "stage",
        "precision",
        "weights",
        "question",
        "cases",
        "worst at",
        "distance",
        "limit",
        "max abs",
        "cosine",
        "verdict",
    ):
        table.add_column(
            column, justify="left" if column in ("stage", "weights", "question") else "right"
        )
    groups: dict[tuple[str, str, str, str], list[dict[str, Any]]] = {}
    for line in parity["lines"]:
        key = (line["stage"], line["precision"], line["weights"], line["question"])
        groups.setdefault(key, []).append(line)
    for (stage, precision, weights, question), lines in groups.items():
        worst = max(lines, key=_share_of_limit)
        detail = worst["detail"] or {}
        table.add_row(
            stage,
            precision,
            weights,
            question,
            str(len(lines)),
            f"{worst['batch']} x {worst['length']}" if worst["batch"] else "all",
            _number(worst["distance"]),
            _number(worst["limit"]),
            _number(detail.get("max_abs")) if detail else "",
            "" if not detail else f"{detail['cosine']:.7f}",
            "[green]pass[/]" if all(ln["passed"] for ln in lines) else "[red]FAIL[/]",
        )
    return table


def islands_table(parity: dict[str, Any]) -> Table:
    """The dtypes that were found in the files and in TensorRT's networks of them."""
    table = Table(title="Islands, from the ONNX file and from TensorRT's network of it")
    precisions = list(dict.fromkeys(record["precision"] for record in parity["islands"]))
    for column in ("stage", "source", "layer", *precisions):
        table.add_column(column)
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for record in parity["islands"]:
        wrong = "" if record["passed"] else f" [red]FAIL: not {record['expected']}[/]"
        key = (record["stage"], record["source"], record["what"])
        rows.setdefault(key, {})[record["precision"]] = record["found"] + wrong
    for key, row in rows.items():
        table.add_row(*key, *(row.get(precision, "") for precision in precisions))
    return table


def drift_table(parity: dict[str, Any]) -> Table:
    """How far each precision's sampler is from the reference, at ten steps along the way."""
    table = Table(title="The sampler's drift: relative L2 of x0_hat from float32 PyTorch")
    table.add_column("precision")
    steps = max(len(curve) for curve in parity["drift"].values())
    shown = sorted({round(i * (steps - 1) / 9) for i in range(10)})
    for step in shown:
        table.add_column(f"step {step + 1}", justify="right")
    for precision, curve in parity["drift"].items():
        table.add_row(precision, *(_number(curve[s]) if s < len(curve) else "" for s in shown))
    return table


def self_test_table(outcomes: Iterable[Outcome]) -> Table:
    """Every damage, and the questions that noticed it per precision."""
    table = Table(title="Would we notice? Damaged graphs, and the questions that noticed")
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for outcome in outcomes:
        noticed = ", ".join(outcome.noticed_by) or "[red]NOBODY[/]"
        rows.setdefault((outcome.stage, outcome.damage), {})[outcome.precision] = noticed
    precisions = list(dict.fromkeys(p for row in rows.values() for p in row))
    for column in ("stage", "damage", *precisions):
        table.add_column(column)
    for (stage, damage), row in rows.items():
        table.add_row(stage, damage, *(row.get(p, "") for p in precisions))
    return table


def _number(value: float | None) -> str:
    return "NaN" if value is None else f"{value:.2g}"
