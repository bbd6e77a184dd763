"""The TensorRT runtime, all of it that is not a CUDA call, on the stand-in."""

from __future__ import annotations

import inspect
import logging
import re
from pathlib import Path
from typing import Any

import fake_tensorrt as fake
import numpy as np
import pytest
import torch
from fake_tensorrt import FakeDevice, FakeTensorRT, runtime_of, stage_of

from engines.artifacts import folder as folders
from engines.proof.inputs import stage_inputs
from engines.runtime.ort import OrtStage
from engines.runtime.pool import IDLE
from engines.runtime.stage import named
from engines.runtime.trt_stage import TrtStage, checked_engine
from engines.tensorrt.cache import RuntimeCache
from engines.tensorrt.stream import Foreign
from export.stages import compiled, stage
from ldlm.errors import ArtifactError, EngineRunError, StageInputError

CLASSES = ("ICudaEngine", "IExecutionContext", "IRuntimeConfig", "IRuntimeCache", "ILogger")
PROPERTIES = {
    "ICudaEngine": ("num_io_tensors", "num_optimization_profiles", "device_memory_size_v2"),
    "IRuntimeConfig": ("cuda_graph_strategy", "dynamic_shapes_kernel_specialization_strategy"),
}
ENUMS = (
    "ExecutionContextAllocationStrategy",
    "CudaGraphStrategy",
    "DynamicShapesKernelSpecializationStrategy",
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ldlm-engines"


def inputs_of(name: str, batch: int, length: int, config: Any) -> list[np.ndarray[Any, Any]]:
    random = np.random.default_rng([batch, length])
    sizes = {"batch": batch, "length": length}
    return [random.random(t.shape(config, sizes), "f4") for t in stage(name).inputs]


@pytest.mark.parametrize("name", compiled())
def test_a_stage_computes_what_its_graph_says(small_artifacts: Path, name: str) -> None:
    """Every output of it; `conditioning` has one shape, and no profile."""
    manifest = folders.load(small_artifacts)
    on_engine = stage_of(runtime_of(small_artifacts), small_artifacts, name)
    on_ort = OrtStage.from_artifacts(small_artifacts, manifest, name, "fp32")
    names = [tensor.name for tensor in on_engine.spec.outputs]
    for batch, length in ((1, 5), (1, 5), (1, 5), (3, 17), (1, 5), (8, 128)):
        inputs = stage_inputs(on_engine.spec, manifest.config, batch, length)
        feeds = named(on_engine.spec, inputs)
        expected, got = on_ort.run(feeds), on_engine.run(feeds)
        np.testing.assert_array_equal(on_engine(*inputs), expected[names[0]])
        assert list(got) == names
        for name in names:
            np.testing.assert_array_equal(got[name], expected[name])


def test_profiles_are_chosen_by_shape(small_artifacts: Path) -> None:
    runtime = runtime_of(small_artifacts)
    decoder = stage_of(runtime, small_artifacts, "latent_decoder")
    for batch in (1, 1, 2, 3, 1):
        decoder(*inputs_of("latent_decoder", batch, 4, decoder.config))
    assert [context.profiles for context in runtime.trt.engines[0].contexts] == [[0], [1], [1]]


def test_no_call_of_a_known_shape_allocates(small_artifacts: Path) -> None:
    runtime = runtime_of(small_artifacts)
    decoder = stage_of(runtime, small_artifacts, "latent_decoder")
    allocated = []
    for batch, length in 2 * ((1, 4), (8, 128), (2, 9), (1, 4)):
        decoder(*inputs_of("latent_decoder", batch, length, decoder.config))
        allocated.append(len(runtime.device.allocated) - 1)  # type: ignore[attr-defined]
    assert allocated == [2, 4, 6, 6, 6, 6, 6, 6]


def test_the_second_run_of_a_shape_is_captured_and_later_ones_replay(small_artifacts: Path) -> None:
    runtime = runtime_of(small_artifacts)
    decoder = stage_of(runtime, small_artifacts, "latent_decoder")
    device: Any = runtime.device
    launches = []
    for length in (4, 4, 4, 9, 4, 9, 9):
        decoder(*inputs_of("latent_decoder", 1, length, decoder.config))
        launches.append(device.launches)
    assert launches == [0, 1, 2, 2, 3, 4, 5]
    assert len(device.graphs) == 2


def test_graphs_of_many_shapes_make_room(small_artifacts: Path) -> None:
    runtime = runtime_of(small_artifacts)
    decoder = stage_of(runtime, small_artifacts, "latent_decoder")
    device: Any = runtime.device
    for length in range(1, IDLE + 4):
        for _ in range(2):
            decoder(*inputs_of("latent_decoder", 1, length, decoder.config))
    assert IDLE <= len(device.graphs) <= IDLE + 1
    decoder.close()
    assert not device.graphs
    assert list(device.memory) == [runtime.scratch.pointer]
    with pytest.raises(EngineRunError, match="closed"):
        decoder(*inputs_of("latent_decoder", 1, 4, decoder.config))


def test_what_a_stage_returned_is_valid_as_long_as_it_is_held(small_artifacts: Path) -> None:
    """Through later runs, and when the stage is closed; then its memory is used again."""
    runtime = runtime_of(small_artifacts)
    device: Any = runtime.device
    decoder = stage_of(runtime, small_artifacts, "latent_decoder")
    inputs = [np.full((1, 4, decoder.config.d_model), n, np.float32) for n in range(3)]
    expected = [decoder(z) for z in inputs]
    held = [decoder.enqueue(z) for z in inputs]
    assert len({array.pointer for array in held}) == 3
    for array, wanted in zip(held, expected, strict=True):
        np.testing.assert_array_equal(array.numpy(), wanted)
    first = held.pop(0)
    pointer, allocated = first.pointer, len(device.allocated)
    first.release()
    with pytest.raises(EngineRunError, match="after its release"):
        first.numpy()
    assert decoder.enqueue(inputs[0]).pointer == pointer
    assert len(device.allocated) == allocated
    decoder.close()
    np.testing.assert_array_equal(held[1].numpy(), expected[2])
    held.clear()
    del array
    assert list(device.memory) == [runtime.scratch.pointer]


def test_a_garbage_collector_may_find_it_in_a_capture(small_artifacts: Path) -> None:
    """Memory that is freed in a turn of this thread is freed at the next one."""
    runtime = runtime_of(small_artifacts)
    device: Any = runtime.device
    array = runtime.stream.allocate((4,), "float32")
    with runtime.stream.turn(), device.capture(runtime.stream.handle):
        pointer = array.pointer
        del array
        assert pointer in device.memory
    runtime.stream.wait()
    assert pointer not in device.memory


def test_a_cache_that_cannot_be_written_stops_nothing(
    small_artifacts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    decoder = stage_of(runtime_of(small_artifacts), small_artifacts, "latent_decoder")
    with caplog.at_level(logging.WARNING):
        decoder(*inputs_of("latent_decoder", 1, 4, decoder.config))
    assert "cannot be kept" in caplog.text


def test_where_no_graph_can_be_captured_the_log_says_so(
    small_artifacts: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = runtime_of(small_artifacts)
    runtime.device.can_capture = False  # type: ignore[attr-defined]
    decoder = stage_of(runtime, small_artifacts, "latent_decoder")
    inputs = inputs_of("latent_decoder", 1, 4, decoder.config)
    with caplog.at_level(logging.WARNING):
        first, second, third = decoder(*inputs), decoder(*inputs), decoder(*inputs)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, third)
    (record,) = [r for r in caplog.records if "no CUDA graph" in r.message]
    assert "latent_decoder" in record.message


def test_stages_share_one_scratch_memory(small_artifacts: Path) -> None:
    """As large as the largest asks for; a graph that knew the older one is not replayed."""
    runtime = runtime_of(small_artifacts)
    first = stage_of(runtime, small_artifacts, "latent_decoder")
    inputs = inputs_of("latent_decoder", 1, 4, first.config)
    expected = first(*inputs)
    first(*inputs)  # captured
    assert runtime.scratch.size == 3072
    old = runtime.scratch.pointer
    stage_of(runtime, small_artifacts, "token_decoder")
    assert runtime.scratch.size == 4096
    assert old not in runtime.device.memory  # type: ignore[attr-defined]
    np.testing.assert_array_equal(first(*inputs), expected)
    assert not runtime.device.graphs  # type: ignore[attr-defined]
    np.testing.assert_array_equal(first(*inputs), expected)
    assert len(runtime.device.graphs) == 1  # type: ignore[attr-defined]


@pytest.mark.fault(18)
def test_sizes_outside_the_profiles_are_refused(small_artifacts: Path) -> None:
    """Case 18 at run time, with the allowed range."""
    decoder = stage_of(runtime_of(small_artifacts), small_artifacts, "latent_decoder")
    with pytest.raises(StageInputError, match=r"expected: +1\.\.8"):
        decoder(*inputs_of("latent_decoder", 9, 4, decoder.config))
    with pytest.raises(StageInputError, match="float32"):
        decoder(np.zeros((1, 4, decoder.config.d_model)))
    with pytest.raises(StageInputError, match="other inputs"):
        decoder()


def test_a_hole_between_the_profiles(small_artifacts: Path) -> None:
    manifest = folders.load(small_artifacts)
    runtime = runtime_of(small_artifacts)
    entry, plan = checked_engine(runtime, small_artifacts, manifest, "latent_decoder", "fp32")
    latency, throughput = entry.profiles["latency"], dict(entry.profiles["throughput"])
    throughput["batch"] = type(throughput["batch"])(4, 4, 8)
    ranges = {"latency": latency, "throughput": throughput}
    decoder = TrtStage(runtime, plan, stage("latent_decoder"), manifest.config, ranges)
    with pytest.raises(StageInputError, match="no profile of the engine holds these sizes"):
        decoder(*inputs_of("latent_decoder", 2, 4, manifest.config))


def test_kernels_compiled_on_the_device_are_kept_on_disk(
    small_artifacts: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run() -> None:
        decoder = stage_of(runtime_of(small_artifacts), small_artifacts, "latent_decoder")
        decoder(*inputs_of("latent_decoder", 1, 4, decoder.config))

    run()
    (path,) = own_cache.iterdir()
    content = path.read_bytes()
    assert content.startswith(b"kernels")
    with caplog.at_level(logging.WARNING):
        run()
        assert not caplog.records
        path.write_bytes(b"torn")
        run()
    assert "of no use" in caplog.text
    assert path.read_bytes() == content


def test_caches_of_different_engines_gpus_and_versions_do_not_meet() -> None:
    one, other = FakeDevice("sm89"), FakeDevice("sm120")
    paths = {
        RuntimeCache(sha * 32, version, device).path
        for sha in ("ab", "cd")
        for version in ("1.7.1", "1.8.0")
        for device in (one, other)
    }
    assert len(paths) == 8


def test_tensors_on_the_device_are_copied_there(
    small_artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = runtime_of(small_artifacts)
    decoder = stage_of(runtime, small_artifacts, "latent_decoder")
    (z,) = inputs_of("latent_decoder", 2, 4, decoder.config)
    expected = decoder(z)
    pointer = runtime.device.allocate(z.nbytes)
    runtime.device.upload(pointer, z, 0)
    tensor = Foreign(runtime.stream, pointer, z.shape, "float32")
    monkeypatch.setattr("engines.runtime.trt_stage.foreign", lambda *_: tensor)
    output = decoder.enqueue(object())
    assert output.shape == z.shape
    np.testing.assert_array_equal(output.numpy(), expected)


def test_what_is_no_tensor_is_refused(small_artifacts: Path) -> None:
    decoder = stage_of(runtime_of(small_artifacts), small_artifacts, "latent_decoder")
    z = np.zeros((1, 4, decoder.config.d_model), np.float32)
    for wrong in ("text", z.tolist(), None):
        with pytest.raises(StageInputError, match="neither a NumPy array nor a tensor"):
            decoder(wrong)
    with pytest.raises(StageInputError, match=">f4"):
        decoder(z.astype(">f4"))
    pytest.importorskip("cuda.core", reason="reads DLPack")
    with pytest.raises(EngineRunError, match=r"x\.numpy\(\)"):
        decoder(torch.from_numpy(z))


def test_tensorrt_that_fails_is_an_error(
    small_artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = stage_of(runtime_of(small_artifacts), small_artifacts, "latent_decoder")
    monkeypatch.setattr(fake.IExecutionContext, "execute_async_v3", lambda *_: False)
    with pytest.raises(EngineRunError, match="refuses the execution"):
        decoder(*inputs_of("latent_decoder", 1, 4, decoder.config))


def test_an_engine_that_tensorrt_does_not_take(small_artifacts: Path) -> None:
    runtime = runtime_of(small_artifacts)
    with pytest.raises(ArtifactError, match="magic tag does not match"):
        runtime.engine(b"something else", "denoiser")


@pytest.mark.parametrize("name", [*CLASSES, "Runtime"])
def test_the_stand_in_has_the_signatures_of_the_real_classes(name: str) -> None:
    """The fake cannot drift: every public method exists and takes the same names in this order."""
    real_module = pytest.importorskip("tensorrt_rtx", reason="only on Linux x86-64")
    real = getattr(real_module, name)
    mine = FakeTensorRT(FakeDevice()).Runtime if name == "Runtime" else getattr(fake, name)
    for method, function in inspect.getmembers(mine, inspect.isfunction):
        if method.startswith("_"):
            continue
        expected = list(inspect.signature(function).parameters)[1:]
        overloads = _parameters(getattr(real, method).__doc__ or "", method)
        if overloads:  # ILogger.log is overridden in Python and has no signature of its own
            assert expected in [found[: len(expected)] for found in overloads], (method, overloads)
    for attribute in PROPERTIES.get(name, ()):
        assert hasattr(mine, attribute) or attribute.startswith("num_")
        assert isinstance(getattr(real, attribute), property)


@pytest.mark.parametrize("name", ENUMS)
def test_the_stand_in_has_the_members_of_the_real_enumerations(name: str) -> None:
    real_module = pytest.importorskip("tensorrt_rtx", reason="only on Linux x86-64")
    real = getattr(real_module, name)
    assert {member.name for member in getattr(fake, name)} == set(real.__members__)


def _parameters(text: str, method: str) -> list[list[str]]:
    """The parameter names of every overload in a pybind docstring, without self."""
    found = re.findall(rf"{method}\((self[^)]*)\) ->", text)
    return [re.findall(r"(?:^|, )(\w+):", arguments)[1:] for arguments in found]
