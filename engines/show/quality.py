"""The judge's verdict as a table."""

from __future__ import annotations

from rich.table import Table

from engines.proof.records import number
from engines.quality.records import QualityReport, Share
from engines.show.table import table


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
