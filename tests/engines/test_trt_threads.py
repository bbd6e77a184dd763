"""Threads that share one sampler on TensorRT's stand-in: every text is the one of a run alone."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_tensorrt import FakeDevice, runtime_of

from engines.artifacts import folder as folders
from engines.runtime.load import load_stages
from engines.runtime.pool import Lease, Pool
from engines.runtime.trt import TrtRuntime
from ldlm.errors import EngineRunError, LDLMError
from ldlm.sampler import Run, SampleRequest, Stages, sample

# Several shapes, two of them alike; solvers with noise; more steps than a table has.
REQUESTS = (
    SampleRequest(length=8, samples=3, batch_size=2, steps=24, seed=1),
    SampleRequest(length=8, samples=4, batch_size=2, steps=70, seed=2, solver="ddpm"),
    SampleRequest(length=17, samples=2, batch_size=1, steps=30, seed=3, solver="ddpm"),
    SampleRequest(length=5, samples=3, batch_size=3, steps=24, seed=4, solver="ddim"),
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def runtime(small_artifacts: Path) -> TrtRuntime:
    return runtime_of(small_artifacts)


@pytest.fixture
def device(runtime: TrtRuntime) -> FakeDevice:
    return runtime.device  # type: ignore[return-value]


@pytest.fixture
def stages(small_artifacts: Path, runtime: TrtRuntime, monkeypatch: pytest.MonkeyPatch) -> Stages:
    """One sampler on the stand-in."""
    monkeypatch.setattr("engines.runtime.trt.TrtRuntime", lambda _: runtime)
    return load_stages(small_artifacts, folders.load(small_artifacts), runtime="rtx")


@pytest.fixture(scope="module")
def alone(small_artifacts: Path) -> list[Any]:
    """The tokens of every request on ONNX Runtime, one after the other."""
    on_ort = load_stages(small_artifacts, folders.load(small_artifacts))
    return [sample(on_ort, request) for request in REQUESTS]


def interleaved(stages: Stages, requests: Sequence[SampleRequest] = REQUESTS) -> list[Any]:
    """Requests in one thread, a step of each in turn."""
    runs = [Run(stages, request) for request in requests]
    going = list(runs)
    while going:
        going = [run for run in going if next(run, None) is not None]
    return [run.token_ids[0] for run in runs]


def threaded(stages: Stages, requests: Sequence[SampleRequest] = REQUESTS) -> list[Any]:
    """Every request in a thread of its own; they start together."""
    start = threading.Barrier(len(requests))

    def work(request: SampleRequest) -> Any:
        start.wait()
        return sample(stages, request)

    with ThreadPoolExecutor(len(requests)) as threads:
        return list(threads.map(work, requests))


def equal(found: list[Any], expected: list[Any]) -> bool:
    return all(map(np.array_equal, found, expected))


def test_runs_in_turn_in_one_thread(stages: Stages, alone: list[Any]) -> None:
    assert equal(interleaved(stages), alone)


def test_threads(stages: Stages, device: FakeDevice, alone: list[Any]) -> None:
    for _ in range(2):  # the second time all comes from the pools
        assert equal(threaded(stages), alone)
    assert device.captures > 0
    assert device.launches > 2 * 24


def test_threads_that_are_cancelled_take_nothing_with_them(
    stages: Stages, device: FakeDevice, alone: list[Any]
) -> None:
    """Each begins a request and leaves it, somewhere else each time, then does its own."""
    threaded(stages)
    memory = len(device.memory)

    def work(number: int) -> Any:
        for other in range(3):
            with Run(stages, REQUESTS[(number + other) % len(REQUESTS)]) as run:
                for step in run:
                    if step.done == 5 * number + other + 1:
                        break
        return sample(stages, REQUESTS[number])

    with ThreadPoolExecutor(len(REQUESTS)) as threads:
        found = list(threads.map(work, range(len(REQUESTS))))
    assert equal(found, alone)
    # What was taken came back: no more than every thread's own of every shape.
    assert len(device.memory) <= memory + len(REQUESTS) * 4 * 9
    assert equal(interleaved(stages), alone)


@pytest.mark.parametrize("way", [interleaved, threaded])
def test_a_binding_that_two_runs_share_is_noticed(
    stages: Stages, way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault that these tests are for: a pool that hands out what is in use."""
    alike = [SampleRequest(length=8, steps=20, seed=seed) for seed in range(3)]
    alone = [sample(stages, request) for request in alike]
    assert equal(way(stages, alike), alone)
    shared: dict[Any, Any] = {}

    def take(self: Any, key: Any, make: Any) -> Any:
        if (self, key) not in shared:
            shared[self, key] = make()
        return Lease(shared[self, key], lambda _: None)

    monkeypatch.setattr(Pool, "take", take)

    def unnoticed() -> bool:
        try:
            return equal(way(stages, alike), alone)
        except (ValueError, LDLMError):  # a run misses the steps that another one counted
            return False

    assert not all(unnoticed() for _ in range(3))


def test_nobody_else_enqueues_into_a_capture(runtime: TrtRuntime, device: FakeDevice) -> None:
    """A turn keeps them waiting; without it the stand-in says what a GPU would do."""
    stream = runtime.stream
    with ThreadPoolExecutor(1) as threads:
        with stream.turn(), device.capture(stream.handle):
            waiting = threads.submit(stream.wait)
            assert not wait([waiting], timeout=0.1).done
        waiting.result()
        with device.capture(stream.handle):
            found = threads.submit(stream.wait).exception()
    assert isinstance(found, EngineRunError)
    assert "another thread" in str(found)
