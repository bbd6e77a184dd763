"""What the proof found, as typed records: the schema of parity.json.

A number that is not finite is None here and null in JSON. A record that has a gate says in `passed`
whether it holds: computed here, written for scripts, and compared with the record when it is read.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from engines.artifacts.manifest import PARITY
from engines.proof.gates import AUTOCAST_RATIO, SIGNAL_LOST
from engines.proof.questions import SAMPLER, Question
from export.precision import ISLANDS, POLICIES, WITHOUT
from export.stages import STAGES, components, stage
from ldlm.errors import ParityError

# The version of parity.json's schema.
SCHEMA = 1
# The graph of the self-test that nobody may notice.
UNDAMAGED = "none: undamaged"


def _one_of(*patterns: str) -> Meta:
    return Meta(pattern=rf"^({'|'.join(patterns)})\Z")


_HALVES = "|".join(name for name, policy in POLICIES.items() if policy.is_half)
_ISLAND = f"({'|'.join(ISLANDS)})"
StageName = Annotated[str, _one_of(*(spec.name for spec in STAGES), SAMPLER)]
ComponentName = Annotated[str, _one_of(*components(), SAMPLER)]
PrecisionName = Annotated[str, _one_of(*POLICIES, rf"({_HALVES}){WITHOUT}{_ISLAND}(\+{_ISLAND})*")]
TapName = Annotated[str, Meta(pattern=r"^(\d{1,4}\.)?[^.]+\Z")]
Count = Annotated[int, Meta(ge=0)]
Figure = Annotated[float, Meta(ge=0)] | None
# The checkpoint as it was given, or a copy of it with outliers and large scores.
Checkpoint = Literal["given", "stress"]
# The ONNX file, or TensorRT's own network of it.
Source = Literal["onnx", "tensorrt"]


# What a record belongs to: a precision, and a component or SAMPLER.
Key = tuple[str, str]


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all records."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            force_setattr(self, name, _finite(getattr(self, name)))

    @property
    def key(self) -> Key:
        """(precision, component) that it belongs to."""
        name: str = getattr(self, "stage", SAMPLER)
        component = name if name == SAMPLER else stage(name).component
        return getattr(self, "precision", ""), component


class Gated(Record, frozen=True, kw_only=True):
    """A record with a gate.

    Raises:
        ValueError: `passed` is given, and is not what the record says.
    """

    passed: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        holds = self._holds()
        if self.passed not in (None, holds):
            raise ValueError("`passed` is not what the record says")
        force_setattr(self, "passed", holds)

    def _holds(self) -> bool:
        raise NotImplementedError


class Distances(Record, frozen=True):
    """All distances of an array from its reference; see `engines.proof.compare.Comparison`."""

    max_abs: Figure
    p99_abs: Figure
    relative_l2: Figure
    cosine: float | None
    non_finite: Count
    size: Count


class Measurement(Gated, frozen=True):
    """One measurement and its gate.

    Attributes:
        batch, length: the case; 0 and 0 where all cases were measured together.
        distance: what was measured; relative L2 unless the question says otherwise.
        limit: what the gate allows. What is not finite fails, and so does a limit that is not.
        detail: all distances, where arrays were compared.
        tensor: the intermediate it speaks of, where it is not the stage's output.
    """

    stage: StageName
    precision: PrecisionName
    checkpoint: Checkpoint
    question: Question
    batch: Count
    length: Count
    distance: Figure
    limit: Figure
    detail: Distances | None = None
    tensor: str | None = None

    def _holds(self) -> bool:
        return self.distance is not None and self.limit is not None and self.distance <= self.limit

    @property
    def share(self) -> float:
        """How much of its limit it uses, or the distance if that is 0; not finite is the worst."""
        if self.distance is None or self.limit is None:
            return math.inf
        return self.distance / self.limit if self.limit else self.distance

    @property
    def where(self) -> str:
        """The tensor and the case, for messages."""
        case = f"batch {self.batch}, length {self.length}" if self.batch else "all cases"
        return f"{self.tensor} at {case}" if self.tensor else case

    def _failure(self, failed: str) -> ParityError:
        overflow = self.limit is None
        finite = "PyTorch's own error to be finite"
        other = overflow or self.limit == SIGNAL_LOST
        return ParityError(
            f"{failed} measurements fail; the first is '{self.question}' in {self.precision} on "
            f"the {self.checkpoint} checkpoint",
            stage=self.stage,
            tensor=self.where,
            expected=finite if overflow else f"<= {number(self.limit, 3)}",
            got="an overflow in it" if overflow else number(self.distance, 3),
            remedy="use bf16 or fp32 for this checkpoint" if other else f"see {PARITY}",
        )


class IslandRecord(Gated, frozen=True):
    """The dtype that a policy asks for, and those found (how often each), in one graph.

    Attributes:
        source: who says so.
        what: an operator of ONNX or a layer of TensorRT.
    """

    stage: StageName
    precision: PrecisionName
    source: Source
    what: str
    expected: str
    found: dict[str, Count]

    def _holds(self) -> bool:
        return self.found.keys() == {self.expected}

    def _failure(self, failed: str) -> ParityError:
        return ParityError(
            f"{failed} islands are not there; the first, says {self.source}, in {self.precision}",
            stage=self.stage,
            tensor=self.what,
            expected=self.expected,
            got=counted(self.found),
        )


class TapReport(Record, frozen=True):
    """Every equation of one stage; see `engines.proof.taps`.

    Attributes:
        case: (batch, length) of the inputs.
        errors: relative L2 per tap, in the order of computation; empty if the file has other
            operators than the model.
        first: the first tap that stands out from all before it, if one does; or where the
            operators begin to differ.
    """

    stage: StageName
    precision: PrecisionName
    about: Literal["formula", "rounding"]
    case: tuple[Count, Count]
    errors: Mapping[TapName, Figure]
    first: str | None


class Outcome(Gated, frozen=True):
    """One damage, and which questions of the self-test noticed it.

    A damage must be noticed; the undamaged graph must not be.
    """

    stage: StageName
    precision: PrecisionName
    damage: str
    noticed_by: tuple[str, ...]

    def _holds(self) -> bool:
        return bool(self.noticed_by) != (self.damage == UNDAMAGED)

    def _failure(self, failed: str) -> ParityError:
        return ParityError(
            f"{failed} graphs of the self-test are judged wrong; the first is '{self.damage}' in "
            f"{self.precision}",
            stage=self.stage,
            expected="every damage noticed, and no other graph",
            got=", ".join(self.noticed_by) or "noticed by no question",
        )


class Ablation(Gated, frozen=True):
    """One stage in one half precision with some of its islands switched off: no gate of the proof.

    Attributes:
        off: the islands that are in half.
        error: relative L2 from float32 PyTorch; None where the graph overflows.
        autocast: the same of PyTorch's autocast.
    """

    stage: StageName
    precision: PrecisionName
    checkpoint: Checkpoint
    off: tuple[str, ...]
    error: Figure
    autocast: Figure

    @property
    def ratio(self) -> float:
        """The error in units of autocast's."""
        finite = self.error is not None and self.autocast
        return self.error / self.autocast if finite else math.inf  # type: ignore[operator]

    def _holds(self) -> bool:
        return self.ratio <= AUTOCAST_RATIO


