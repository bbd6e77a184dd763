"""The sampler's loop on TensorRT, on the stand-in: a device that is as lazy as one may be."""

from __future__ import annotations

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
from engines.runtime.step_tables import HANDED_ON
from engines.runtime.trt import TrtRuntime
from engines.runtime.trt_loop import TrtLoop
from engines.tensorrt.device import Cuda
from engines.tensorrt.stream import DeviceArray, Stream
from ldlm.errors import SamplerError, StageInputError
from ldlm.noise import NoiseStream
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


def run(steps: Any, table: StepTable, noise: NoiseStream) -> Array:
    """The latents after all steps; there is one for every row of the table."""
    for count, step in enumerate(steps(noise), 1):
        if count == len(table):
            z = step.x()
    assert count == len(table)
    return np.array(z.numpy() if isinstance(z, DeviceArray) else z)


def latents(loop: Any, table: StepTable, batch: int = 2) -> Array:
    """What a loop makes of the noise."""
    return run(loop(table), table, noise_of(batch))


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
    assert compare(got, latents(plain.loop, table, batch)).relative_l2 < 1e-5


def test_a_step_is_one_launch_of_one_graph(loop: TrtLoop, device: FakeDevice) -> None:
    """Nothing comes back, nothing is allocated, and the host waits for no more than old steps."""
    steps = loop(table_of(130))
    assert (device.captures, device.launches) == (1, 2)  # of the conditioning, three times
    for first in (True, False):
        before = (device.captures, device.launches, len(device.allocated), device.waits)
        for _ in steps(noise_of()):
            pass
        assert device.captures == before[0] + first
        assert device.launches == before[1] + 130 - first  # the first of a binding runs plainly
        assert len(device.allocated) == before[2] + 9 * first
        assert device.waits == before[3] + 2 * first  # for a profile, and to keep what it compiled
    assert device.downloads == 0


def test_batches_share_the_tables_and_the_graph(
    loop: TrtLoop, on_ort: OrtLoop, device: FakeDevice
) -> None:
    table = table_of(70)
    steps, expected = loop(table), on_ort(table)
    for indices in (range(2), range(2, 4), range(4, 5), range(5, 7)):
        got, wanted = (
            run(one, table, NoiseStream(1, indices, (LENGTH, WIDTH))) for one in (steps, expected)
        )
        np.testing.assert_array_equal(got, wanted)
    assert device.captures == 1 + 2  # the conditioning, and the step at two sizes
    assert device.launches == 1 + 69 + 70 + 69 + 70


def test_no_noise_is_drawn_where_none_is_added(loop: TrtLoop) -> None:
    for solver, draws in (("ddim", 1), ("ddpm", 30)):
        noise = noise_of()
        for _ in loop(table_of(30, solver))(noise):
            pass
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
    loop: TrtLoop, on_ort: OrtLoop, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {name: HANDED_ON[name] for name in HANDED_ON if name != lost}
    monkeypatch.setattr(trt_loop, "HANDED_ON", others)
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
    steps, table = loop(table_of(30)), table_of(30)
    run(steps, table, noise_of())  # the first steps of a shape wait for more
    run(steps, table, noise)
    assert set(waiting[3:]) == {2}  # the begin and the end of one step


def test_a_cancelled_run_leaves_no_trace(
    loop: TrtLoop, on_ort: OrtLoop, device: FakeDevice
) -> None:
    """What it held serves the next run; nothing is left in the device's queue that reads noise."""
    table = table_of(20)
    steps = loop(table)
    first = steps(noise_of())
    for _ in range(5):
        next(first)
    allocated = len(device.allocated)
    first.close()
    assert not any(event is None for event in device.events.values())
    np.testing.assert_array_equal(run(steps, table, noise_of()), latents(on_ort, table))
    assert len(device.allocated) == allocated


def test_after_an_error_the_state_is_dropped(
    loop: TrtLoop, on_ort: OrtLoop, device: FakeDevice
) -> None:
    table = table_of(20)
    steps = loop(table)
    noise, draws = noise_of(), iter(range(5))
    draw = noise.draw

    def stop(out: Any = None) -> Any:
        if next(draws, None) is None:
            raise KeyboardInterrupt
        return draw(out)

    noise.draw = stop  # type: ignore[method-assign]
    memory = len(device.memory)
    with pytest.raises(KeyboardInterrupt):
        run(steps, table, noise)
    assert len(device.memory) == memory
    np.testing.assert_array_equal(run(steps, table, noise_of()), latents(on_ort, table))


