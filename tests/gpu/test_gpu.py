"""What only a GPU can show: `make test-gpu`. Prints a table of what it measured.

On a GPU that TensorRT-RTX knows, its engines; with plain TensorRT installed, engines built for
this GPU; always ONNX Runtime's CUDA provider. Without a GPU all of it is skipped, with the reason.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engines import compare
from engines.artifacts import folder as folders
from engines.artifacts.build import Build
from engines.compile.target import Target, chosen_target
from engines.proof.gates import AUTOCAST_RATIO, FORMULA_L2
from engines.proof.inputs import stage_inputs
from engines.proof.loop import LoopDenoiser
from engines.runtime.load import load_stages
from engines.runtime.ort import OrtStage
from engines.runtime.torch import TorchStage
from engines.runtime.trt import TrtRuntime
from engines.runtime.trt_stage import TrtStage
from engines.tensorrt.device import Cuda
from engines.tensorrt.library import load_library
from engines.tensorrt.profiles import profiles
from engines.tensorrt.targets import RTX_SMS
from export.stages import LOOP, SAMPLED, compared, stage
from ldlm import LDLM, PRESETS
from ldlm.errors import LDLMError, ProviderError
from ldlm.noise import NoiseStream
from ldlm.sampler import SampleRequest, sample

pytestmark = pytest.mark.gpu

CASES = ((1, 17), (3, 128))
WIDTH = PRESETS["small"].d_model
Array = NDArray[Any]


@pytest.fixture(scope="module")
def gpu() -> Cuda:
    try:
        return Cuda()
    except LDLMError as error:
        pytest.skip(f"needs an NVIDIA GPU: {error.problem}")


@pytest.fixture(scope="module", params=["rtx", "trt"])
def runtime(request: pytest.FixtureRequest, gpu: Cuda) -> TrtRuntime:
    name: str = request.param
    if name == "rtx" and gpu.sm not in RTX_SMS:
        pytest.skip(f"TensorRT-RTX has no engines for {gpu.sm}")
    try:
        load_library(name)
    except ProviderError as error:
        pytest.skip(error.problem)
    return TrtRuntime(name, gpu)


@pytest.fixture(scope="module")
def built(
    runtime: TrtRuntime, small_artifacts: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A copy of the small artifacts with engines for this GPU."""
    own = tmp_path_factory.mktemp(runtime.name) / "artifacts"
    shutil.copytree(small_artifacts, own)
    sm = runtime.device.sm
    on_rtx = runtime.name == "rtx"
    target = Target((sm,), skip_unsupported=True) if on_rtx else chosen_target("trt")
    Build(own, target, profiles(folders.load(own).config)).run(None, lambda *_: None)
    return own


def median_ms(call: Callable[[], object], repeats: int = 50) -> float:
    for _ in range(5):
        call()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def autocast_error(model: LDLM, name: str, dtype: str, inputs: list[Array]) -> float:
    """CUDA autocast's distance from float32 PyTorch on the CPU."""
    import torch

    spec = stage(name)
    expected = TorchStage(model, spec)(*inputs)
    module = spec.torch(model).eval().cuda()
    try:
        with torch.inference_mode(), torch.autocast("cuda", getattr(torch, dtype)):
            got = module(*(torch.from_numpy(x).cuda() for x in inputs)).float().cpu().numpy()
    finally:
        module.cpu()
    return compare(got, expected).relative_l2


