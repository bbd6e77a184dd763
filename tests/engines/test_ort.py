"""Stages on ONNX Runtime and PyTorch: the provider asked for, checked inputs, every size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from files_of import data_path, graph_path

from engines import OrtStage, compare
from engines.artifacts import folder as folders
from engines.memory import cores
from engines.proof.inputs import stage_inputs
from engines.runtime.load import load_stages
from engines.runtime.stage import RuntimeStage
from engines.runtime.torch import EvaluatorStage, TorchStage
from export.stages import stage
from ldlm import LDLM
from ldlm.errors import ArtifactError, ConfigError, ProviderError, StageInputError


def opened(folder: Path, name: str, precision: str = "fp32", **options: object) -> OrtStage:
    return OrtStage.from_artifacts(folder, folders.load(folder), name, precision, **options)


def has_cuda() -> bool:
    return torch.cuda.is_available()


@pytest.mark.fault(14)
@pytest.mark.skipif(has_cuda(), reason="the machine has a CUDA device; this is about having none")
def test_cuda_asked_for_and_absent_is_an_error(small_artifacts: Path) -> None:
    """Case 14: ONNX Runtime itself would use the CPU and print a warning."""
    with pytest.raises(ProviderError, match="CUDAExecutionProvider"):
        opened(small_artifacts, "token_decoder", provider="cuda")


def test_unknown_provider(small_artifacts: Path) -> None:
    with pytest.raises(ProviderError, match="cpu or cuda"):
        opened(small_artifacts, "token_decoder", provider="tpu")


LEVELS = ("ORT_ENABLE_ALL", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_BASIC", "ORT_DISABLE_ALL")


def distance(
    small: LDLM, folder: Path, name: str, precision: str, level: str | None = None
) -> float:
    """Relative L2 of a file in ONNX Runtime from PyTorch; None is the deployed level."""
    spec = stage(name)
    arrays = stage_inputs(spec, small.config, 2, 9)
    run = opened(folder, name, precision)
    if level is not None:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        options.intra_op_num_threads = cores()
        run.session = onnxruntime.InferenceSession(str(run.path), options, ["CPUExecutionProvider"])
    return compare(run(*arrays), TorchStage(small, spec)(*arrays)).relative_l2


@pytest.mark.fault(1)
@pytest.mark.parametrize("level", LEVELS)
def test_a_float32_norm_between_half_casts_loads_at_every_level(
    small: LDLM, small_artifacts: Path, level: str
) -> None:
    """Case 1: one LayerNormalization with casts around it, not its parts, which do not load."""
    for name in ("denoiser", "latent_decoder"):
        path = graph_path(small_artifacts, "fp16", name)
        found = {node.op_type for node in onnx.load(path, load_external_data=False).graph.node}
        assert "LayerNormalization" in found
        assert not found & {"ReduceMean", "Pow", "Sqrt"}
        assert distance(small, small_artifacts, name, "fp16", level) <= 5e-3


@pytest.mark.fault(19)
@pytest.mark.parametrize("level", LEVELS)
def test_no_fusion_changes_the_numbers_at_any_level(
    small: LDLM, small_artifacts: Path, level: str
) -> None:
    """Case 19: float32 stays float32, whatever the optimiser fuses."""
    for name in ("denoiser", "latent_decoder", "token_decoder_logits"):
        assert distance(small, small_artifacts, name, "fp32", level) <= 1e-5


def test_the_proof_runs_at_the_deployed_level(small: LDLM, small_artifacts: Path) -> None:
    """Case 19: what is compared is bit for bit what is deployed."""
    name = "denoiser"
    deployed = distance(small, small_artifacts, name, "fp32")
    assert deployed == distance(small, small_artifacts, name, "fp32", "ORT_ENABLE_ALL")
    assert deployed != distance(small, small_artifacts, name, "fp32", "ORT_DISABLE_ALL")


@pytest.mark.fault(11)
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (64, 2), (1, 128), (5, 31)])
def test_no_graph_is_specialised_to_its_example(
    small: LDLM, small_artifacts: Path, batch: int, length: int
) -> None:
    """Case 11: other batches and lengths than the example's run, 1 and the largest among them."""
    for name in ("denoiser", "latent_decoder", "token_decoder_logits"):
        spec = stage(name)
        arrays = stage_inputs(spec, small.config, batch, length)
        got = opened(small_artifacts, name)(*arrays)
        assert compare(got, TorchStage(small, spec)(*arrays)).relative_l2 <= 1e-5


