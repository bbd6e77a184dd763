"""Rotary attention on rows: how often, what is left, the same numbers, and where it must not."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from files_of import graph_path

from engines import OrtStage, compare
from engines.proof.inputs import stage_inputs
from engines.runtime.torch import TorchStage
from export.checks import check_graph
from export.exporter import OPSET
from export.passes.fuse_rotary import fuse_rotary
from export.passes.unfuse_attention import unfuse_attention
from export.precision import Precision
from export.stages import compared, stage
from ldlm import LDLM
from ldlm.errors import GraphCheckError

STEP = stage("denoiser_step")
# Operators that moved heads or turned them, and are gone.
MOVED = {"Transpose", "Neg"}


def plain(folder: Path, precision: str = "fp32", name: str = "denoiser") -> ir.Model:
    return ir.load(graph_path(folder, precision, name))


def attentions(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == "Attention"]


def outputs(model: ir.Model, small: LDLM, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """What a denoiser's graph computes, and what PyTorch does."""
    spec = compared("denoiser")
    inputs = stage_inputs(spec, small.config, 2, 17)
    ir.save(model, path, external_data=f"{path.name}.data")
    return OrtStage(path, spec, small.config)(*inputs), TorchStage(small, spec)(*inputs)


def test_it_fires_once_per_block_and_computes_the_same(
    small_artifacts: Path, small: LDLM, tmp_path: Path
) -> None:
    model = plain(small_artifacts)
    before = len(model.graph)
    assert fuse_rotary(model, STEP) == small.config.denoiser_blocks == 2
    kinds = [node.op_type for node in model.graph]
    assert kinds.count("Attention") == 2
    assert kinds.count("RotaryEmbedding") == 4
    assert not MOVED & set(kinds)
    assert len(model.graph) < before - 30
    assert fuse_rotary(model, STEP) == 0
    got, expected = outputs(model, small, tmp_path / "fused.onnx")
    assert compare(got, expected).relative_l2 < 1e-5


def test_another_rotation_would_be_seen(small_artifacts: Path, small: LDLM, tmp_path: Path) -> None:
    """Pairs that stand beside one another in place of half a head apart."""
    model = plain(small_artifacts)
    fuse_rotary(model, STEP)
    for node in model.graph:
        if node.op_type == "RotaryEmbedding":
            node.attributes["interleaved"] = ir.AttrInt64("interleaved", 1)
    got, expected = outputs(model, small, tmp_path / "other.onnx")
    assert compare(got, expected).relative_l2 > 1e-3


def test_attention_on_rows_can_be_unfused(
    small_artifacts: Path, small: LDLM, tmp_path: Path
) -> None:
    model = plain(small_artifacts)
    fuse_rotary(model, STEP)
    assert unfuse_attention(model) == 2
    assert not [node for node in model.graph if node.op_type == "Attention"]
    got, expected = outputs(model, small, tmp_path / "unfused.onnx")
    assert compare(got, expected).relative_l2 < 1e-5


def two_angles(model: ir.Model) -> None:
    """A table that turns the halves of a pair by different angles."""
    table = model.graph.initializers["rotary.cos"]
    assert table.const_value is not None
    array = np.array(table.const_value.numpy())
    array[3, -1] += 0.01
    table.const_value = ir.tensor(array, name="rotary.cos")


def other_sign(model: ir.Model) -> None:
    """[x_2, -x_1] in place of [-x_2, x_1]: every rotation the other way round."""
    for node in model.graph:
        if node.op_type == "Concat" and node.inputs[0].producer() is not None:
            minus = node.inputs[0].producer()
            if minus.op_type == "Neg":
                straight, turned = node.inputs[1], minus.inputs[0]
                minus.replace_input_with(0, straight)
                node.replace_input_with(1, turned)


def another_reader(model: ir.Model) -> None:
    """Something else wants every turned query."""
    for node in list(model.graph):
        if node.op_type == "Attention":
            model.graph.outputs.append(node.inputs[0])


def causal(model: ir.Model) -> None:
    for node in model.graph:
        if node.op_type == "Attention":
            node.attributes["is_causal"] = ir.AttrInt64("is_causal", 1)


def scaled(model: ir.Model) -> None:
    for node in model.graph:
        if node.op_type == "Attention":
            node.attributes["scale"] = ir.AttrFloat32("scale", 0.5)


def half(model: ir.Model) -> None:
    """The same pattern in half precision, without the casts that hide it as traced."""
    for node in attentions(model):
        node.outputs[0].dtype = ir.DataType.FLOAT16


def wanted(model: ir.Model) -> None:
    """The rows are outputs of the graph: their names are not ours to change."""
    for node in attentions(model):
        (turned,) = node.outputs[0].consumers()
        (merged,) = turned.outputs[0].consumers()
        model.graph.outputs.append(merged.outputs[0])


