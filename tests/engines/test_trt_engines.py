"""Engines of an artifacts folder on the stand-in: which of them are refused, text, the proof."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_tensorrt import runtime_of
from files_of import copy_graphs, engine_path

from engines.artifacts import folder as folders
from engines.artifacts.manifest import FileEntry
from engines.proof.engine import engine_questions
from engines.proof.records import Measurement
from engines.proof.subject import Subject
from engines.runtime.load import load_stages
from engines.runtime.ort import OrtStage
from engines.runtime.trt_stage import checked_engine
from engines.tensorrt import library as libraries
from engines.tensorrt.device import Cuda
from engines.tensorrt.library import load_library
from export.precision import POLICIES
from export.stages import compared, components, stage
from ldlm import LDLM
from ldlm.errors import ArtifactError, ConfigError, LDLMError, ProviderError
from ldlm.sampler import SampleRequest, sample


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ldlm-engines"


@pytest.mark.fault(16)
@pytest.mark.parametrize(
    ("precision", "library", "sm", "version", "words"),
    [
        ("fp32", "rtx", "sm90", "1.7.1", "built for other GPUs"),
        ("fp32", "rtx", "sm75", "1.7.1", "no float32 matrix product"),
        ("fp32", "rtx", "sm89", "1.8.0", "another version of TensorRT"),
        ("fp32", "trt", "sm89", "11.4", "was not built"),
        ("fp64", "rtx", "sm89", "1.7.1", "was not built"),
    ],
)
def test_an_engine_that_cannot_run_here(
    small_artifacts: Path, precision: str, library: str, sm: str, version: str, words: str
) -> None:
    """Case 16: a reason with a name before TensorRT is asked, and what to do."""
    runtime, manifest = runtime_of(sm=sm), folders.load(small_artifacts)
    runtime.name, runtime.version = library, version
    with pytest.raises(ArtifactError, match=words) as caught:
        checked_engine(runtime, small_artifacts, manifest, "denoiser_step", precision)
    assert "remedy" in str(caught.value)
    if sm == "sm90":
        assert "--target trt" in str(caught.value)


@pytest.mark.fault(15)
def test_engines_of_other_weights_cannot_be_confused(own_artifacts: Path, tmp_path: Path) -> None:
    """Same architecture, same size, same header: only the hash tells them apart. Case 15."""
    pytest.importorskip("tensorrt_rtx", reason="only on Linux x86-64")
    from engines import build_engine

    manifest = folders.load(own_artifacts)
    entry = manifest.engine("fp16", "token_decoder", "rtx")
    assert entry is not None
    graphs = copy_graphs(own_artifacts, "fp16", tmp_path / "graphs")

    def build() -> bytes:
        return build_engine(
            graphs / "token_decoder.onnx",
            stage("token_decoder"),
            manifest.config,
            sms=["sm89"],
            profiles=entry.profiles,
        ).plan

    mine = build()
    data = np.fromfile(graphs / "token_decoder.onnx.data", np.uint16)
    (data ^ 1).tofile(graphs / "token_decoder.onnx.data")  # the last bit of every weight
    theirs = build()
    assert abs(len(theirs) - len(mine)) < 64
    assert theirs != mine
    path = own_artifacts / entry.engine.path
    path.write_bytes(mine)
    known = dataclasses.replace(entry, engine=FileEntry.of(own_artifacts, path), sms=("sm89",))
    manifest.put_engine(known)
    arguments = (runtime_of(), own_artifacts, manifest, "token_decoder", "fp16")
    checked_engine(*arguments)
    path.write_bytes(theirs)
    with pytest.raises(ArtifactError, match="is not the file that was made"):
        checked_engine(*arguments)
    as_large = dataclasses.replace(known.engine, bytes=len(theirs))
    manifest.put_engine(dataclasses.replace(known, engine=as_large))
    with pytest.raises(ArtifactError, match="has changed since it was made"):
        checked_engine(*arguments)


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_an_engine_that_is_not_whole(own_artifacts: Path, damage: str) -> None:
    path = engine_path(own_artifacts, "fp32", "denoiser_step")
    content = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(content[:-1])
    with pytest.raises(ArtifactError, match=r"is not the file that was made|is missing"):
        checked_engine(
            runtime_of(), own_artifacts, folders.load(own_artifacts), "denoiser_step", "fp32"
        )


def test_the_sampler_on_engines(small_artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four stages in one runtime; the same tokens as ONNX Runtime, and nothing else comes back."""
    manifest = folders.load(small_artifacts)
    runtime = runtime_of(small_artifacts)
    monkeypatch.setattr("engines.runtime.trt.TrtRuntime", lambda _: runtime)
    request = SampleRequest(length=8, samples=3, batch_size=2, steps=32, seed=3)
    tokens = [
        sample(load_stages(small_artifacts, manifest, runtime=name), request)
        for name in ("rtx", "ort")
    ]
    np.testing.assert_array_equal(*tokens)
    assert len(runtime.trt.engines) == 4
    assert runtime.device.downloads == 2  # type: ignore[attr-defined]


