"""Nothing outside the temporary folders is deleted, moved, replaced or linked by a test.

Tests of links, mounts, deletions and kills work on decoys. A fault of the product, run as root,
could otherwise reach a system folder: that has happened. Python reports such calls before they are
made, and here they are refused.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

# The audited calls, with the places of their paths and of the directory descriptors of these.
CALLS: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
    "os.truncate": ((0, None),),
    "shutil.rmtree": ((0, None),),
}

# What tools keep in a checkout; a name among a path's parts.
OWN = ("__pycache__", ".pytest_cache", ".hypothesis", ".ruff_cache", "build", "dist")


class NotADecoy(BaseException):
    """A test was about to change something outside the temporary folders."""


def allowed_roots() -> list[Path]:
    """The temporary folders, and shared memory."""
    return [Path(p).resolve() for p in (tempfile.gettempdir(), "/dev/shm") if Path(p).exists()]


ROOTS = allowed_roots()


def is_decoy(path: Any) -> bool:
    """Whether a path lies in a temporary folder; its own last part is not followed."""
    path = Path(os.fsdecode(path))
    place = path.parent.resolve() / path.name
    if any(place.is_relative_to(root) for root in ROOTS) or set(OWN) & set(place.parts):
        return True
    # In a new clone pytest makes its cache folder under this name.
    return any(part.startswith("pytest-cache-files-") for part in place.parts)


def hook(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse a call that would change what is no decoy."""
    if event not in CALLS:
        return
    for place, descriptor in CALLS[event]:
        path = arguments[place] if place < len(arguments) else None
        if path is None or isinstance(path, int):
            continue
        # Relative to a descriptor: the folder that it is of was refused or allowed before.
        relative = descriptor is not None and len(arguments) > descriptor
        if relative and arguments[descriptor] not in (-1, None):  # type: ignore[index]
            continue
        if not is_decoy(path):
            raise NotADecoy(f"{event} of {os.fsdecode(path)}: tests work on decoys alone")


def install() -> None:
    """For this process and, through `sitecustomize`, for every Python that it starts."""
    sys.addaudithook(hook)
    here = str(Path(__file__).parent)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if here not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, paths)])
