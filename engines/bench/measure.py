"""Peers in turn, each in a process of its own, on the same questions."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from engines.artifacts import folder as folders
from engines.bench.peers import MATMUL, parse
from engines.tensorrt.library import LIBRARIES
from export.precision import Precision
from export.stages import MAX_BATCH
from ldlm.config import LDLMConfig
from ldlm.errors import BenchError, ConfigError

STEP = "step"
WHAT = (STEP, "latent_decoder")

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Case:
    """What is timed: a step of the loop or a call of a decoder, at a batch and a length."""

    what: str
    batch: int
    length: int

    def __str__(self) -> str:
        return f"{self.what}, batch {self.batch}, length {self.length}"


@dataclass
class Samples:
    """All that one peer measured in one case.

    Attributes:
        seconds: of every step or call, warm-up left out.
        outside: share of the loop's time outside the graph, one per round.
        prepared: seconds for what is done once before the loop.
        peak: bytes of the peer's process in this case.
    """

    seconds: list[float] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)
    prepared: float | None = None
    peak: int = 0

    def add(self, answer: dict[str, Any]) -> None:
        """Take in one answer of a worker."""
        self.seconds += answer["seconds"]
        self.peak = max(self.peak, answer["peak"])
        if "outside" in answer:
            self.outside.append(answer["outside"])
            self.prepared = answer["prepared"]


class Worker:
    """A peer's process; see `engines.bench.worker`.

    Raises:
        BenchError: the peer does not start, with its own reason.
    """

    def __init__(self, peer: str, folder: Path, checkpoint: Path) -> None:
        self.peer = peer
        command = [sys.executable, "-m", "engines.bench.worker", peer, str(folder), str(checkpoint)]
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True
        )
        self._input: IO[str] = _pipe(self._process.stdin)
        self._output: IO[str] = _pipe(self._process.stdout)
        self._answer()

    def ask(self, **question: Any) -> dict[str, Any]:
        """One question, one answer.

        Raises:
            BenchError: the peer could not answer.
        """
        with contextlib.suppress(BrokenPipeError):  # what it said last tells more
            self._input.write(json.dumps(question) + "\n")
            self._input.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._input.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()
        self._said.close()

    def _answer(self) -> dict[str, Any]:
        line = self._output.readline()
        whole = line.endswith("\n")  # a process that is killed may leave half a line
        answer: dict[str, Any] = json.loads(line) if whole else {"error": self._last_words()}
        if "error" in answer:
            self.close()
            raise BenchError("a peer cannot run", tensor=self.peer, got=answer["error"])
        return answer

    def _last_words(self) -> str:
        self._said.seek(0)
        return f"its process ended: {self._said.read()[-500:].strip() or 'without a word'}"


def _pipe(stream: IO[str] | None) -> IO[str]:
    if stream is None:
        raise BenchError("a process without pipes")
    return stream


def bench(
    folder: Path,
    checkpoint: Path,
    peers: Sequence[str],
    cases: Sequence[Case],
    *,
    rounds: int = 3,
    seconds: float = 2.0,
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Measure every peer in every case, in turn.

    Args:
        folder, checkpoint: what the peers run.
        peers: see `engines.bench.peers`; ratios are to the first.
        cases: what is timed.
        rounds: how often the turn goes round in each case.
        seconds: about how long a peer runs in one turn; two steps at least.
        progress: told (what, turn, turns).

    Returns:
        A document of plain values: the machine, and a row per case and peer.

    Raises:
        ConfigError: something is asked that cannot be.
        BenchError: a peer does not run here.
    """
    config = folders.load(folder).config
    _require(config, peers, cases, rounds, seconds)
    load = round(os.getloadavg()[0], 2)  # others' work at the start makes every figure doubtful
    turns, total = 0, len(cases) * len(peers) * (rounds + 1)
    with _workers([*peers, MATMUL], folder, checkpoint, progress) as workers:
        rates = [workers[MATMUL].ask()["rate"]]
        measured = []
        for case in cases:
            samples = {peer: Samples() for peer in peers}
            repeats: dict[str, int] = {}
            for turn in range(rounds + 1):  # the first is the warm-up
                for peer in peers:
                    progress(f"{peer}: {case}", turns, total)
                    answer = _ask(workers[peer], case, config, repeats.get(peer, 2))
                    turns += 1
                    if turn:
                        samples[peer].add(answer)
                    else:
                        once = min(answer["seconds"])
                        repeats[peer] = max(2, min(200, math.ceil(seconds / once)))
            rates.append(workers[MATMUL].ask()["rate"])
            measured.append((case, samples))
    rate = max(rates)
    rows = [row for case, found in measured for row in _rows(case, found, config, rate)]
    machine = {
        "cpu": _cpu(),
        "threads": _threads(),
        "load": load,
        "matmul_gflops": round(rate / 1e9, 1),
    }
    asked = {"peers": list(peers), "rounds": rounds, "seconds": seconds}
    return {"bench": folders.load(folder).name, "machine": machine, **asked, "rows": rows}


