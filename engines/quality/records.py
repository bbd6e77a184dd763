"""A judge's verdict, as typed records: the schema of quality.json."""

import math
from typing import Annotated, Self

from msgspec import Meta

from engines.proof.records import Count, PrecisionName, Record

# The version of quality.json's schema.
SCHEMA = 1
# z of a 95 % interval.
Z = 1.959964

Portion = Annotated[float, Meta(ge=0, le=1)]


class Share(Record, frozen=True):
    """A share of the samples, with the ends of its 95 % interval (Wilson)."""

    value: Portion
    low: Portion
    high: Portion

    @classmethod
    def of(cls, count: int, total: int) -> Self:
        """The share count / total."""
        if not total:
            return cls(0.0, 0.0, 1.0)
        p, z2 = count / total, Z * Z / total
        middle = (p + z2 / 2) / (1 + z2)
        half = Z / (1 + z2) * math.sqrt(p * (1 - p) / total + z2 / (4 * total))
        low, high = max(0.0, middle - half), min(1.0, middle + half)
        return cls(p, low if count else 0.0, high if count < total else 1.0)


class Quality(Record, frozen=True):
    """The verdict on one runtime in one precision.

    Attributes:
        accepted: share of texts that the judge accepts.
        unseen: share of the accepted texts that are not in the training set.
        distinct: number of different texts.
        mean_words: words per text.
        agreement: share of tokens that are float32 PyTorch's, up to the end of the longer text.
        same: share of texts that are float32 PyTorch's.
    """

    runtime: str
    precision: PrecisionName
    samples: Count
    accepted: Share
    unseen: Share
    distinct: Count
    mean_words: Annotated[float, Meta(ge=0)]
    agreement: Portion
    same: Portion


class QualityReport(Record, frozen=True, tag_field="schema", tag=SCHEMA):
    """The verdict on a folder's graphs.

    Attributes:
        checkpoint: sha256 of what they were made from.
        graphs: `precision/stage` to identity; see `engines.proof.saved.identity`.
        steps, solver, seed, length: what was sampled.
    """

    checkpoint: str
    graphs: dict[str, str]
    steps: Count | None
    solver: str
    seed: Count
    length: Count | None
    rows: tuple[Quality, ...]
