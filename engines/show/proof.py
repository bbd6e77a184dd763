"""Tables of the proof, from parity.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from engines.proof.gates import AUTOCAST_RATIO, STANDS_OUT
from engines.proof.records import SAMPLER
from export.equations import TAPS
from export.precision import ISLANDS
from export.stages import STAGES, components

Document = dict[str, Any]

# Questions about a formula; the others are about rounding.
FORMULA = ("graph", "formula", "update", "engine update", "taps")


def tables(parity: Document) -> Iterator[Table]:
    """Every table that parity.json has something for; the four answers come last."""
    yield islands_table(parity)
    yield parity_table(parity)
    for report in parity["taps"]:
        yield taps_table(report)
    for part, table in (
        ("drift", drift_table), ("self_test", self_test_table), ("ablation", ablation_table),
    ):  # fmt: skip
        if parity[part]:
            yield table(parity)
    yield answers_table(parity)


def parity_table(parity: dict[str, Any]) -> Table:
    """Every question per stage and precision: its worst case and the verdict."""
    table = Table(
        title="Parity against PyTorch",
        caption=(
            "graph: file = model of the same policy.  formula: file without rounding = model.\n"
            f"precision: file against float32, held to {AUTOCAST_RATIO} x PyTorch's own.  "
            "file: in ONNX Runtime.\n"
            "kl: of the softmax, held to PyTorch's.  tokens: share that differs and is no "
            "near-tie.\nengine: on the GPU at hand, held to the same limits"
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
        worst = max(lines, key=share_of_limit)
        detail = worst["detail"] or {}
        table.add_row(
            stage,
            precision,
            weights,
            question,
            str(len(lines)),
            f"{worst['batch']} x {worst['length']}" if worst["batch"] else "all",
            number(worst["distance"]),
            number(worst["limit"]),
            number(detail.get("max_abs")) if detail else "",
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
        table.add_row(precision, *(number(curve[s]) if s < len(curve) else "" for s in shown))
    return table


def self_test_table(parity: Document) -> Table:
    """Every damage, and the questions that noticed it per precision."""
    table = Table(title="Would we notice? Damaged graphs, and the questions that noticed")
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for outcome in parity["self_test"]:
        noticed = ", ".join(outcome["noticed_by"]) or "nobody"
        noticed = noticed if outcome["passed"] else f"[red]{noticed.upper()}[/]"
        key = (outcome["stage"], outcome["damage"])
        rows.setdefault(key, {})[outcome["precision"]] = noticed
    precisions = list(dict.fromkeys(p for row in rows.values() for p in row))
    for column in ("stage", "damage", *precisions):
        table.add_column(column)
    for (stage, damage), row in rows.items():
        table.add_row(stage, damage, *(row.get(p, "") for p in precisions))
    return table


def taps_table(report: Document) -> Table:
    """One stage in one precision: a row per equation, a column per block."""
    taps = TAPS[next(spec.component for spec in STAGES if spec.name == report["stage"])]
    errors: dict[str, float | None] = report["errors"]
    blocks = sorted({int(name.partition(".")[0]) for name in errors if "." in name})
    first = report["first"]
    verdict = (
        "no equation stands out from those before it"
        if first is None
        else f"[red]first at {escape(first)}: more than {STANDS_OUT:.0f} times all before it[/]"
        if errors
        else f"[red]the file has other operators: {escape(first)}[/]"
    )
    table = Table(
        title=f"Taps: {report['stage']} {report['precision']}, {report['question']}",
        caption=f"relative L2 from PyTorch; {verdict}",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    for column in ("tap", "equation", "once", *map(str, blocks)):
        left = column in ("tap", "equation")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)

    def cell(name: str) -> str:
        text = number(errors[name], digits=0) if name in errors else "-"
        return f"[red]{text}[/]" if name == first else text

    for tap in taps.before:
        table.add_row(tap.name, escape(tap.equation), cell(tap.name))
    for tap in taps.block:
        cells = [cell(f"{block}.{tap.name}") for block in blocks]
        table.add_row(tap.name, escape(tap.equation), "", *cells)
    for tap in taps.after:
        table.add_row(tap.name, escape(tap.equation), cell(tap.name))
    return table


def ablation_table(parity: Document) -> Table:
    """What each island buys: errors in units of autocast's."""
    table = Table(
        title="Islands switched off: error against float32, in units of PyTorch autocast's",
        caption=f"each column is one island in half; the gate is {AUTOCAST_RATIO}; "
        "inf: the graph overflows",
    )
    for column in ("stage", "weights", "precision", "autocast", "none", *ISLANDS, "all"):
        left = column in ("stage", "weights", "precision")
        table.add_column(column, justify="left" if left else "right")
    groups: dict[tuple[str, str, str], dict[str, Document]] = {}
    for row in parity["ablation"]:
        off = row["off"]
        name = "none" if not off else off[0] if len(off) == 1 else "all"
        key = (row["stage"], row["weights"], row["precision"])
        groups.setdefault(key, {})[name] = row
    for key, rows in groups.items():
        cells = []
        for name in ("none", *ISLANDS, "all"):
            if name not in rows:
                cells.append("-")
                continue
            ratio = "inf" if rows[name]["ratio"] is None else f"{rows[name]['ratio']:.3g}"
            cells.append(ratio if rows[name]["passed"] else f"[red]{ratio}[/]")
        table.add_row(*key, number(next(iter(rows.values()))["autocast"]), *cells)
    return table


