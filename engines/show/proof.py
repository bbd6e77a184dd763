"""Tables of the proof; see `engines.proof.records`."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from engines.proof.gates import AUTOCAST_RATIO, STANDS_OUT
from engines.proof.questions import SAMPLER
from engines.proof.records import (
    Ablation,
    IslandRecord,
    Measurement,
    Outcome,
    Proof,
    TapReport,
    counted,
    number,
)
from engines.show.table import BAD, Cell, add_row, marked, table, verdict
from export.equations import TAPS, Tap
from export.precision import ISLANDS, Precision
from export.stages import components, stage

# Cells by what stands in the first columns and, last, the name of a further one.
Found = dict[tuple[str, ...], Cell]


def tables(proof: Proof) -> Iterator[Table]:
    """Every table that a proof has something for; the four answers come last."""
    yield islands_table(proof)
    yield parity_table(proof)
    yield from map(taps_table, proof.taps)
    if proof.drift:
        yield drift_table(proof)
    if proof.self_test:
        yield self_test_table(proof)
    if proof.ablation:
        yield ablation_table(proof)
    yield answers_table(proof)


def parity_table(proof: Proof) -> Table:
    """Every question per stage and precision: its worst case and the verdict."""
    questions = dict.fromkeys(found.question for found in proof.measurements)
    made = table(
        "Parity against PyTorch",
        ("stage", "precision", "checkpoint", "question", ">cases", ">worst at", ">distance",
         ">limit", ">max abs", ">cosine", "verdict"),
        "\n".join(f"{question}: {question.text}" for question in questions),
        dense=True,
    )  # fmt: skip # the items of a row belong together
    groups: dict[tuple[str, ...], list[Measurement]] = defaultdict(list)
    for found in proof.measurements:
        where = (found.stage, found.precision, found.checkpoint, found.question)
        groups[where].append(found)
    for key, group in groups.items():
        worst = max(group, key=lambda found: found.share)
        detail = worst.detail
        add_row(
            made, *key, str(len(group)),
            f"{worst.batch} x {worst.length}" if worst.batch else "all",
            number(worst.distance), number(worst.limit),
            number(detail.max_abs) if detail else "",
            "" if detail is None or detail.cosine is None else f"{detail.cosine:.7f}",
            verdict(all(found.passed for found in group)),
        )  # fmt: skip # the items of a row belong together
    return made


def islands_table(proof: Proof) -> Table:
    """The dtypes that were found in the files and in TensorRT's networks of them."""
    found: Found = {}
    for record in proof.islands:
        wrong = "" if record.passed else f" FAIL: not {record.expected}"
        where = (record.stage, record.source, record.what, record.precision)
        found[where] = Text.assemble(counted(record.found), (wrong, BAD))
    title = "Islands, from the ONNX file and from TensorRT's network of it"
    return _by_last(title, ("stage", "source", "layer"), found)


def self_test_table(proof: Proof) -> Table:
    """Every damage, and the questions that noticed it per precision."""
    found: Found = {}
    for outcome in proof.self_test:
        noticed = ", ".join(outcome.noticed_by) or "nobody"
        shown = marked(noticed if outcome.passed else noticed.upper(), good=bool(outcome.passed))
        found[outcome.stage, outcome.damage, outcome.precision] = shown
    title = "Would we notice? Damaged graphs, and the questions that noticed"
    return _by_last(title, ("stage", "damage"), found)


def _by_last(title: str, names: Sequence[str], found: Found) -> Table:
    """A column for each last part of the keys, a row for what stands before it."""
    columns = list(dict.fromkeys(key[-1] for key in found))
    made = table(title, (*names, *columns))
    for row in dict.fromkeys(key[:-1] for key in found):
        add_row(made, *row, *(found.get((*row, column), "") for column in columns))
    return made


def drift_table(proof: Proof) -> Table:
    """How far each precision's sampler is from the reference, at ten steps along the way."""
    steps = max(len(curve.errors) for curve in proof.drift)
    shown = sorted({round(i * (steps - 1) / 9) for i in range(10)})
    made = table(
        "The sampler's drift: relative L2 of x0_hat from float32 PyTorch, by step",
        ("precision", *(f">{step + 1}" for step in shown)),
    )
    for curve in proof.drift:
        cells = (number(curve.errors[s]) if s < len(curve.errors) else "" for s in shown)
        add_row(made, curve.precision, *cells)
    return made


