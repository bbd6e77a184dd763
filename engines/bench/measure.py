"""The peers side by side: each in a process of its own, in turn, on the same questions."""

import contextlib
import itertools
import math
import os
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from engines.artifacts import folder as folders
from engines.bench.peers import (
    MATMUL,
    STEP,
    Case,
    Timing,
    Worker,
    matmul_rate,
    parse,
    prepare,
    timed,
)
from engines.memory import cores
from engines.tensorrt.library import LIBRARIES
from export.precision import Precision
from export.stages import MAX_BATCH
from ldlm import files
from ldlm.config import LDLMConfig
from ldlm.errors import ConfigError

WHAT = (STEP, "latent_decoder")
Progress = Callable[[str, int, int], None]


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
    manifest = folders.load(folder)
    _require(manifest.config, peers, cases, rounds, seconds)
    load = round(os.getloadavg()[0], 2)  # others' work at the start makes every figure doubtful
    turn, total = itertools.count(), len(cases) * len(peers) * (rounds + 1)
    with _started(peers, folder, checkpoint, progress) as workers:
        rates, timings = [workers[MATMUL].ask(matmul_rate)], {}
        for case in cases:
            found: dict[str, list[Timing]] = {peer: [] for peer in peers}
            for peer in [*peers] * (rounds + 1):  # the first is the warm-up
                progress(f"{peer}: {case}", next(turn), total)
                once = min(found[peer][0].seconds) if found[peer] else seconds
                repeats = max(2, min(200, math.ceil(seconds / once)))
                told = workers[peer].ask(timed, peer, folder, checkpoint, case, repeats)
                found[peer].append(told)
            rates.append(workers[MATMUL].ask(matmul_rate))
            timings[case] = {peer: turns[1:] for peer, turns in found.items()}
    rate = max(rates)
    rows = [row for case in cases for row in _rows(case, timings[case], manifest.config, rate)]
    asked = {"peers": list(peers), "rounds": rounds, "seconds": seconds}
    return {"bench": manifest.name, "machine": _machine(load, rate), **asked, "rows": rows}


@contextlib.contextmanager
def _started(
    peers: Sequence[str], folder: Path, checkpoint: Path, progress: Progress
) -> Iterator[dict[str, Worker]]:
    """A process for each peer, with its stages loaded, and one for the machine's own rate."""
    workers: dict[str, Worker] = {}
    with contextlib.ExitStack() as stack:
        for number, name in enumerate([*peers, MATMUL]):
            progress(f"starting {name}", number, len(peers) + 1)
            workers[name] = stack.enter_context(contextlib.closing(Worker(name)))
            if name != MATMUL:
                workers[name].ask(prepare, name, folder, checkpoint)
        yield workers


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
    case: Case, timings: dict[str, list[Timing]], config: LDLMConfig, rate: float
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    calls = config.sampler_steps if case.what == STEP else 1
    for peer, found in timings.items():
        seconds = [second for timing in found for second in timing.seconds]
        p50, p90, p99 = np.percentile(seconds, (50, 90, 99)).tolist()
        outside = [timing.outside for timing in found if timing.outside is not None]
        on_cpu = parse(peer)[0] not in LIBRARIES  # as the rate is
        row = {
            **asdict(case),
            "peer": peer,
            "p50_ms": round(1e3 * p50, 3),
            "p90_ms": round(1e3 * p90, 3),
            "p99_ms": round(1e3 * p99, 3),
            "count": len(seconds),
            "tokens_per_second": round(case.batch * case.length / (calls * p50), 2),
            "outside": round(float(np.median(outside)), 4) if outside else None,
            "peak_gb": round(max(timing.peak for timing in found) / 1e9, 2),
            "of_matmul_rate": round(flops(case, config) / p50 / rate, 3) if on_cpu else None,
        }
        rows.append(row | {"ratio": round((rows or [row])[0]["p50_ms"] / row["p50_ms"], 3)})
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


def _machine(load: float, rate: float) -> dict[str, Any]:
    info = files.read_if_possible(Path("/proc/cpuinfo")).decode()
    model = re.search(r"^model name\s*:\s*(.*)", info, re.MULTILINE)
    return {
        "cpu": model.group(1) if model else platform.processor() or platform.machine(),
        "threads": cores(),
        "load": load,
        "matmul_gflops": round(rate / 1e9, 1),
    }
