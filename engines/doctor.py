"""What of this machine can be used, and what is missing for the rest.

Every provider is tried, not looked up in a list. Imports no torch: the answer comes in seconds.
"""

import contextlib
import importlib
import io
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engines.artifacts.ingredients import installed_version
from engines.memory import available_bytes, cores
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
MEMORY, DISK = 8, 10  # GB that `make engines` at the published size needs


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, what it means, what to do about it."""

    level: str
    what: str
    found: str
    means: str
    remedy: str = ""


def examine(folder: Path = Path()) -> list[Finding]:
    """Look at everything; `folder` is where artifacts would be written."""
    gpu, sm = _gpu()
    memory, disk = available_bytes() / GB, files.free_bytes(folder) / GB
    system = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    return [
        Finding(GOOD, "Python", system, "everything here runs on it"),
        _torch(),
        gpu,
        *_onnxruntime(),
        _integers(),
        _rtx(sm),
        _plain(sm),
        _enough("memory", f"{memory:.1f} GB available, {cores()} cores", memory, MEMORY),
        _enough("disk", f"{disk:.1f} GB free at {folder.resolve()}", disk, DISK),
    ]


def _torch() -> Finding:
    found = installed_version("torch")
    if found is None:
        means = "sampling from artifacts works; init, export, verify and evaluate need it"
        return Finding(PARTLY, "torch", "not installed", means, installs("build"))
    means = "init, export, verify and the reference sampler run on the CPU"
    return Finding(GOOD, "torch", found, means)


def _gpu() -> tuple[Finding, str]:
    """The GPU that the TensorRT runtime opens, CUDA's first, and its compute capability."""
    what, without = "GPU", "export, proof and TARGET=rtx builds need none; engines cannot be run"
    if not (installed_version("cuda-bindings") and installed_version("cuda-core")):
        found = "not looked at: CUDA's Python bindings are not installed"
        return Finding(PARTLY, what, found, without, installs("rtx")), ""
    from engines.tensorrt.device import Cuda

    try:
        device = Cuda()
    except LDLMError as error:
        found = f"none: {error.details.get('got', error.problem)}"
        remedy = "an NVIDIA GPU and a driver for CUDA 13"
        return Finding(PARTLY, what, found, without, remedy), ""
    return Finding(GOOD, what, f"{device.name}, {device.sm}", "engines run on it"), device.sm


def _onnxruntime() -> Iterator[Finding]:
    package = "onnxruntime-gpu" if installed_version("onnxruntime-gpu") else "onnxruntime"
    if problem := _problem(package, "onnxruntime"):
        remedy = "pip install 'ldlm-engines'"
        yield Finding(MISSING, "onnxruntime", problem, "the sampler cannot run", remedy)
        return
    found = f"{package} {installed_version(package)}"
    cuda = "a GPU, its driver, and onnxruntime-gpu with the CUDA libraries it names"
    for name, level, means, remedy in (
        ("cpu", MISSING, "the sampler runs on the CPU", "reinstall onnxruntime"),
        ("cuda", PARTLY, "the sampler runs on the GPU with --provider cuda", cuda),
    ):
        what = f"onnxruntime {name}"
        if problem := _try_provider(name):
            stops = f"--provider {name} stops with an error; nothing falls back unasked"
            yield Finding(level, what, f"{found}: {problem}", stops, remedy)
        else:
            yield Finding(GOOD, what, f"{found}, tried", means)


def _try_provider(name: str) -> str | None:
    """Run one node on a provider, as the runtime opens it; what went wrong, or None."""
    import numpy as np
    import onnxruntime

    from engines.runtime.ort import open_session

    onnxruntime.set_default_logger_severity(4)  # what it would log is told here
    with contextlib.redirect_stdout(io.StringIO()) as output:  # where missing libraries are told
        try:
            open_session(PROBE, "probe", name).run(None, {"x": np.zeros(1, np.float32)})
        except LDLMError as error:
            reason = output.getvalue() or str(error.details.get("got", error.problem))
            return f"does not start: {reason.strip().splitlines()[0][:200]}"
    return None


def _integers() -> Finding:
    """Whether the precision int8 can be faster than float32 on this CPU."""
    what, runs = "int8 on the CPU", "--precision int8 runs, in about half the memory"
    flags = files.read_if_possible(Path("/proc/cpuinfo")).decode().split()
    if known := [name for name in DOT_PRODUCTS if name in flags]:
        return Finding(GOOD, what, ", ".join(known), "int8 has instructions of its own here")
    if flags:
        found, means = "no dot products of 8-bit integers", "it is hardly faster than fp32"
        return Finding(PARTLY, what, found, f"{runs}; {means}", "a CPU with VNNI")
    found, means = "this system does not say", "whether it is faster is not known"
    return Finding(PARTLY, what, found, f"{runs}; {means}", "ldlm bench --peers ort,ort:int8")


def _problem(package: str, module: str) -> str | None:
    """Import an installed library; what went wrong, or None."""
    if installed_version(package) is None:
        return "not installed"
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:
        return str(error)[:200]
    return None


def _rtx(sm: str) -> Finding:
    what = "TensorRT-RTX"
    if problem := _problem("tensorrt-rtx", "tensorrt_rtx"):
        means = "no TARGET=rtx: engines can neither be built nor run"
        remedy = f"to build: {installs('build')}; to run: {installs('rtx')}; Linux x86-64"
        return Finding(PARTLY, what, problem, means, remedy)
    found = str(installed_version("tensorrt-rtx"))
    builds = f"TARGET=rtx builds for SM {' '.join(each.removeprefix('sm') for each in RTX_SMS)}"
    if sm in RTX_SMS:
        return Finding(GOOD, what, found, f"{builds}; runs on {sm}")
    why = NO_RTX.get(sm, "to run them: a GPU of that list")
    return Finding(PARTLY, what, found, f"{builds}; runs none here", why)


def _plain(sm: str) -> Finding:
    what, found = "TensorRT", installed_version("tensorrt")
    if found is None:
        remedy = f"on the GPU that shall run the engine: {installs('tensorrt')}"
        return Finding(PARTLY, what, "not installed", "no TARGET=trt", remedy)
    if not sm:
        means = "TARGET=trt builds only on the GPU that will run the engine"
        return Finding(PARTLY, what, found, means, "an NVIDIA GPU")
    if problem := _problem("tensorrt", "tensorrt"):
        return Finding(MISSING, what, problem, "no TARGET=trt", "reinstall tensorrt")
    return Finding(GOOD, what, found, f"TARGET=trt builds and runs for {sm}")


def _enough(what: str, found: str, has: float, needs: float) -> Finding:
    """Whether there is as much as `make engines` at the published size needs."""
    if has >= needs:
        return Finding(GOOD, what, found, "enough for make engines at the published size")
    means = f"make engines at the published size needs {needs:.0f} GB; PRESET=small fits"
    return Finding(PARTLY, what, found, means, f"a machine, or a place, with more {what}")