@pytest.mark.parametrize("name", ["denoiser", "latent_decoder"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_engines_compute_what_pytorch_computes(
    runtime: TrtRuntime, built: Path, small: LDLM, precision: str, name: str
) -> None:
    """Case 8: parity on the target GPU, at the deployed precision; plain, captured, replayed."""
    manifest = folders.load(built)
    names = LOOP if name == "denoiser" else (name,)
    stages = [TrtStage.from_artifacts(runtime, built, manifest, n, precision) for n in names]
    on_engine: Callable[..., Array] = stages[0]
    if name == "denoiser":
        on_engine = LoopDenoiser(*stages, whole=True)
    for batch, length in CASES:
        inputs = stage_inputs(compared(name), small.config, batch, length)
        expected = TorchStage(small, stage(name))(*inputs)
        dtype = {"fp16": "float16", "bf16": "bfloat16"}.get(precision)
        limit = (
            FORMULA_L2
            if dtype is None
            else AUTOCAST_RATIO * autocast_error(small, name, dtype, list(inputs))
        )
        runs = [on_engine(*inputs) for _ in range(3)]
        assert compare(runs[0], expected).relative_l2 <= limit
        np.testing.assert_array_equal(runs[1], runs[2])
        assert compare(runs[1], expected).relative_l2 <= limit


def test_tensors_of_torch_are_read_and_written_in_place(
    runtime: TrtRuntime, built: Path, small: LDLM
) -> None:
    import torch

    decoder = TrtStage.from_artifacts(runtime, built, folders.load(built), "latent_decoder", "fp32")
    (z,) = stage_inputs(stage("latent_decoder"), small.config, 2, 16)
    expected = decoder(z)
    output = decoder.enqueue(torch.from_numpy(z).cuda())
    np.testing.assert_array_equal(torch.from_dlpack(output).cpu().numpy(), expected)


def test_the_sampler_writes_the_same_tokens(runtime: TrtRuntime, built: Path) -> None:
    manifest = folders.load(built)
    request = SampleRequest(length=32, samples=4, batch_size=4, steps=64)
    tokens = {
        name: sample(load_stages(built, manifest, runtime=name), request)
        for name in (runtime.name, "ort")
    }
    agreement = float((tokens[runtime.name] == tokens["ort"]).mean())
    print(f"\n{runtime.device.name}, {runtime.name} fp32: token agreement {agreement:.4f}")  # noqa: T201
    assert agreement >= 0.99


def test_the_loop_on_the_device_is_that_of_onnxruntime(runtime: TrtRuntime, built: Path) -> None:
    """Two batches, two tables of modulations; prints the share of time outside the graph."""
    manifest = folders.load(built)
    request = SampleRequest(length=64, samples=4, batch_size=2, steps=100, solver="ddpm", seed=5)
    on_engines, on_ort = (
        load_stages(built, manifest, runtime=name) for name in (runtime.name, "ort")
    )
    np.testing.assert_array_equal(sample(on_engines, request), sample(on_ort, request))

    table = SampleRequest(steps=1024, solver="ddpm").table(manifest.config)
    steps = on_engines.loop(table)
    began = time.perf_counter()
    inside = sum(step.seconds for step in steps(NoiseStream(0, range(2), (64, WIDTH))))
    seconds = time.perf_counter() - began
    print(  # noqa: T201
        f"\n{runtime.device.name}, {runtime.name} fp32: {1e3 * seconds / 1024:.3f} ms a step, "
        f"{100 * (1 - inside / seconds):.1f} % outside the graph"
    )


def test_threads_write_what_each_writes_alone(runtime: TrtRuntime, built: Path) -> None:
    """Four at a time, of several shapes, on one sampler."""
    stages = load_stages(built, folders.load(built), runtime=runtime.name)
    requests = [
        SampleRequest(length=16 * n, samples=2 * n, batch_size=n, steps=70, solver="ddpm", seed=n)
        for n in (1, 2, 3, 4)
    ]
    alone = [sample(stages, request) for request in requests]
    for _ in range(3):
        with ThreadPoolExecutor(len(requests)) as threads:
            found = threads.map(lambda request: sample(stages, request), requests)
            for got, wanted in zip(found, alone, strict=True):
                np.testing.assert_array_equal(got, wanted)


def test_latency_of_a_step(runtime: TrtRuntime, built: Path) -> None:
    """A table, and no limit: a time is no test."""
    manifest = folders.load(built)
    table = SampleRequest(steps=128, solver="ddpm").table(manifest.config)
    for precision in ("fp32", "fp16"):
        steps = load_stages(built, manifest, runtime=runtime.name, precision=precision).loop(table)
        noise = NoiseStream(0, range(1), (64, WIDTH))
        milliseconds = 1e3 * statistics.median(step.seconds for step in steps(noise))
        print(  # noqa: T201
            f"\n{runtime.device.name}, {runtime.name} {precision}: {milliseconds:.3f} ms a step"
        )


@pytest.mark.parametrize("name", SAMPLED)
def test_onnxruntime_on_cuda(gpu: Cuda, small_artifacts: Path, small: LDLM, name: str) -> None:
    """Every node on the device: the session refuses to fall back."""
    manifest = folders.load(small_artifacts)
    spec = compared(name)
    try:
        on_gpu = OrtStage.from_artifacts(
            small_artifacts, manifest, spec.name, "fp32", provider="cuda"
        )
    except ProviderError as error:
        pytest.skip(f"ONNX Runtime's CUDA provider does not start: {error}")
    for batch, length in CASES:
        inputs = stage_inputs(spec, small.config, batch, length)
        expected = TorchStage(small, spec)(*inputs)
        assert compare(on_gpu(*inputs), expected).relative_l2 <= FORMULA_L2
    print(f"\n{gpu.name}, ort cuda {name}: {median_ms(lambda: on_gpu(*inputs)):.3f} ms")  # noqa: T201
