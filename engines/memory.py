"""Memory, cores and seconds: what this process has used, what it may use, what a worker needs."""

import contextlib
import math
import os
import re
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ldlm import checkpoint as checkpoints

# What a worker process needs: so much for its libraries, and so many bytes for each byte of its
# component's float32 parameters. Lines above every peak measured at `base` (Linux, torch 2.13):
#   export: denoiser fp32 1.61 GB, fp16 1.45; latent decoder fp32 1.41; token decoder fp32 1.04
#   verify: at most 3.7 GB, for the float16 token decoder (0.27 GB of parameters)
BASE_MEMORY = 1_300_000_000
PER_BYTE = {"export": 0.6, "verify": 9.0, "build": 1.0}
WORTH_WORKERS = 100_000_000  # bytes of a checkpoint: to start workers for less takes too long


def job_memory(kind: str, checkpoint: Path, component: str) -> int:
    """Bytes that a worker holds at most, for a kind of work (`PER_BYTE`) on a component."""
    header = checkpoints.read_header(checkpoint / checkpoints.WEIGHTS)
    own = f"{component}."
    parameters = sum(4 * math.prod(e.shape) for n, e in header.items() if n.startswith(own))
    return BASE_MEMORY + int(PER_BYTE[kind] * parameters)


def workers_for(checkpoint: Path) -> int | None:
    """1 for a checkpoint that is not worth workers; None for as many as cores and memory allow."""
    return 1 if (checkpoint / checkpoints.WEIGHTS).stat().st_size < WORTH_WORKERS else None


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
    if found := re.search(r"VmHWM:\s+(\d+) kB", _text(Path("/proc/self/status"))):
        return 1024 * int(found.group(1))
    # Linux counts kilobytes, macOS bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def cores() -> int:
    """Cores to use: by this process's affinity, its cgroups' quotas, and OMP_NUM_THREADS."""
    has = hasattr(os, "sched_getaffinity")
    found = [len(os.sched_getaffinity(0)) if has else os.cpu_count() or 1]
    for folder in _cgroups("cpu"):
        quota = _words(folder / "cpu.max") or [
            *_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us"),
        ]  # fmt: skip # rows, as a table
        if len(quota) == 2 and all(word.isdigit() for word in quota):  # not "max", not -1
            found.append(int(quota[0]) // int(quota[1]))
    if (threads := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        found.append(int(threads))
    return max(1, min(found))


def available_bytes() -> int:
    """Memory that can be had without swapping: of the machine, and within its cgroups' limits."""
    machine = re.search(r"MemAvailable:\s+(\d+) kB", _text(Path("/proc/meminfo")))
    pages = "SC_AVPHYS_PAGES" if sys.platform == "linux" else "SC_PHYS_PAGES"
    found = [
        1024 * int(machine.group(1)) if machine else os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    ]
    for folder in _cgroups("memory"):
        limit = _words(folder / "memory.max") or _words(folder / "memory.limit_in_bytes")
        used = _words(folder / "memory.current") or _words(folder / "memory.usage_in_bytes")
        if limit and used and limit[0].isdigit():
            # Files read long ago count as used, and make room.
            cached = re.search(
                r"^(?:total_)?inactive_file (\d+)", _text(folder / "memory.stat"), re.M
            )
            free = int(limit[0]) - int(used[0]) + (int(cached.group(1)) if cached else 0)
            found.append(free)
    return max(0, min(found))


def _cgroups(controller: str) -> Iterator[Path]:
    """The folders of this process's cgroups, innermost first, of version 2 or 1; Linux only."""
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        number, names, path = line.split(":", 2)
        root = Path("/sys/fs/cgroup") / ("" if number == "0" else controller)
        if number == "0" or controller in names.split(","):
            inner = root / path.lstrip("/")
            # In a container the path may be the host's, and the root is its own.
            yield from (p for p in (inner, *inner.parents) if p.is_relative_to(root))


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii")
    except OSError:
        return ""


def _words(path: Path) -> list[str]:
    return _text(path).split()
