"""Peak memory of this process."""

from __future__ import annotations

import contextlib
import re
import resource
import sys
from pathlib import Path


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
