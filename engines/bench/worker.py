"""The process of one peer: a JSON line in, a JSON line out, until its input ends.

python -m engines.bench.worker PEER ARTIFACTS CHECKPOINT
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from engines.bench.peers import MATMUL, load, matmul_rate
from engines.memory import peak_bytes, reset_peak
from ldlm.errors import LDLMError, installs
from ldlm.noise import NoiseStream
from ldlm.sampler import Stages
from ldlm.schedule import TangentSchedule
from ldlm.solvers import step_table

Answer = dict[str, Any]


def loop(stages: Stages, batch: int, length: int, d_model: int, steps: int) -> Answer:
    """Some steps of a sampling run: seconds per step, and those inside the graph.

    Two steps more are run and left out: the first, which makes the buffers, and the last, which
    adds no noise.
    """
    schedule = TangentSchedule()
    started = time.perf_counter()
    run = stages.loop(step_table("ddpm", schedule, schedule.grid(steps + 2)))
    prepared = time.perf_counter() - started
    noise = NoiseStream(0, range(batch), (length, d_model))
    ticks = [(time.perf_counter(), step.seconds) for step in run(noise)]
    times, inside = zip(*ticks[:-1], strict=True)
    outside = 1 - sum(inside[1:]) / (times[-1] - times[0])
    return {"seconds": np.diff(times).tolist(), "outside": outside, "prepared": prepared}


def decoder(
    stages: Stages, name: str, batch: int, length: int, d_model: int, repeats: int
) -> Answer:
    """Some calls of a decoder: seconds per call."""
    z = NoiseStream(0, range(batch), (length, d_model)).draw()
    stage = getattr(stages, name)
    times = [time.perf_counter()]
    for _ in range(repeats):
        done = stage(z)
        if hasattr(done, "numpy"):  # on a device it is only enqueued
            done.numpy()
        times.append(time.perf_counter())
    return {"seconds": np.diff(times).tolist()}


def answers(name: str, folder: Path, checkpoint: Path) -> Callable[[Answer], Answer]:
    """What this process says to a question."""
    if name == MATMUL:
        return lambda _: {"rate": matmul_rate()}
    stages = load(name, folder, checkpoint)

    def answer(question: Answer) -> Answer:
        reset_peak()
        what = question.pop("what")
        found = loop(stages, **question) if what == "step" else decoder(stages, what, **question)
        return {**found, "peak": peak_bytes()}

    return answer


def main() -> None:
    """Answer until the input ends; what a library prints goes to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(content: Answer) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    name, folder, checkpoint = sys.argv[1:]
    try:
        answer = answers(name, Path(folder), Path(checkpoint))
    except LDLMError as error:
        return reply({"error": str(error)})
    except ImportError as error:
        return reply({"error": f"{error}\n  remedy:   {installs('build')}"})
    reply({"ready": True})
    for line in sys.stdin:
        try:
            reply(answer(json.loads(line)))
        except LDLMError as error:
            reply({"error": str(error)})
    return None


if __name__ == "__main__":
    main()