def test_the_last_state_alone_can_be_read(loop: TrtLoop, on_ort: OrtLoop) -> None:
    table = table_of(20)
    wanted = [step.x0_hat() for step in on_ort(table)(noise_of())][-1]
    told = loop(table)(noise_of())
    for step in (next(told) for _ in range(len(table) - 1)):
        for read in (step.x, step.x0_hat):
            with pytest.raises(SamplerError, match="not kept on a device"):
                read()
    last = next(told)
    np.testing.assert_array_equal(last.x0_hat(), wanted)
    z = last.x()
    kept = z.numpy()
    assert next(told, None) is None
    latents(loop, table_of(30))  # takes a state of its own, as long as z is held
    np.testing.assert_array_equal(z.numpy(), kept)
    del z
    with pytest.raises(SamplerError, match="not kept on a device"):
        last.x()


def test_scratch_memory_that_was_replaced_is_not_used(
    loop: TrtLoop, on_ort: OrtLoop, small_artifacts: Path, runtime: TrtRuntime, device: FakeDevice
) -> None:
    """A stage that is loaded later may need more; the graph is captured anew."""
    table = table_of(20)
    steps = loop(table)
    run(steps, table, noise_of())
    stage_of(runtime, small_artifacts, "token_decoder")
    np.testing.assert_array_equal(run(steps, table, noise_of()), latents(on_ort, table))
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
    steps = loop(table_of(20))
    queued = len(device.queue)
    with pytest.raises(StageInputError, match=words):
        next(steps(noise))
    assert len(device.queue) == queued


def test_seconds_on_the_device_are_told(loop: TrtLoop) -> None:
    steps = loop(table_of(30))
    began = time.perf_counter()
    seconds = [step.seconds for step in steps(noise_of())]
    assert min(seconds) > 0
    assert sum(seconds) < time.perf_counter() - began


def test_memory_is_given_back(small_artifacts: Path, runtime: TrtRuntime) -> None:
    device: Any = runtime.device
    with runtime:
        loop = TrtLoop(*(stage_of(runtime, small_artifacts, name) for name in LOOP))
        before = len(device.memory)
        steps = loop(table_of(130))
        assert len(device.memory) == before + 2 + 3  # of the conditioning, and three tables
        run(steps, table_of(130), noise_of())
        assert len(device.memory) == before + 2 + 3 + 9
        del steps
        assert len(device.memory) == before + 2 + 9
    assert not device.events
    assert not device.memory
    assert not device.graphs


def test_what_a_stage_returned_goes_into_the_next_without_a_stop(
    small_artifacts: Path, runtime: TrtRuntime, device: FakeDevice
) -> None:
    decoder, tokens = (
        stage_of(runtime, small_artifacts, name) for name in ("latent_decoder", "token_decoder")
    )
    z = noise_of().draw()
    expected = tokens(decoder(z))
    decoder(z)
    waits = device.waits
    ids = tokens.enqueue(decoder.enqueue(z))
    assert device.waits == waits
    np.testing.assert_array_equal(ids.numpy(), expected)


def test_an_array_of_another_stream_is_waited_for(
    small_artifacts: Path, runtime: TrtRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = stage_of(runtime, small_artifacts, "latent_decoder")
    z = decoder.enqueue(noise_of().draw())
    asked = []

    def foreign(tensor: Any, *_: Any) -> Any:
        asked.append(tensor)
        return tensor

    monkeypatch.setattr("engines.runtime.trt_stage.foreign", foreign)
    decoder.enqueue(z)
    assert not asked
    other = DeviceArray(Stream(runtime.device), z.pointer, z.shape, "float32")
    decoder.enqueue(other)
    assert asked == [other]


def test_the_stand_in_has_the_methods_of_the_device() -> None:
    for name, function in inspect.getmembers(Cuda, inspect.isfunction):
        if not name.startswith("_"):
            expected, found = (
                list(inspect.signature(inspect.unwrap(made)).parameters)
                for made in (function, vars(FakeDevice)[name])
            )
            assert found == expected, name
