"""What of this machine can be used, and what is missing for the rest.

Every provider is tried, not looked up in a list. Imports no torch: the answer comes in seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from engines.artifacts.ingredients import installed_version
from engines.tensorrt.targets import NO_RTX, RTX_SMS
from ldlm import files
from ldlm.errors import LDLMError, installs

GOOD, PARTLY, MISSING = "green", "yellow", "red"

# An ONNX graph of one Identity node, float32 [1], opset 13: what a provider is tried with.
PROBE = bytes.fromhex(
    "08073a370a100a017812017922084964656e746974791201705a0f0a0178120a"
    "0a08080112040a020801620f0a0179120a0a08080112040a02080142040a00100d"
)

# What /proc/cpuinfo calls dot products of 8-bit integers, on x86-64 and on aarch64.
DOT_PRODUCTS = ("avx_vnni", "avx512_vnni", "amx_int8", "asimddp", "i8mm")

GB = 1e9
MEMORY = 8 * GB  # what `make engines` at the published size needs
DISK = 10 * GB


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, what it means, what to do about it."""

    level: str
    what: str
    found: str
    means: str
    remedy: str = ""


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver reports it."""

    name: str
    sm: str
    driver: str
    memory: str


def examine(folder: Path = Path()) -> list[Finding]:
    """Look at everything; `folder` is where artifacts would be written."""
    gpus = list_gpus()
    return [
        _python(),
        _torch(),
        _gpu(gpus),
        *_onnxruntime(),
        _integers(),
        _rtx(gpus),
        _plain(gpus),
        _bindings(),
        _memory(),
        _disk(folder),
    ]


def list_gpus() -> list[Gpu]:
    """What nvidia-smi, which comes with the driver, reports; empty without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    fields = "name,compute_cap,driver_version,memory.total"
    asked = [tool, f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        text = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[item.strip() for item in line.split(",")] for line in text.splitlines()]
    return [
        Gpu(name, "sm" + capability.replace(".", ""), driver, memory)
        for name, capability, driver, memory in (row for row in rows if len(row) == 4)
    ]


def _python() -> Finding:
    good = sys.version_info >= (3, 11) and os.name == "posix"
    return Finding(
        GOOD if good else MISSING,
        "Python",
        f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        "everything here runs on it" if good else "3.11 or newer on Linux or macOS is needed",
        "" if good else "install a newer Python",
    )


def _torch() -> Finding:
    found = installed_version("torch")
    if found is None:
        return Finding(
            PARTLY, "torch", "not installed",
            "sampling from artifacts works; init, export, verify and evaluate need it",
            installs("build"),
        )  # fmt: skip
    cuda = _torch_cuda()
    return Finding(
        GOOD, "torch", f"{found}, {f'CUDA {cuda}' if cuda else 'CPU build'}",
        "init, export, verify and the reference sampler run on the CPU",
    )  # fmt: skip


