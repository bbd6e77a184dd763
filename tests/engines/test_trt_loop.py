"""The sampler's loop on TensorRT, on the stand-in: a device that is as lazy as one may be."""

from __future__ import annotations

import gc
import inspect
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_tensorrt import FakeDevice, runtime_of, stage_of
from numpy.typing import NDArray

from engines import compare
from engines.artifacts import folder as folders
from engines.runtime import trt_loop
from engines.runtime.load import load_stages
from engines.runtime.ort import OrtStage
from engines.runtime.ort_loop import OrtLoop
from engines.runtime.trt import TrtRuntime
from engines.runtime.trt_loop import HANDED_ON, TrtLoop
from engines.tensorrt.device import Cuda, Device, DeviceArray
from ldlm.errors import StageInputError
from ldlm.noise import NoiseStream
from ldlm.sampler import plain_loop
from ldlm.schedule import TangentSchedule
from ldlm.solvers import StepTable, step_table

Array = NDArray[Any]

LOOP = ("conditioning", "denoiser_step")
WIDTH = 128
LENGTH = 6


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
def loop(small_artifacts: Path, runtime: TrtRuntime) -> TrtLoop:
    return TrtLoop(*(stage_of(runtime, small_artifacts, name) for name in LOOP))


@pytest.fixture(scope="module")
def on_ort(small_artifacts: Path) -> OrtLoop:
    manifest = folders.load(small_artifacts)
    return OrtLoop(*(OrtStage.from_artifacts(small_artifacts, manifest, n, "fp32") for n in LOOP))


def table_of(steps: int, solver: str = "ddpm") -> StepTable:
    schedule = TangentSchedule()
    return step_table(solver, schedule, schedule.grid(steps))


def noise_of(batch: int = 2, length: int = LENGTH, width: int = WIDTH) -> NoiseStream:
    return NoiseStream(3, range(batch), (length, width))


def latents(loop: Any, table: StepTable, batch: int = 2) -> Array:
    """What a loop makes of the noise; it ticks once per step."""
    ticks: list[int] = []
    z = loop(table)(noise_of(batch), lambda: ticks.append(1))
    assert len(ticks) == len(table)
    return z.numpy() if isinstance(z, DeviceArray) else z


@pytest.mark.parametrize(
    ("solver", "steps", "batch"),
    [("euler", 24, 1), ("ddpm", 130, 3), ("ddpm", 1, 1), ("ddim", 70, 2)],
)
def test_it_computes_what_onnxruntime_computes(
    loop: TrtLoop, on_ort: OrtLoop, small_artifacts: Path, solver: str, steps: int, batch: int
) -> None:
    """Bit for bit, through several tables of modulations; and as close to the plain loop."""
    table = table_of(steps, solver)
    got = latents(loop, table, batch)
    np.testing.assert_array_equal(got, latents(on_ort, table, batch))
    plain = load_stages(small_artifacts, folders.load(small_artifacts), plain=True)
    assert compare(got, latents(plain_loop(plain), table, batch)).relative_l2 < 1e-5


def test_a_step_is_one_launch_of_one_graph(loop: TrtLoop, device: FakeDevice) -> None:
    """Nothing comes back, nothing is allocated, and the host waits for no more than old steps."""
    run = loop(table_of(130))
    before = (device.captures, device.launches, len(device.allocated))
    assert before[:2] == (1, 2)  # of the conditioning, three times
    waits = device.waits
    run(noise_of(), lambda: None)
    assert device.captures == before[0] + 1
    assert device.launches == before[1] + 129  # the first step of a shape runs plainly
    assert len(device.allocated) == before[2]
    assert device.downloads == 0
    assert device.waits - waits <= 5


