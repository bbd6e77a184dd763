"""The judge's verdict as a table."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def quality_table(quality: dict[str, Any]) -> Table:
    """The judge's verdict per runtime and precision, with 95 % intervals."""
    table = Table(
        title="Quality of the text, on the same noise",
        caption=f"{quality['steps']} steps of {quality['solver']}, seed {quality['seed']}; "
        "95 % intervals (Wilson); unseen: of the accepted; agreement: with PyTorch fp32",
    )
    for column in ("runtime", "precision", "samples"):
        table.add_column(column)
    for column in ("accepted %", "unseen %", "distinct", "words", "agreement", "same texts"):
        table.add_column(column, justify="right")

    def share(value: dict[str, float]) -> str:
        return f"{100 * value['value']:.1f} ({100 * value['low']:.1f}..{100 * value['high']:.1f})"

    for row in quality["rows"]:
        table.add_row(
            row["runtime"], row["precision"], str(row["samples"]),
            share(row["accepted"]), share(row["unseen"]), str(row["distinct"]),
            f"{row['mean_words']:.1f}", f"{row['agreement']:.4f}", f"{row['same']:.3f}",
        )  # fmt: skip
    return table
