"""Imported first by tests/conftest.py: guards the process, and gives a worker a core of its own.

Thread counts follow a process's cores, torch's and ONNX Runtime's among them: with one each, no
worker's threads spin where another's compute.
"""

from __future__ import annotations

import os

import only_decoys

only_decoys.install()

_worker = os.environ.get("PYTEST_XDIST_WORKER", "")
if _worker and hasattr(os, "sched_setaffinity"):
    _cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {_cores[int(_worker.removeprefix("gw")) % len(_cores)]})