@contextlib.contextmanager
def _workers(
    names: Sequence[str], folder: Path, checkpoint: Path, progress: Progress
) -> Iterator[dict[str, Worker]]:
    workers: dict[str, Worker] = {}
    try:
        for number, name in enumerate(names):
            progress(f"starting {name}", number, len(names))
            workers[name] = Worker(name, folder, checkpoint)
        yield workers
    finally:
        for worker in workers.values():
            worker.close()


def _ask(worker: Worker, case: Case, config: LDLMConfig, repeats: int) -> dict[str, Any]:
    count = {"steps" if case.what == STEP else "repeats": repeats}
    return worker.ask(**asdict(case), d_model=config.d_model, **count)


def _require(
    config: LDLMConfig, peers: Sequence[str], cases: Sequence[Case], rounds: int, seconds: float
) -> None:
    if not peers or not cases or rounds < 1:
        raise ConfigError("nothing to measure", expected="a peer, a length, a batch and a round")
    if len(set(peers)) != len(peers):
        raise ConfigError("a peer is named twice", got=", ".join(peers))
    for peer in peers:
        if Precision.of(parse(peer)[1]).is_integer and any(case.batch > 1 for case in cases):
            raise ConfigError(
                "this precision takes every sample by itself",
                expected="batch 1",
                got=peer,
                remedy="--batch 1, or leave the peer out",
            )
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError("a turn takes time", expected="seconds > 0", got=seconds)
    for case in cases:
        if case.what not in WHAT:
            raise ConfigError("this cannot be measured", expected=" or ".join(WHAT), got=case.what)
        if not (1 <= case.batch <= MAX_BATCH and 1 <= case.length <= config.n_positions):
            raise ConfigError(
                "this size cannot be measured",
                expected=f"batch 1..{MAX_BATCH} and length 1..{config.n_positions}",
                got=str(case),
            )


def _rows(
    case: Case, samples: dict[str, Samples], config: LDLMConfig, rate: float
) -> list[dict[str, Any]]:
    first = float(np.median(next(iter(samples.values())).seconds))
    rows = []
    for peer, found in samples.items():
        p50, p90, p99 = (float(p) for p in np.percentile(found.seconds, (50, 90, 99)))
        calls = config.sampler_steps if case.what == STEP else 1
        rows.append(
            {
                **asdict(case),
                "peer": peer,
                "p50_ms": round(1e3 * p50, 3),
                "p90_ms": round(1e3 * p90, 3),
                "p99_ms": round(1e3 * p99, 3),
                "count": len(found.seconds),
                "tokens_per_second": round(case.batch * case.length / (calls * p50), 2),
                "outside": round(float(np.median(found.outside)), 4) if found.outside else None,
                "prepared_ms": None if found.prepared is None else round(1e3 * found.prepared, 2),
                "peak_gb": round(found.peak / 1e9, 2),
                "ratio": round(first / p50, 3),
                # The rate is the CPU's.
                "of_matmul_rate": None
                if parse(peer)[0] in LIBRARIES
                else round(flops(case, config) / p50 / rate, 3),
            }
        )
    return rows


def flops(case: Case, config: LDLMConfig) -> float:
    """Floating-point operations of the products that a step or a call cannot do without.

    A product and a sum count as two. What depends on the time or the position alone is left out.
    """
    d, T = config.d_model, case.length
    if case.what == STEP:
        weights = 2 * d * d + d * d + config.denoiser_blocks * (4 + 2 * config.mlp_ratio) * d * d
        scores = config.denoiser_blocks * 2 * T * d
    else:
        blocks = config.decoder_blocks
        weights = (blocks * (6 + 2 * config.mlp_ratio) - 3) * d * d
        scores = blocks * 2 * (2 * T) * d
    return 2.0 * case.batch * T * (weights + scores)


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text("utf-8").splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
