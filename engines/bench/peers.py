"""Who is measured: one sampler behind every name, the same weights and the same noise.

A peer is built and run in a process of its own: ONNX Runtime's threads spin after a call, and would
slow whoever shares its process.
"""

import functools
import importlib.util
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from engines.artifacts import folder as folders
from engines.artifacts.manifest import Manifest
from engines.memory import peak_bytes, reset_peak
from engines.runtime.load import load_stages
from engines.tensorrt.library import LIBRARIES
from ldlm.errors import BenchError, ConfigError, LDLMError, installs
from ldlm.noise import NoiseStream
from ldlm.sampler import DenoiserLoop, Stages
from ldlm.schedule import TangentSchedule
from ldlm.solvers import step_table

T = TypeVar("T")

MATMUL, STEP = "matmul", "step"

# PyTorch eager in float32, in bfloat16 throughout, and compiled; ONNX Runtime on the plain graphs,
# called step by step, and on the loop's; the engines.
PEERS = ("torch", "torch-bf16", "torch-compile", "ort-plain", "ort", *LIBRARIES)


def default_peers(manifest: Manifest, batches: Sequence[int]) -> list[str]:
    """Who is measured unless asked otherwise; int8 takes no batch but 1."""
    int8 = "int8" in manifest.precisions() and set(batches) == {1}
    return [*(peer for peer in PEERS if peer not in LIBRARIES), *(["ort:int8"] if int8 else [])]


def parse(name: str) -> tuple[str, str]:
    """`ort:fp16` -> ("ort", "fp16"); without a precision fp32.

    Raises:
        ConfigError: no such peer, or the reference in a precision of ours.
    """
    kind, _, precision = name.partition(":")
    if kind not in PEERS or (kind.startswith("torch") and precision):
        known = f"{', '.join(PEERS)}; all but torch's as name:precision"
        raise ConfigError("no such peer", expected=known, got=name)
    return kind, precision or "fp32"


@functools.cache
def load(name: str, folder: Path, checkpoint: Path) -> Stages:
    """Build a peer in this process, once.

    Raises:
        ConfigError, ArtifactError, ProviderError: it cannot run here.
    """
    kind, precision = parse(name)
    manifest = folders.load(folder)
    if kind.startswith("torch"):
        return _torch(kind, checkpoint, manifest)
    runtime, plain = kind.removesuffix("-plain"), kind.endswith("-plain")
    return load_stages(folder, manifest, runtime=runtime, precision=precision, plain=plain)


def _torch(kind: str, checkpoint: Path, manifest: Manifest) -> Stages:
    import torch

    from export.stages import SAMPLED, stage
    from ldlm.model import LDLM

    folders.require_origin(manifest, checkpoint)
    # Past the limit torch.compile would run eagerly, and say so on stderr alone.
    torch._dynamo.config.recompile_limit = 1024
    model = LDLM.from_checkpoint(checkpoint).eval().requires_grad_(False)
    dtype = torch.bfloat16 if kind == "torch-bf16" else torch.float32

    def call(name: str) -> Callable[..., Any]:
        module: Any = stage(name).torch(model).to(dtype)
        if kind == "torch-compile":
            module = torch.compile(module, dynamic=False)

        def run(*inputs: Any) -> Any:
            with torch.no_grad():  # torch.compile guards against a change to inference_mode
                output = module(*(torch.as_tensor(x).to(dtype) for x in inputs))
            return output.float() if output.is_floating_point() else output

        return run

    denoiser, latents, tokens = map(call, SAMPLED)
    return Stages(manifest.config, DenoiserLoop(denoiser, torch.from_numpy), latents, tokens)


def matmul_rate(size: int = 2048) -> float:
    """FLOP/s of the machine's own float32 matrix product: the best of NumPy and PyTorch.

    Of NumPy alone, where PyTorch is not installed.
    """
    a = np.random.default_rng(0).standard_normal((size, size), np.float32)
    products: list[Callable[[], Any]] = [lambda: a @ a]
    if importlib.util.find_spec("torch") is not None:
        import torch

        t = torch.from_numpy(a)
        products.append(lambda: t @ t)
    seconds = []
    for product in products:
        for _ in range(3):
            started = time.perf_counter()
            product()
            seconds.append(time.perf_counter() - started)
    return float(2 * size**3 / min(seconds))


