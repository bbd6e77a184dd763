"""Tables of the proof; see `engines.proof.records`."""

import itertools
from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from engines.proof.gates import AUTOCAST_RATIO, STANDS_OUT
from engines.proof.questions import SAMPLER
from engines.proof.records import (
    IslandRecord,
    Measurement,
    Outcome,
    Proof,
    TapReport,
    counted,
    number,
)
from engines.show.table import BAD, GOOD, Cell, Cells, grouped, marked, pivot, table
from export.equations import TAPS, Tap
from export.precision import ISLANDS, Precision
from export.stages import components, stage


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
    groups = grouped(
        proof.measurements, lambda m: (m.stage, m.precision, m.checkpoint, m.question.value)
    )
    questions = dict.fromkeys(found.question for found in proof.measurements)
    return table(
        "Parity against PyTorch",
        ("stage", "precision", "checkpoint", "question", ">cases", ">worst at", ">distance",
         ">limit", ">max abs", ">cosine", "verdict"),
        [(*asked, str(len(found)), *_worst_case(found)) for asked, found in groups.items()],
        "\n".join(f"{question}: {question.text}" for question in questions),
        dense=True,
    )  # fmt: skip # the items of a row belong together


def _worst_case(group: Sequence[Measurement]) -> Iterator[Cell]:
    """Where it is worst, the distances there, and whether all passed."""
    worst = max(group, key=lambda found: found.share)
    detail = worst.detail
    yield f"{worst.batch} x {worst.length}" if worst.batch else "all"
    yield number(worst.distance)
    yield number(worst.limit)
    yield number(detail.max_abs) if detail else ""
    yield "" if detail is None or detail.cosine is None else f"{detail.cosine:.7f}"
    passed = all(found.passed for found in group)
    yield Text("pass", GOOD) if passed else Text("FAIL", BAD)


def islands_table(proof: Proof) -> Table:
    """The dtypes that were found in the files and in TensorRT's networks of them."""

    def cell(record: IslandRecord) -> Cell:
        wrong = "" if record.passed else f" FAIL: not {record.expected}"
        return Text.assemble(counted(record.found), (wrong, BAD))

    title = "Islands, from the ONNX file and from TensorRT's network of it"
    found: Cells = {(r.stage, r.source, r.what, r.precision): cell(r) for r in proof.islands}
    return pivot(title, ("stage", "source", "layer"), found)


def self_test_table(proof: Proof) -> Table:
    """Every damage, and the questions that noticed it per precision."""

    def cell(outcome: Outcome) -> Cell:
        noticed = ", ".join(outcome.noticed_by) or "nobody"
        return noticed if outcome.passed else Text(noticed.upper(), BAD)

    title = "Would we notice? Damaged graphs, and the questions that noticed"
    found: Cells = {(o.stage, o.damage, o.precision): cell(o) for o in proof.self_test}
    return pivot(title, ("stage", "damage"), found)


def drift_table(proof: Proof) -> Table:
    """How far each precision's sampler is from the reference, at ten steps along the way."""
    steps = max(len(curve.errors) for curve in proof.drift)
    shown = sorted({round(i * (steps - 1) / 9) for i in range(10)})
    title = "The sampler's drift: relative L2 of x0_hat from float32 PyTorch, by step"
    found: Cells = {
        (curve.precision, f">{step + 1}"): number(curve.errors[step])
        for curve in proof.drift
        for step in shown
        if step < len(curve.errors)
    }
    return pivot(title, ("precision",), found)


def taps_table(report: TapReport) -> Table:
    """One stage in one precision: a row per equation, a column per block."""
    errors, first = report.errors, report.first
    blocks = sorted({int(name.partition(".")[0]) for name in errors if "." in name})
    finding = "no equation stands out from those before it"
    if first is not None:
        finding = f"first at {first}: more than {STANDS_OUT:.0f} times all before it"
        finding = finding if errors else f"the file has other operators: {first}"

    def cell(name: str) -> Cell:
        return marked(number(errors[name], 1) if name in errors else "-", good=name != first)

    taps = TAPS[stage(report.stage).component]
    rows: list[tuple[Tap, list[Cell]]] = [(tap, [cell(tap.name)]) for tap in taps.before]
    rows += [(tap, ["", *(cell(f"{b}.{tap.name}") for b in blocks)]) for tap in taps.block]
    rows += [(tap, [cell(tap.name)]) for tap in taps.after]
    return table(
        f"Taps: {report.stage} {report.precision}, {report.about}",
        ("tap", "equation", ">once", *(f">{block}" for block in blocks)),
        [(tap.name, tap.equation, *cells) for tap, cells in rows],
        Text.assemble("relative L2 from PyTorch; ", marked(finding, good=first is None)),
        dense=True,
    )


def ablation_table(proof: Proof) -> Table:
    """What each island buys: errors in units of autocast's."""
    found: Cells = {}
    for row in proof.ablation:
        off = "none" if not row.off else row.off[0] if len(row.off) == 1 else "all"
        key = (row.stage, row.checkpoint, row.precision, number(row.autocast), f">{off}")
        found[key] = marked(f"{row.ratio:.3g}", good=bool(row.passed))
    return pivot(
        "Islands switched off: error against float32, in units of PyTorch autocast's",
        ("stage", "checkpoint", "precision", ">autocast"),
        found,
        [f">{name}" for name in ("none", *ISLANDS, "all")],
        f"each column is one island in half; the gate is {AUTOCAST_RATIO}; "
        "inf: the graph overflows",
    )


def answers_table(proof: Proof) -> Table:
    """The four questions of the proof, one row per component and precision."""
    precisions = dict.fromkeys(found.precision for found in proof.measurements)
    rows = [
        (component, precision, *_answers(component, precision, mine))
        for component, precision in itertools.product((*components(), SAMPLER), precisions)
        if (mine := proof.only({(precision, component)})).measurements
    ]
    questions = ("computes the model?", "precise enough?", "islands there?", "would we notice?")
    caption = "errors as shares of their limits, the worst of each"
    return table("The four answers", ("component", "precision", *questions), rows, caption)


def _answers(component: str, precision: str, mine: Proof) -> tuple[Cell, ...]:
    found = mine.measurements
    if component == SAMPLER:
        return "", _worst(found), "", ""
    exact = Precision.of(precision).is_float32
    return (
        _worst([m for m in found if exact or m.question.of_formula]),
        "it is the measure" if exact else _worst([m for m in found if not m.question.of_formula]),
        _count(mine.islands, "dtypes"),
        _count(mine.self_test, "judged right"),
    )


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