@pytest.mark.parametrize("kind", ["ort", "torch"])
def test_wrong_inputs_are_refused(small: LDLM, small_artifacts: Path, kind: str) -> None:
    spec = stage("latent_decoder")
    run = opened(small_artifacts, spec.name) if kind == "ort" else TorchStage(small, spec)
    good = np.zeros((1, 4, 128), np.float32)
    run(good)
    for bad, words in (
        ((good.astype(np.float64),), "wrong dtype"),
        ((good[0],), "wrong dtype or shape"),
        ((np.zeros((1, 129, 128), np.float32),), "length is outside"),
        ((np.zeros((65, 1, 128), np.float32),), "batch is outside"),
        ((good.astype(">f4"),), "wrong dtype"),
        ((good.tolist(),), "no NumPy array"),
        ((torch.zeros(1, 4, 128),), r"numpy\(force=True\)"),
        ((good, good), "other inputs"),
        ((), "other inputs"),
    ):
        with pytest.raises(StageInputError, match=words):
            run(*bad)


@pytest.mark.parametrize("kind", ["ort", "torch", "evaluator"])
def test_every_runtime_is_one_protocol(small: LDLM, small_artifacts: Path, kind: str) -> None:
    """Named tensors in, named tensors out; a context manager; the same metadata."""
    spec = stage("latent_decoder")
    path = graph_path(small_artifacts, "fp32", spec.name)
    made: dict[str, Callable[[], RuntimeStage]] = {
        "ort": lambda: OrtStage(path, spec, small.config),
        "torch": lambda: TorchStage(small, spec),
        "evaluator": lambda: EvaluatorStage(path, spec, small.config),
    }
    (z,) = stage_inputs(spec, small.config, 2, 9)
    with made[kind]() as run:
        assert (run.spec, run.config, run.device) == (spec, small.config, "cpu")
        assert run.ranges["length"].max == 128
        found = run.run({"z": z})
        assert list(found) == ["h_hat"]
        assert np.array_equal(run(z), found["h_hat"])
        assert compare(found["h_hat"], TorchStage(small, spec)(z)).relative_l2 <= 1e-5
        with pytest.raises(StageInputError, match="other inputs"):
            run.run({"h": z})


def test_ids_are_the_argmax_of_the_logits(small: LDLM, small_artifacts: Path) -> None:
    (h_hat,) = stage_inputs(stage("token_decoder"), small.config, 3, 17)
    for precision in ("fp32", "fp16"):
        ids = opened(small_artifacts, "token_decoder", precision)(h_hat)
        logits = opened(small_artifacts, "token_decoder_logits", precision)(h_hat)
        assert ids.dtype == np.int64
        assert np.array_equal(ids, logits.argmax(-1))


@pytest.mark.fault(13)
def test_changed_files_are_refused(own_artifacts: Path) -> None:
    """Cases 13 and 15: cut, changed, renamed or missing; named before a runtime sees them."""
    data = data_path(own_artifacts, "fp32", "denoiser")
    content = data.read_bytes()
    data.write_bytes(content[:-1])
    with pytest.raises(ArtifactError, match="is not the file that was made"):
        opened(own_artifacts, "denoiser")
    data.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ArtifactError, match="has changed since it was made"):
        opened(own_artifacts, "denoiser")
    data.unlink()
    with pytest.raises(ArtifactError, match="a file is missing"):
        opened(own_artifacts, "denoiser")


def test_a_broken_graph_is_an_artifact_error(small: LDLM, tmp_path: Path) -> None:
    (tmp_path / "x.onnx").write_bytes(b"not a graph")
    with pytest.raises(ArtifactError, match="could not load"):
        OrtStage(tmp_path / "x.onnx", stage("denoiser"), small.config)


def test_runtimes_that_are_not_there(small_artifacts: Path, tmp_path: Path) -> None:
    manifest = folders.load(small_artifacts)
    with pytest.raises(ConfigError, match="ort or torch"):
        load_stages(small_artifacts, manifest, runtime="tflite")
    with pytest.raises(ConfigError, match="torch does not run this precision"):
        load_stages(small_artifacts, manifest, runtime="torch", precision="fp16")
    with pytest.raises(ArtifactError, match="needs the checkpoint"):
        load_stages(small_artifacts, manifest, runtime="torch")
    with pytest.raises(ArtifactError, match="was not exported"):
        load_stages(small_artifacts, manifest, precision="int8")
    with pytest.raises(ConfigError, match="ort does not run this precision"):
        load_stages(small_artifacts, manifest, precision="bf16")


def test_the_cpu_is_the_provider_in_use(small_artifacts: Path) -> None:
    session = opened(small_artifacts, "token_decoder").session
    assert session.get_providers() == ["CPUExecutionProvider"]
    assert "CPUExecutionProvider" in onnxruntime.get_available_providers()
