"""Tables about an artifacts folder: what it holds, what was done, what could go, what a file is."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from engines.artifacts.collect import Leftover
from engines.artifacts.ingredients import Decision
from engines.artifacts.inspect import Document, flatten
from engines.artifacts.manifest import EngineEntry, Manifest
from engines.proof.gates import AUTOCAST_RATIO
from engines.proof.questions import Question
from engines.proof.records import Proof, number
from engines.proof.saved import current, read
from engines.show.table import GOOD, WARNING, Cell, marked, table
from export.precision import Precision
from export.stages import compiled, components, stages_of

MB = 1e6


def summary_table(folder: Path, manifest: Manifest) -> Table:
    """Component, precision, sizes, targets, seconds, error of the graph and the verdict on it."""
    saved = read(folder)
    proof = current(saved.content or Proof(), manifest)
    caption = (
        "error: the graph's worst relative L2 against float32 PyTorch; the limit of all but fp32 "
        f"is {AUTOCAST_RATIO} times PyTorch's own"
    )
    return table(
        f"{manifest.name}: {folder}",
        ("component", "precision", ">ONNX MB", ">engine MB", "targets", ">seconds", ">error",
         ">limit", ">graph"),
        [row
         for precision in dict.fromkeys(entry.precision for entry in manifest.graphs)
         for component in components()
         for row in _rows(manifest, precision, component, proof)],
        caption if saved.content else f"{caption}\n{saved.problem}",
    )  # fmt: skip # the items of a row belong together


def _rows(manifest: Manifest, precision: str, component: str, proof: Proof) -> Iterator[list[Cell]]:
    """A row per target of a component's engines, or one that says that there is none."""
    found = (manifest.find_graph(precision, s.name) for s in stages_of(component))
    graphs = [graph for graph in found if graph is not None]
    if not graphs:
        return
    files = {f.path: f.bytes for g in graphs for f in (g.graph, g.data)}
    size = f"{sum(files.values()) / MB:,.1f}"
    seconds = max(graph.seconds for graph in graphs)
    judged = verdict(proof, precision, component)
    names = compiled(component)
    mine = [e for e in manifest.engines if e.precision == precision and e.stage in names]
    if not mine:
        yield [component, precision, size, "-", "none built", f"{seconds:.1f}", *judged]
    for target in dict.fromkeys(entry.target for entry in mine):
        built = [e for e in mine if e.target == target]
        yield [
            component, precision, size, f"{sum(e.engine.bytes for e in built) / MB:,.1f}",
            Text("\n").join(_where(target, names, built)),
            f"{seconds + sum(e.seconds for e in built):.1f}", *judged,
        ]  # fmt: skip # rows, as a table


def _where(target: str, names: Sequence[str], built: Sequence[EngineEntry]) -> Iterator[Text]:
    """Where the engines of a target run together, and what they lack."""
    sms = [sm for sm in built[0].sms if all(sm in entry.sms for entry in built)]
    yield Text(" ".join((target, *(sm.removeprefix("sm") for sm in sms))))
    refused = {sm: reason for entry in reversed(built) for sm, reason in entry.refused.items()}
    for sm, reason in refused.items():
        yield Text.assemble((f"not {sm}", WARNING), f": {reason}")
    for name in sorted(set(names) - {entry.stage for entry in built}):
        yield Text.assemble(("not built", WARNING), f": {name}")


def verdict(proof: Proof, precision: str, component: str) -> tuple[str, str, Text]:
    """(worst error, its limit, verdict) of a component; the proof is of the present graphs."""
    mine = proof.only({(precision, component)})
    if not mine.scopes:
        return "-", "-", Text("not verified", WARNING)
    gated = list(mine.gated())
    failed = sum(not record.passed for record in gated)
    shown = marked(f"{failed} of {len(gated)} fail", good=False) if failed else Text("pass", GOOD)
    exact = Precision.of(precision).is_float32
    asked = Question.GRAPH if exact else Question.PRECISION
    found = [m for m in mine.measurements if (m.question, m.checkpoint) == (asked, "given")]
    if not found:
        return "-", "-", shown
    worst = max(found, key=lambda each: each.share)
    return number(worst.distance), number(worst.limit), shown


def leftovers_table(folder: Path, found: Iterable[Leftover], *, deleted: bool) -> Table:
    """What can go, or went, from a folder, and why."""
    title = "deleted" if deleted else "would be deleted with --delete"
    rows = [
        (item.path.relative_to(folder).as_posix(), f"{item.bytes / MB:,.1f}", item.reason)
        for item in found
    ]
    return table(title, ("file", ">MB", "why"), rows)


def decisions_table(command: str, decisions: Sequence[Decision]) -> Table:
    """What was made, what was kept, and why."""
    kept = "nothing that it depends on has changed"
    rows = [
        (made.what, "made" if made.reasons else "kept", "; ".join(made.reasons) or kept)
        for made in decisions
    ]
    return table(f"{command}: what was done, and why", ("file", "done", "because"), rows)


def description_table(path: Path, document: Document) -> Table:
    """A document about a folder or a file; see `engines.artifacts.inspect.describe`."""
    made = table(str(path), ("", ""), flatten(document))
    made.show_header = False
    return made