def test_batches_share_the_tables_and_the_graph(
    loop: TrtLoop, on_ort: OrtLoop, device: FakeDevice
) -> None:
    table = table_of(70)
    run, expected = loop(table), on_ort(table)
    for indices in (range(2), range(2, 4), range(4, 5), range(5, 7)):
        noise = [NoiseStream(1, indices, (LENGTH, WIDTH)) for _ in range(2)]
        z = run(noise[0], lambda: None)
        np.testing.assert_array_equal(z.numpy(), expected(noise[1], lambda: None))
    assert device.captures == 1 + 2  # the conditioning, and the step at two sizes
    assert device.launches == 1 + 69 + 70 + 69 + 70


def test_no_noise_is_drawn_where_none_is_added(loop: TrtLoop) -> None:
    for solver, draws in (("ddim", 1), ("ddpm", 30)):
        noise = noise_of()
        loop(table_of(30, solver))(noise, lambda: None)
        fresh = noise_of()
        for _ in range(draws):
            fresh.draw()
        np.testing.assert_array_equal(noise.draw(), fresh.draw())


def test_where_no_graph_can_be_captured_it_runs_plainly_and_says_so(
    loop: TrtLoop, on_ort: OrtLoop, device: FakeDevice, caplog: pytest.LogCaptureFixture
) -> None:
    device.can_capture = False
    with caplog.at_level(logging.WARNING):
        got = latents(loop, table_of(70))
    np.testing.assert_array_equal(got, latents(on_ort, table_of(70)))
    assert device.launches == 0
    words = [record.getMessage() for record in caplog.records]
    assert [w.partition(":")[0] for w in words if "no CUDA graph" in w] == list(LOOP)


@pytest.mark.parametrize("lost", HANDED_ON)
def test_a_copy_that_is_forgotten_is_noticed(
    loop: TrtLoop, on_ort: OrtLoop, lost: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trt_loop, "HANDED_ON", tuple(pair for pair in HANDED_ON if pair != lost))
    assert not np.array_equal(latents(loop, table_of(20)), latents(on_ort, table_of(20)))