def answers_table(parity: Document) -> Table:
    """The four questions of the proof, one row per stage and precision."""
    table = Table(
        title="The four answers",
        caption="errors as shares of their limits, the worst of each",
    )
    for column in (
        "stage", "precision",
        "computes the model?", "precise enough?", "islands there?", "would we notice?",
    ):  # fmt: skip
        table.add_column(column)
    precisions = dict.fromkeys(line["precision"] for line in parity["lines"])
    for weights in components():
        stages = {spec.name for spec in STAGES if spec.component == weights}
        for precision in precisions:
            mine = {
                part: [
                    item
                    for item in parity[part]
                    if item["precision"] == precision and item["stage"] in stages
                ]
                for part in ("lines", "islands", "self_test")
            }
            exact = precision == "fp32"
            of_formula = [x for x in mine["lines"] if exact or x["question"] in FORMULA]
            of_rounding = [x for x in mine["lines"] if x not in of_formula]
            table.add_row(
                weights, precision, _worst(of_formula),
                "it is the measure" if exact else _worst(of_rounding),
                _count(mine["islands"], "dtypes"), _count(mine["self_test"], "judged right"),
            )  # fmt: skip
    for precision in precisions:
        drift = [
            line
            for line in parity["lines"]
            if (line["stage"], line["precision"]) == (SAMPLER, precision)
        ]
        if drift:
            table.add_row(SAMPLER, precision, "", _worst(drift), "", "")
    return table


def _worst(lines: list[Document]) -> str:
    if not lines:
        return "not asked"
    failed = [line for line in lines if not line["passed"]]
    share = max(share_of_limit(line) for line in failed or lines)
    if not failed:
        return f"yes, {share:.2g} of the limit"
    shown = f"{share:.2g} times the limit" if failed[0]["limit"] else f"{share:.2g} in place of 0"
    return f"[red]NO: {len(failed)} of {len(lines)}, {shown}[/]"


def _count(records: list[Document], what: str) -> str:
    if not records:
        return "not asked"
    held = sum(record["passed"] for record in records)
    shown = f"{held} of {len(records)} {what}"
    return f"yes, {shown}" if held == len(records) else f"[red]NO: {shown}[/]"


def number(value: float | None, digits: int = 1) -> str:
    """A measurement for a table; parity.json has null for what is not finite."""
    if value is None:
        return "not finite"
    return f"{value:.{digits + 1}g}" if digits else f"{value:.0e}"


def share_of_limit(line: dict[str, Any]) -> float:
    """How much of its limit a line uses; what is not finite is the worst."""
    if line["distance"] is None or line["limit"] is None:
        return float("inf")
    return float(line["distance"] / line["limit"] if line["limit"] else line["distance"])
