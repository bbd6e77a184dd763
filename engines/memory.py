"""Seconds and peak memory of what this process does."""

from __future__ import annotations

import contextlib
import re
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def measured() -> Iterator[dict[str, float]]:
    """Wall seconds and peak resident memory of a block, in the dict at its end."""
    started = time.perf_counter()
    result: dict[str, float] = {}
    reset_peak()
    yield result
    seconds, peak = time.perf_counter() - started, peak_bytes()
    result.update(seconds=round(seconds, 1), peak_gb=round(peak / 1e9, 2))


def reset_peak() -> None:
    """Begin to measure anew: several steps may run in one process. Linux only."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", "ascii")


def peak_bytes() -> int:
    """Peak resident memory in bytes since the reset; elsewhere than on Linux, of the process."""
    status = Path("/proc/self/status")
    if status.exists():
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text("ascii"))
        if found:
            return 1024 * int(found.group(1))
    # Linux counts kilobytes, macOS bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