def test_noise_that_is_overwritten_too_early_is_noticed(
    loop: TrtLoop, on_ort: OrtLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in reads a buffer as late as a device may."""
    monkeypatch.setattr(FakeDevice, "wait", lambda *_: None)
    monkeypatch.setattr(FakeDevice, "elapsed", lambda *_: 0.0)
    assert not np.array_equal(latents(loop, table_of(20)), latents(on_ort, table_of(20)))


def test_the_host_is_a_step_ahead_of_the_device(loop: TrtLoop, device: FakeDevice) -> None:
    """When noise is drawn, the device has at least one whole step to do."""
    waiting = []
    noise = noise_of()
    draw = noise.draw

    def watched(out: Any = None) -> Any:
        waiting.append(sum(event is None for event in device.events.values()))
        return draw(out)

    noise.draw = watched  # type: ignore[method-assign]
    run = loop(table_of(30))
    run(noise_of(), lambda: None)  # the first steps of a shape wait for more
    run(noise, lambda: None)
    assert set(waiting[3:]) == {2}  # the begin and the end of one step


def test_an_interrupted_run_leaves_no_trace(loop: TrtLoop, on_ort: OrtLoop) -> None:
    table = table_of(20)
    run = loop(table)
    ticks = iter(range(5))

    def stop() -> None:
        if next(ticks, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(noise_of(), stop)
    z = run(noise_of(), lambda: None)
    np.testing.assert_array_equal(z.numpy(), latents(on_ort, table))


def test_scratch_memory_that_was_replaced_is_not_used(
    loop: TrtLoop, on_ort: OrtLoop, small_artifacts: Path, runtime: TrtRuntime, device: FakeDevice
) -> None:
    """A stage that is loaded later may need more; the graph is captured anew."""
    table = table_of(20)
    run = loop(table)
    run(noise_of(), lambda: None)
    stage_of(runtime, small_artifacts, "token_decoder")
    z = run(noise_of(), lambda: None)
    np.testing.assert_array_equal(z.numpy(), latents(on_ort, table))
    assert device.captures == 2


@pytest.mark.parametrize(
    ("noise", "words"),
    [
        (noise_of(9), "batch is outside"),
        (noise_of(2, 129), "length is outside"),
        (noise_of(2, LENGTH, 64), "wrong dtype or shape"),
    ],
)
def test_a_shape_that_was_not_built_is_refused(
    loop: TrtLoop, device: FakeDevice, noise: NoiseStream, words: str
) -> None:
    """Before anything is copied: it would not fit."""
    run = loop(table_of(20))
    queued = len(device.queue)
    with pytest.raises(StageInputError, match=words):
        run(noise, lambda: None)
    assert len(device.queue) == queued


def test_seconds_on_the_device_are_counted(loop: TrtLoop) -> None:
    run = loop(table_of(30))
    assert loop.inside == 0.0
    began = time.perf_counter()
    run(noise_of(), lambda: None)
    assert 0 < loop.inside < time.perf_counter() - began


def test_memory_is_given_back(small_artifacts: Path, runtime: TrtRuntime) -> None:
    device: Any = runtime.device
    stages = [stage_of(runtime, small_artifacts, name) for name in LOOP]
    loop = TrtLoop(*stages)
    before = len(device.memory)
    run = loop(table_of(130))
    assert len(device.memory) == before + 9
    run(noise_of(), lambda: None)
    del run
    gc.collect()
    assert len(device.memory) == before
    while stages:
        stages.pop().close()
    del loop
    gc.collect()
    assert not device.events
    assert len(device.memory) == 1  # the scratch memory


def test_what_a_stage_returned_goes_into_the_next_without_a_stop(
    small_artifacts: Path, runtime: TrtRuntime, device: FakeDevice
) -> None:
    decoder, tokens = (
        stage_of(runtime, small_artifacts, name) for name in ("latent_decoder", "token_decoder")
    )
    z = noise_of().draw()
    expected = tokens(decoder(z))
    decoder.run(z)
    waits = device.waits
    h_hat = decoder.run(z)
    ids = tokens.run(h_hat)
    assert device.waits == waits
    np.testing.assert_array_equal(ids.numpy(), expected)


def test_an_array_of_another_stream_is_waited_for(
    small_artifacts: Path, runtime: TrtRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = stage_of(runtime, small_artifacts, "latent_decoder")
    z = decoder.run(noise_of().draw())
    asked = []

    def foreign(tensor: Any, *_: Any) -> Any:
        asked.append(tensor)
        return tensor

    monkeypatch.setattr("engines.runtime.trt_stage.foreign", foreign)
    decoder.run(z)
    assert not asked
    other = DeviceArray(z.device, z.stream + 1, z.pointer, z.shape, "float32")
    decoder.run(other)
    assert asked == [other]


def test_work_that_follows_a_stage_is_captured_with_it(
    small_artifacts: Path, runtime: TrtRuntime, device: FakeDevice
) -> None:
    """Also where the stage had a graph before."""
    decoder = stage_of(runtime, small_artifacts, "latent_decoder")
    z = noise_of().draw()
    for _ in range(3):
        decoder.run(z)
    done = []
    decoder.then(lambda sizes: device.enqueue(lambda: done.append(dict(sizes))))
    for _ in range(3):
        decoder.run(z)
    device.synchronize(runtime.stream)
    assert done == 3 * [{"batch": 2, "length": LENGTH}]
    assert len(device.graphs) == 1


def test_the_stand_in_has_the_methods_of_the_device() -> None:
    for name, function in inspect.getmembers(Device, inspect.isfunction):
        if not name.startswith("_"):
            expected = list(inspect.signature(function).parameters)
            for made in (FakeDevice, Cuda):
                found = inspect.signature(inspect.unwrap(getattr(made, name)))
                assert list(found.parameters) == expected, name
