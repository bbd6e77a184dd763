"""The switch for a GPU whose fused attention computes something else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest
from files_of import graph_path

from engines import compare
from engines.compile.rtx import layer_dtypes
from engines.compile.target import Target, _unfused
from engines.proof.inputs import stage_inputs
from engines.runtime.ort import OrtStage
from engines.runtime.torch import EvaluatorStage, TorchStage
from engines.tensorrt.profiles import profiles
from export.passes.unfuse_attention import unfuse_attention
from export.stages import compared, stage
from ldlm import LDLM
from ldlm.errors import GraphCheckError

FUSED = {"denoiser": 2, "denoiser_step": 2, "token_decoder_logits": 2, "latent_decoder": 0}


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", FUSED)
def test_how_often_it_fires(small_artifacts: Path, name: str, precision: str) -> None:
    model = ir.load(graph_path(small_artifacts, precision, name))
    assert unfuse_attention(model) == FUSED[name]
    assert not [node for node in model.graph if node.op_type == "Attention"]
    assert sum(node.op_type == "Softmax" for node in model.graph) == 2
    softmax = [node for node in model.graph if node.op_type == "Softmax"]
    assert all(node.outputs[0].dtype == ir.DataType.FLOAT for node in softmax)
    assert unfuse_attention(model) == 0


def test_it_computes_the_same(small_artifacts: Path, small: LDLM) -> None:
    """In float32 equal to rounding; in half never further from PyTorch than the fused form."""
    spec = compared("denoiser")
    inputs = stage_inputs(spec, small.config, 2, 17)
    expected = TorchStage(small, spec)(*inputs)
    with _unfused(graph_path(small_artifacts, "fp32", "denoiser")) as path:
        assert compare(OrtStage(path, spec, small.config)(*inputs), expected).relative_l2 < 1e-5
    for precision in ("fp16", "bf16"):
        fused = graph_path(small_artifacts, precision, "denoiser")
        with _unfused(fused) as path:
            errors = [
                compare(EvaluatorStage(p, spec, small.config)(*inputs), expected).relative_l2
                for p in (path, fused)
            ]
        assert errors[0] <= 1.02 * errors[1]


def test_the_loops_rows_unfused_compute_the_same(small_artifacts: Path, small: LDLM) -> None:
    """The file that engines are built of: its attention reads rows, and splits them here."""
    spec = stage("denoiser_step")
    inputs = stage_inputs(spec, small.config, 2, 17)
    path = graph_path(small_artifacts, "fp32", "denoiser_step")
    expected = OrtStage(path, spec, small.config)(*inputs)
    with _unfused(path) as changed:
        assert compare(OrtStage(changed, spec, small.config)(*inputs), expected).relative_l2 < 1e-5
        kinds = {kind for kind, _ in layer_dtypes(changed, spec)}
    assert not [kind for kind in kinds if "ATTENTION" in kind]
    assert "SOFTMAX" in kinds


def test_a_scale_of_its_own_is_kept(small_artifacts: Path, small: LDLM, tmp_path: Path) -> None:
    spec = compared("denoiser")
    inputs = stage_inputs(spec, small.config, 2, 17)
    model = ir.load(graph_path(small_artifacts, "fp32", "denoiser"))
    for node in model.graph:
        if node.op_type == "Attention":
            node.attributes["scale"] = ir.AttrFloat32("scale", 0.5)
    found = []
    for name in ("fused", "unfused"):
        path = tmp_path / f"{name}.onnx"
        ir.save(model, path, external_data=f"{path.name}.data")
        found.append(OrtStage(path, spec, small.config)(*inputs))
        unfuse_attention(model)
    assert compare(*found).relative_l2 < 1e-5


def mask(node: ir.Node) -> None:
    node.resize_inputs(4)
    node.replace_input_with(3, ir.Value(name="mask"))


def cache(node: ir.Node) -> None:
    """The keys so far, which something reads."""
    node.resize_outputs(2)
    node.outputs[1].name = "present_key"
    reader = ir.node("Identity", [node.outputs[1]])
    node.graph.insert_after(node, reader)
    node.graph.outputs.append(reader.outputs[0])


def attribute(name: str, value: float) -> Callable[[ir.Node], None]:
    kind = ir.AttrFloat32 if isinstance(value, float) else ir.AttrInt64

    def change(node: ir.Node) -> None:
        node.attributes[name] = kind(name, value)

    return change


# What an attention can have, by its name, and the reason that the log gives.
NOT_PLAIN = {
    "is_causal": (attribute("is_causal", 1), "it has is_causal"),
    "kv_num_heads": (attribute("kv_num_heads", 1), "it has kv_num_heads"),
    "softcap": (attribute("softcap", 30.0), "it has softcap"),
    "mask": (mask, "it has mask"),
    "present_key": (cache, "other uses"),
}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_an_attention_that_is_not_ours_is_refused(
    small_artifacts: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = ir.load(graph_path(small_artifacts, "fp16", "denoiser"))
    node = next(node for node in model.graph if node.op_type == "Attention")
    change, reason = NOT_PLAIN[name]
    change(node)
    caplog.set_level(logging.DEBUG, "export.passes.rules")
    with pytest.raises(GraphCheckError, match="not plain") as caught:
        unfuse_attention(model)
    assert caught.value.details["got"] == name
    (found,) = [r.getMessage() for r in caplog.records if r.name == "export.passes.rules"]
    assert found.startswith(f"Attention {node.name} is left as it is: ")
    assert reason in found


def test_tensorrt_builds_it(small_artifacts: Path, small: LDLM) -> None:
    """Case 8: the network has no attention layer, and its softmax is in float32."""
    spec = compared("denoiser")
    path = graph_path(small_artifacts, "fp16", "denoiser")
    with _unfused(path) as changed:
        layers = layer_dtypes(changed, spec)
    assert not [kind for kind, _ in layers if "ATTENTION" in kind]
    assert [dtype for kind, dtype in layers if kind == "SOFTMAX"] == ["FLOAT", "FLOAT"]
    target = Target(("sm89",), unfused=True)
    assert target.asked == "sm89, attention unfused"
    built = target.build(path, spec, small.config, profiles(small.config), lambda *_: None)
    assert built.builder["attention"] == "unfused, in float32"
    assert built.plan
    assert not list(path.parent.glob(".*"))