class Drift(Record, frozen=True):
    """The sampler's distance from the reference at every step, relative L2."""

    precision: PrecisionName
    errors: Annotated[tuple[Figure, ...], Meta(min_length=1)]


class Scope(Record, frozen=True):
    """What was proved: a component, or SAMPLER, in a precision.

    Attributes:
        graphs: identities of its stages' graphs; see `engines.proof.saved.identities`.
        made_from: see `engines.artifacts.ingredients.proof_ingredients`.
        asked: what was asked besides; see `ProofOptions.asked`.
    """

    precision: PrecisionName
    component: ComponentName
    graphs: dict[str, str]
    made_from: dict[str, str]
    asked: tuple[str, ...] = ()

    @property
    def key(self) -> Key:
        """(precision, component)."""
        return self.precision, self.component


class Proof(Gated, frozen=True, tag_field="schema", tag=SCHEMA):
    """All that was found, and of which graphs.

    It has passed if every gate holds and no precision lacks a component.
    """

    measurements: tuple[Measurement, ...] = ()
    islands: tuple[IslandRecord, ...] = ()
    taps: tuple[TapReport, ...] = ()
    self_test: tuple[Outcome, ...] = ()
    ablation: tuple[Ablation, ...] = ()
    drift: tuple[Drift, ...] = ()
    scopes: tuple[Scope, ...] = ()

    def _holds(self) -> bool:
        known = {scope.key for scope in self.scopes}
        whole = all((name, c) in known for name, _ in known for c in components())
        return whole and all(record.passed for record in self.gated())

    def gated(self) -> Iterator[Measurement | IslandRecord | Outcome]:
        """The records whose gates must hold."""
        yield from self.measurements
        yield from self.islands
        yield from self.self_test

    def failures(self) -> list[Measurement]:
        """Measurements whose gate does not hold."""
        return [found for found in self.measurements if not found.passed]

    def records(self) -> Iterator[Record]:
        """All records, by kind."""
        for name in self.__struct_fields__:
            if name != "passed":
                yield from getattr(self, name)

    @classmethod
    def of(cls, records: Iterable[Record]) -> Self:
        """A proof of these records, each kind in the order in which they come."""
        kinds: dict[type[Record], list[Any]] = {kind: [] for kind in KINDS}
        for record in records:
            kinds[type(record)].append(record)
        return cls(*map(tuple, kinds.values()))

    def only(self, keys: Collection[Key]) -> Self:
        """The records of these (precision, component)."""
        return self.of(record for record in self.records() if record.key in keys)

    def merged(self, new: Self) -> Self:
        """This proof with another one, which replaces what both have proved."""
        old = self.only({s.key for s in self.scopes} - {s.key for s in new.scopes})
        return self.of(sorted((*old.records(), *new.records()), key=_place))

    def require_passed(self) -> None:
        """Fail on the first gate that does not hold, or on a damage that nobody noticed.

        Raises:
            ParityError: naming it, and saying how many there are of its kind.
        """
        for records in (self.measurements, self.islands, self.self_test):
            failed = [record for record in records if not record.passed]
            if failed:
                raise failed[0]._failure(f"{len(failed)} of {len(records)}")


# In the order of the proof's fields.
KINDS = (Measurement, IslandRecord, TapReport, Outcome, Ablation, Drift, Scope)


def number(value: float | None, digits: int = 2) -> str:
    """A measurement in words."""
    return "not finite" if value is None else f"{value:.{digits}g}"


def counted(found: Mapping[str, int]) -> str:
    """How often each dtype was found, in words."""
    return ", ".join(f"{count} {dtype}" for dtype, count in found.items())


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_finite(item) for item in value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _place(record: Record) -> tuple[int, int, str]:
    """By component, then by precision: in whichever order things were proved."""
    precision, component = record.key
    rank = list(POLICIES).index(precision.partition(WITHOUT)[0])
    return [*components(), SAMPLER].index(component), rank, precision