def proof_of_engines(folder: Path, small: LDLM) -> list[Measurement]:
    return [
        line
        for component in components()
        for precision in ("fp32", "fp16")
        for line in engine_questions(
            Subject(small, compared(component), POLICIES[precision]).at((1, 5), (3, 17)),
            folder,
            folders.load(folder),
            runtime_of(folder),
        )
    ]


def test_engines_are_compared_with_pytorch(small_artifacts: Path, small: LDLM) -> None:
    """ldlm verify --runtime: per precision two stages at once, and the ids case by case."""
    lines = proof_of_engines(small_artifacts, small)
    assert [(line.stage, line.precision) for line in lines] == [
        *(("denoiser", p) for p in ("fp32", "fp32", "fp16", "fp16")),
        *(("latent_decoder", p) for p in ("fp32", "fp16")),
        *(("token_decoder_logits", p) for p in ("fp32", "fp32", "fp16", "fp16")),
    ]
    assert all(line.passed for line in lines)
    assert [line.question for line in lines].count("engine update") == 2
    assert {line.question for line in lines} == {"engine", "engine update"}


@pytest.mark.fault(8)
@pytest.mark.parametrize(
    ("name", "output", "questions"),
    [
        ("conditioning", "modulations", {"engine"}),
        ("denoiser_step", "x0_hat", {"engine", "engine update"}),
        ("denoiser_step", "x_next", {"engine update"}),
        ("denoiser_step", "next_step", {"engine update"}),
        ("latent_decoder", "h_hat", {"engine"}),
        ("token_decoder", "token_ids", {"engine"}),
    ],
)
def test_an_engine_that_computes_something_else_is_noticed(
    small_artifacts: Path,
    small: LDLM,
    name: str,
    output: str,
    questions: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Case 8: silently wrong on this GPU, and the build said nothing."""
    run = OrtStage.run

    def wrong(self: OrtStage, feeds: Any, outputs: Any = None) -> Any:
        found = run(self, feeds, outputs)
        if self.spec.name == name:
            result = found[output]
            whole = result.dtype == np.int64
            found[output] = (result + 1) % 256 if whole else result * np.float32(1.01)
        return found

    monkeypatch.setattr(OrtStage, "run", wrong)
    failed = [line for line in proof_of_engines(small_artifacts, small) if not line.passed]
    assert {stage(line.stage).component for line in failed} == {stage(name).component}
    assert {line.question for line in failed} == questions


@pytest.mark.parametrize("name", ["rtx", "trt"])
def test_without_a_gpu_the_error_says_so(small_artifacts: Path, name: str) -> None:
    if _gpu_is_here():
        pytest.skip("a GPU is here: tests/gpu has the real thing")
    with pytest.raises(ProviderError, match=r"no usable GPU|is not usable here") as caught:
        load_stages(small_artifacts, folders.load(small_artifacts), runtime=name)
    assert "remedy" in str(caught.value)


def _gpu_is_here() -> bool:
    try:
        Cuda()
    except LDLMError:
        return False
    return True


@pytest.mark.parametrize("name", ["rtx", "trt"])
def test_a_library_that_is_not_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(module: str) -> None:
        raise ImportError(f"No module named '{module}'")

    monkeypatch.setattr(libraries.importlib, "import_module", absent)
    with pytest.raises(ProviderError, match=r"pip install 'ldlm-engines\[(rtx|tensorrt)\]'"):
        load_library(name)


def test_engines_run_on_one_device_only(small_artifacts: Path) -> None:
    with pytest.raises(ConfigError, match="one device"):
        load_stages(small_artifacts, folders.load(small_artifacts), runtime="rtx", provider="cpu")