def other_axis(model: ir.Model) -> None:
    """The two halves joined along the positions."""
    for node in model.graph:
        if node.op_type == "Concat" and node.inputs[0].name.startswith("neg"):
            node.attributes["axis"] = ir.AttrInt64("axis", -2)


def other_heads(model: ir.Model) -> None:
    """A value of fewer heads than the queries have."""
    for node in model.graph:
        if node.op_type == "Attention":
            rows = node.inputs[2].producer().inputs[0].producer().inputs[0]
            rows.shape = ir.Shape([*rows.shape[:2], rows.shape[2] // 2])


# What must not be rewritten, and the reason that the log gives for it.
NEAR_MISSES = {
    two_angles: "cos does not turn both elements of a pair by one angle",
    other_sign: "output index mismatch",
    another_reader: "other uses",
    causal: "it has is_causal",
    scaled: "it has scale",
    half: "it is computed in FLOAT16",
    wanted: "its result is an output of the graph",
    other_axis: "Attribute axis mismatch",
    other_heads: "its rows are",
}


@pytest.mark.parametrize("change", NEAR_MISSES)
def test_it_must_not_fire(
    small_artifacts: Path, change: Callable[[ir.Model], None], caplog: pytest.LogCaptureFixture
) -> None:
    model = plain(small_artifacts)
    change(model)
    before = [node.op_type for node in model.graph]
    with caplog.at_level(logging.DEBUG, "export.passes.rules"):
        assert fuse_rotary(model, STEP) == 0
    assert [node.op_type for node in model.graph] == before
    reasons = [r.getMessage() for r in caplog.records if r.name == "export.passes.rules"]
    assert len(reasons) == 2  # one per block
    for reason, node in zip(reasons, attentions(model), strict=True):
        assert reason.startswith(f"Attention {node.name} is left as it is: ")
        assert NEAR_MISSES[change] in reason


def test_one_near_miss_keeps_no_other_from_its_rows(
    small_artifacts: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing is logged of what was rewritten, nor where nobody asks for it."""
    for level, expected in ((logging.DEBUG, 1), (logging.INFO, 0)):
        model = plain(small_artifacts)
        second = attentions(model)[1]
        second.attributes["scale"] = ir.AttrFloat32("scale", 0.5)
        caplog.clear()
        with caplog.at_level(level, "export.passes.rules"):
            assert fuse_rotary(model, STEP) == 1
        found = [r.getMessage() for r in caplog.records if r.name == "export.passes.rules"]
        assert len(found) == expected
        assert all(second.name in message for message in found)
        assert [node.op_type for node in model.graph].count("RotaryEmbedding") == 2


def test_the_half_tables_are_made_once(small_artifacts: Path) -> None:
    model = plain(small_artifacts)
    fuse_rotary(model, STEP)
    kinds = [node.op_type for node in model.graph]
    assert kinds.count("Expand") == 2
    turned = [node for node in model.graph if node.op_type == "RotaryEmbedding"]
    assert len({node.inputs[1:] for node in turned}) == 1


@pytest.mark.parametrize(
    ("precision", "name"),
    [("fp16", "denoiser"), ("bf16", "denoiser_step"), ("fp32", "latent_decoder")],
)
def test_it_must_not_fire_elsewhere(small_artifacts: Path, precision: str, name: str) -> None:
    """Half attention keeps its layout, which is what the engines were tried with."""
    model = plain(small_artifacts, precision, name)
    before = [node.op_type for node in model.graph]
    assert fuse_rotary(model, STEP) == 0
    assert [node.op_type for node in model.graph] == before


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_exported_step_reads_whole_rows(int8_artifacts: Path, precision: str) -> None:
    kinds = [node.op_type for node in plain(int8_artifacts, precision, "denoiser_step").graph]
    assert kinds.count("RotaryEmbedding") == 4
    assert "Transpose" not in kinds


def test_a_step_with_heads_moved_to_and_fro_is_refused(
    small_artifacts: Path, small: LDLM, tmp_path: Path
) -> None:
    """What a change of the traced pattern would do: the pass fits nothing, and nobody notices."""
    source, spec = graph_path(small_artifacts, "fp32", "denoiser_step"), stage("denoiser_step")
    path = Path(shutil.copytree(source.parent, tmp_path / "onnx")) / source.name
    model = ir.load(path)
    for node in model.graph:
        if node.op_type == "Attention":
            node.attributes.pop("q_num_heads")
    ir.save(model, path)
    with pytest.raises(GraphCheckError, match="does not read whole rows"):
        check_graph(path, spec, small.config, small.denoiser, Precision.of("fp32"), OPSET)