def _torch_cuda() -> str | None:
    """The CUDA that torch was built with, from its version file: importing torch takes seconds."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / "version.py"
    found = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)['\"]", path.read_text("utf-8"), re.MULTILINE)
    return found.group(1) if found else None


def _gpu(gpus: list[Gpu]) -> Finding:
    if not gpus:
        return Finding(
            PARTLY, "GPU", "none that the driver reports",
            "export, proof and TARGET=rtx builds need none; running an engine, TARGET=trt and "
            "--provider cuda do",
            "an NVIDIA GPU and a driver for CUDA 13 (nvidia-smi must list it)",
        )  # fmt: skip
    found = "; ".join(f"{g.name}, {g.sm}, {g.memory}, driver {g.driver}" for g in gpus)
    return Finding(GOOD, "GPU", found, "whether it can be used: see CUDA bindings")


def _onnxruntime() -> Iterator[Finding]:
    package = next((p for p in ("onnxruntime-gpu", "onnxruntime") if installed_version(p)), None)
    problem = "not installed" if package is None else _loads("onnxruntime")
    if package is None or problem is not None:
        remedy = "pip install 'ldlm-engines'"
        yield Finding(MISSING, "onnxruntime", problem or "", "the sampler cannot run", remedy)
        return
    for name, provider, means in (
        ("cpu", "CPUExecutionProvider", "the sampler runs on the CPU"),
        ("cuda", "CUDAExecutionProvider", "the sampler runs on the GPU with --provider cuda"),
    ):
        problem = _try_provider(provider)
        found = f"{package} {installed_version(package)}"
        if problem is None:
            yield Finding(GOOD, f"onnxruntime {name}", f"{found}, tried", means)
        else:
            yield Finding(
                MISSING if name == "cpu" else PARTLY,
                f"onnxruntime {name}",
                f"{found}: {problem}",
                f"--provider {name} stops with an error; nothing falls back unasked",
                "a GPU, its driver, and onnxruntime-gpu with the CUDA libraries it names"
                if name == "cuda"
                else "reinstall onnxruntime",
            )


def _try_provider(provider: str) -> str | None:
    """Run one node on a provider; what went wrong, or None."""
    import numpy as np
    import onnxruntime as ort

    if provider not in ort.get_available_providers():
        return "built without this provider"
    with _stderr() as said:
        try:
            session = ort.InferenceSession(PROBE, providers=[provider])
            session.run(None, {"x": np.zeros(1, np.float32)})
        except Exception as error:  # the library's exceptions share no base but this one
            return str(error).splitlines()[0][:200]
    if session.get_providers()[0] == provider:
        return None
    # It starts on the CPU instead, and says why on stderr alone.
    reason = re.search(r"with error: (.*)", said())
    return f"does not start: {reason.group(1)}" if reason else "does not start"


def _integers() -> Finding:
    """Whether the precision int8 can be faster than float32 on this CPU."""
    what = "int8 on the CPU"
    flags = files.read_if_possible(Path("/proc/cpuinfo")).decode().split()
    if not flags:
        return Finding(
            PARTLY, what, "this system does not say what its CPU can do",
            "--precision int8 runs, in about half the memory; whether it is faster is not known",
            "ldlm bench --peers ort,ort:int8 tells",
        )  # fmt: skip
    found = [name for name in DOT_PRODUCTS if name in flags]
    if found:
        return Finding(GOOD, what, ", ".join(found), "int8 has instructions of its own here")
    return Finding(
        PARTLY, what, "no dot products of 8-bit integers that are known here",
        "--precision int8 runs, in about half the memory; it is hardly faster than fp32",
        "a CPU with VNNI",
    )  # fmt: skip


@contextlib.contextmanager
def _stderr() -> Iterator[Callable[[], str]]:
    """Hold back what native code writes to stderr; a function that gives it afterwards."""
    with tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        text = ""
        try:
            yield lambda: text
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            text = file.read().decode(errors="replace")


def _loads(module: str) -> str | None:
    """Import a library; what went wrong, or None."""
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:
        return str(error)[:200]
    return None


def _rtx(gpus: list[Gpu]) -> Finding:
    found = installed_version("tensorrt-rtx")
    problem = "not installed" if found is None else _loads("tensorrt_rtx")
    if found is None or problem is not None:
        return Finding(
            PARTLY, "TensorRT-RTX", problem or "",
            "no TARGET=rtx: engines can neither be built nor run",
            f"to build: {installs('build')}; to run: {installs('rtx')}; Linux x86-64",
        )  # fmt: skip
    targets = " ".join(sm.removeprefix("sm") for sm in RTX_SMS)
    builds = f"TARGET=rtx builds for SM {targets}"
    first = gpus[0].sm if gpus else None  # the one that the runtime takes
    if first in RTX_SMS:
        return Finding(GOOD, "TensorRT-RTX", found, f"{builds}; runs on {first}")
    why = NO_RTX.get(first or "", "to run them: a GPU of that list")
    return Finding(PARTLY, "TensorRT-RTX", found, f"{builds}; runs none here", why)


def _plain(gpus: list[Gpu]) -> Finding:
    found = installed_version("tensorrt")
    if found is None:
        return Finding(
            PARTLY, "TensorRT", "not installed", "no TARGET=trt",
            f"on the GPU that shall run the engine: {installs('tensorrt')}",
        )  # fmt: skip
    if not gpus:
        return Finding(
            PARTLY, "TensorRT", found, "TARGET=trt builds only on the GPU that will run the engine",
            "an NVIDIA GPU",
        )  # fmt: skip
    problem = _loads("tensorrt")
    if problem is not None:
        return Finding(MISSING, "TensorRT", problem, "no TARGET=trt", "reinstall tensorrt")
    return Finding(GOOD, "TensorRT", found, f"TARGET=trt builds and runs for {gpus[0].sm}")


def _bindings() -> Finding:
    """CUDA from Python: tried, as the runtime does it."""
    found = installed_version("cuda-bindings")
    if found is None or installed_version("cuda-core") is None:
        return Finding(
            PARTLY, "CUDA bindings", "not installed", "engines cannot be run",
            installs("rtx"),
        )  # fmt: skip
    from engines.tensorrt.device import Cuda

    try:
        device = Cuda()
    except LDLMError as error:
        reason = error.details.get("got", error.problem)
        return Finding(
            PARTLY, "CUDA bindings", f"{found}: {reason}", "engines cannot be run here",
            "an NVIDIA GPU and a driver for CUDA 13",
        )  # fmt: skip
    return Finding(GOOD, "CUDA bindings", found, f"engines run on {device.name}, {device.sm}")


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = files.read_if_possible(Path("/sys/fs/cgroup/memory.max")).strip()
    if limit.isdigit():  # a container's own
        total = min(total, int(limit))
    good = total >= MEMORY
    return Finding(
        GOOD if good else PARTLY, "memory", f"{total / GB:.1f} GB, {os.cpu_count()} CPUs",
        "make engines at the published size fits" if good else
        f"make engines at the published size needs {MEMORY / GB:.0f} GB; PRESET=small fits",
    )  # fmt: skip


def _disk(folder: Path) -> Finding:
    free = files.free_bytes(folder)
    good = free >= DISK
    return Finding(
        GOOD if good else PARTLY, "disk", f"{free / GB:.1f} GB free at {folder.resolve()}",
        "enough for checkpoint, graphs and engines" if good else
        f"the published size needs {DISK / GB:.0f} GB; PRESET=small fits",
        "" if good else "choose another --out, or free space",
    )  # fmt: skip
