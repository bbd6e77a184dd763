"""ldlm gc: what in an artifacts folder belongs to nothing any more."""

from engines.cli import options as opt
from engines.cli._shared import out, say


def command(
    folder: opt.Folder, precision: opt.OldPrecision = None, delete: opt.Delete = False
) -> None:
    """List, or delete, files that the manifest does not speak of and what killed runs left."""
    from engines.artifacts.collect import collect, drop, leftovers
    from engines.show.summary import leftovers_table

    if precision is not None:
        found = drop(folder, precision, delete=delete)
    else:
        found = collect(folder) if delete else leftovers(folder)
    if found:
        out.print(leftovers_table(folder, found, deleted=delete))
    total = sum(item.bytes for item in found) / 1e6
    say(f"{folder}: {len(found)} files, {total:,.1f} MB")