@dataclass(frozen=True)
class Case:
    """What is timed: a step of the loop or a call of a decoder, at a batch and a length."""

    what: str
    batch: int
    length: int

    def __str__(self) -> str:
        return f"{self.what}, batch {self.batch}, length {self.length}"


@dataclass(frozen=True)
class Timing:
    """What a peer measured in one turn.

    Attributes:
        seconds: of every step or call.
        outside: share of the loop's time outside the graph.
        peak: bytes of the peer's process in this turn.
    """

    seconds: list[float]
    outside: float | None = None
    peak: int = 0


class Worker:
    """A process of one peer's own; what a library prints there is kept for its last words."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self._output = tempfile.NamedTemporaryFile()  # noqa: SIM115  # open as long as the process
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, spawn, _print_into, (self._output.name,))
        others = set(multiprocessing.active_children())
        self._pool.submit(os.getpid)
        (self._process,) = set(multiprocessing.active_children()) - others

    def ask(self, function: Callable[..., T], *arguments: object) -> T:
        """What a function gives in the process.

        Raises:
            BenchError: it cannot answer, with its own reason; the process is ended.
        """
        try:
            return self._pool.submit(function, *arguments).result()
        except Exception as error:  # the libraries' exceptions share no base but this one
            reason = self._reason(error)
            self.close()
            raise BenchError("a peer cannot run", tensor=self.peer, got=reason) from error

    def _reason(self, error: Exception) -> str:
        if isinstance(error, BrokenProcessPool):
            last = self._output.read()[-500:].decode(errors="replace").strip()
            return f"its process ended: {last or 'without a word'}"
        if isinstance(error, ImportError):
            return f"{error}\n  remedy:   {installs('build')}"
        return str(error) if isinstance(error, LDLMError) else repr(error)

    def close(self) -> None:
        """End the process; what it is still at is waited for 10 seconds."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._process.join(10)
        self._process.kill()
        self._output.close()


def _print_into(path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def prepare(peer: str, folder: Path, checkpoint: Path) -> None:
    """Load a peer in this process, once."""
    load(peer, folder, checkpoint)


def timed(peer: str, folder: Path, checkpoint: Path, case: Case, repeats: int) -> Timing:
    """Time a peer's steps or calls in this process."""
    stages = load(peer, folder, checkpoint)
    reset_peak()
    timing = (loop if case.what == STEP else decoder)(stages, case, repeats)
    return replace(timing, peak=peak_bytes())


def loop(stages: Stages, case: Case, repeats: int) -> Timing:
    """Some steps of a sampling run: seconds per step, and those inside the graph.

    Two steps more are run and left out: the first, which makes the buffers, and the last, which
    adds no noise.
    """
    schedule = TangentSchedule()
    run = stages.loop(step_table("ddpm", schedule, schedule.grid(repeats + 2)))
    ticks = [(time.perf_counter(), step.seconds) for step in run(_noise(stages, case))]
    times, inside = zip(*ticks[:-1], strict=True)
    outside = 1 - sum(inside[1:]) / (times[-1] - times[0])
    return Timing(np.diff(times).tolist(), outside)


def decoder(stages: Stages, case: Case, repeats: int) -> Timing:
    """Some calls of a decoder: seconds per call."""
    z = _noise(stages, case).draw()
    stage = getattr(stages, case.what)
    times = [time.perf_counter()]
    for _ in range(repeats):
        done = stage(z)
        if hasattr(done, "numpy"):  # on a device it is only enqueued
            done.numpy()
        times.append(time.perf_counter())
    return Timing(np.diff(times).tolist())


def _noise(stages: Stages, case: Case) -> NoiseStream:
    return NoiseStream(0, range(case.batch), (case.length, stages.config.d_model))