def taps_table(report: TapReport) -> Table:
    """One stage in one precision: a row per equation, a column per block."""
    errors, first = report.errors, report.first
    blocks = sorted({int(name.partition(".")[0]) for name in errors if "." in name})
    finding = "no equation stands out from those before it"
    if first is not None:
        finding = f"first at {first}: more than {STANDS_OUT:.0f} times all before it"
        finding = finding if errors else f"the file has other operators: {first}"
    made = table(
        f"Taps: {report.stage} {report.precision}, {report.about}",
        ("tap", "equation", ">once", *(f">{block}" for block in blocks)),
        Text.assemble("relative L2 from PyTorch; ", marked(finding, good=first is None)),
        dense=True,
    )

    def cell(name: str) -> Cell:
        text = number(errors[name], digits=1) if name in errors else "-"
        return marked(text, good=name != first)

    taps = TAPS[stage(report.stage).component]
    rows: list[tuple[Tap, list[Cell]]] = [(tap, [cell(tap.name)]) for tap in taps.before]
    rows += [(tap, ["", *(cell(f"{b}.{tap.name}") for b in blocks)]) for tap in taps.block]
    rows += [(tap, [cell(tap.name)]) for tap in taps.after]
    for tap, cells in rows:
        add_row(made, tap.name, tap.equation, *cells)
    return made


def ablation_table(proof: Proof) -> Table:
    """What each island buys: errors in units of autocast's."""
    variants = ("none", *ISLANDS, "all")
    made = table(
        "Islands switched off: error against float32, in units of PyTorch autocast's",
        ("stage", "checkpoint", "precision", ">autocast", *(f">{name}" for name in variants)),
        f"each column is one island in half; the gate is {AUTOCAST_RATIO}; "
        "inf: the graph overflows",
    )
    groups: dict[tuple[str, str, str], dict[str, Ablation]] = defaultdict(dict)
    for row in proof.ablation:
        name = "none" if not row.off else row.off[0] if len(row.off) == 1 else "all"
        groups[row.stage, row.checkpoint, row.precision][name] = row
    for key, rows in groups.items():
        shown = {n: marked(f"{r.ratio:.3g}", good=bool(r.passed)) for n, r in rows.items()}
        autocast = number(next(iter(rows.values())).autocast)
        add_row(made, *key, autocast, *(shown.get(name, "-") for name in variants))
    return made


def answers_table(proof: Proof) -> Table:
    """The four questions of the proof, one row per component and precision."""
    made = table(
        "The four answers",
        ("component", "precision",
         "computes the model?", "precise enough?", "islands there?", "would we notice?"),
        "errors as shares of their limits, the worst of each",
    )  # fmt: skip # the items of a row belong together
    precisions = dict.fromkeys(found.precision for found in proof.measurements)
    for component, precision in itertools.product((*components(), SAMPLER), precisions):
        mine = proof.only({(precision, component)})
        found = mine.measurements
        if component == SAMPLER and found:
            add_row(made, component, precision, "", _worst(found), "", "")
        elif found:
            exact = Precision.of(precision).is_float32
            formula = [m for m in found if exact or m.question.of_formula]
            rounding = [m for m in found if not m.question.of_formula]
            add_row(
                made, component, precision, _worst(formula),
                "it is the measure" if exact else _worst(rounding),
                _count(mine.islands, "dtypes"), _count(mine.self_test, "judged right"),
            )  # fmt: skip # the items of a row belong together
    return made


def _worst(found: Sequence[Measurement]) -> Cell:
    if not found:
        return "not asked"
    failed = [each for each in found if not each.passed]
    worst = max(failed or found, key=lambda each: each.share)
    if not failed:
        return f"yes, {worst.share:.2g} of the limit"
    limit = "times the limit" if worst.limit else "in place of 0"
    return Text(f"NO: {len(failed)} of {len(found)}, {worst.share:.2g} {limit}", BAD)


def _count(records: Sequence[IslandRecord | Outcome], what: str) -> Cell:
    if not records:
        return "not asked"
    held = sum(bool(record.passed) for record in records)
    shown = f"{held} of {len(records)} {what}"
    return f"yes, {shown}" if held == len(records) else Text(f"NO: {shown}", BAD)
