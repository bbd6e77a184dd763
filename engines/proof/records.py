"""What the proof found: lines, their gates, and parity.json."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.artifacts import ingredients
from engines.artifacts.manifest import PARITY, GraphEntry, Manifest
from engines.proof.gates import SIGNAL_LOST
from ldlm import files
from ldlm.errors import ArtifactError, ParityError

if TYPE_CHECKING:
    from engines.proof.compare import Comparison

# Lists of records that name their precision; those that can fail.
PARTS = ("lines", "islands", "taps", "self_test", "ablation")
GATED = ("lines", "islands", "self_test")
# Mappings from a precision.
BY_PRECISION = ("made_from", "asked", "drift")

# The stage of the lines about the whole sampler.
SAMPLER = "sampler"


@dataclass(frozen=True)
class Extra:
    """What can be asked beyond the comparison of every graph.

    Attributes:
        stress: also export a stressed copy of the checkpoint, and prove that.
        self_test: damage the graphs in every known way, and see who notices.
        taps: compare every equation's intermediate.
        ablate: measure every stage with each of its islands switched off.
        sampler_steps: also sample with this many steps on every runtime; 0 leaves it out.
        runtime: also compare the engines, on this TensorRT and the GPU at hand; "" leaves it out.
    """

    stress: bool = False
    self_test: bool = False
    taps: bool = False
    ablate: bool = False
    sampler_steps: int = 0
    runtime: str = ""

    def asked(self) -> list[str]:
        """The names of what is asked."""
        found = [name for name, value in dataclasses.asdict(self).items() if value is True]
        found += [f"sampler_steps {self.sampler_steps}"] if self.sampler_steps else []
        return found + ([f"engines on {self.runtime}"] if self.runtime else [])


NOTHING_MORE = Extra()


@dataclass(frozen=True)
class Line:
    """One measurement and its gate.

    Attributes:
        weights: "given", or "stress" for the stressed copy of the checkpoint.
        question: what was asked; see `engines.proof.stage`.
        batch, length: the case; 0 and 0 where all cases were measured together.
        distance: what was measured; relative L2 unless the question says otherwise.
        limit: what the gate allows.
        detail: all distances, where arrays were compared.
        tensor: the intermediate it speaks of, where it is not the stage's output.
    """

    stage: str
    precision: str
    weights: str
    question: str
    batch: int
    length: int
    distance: float
    limit: float
    detail: Comparison | None = None
    tensor: str | None = None

    @property
    def passed(self) -> bool:
        """Whether the gate holds. What is not finite fails, and so does a limit that is not."""
        finite = math.isfinite(self.distance) and math.isfinite(self.limit)
        return finite and self.distance <= self.limit

    def where(self) -> str:
        """The tensor and the case, for messages."""
        case = f"batch {self.batch}, length {self.length}" if self.batch else "all cases"
        return f"{self.tensor} at {case}" if self.tensor else case


def identity(entry: GraphEntry) -> str:
    """What a line of the proof speaks of: the graph and the weights it reads."""
    return f"{entry.graph.sha256}+{entry.data.sha256}"


@dataclass
class Parity:
    """All lines, the islands that were looked at, and the graphs that both speak of.

    Attributes:
        drift: per precision, the sampler's distance from the reference at every step.
        taps, self_test, ablation: records of what was asked besides; see `Extra`.
        made_from: per precision, what the proof depends on; see
            `engines.artifacts.ingredients.proof_ingredients`.
        asked: per precision, what was asked besides.
    """

    lines: list[Line]
    graphs: dict[str, str]
    islands: list[dict[str, Any]] = field(default_factory=list)
    drift: dict[str, list[float]] = field(default_factory=dict)
    taps: list[dict[str, Any]] = field(default_factory=list)
    self_test: list[dict[str, Any]] = field(default_factory=list)
    ablation: list[dict[str, Any]] = field(default_factory=list)
    made_from: dict[str, ingredients.Ingredients] = field(default_factory=dict)
    asked: dict[str, list[str]] = field(default_factory=dict)

    def failures(self) -> list[Line]:
        """Lines whose gate does not hold."""
        return [line for line in self.lines if not line.passed]

    def document(self) -> dict[str, Any]:
        """The content of parity.json. JSON has no infinity: what is not finite is null."""
        lines = [{**dataclasses.asdict(line), "passed": line.passed} for line in self.lines]
        document: dict[str, Any] = _finite(
            {
                "passed": True,
                "graphs": self.graphs,
                "made_from": self.made_from,
                "asked": self.asked,
                "lines": lines,
                "islands": self.islands,
                "drift": self.drift,
                "taps": self.taps,
                "self_test": self.self_test,
                "ablation": self.ablation,
            }
        )
        document["passed"] = _passed(document)
        return document

    def save(self, folder: Path, manifest: Manifest) -> dict[str, Any]:
        """Write parity.json; lines of other precisions stay while their graphs are the same.

        Returns:
            What was written.
        """
        document = self.document()
        with files.locked(folder):
            old = read(folder)
            if old is not None:
                _keep_current(document, old, manifest)
            text = json.dumps(document, indent=1, allow_nan=False)
            files.write_whole(folder / PARITY, text.encode())
        return document

    def require_passed(self) -> None:
        """Fail on the first gate that does not hold, or on a damage that nobody noticed.

        Raises:
            ParityError: naming it.
        """
        for line in self.failures():
            overflow = not math.isfinite(line.limit)
            other = overflow or line.limit == SIGNAL_LOST
            raise ParityError(
                f"{len(self.failures())} of {len(self.lines)} parity lines fail; the first is "
                f"'{line.question}' in {line.precision} on {line.weights} weights",
                stage=line.stage,
                tensor=line.where(),
                expected="PyTorch's own error to be finite" if overflow else f"<= {line.limit:.3g}",
                got="an overflow in it" if overflow else f"{line.distance:.3g}",
                remedy="use bf16 or fp32 for this checkpoint" if other else f"see {PARITY}",
            )
        for island in self.islands:
            if not island["passed"]:
                raise ParityError(
                    f"an island is not there, says {island['source']}, in {island['precision']}",
                    stage=island["stage"],
                    tensor=island["what"],
                    expected=island["expected"],
                    got=island["found"],
                )
        missed = [outcome for outcome in self.self_test if not outcome["passed"]]
        if missed:
            raise ParityError(
                f"{len(missed)} of {len(self.self_test)} graphs of the self-test are judged wrong; "
                f"the first is '{missed[0]['damage']}' in {missed[0]['precision']}",
                stage=missed[0]["stage"],
                expected="every damage noticed, and no other graph",
                got=", ".join(missed[0]["noticed_by"]) or "noticed by no question",
            )


def read(folder: Path) -> dict[str, Any] | None:
    """parity.json, or None where nothing was verified.

    Raises:
        ArtifactError: it is damaged.
    """
    path = folder / PARITY
    if not path.exists():
        return None
    text = files.read_text(path, ArtifactError, "proof")
    try:
        document: dict[str, Any] = json.loads(text)
        known = {"passed", "graphs", *BY_PRECISION, *PARTS} <= document.keys()
    except (json.JSONDecodeError, AttributeError):
        known = False
    if not known:
        raise ArtifactError(f"{path} is damaged", remedy="remove it and run ldlm verify")
    return document


def identities(manifest: Manifest, precision: str) -> dict[str, str]:
    """What a proof of a precision speaks of: `precision/stage` to identity."""
    return {
        f"{entry.precision}/{entry.stage}": identity(entry)
        for entry in manifest.graphs
        if entry.precision == precision
    }


def reasons(
    document: dict[str, Any] | None, manifest: Manifest, precision: str, extra: Extra
) -> tuple[str, ...]:
    """Why a precision must be verified again; empty if the proof would say the same.

    Args:
        document: parity.json, as `read` gives it.
        manifest: of the present files.
        precision: which.
        extra: what is asked now.
    """
    if extra.runtime:
        return ("engines are compared whenever it is asked",)
    if document is None or precision not in document["made_from"]:
        return ("not verified yet",)
    wanted = ingredients.proof_ingredients(
        identities(manifest, precision), manifest.checkpoint, manifest.config
    )
    if changed := ingredients.changes(document["made_from"][precision], wanted):
        return changed
    asked = document["asked"][precision]
    if missing := [name for name in extra.asked() if name not in asked]:
        return (f"not asked yet: {', '.join(missing)}",)
    items = [item for part in GATED for item in document[part] if item["precision"] == precision]
    return () if all(item["passed"] for item in items) else ("a gate failed the last time",)


def is_current(manifest: Manifest, graphs: dict[str, str], keys: Iterable[str]) -> bool:
    """Whether a proof of `graphs` speaks of the present files under all these ingredients."""
    present = {f"{e.precision}/{e.stage}": identity(e) for e in manifest.graphs}
    return all(key in graphs and graphs[key] == present.get(key) for key in keys)


def _keep_current(document: dict[str, Any], old: dict[str, Any], manifest: Manifest) -> None:
    new = {key.partition("/")[0] for key in document["graphs"]}
    kept = {
        key: value
        for key, value in old["graphs"].items()
        if key.partition("/")[0] not in new and is_current(manifest, old["graphs"], [key])
    }
    precisions = {key.partition("/")[0] for key in kept}
    document["graphs"].update(kept)
    for part in BY_PRECISION:
        document[part].update({p: d for p, d in old[part].items() if p in precisions})
    for part in PARTS:
        document[part] += [item for item in old[part] if item["precision"] in precisions]
    document["passed"] = _passed(document)


def _passed(document: dict[str, Any]) -> bool:
    return all(item["passed"] for part in GATED for item in document[part])


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
