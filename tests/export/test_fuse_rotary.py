"""Rotary attention on rows: how often, what is left, the same numbers, and where it must not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from files_of import copy_graphs, graph_path

from engines import OrtStage, compare
from engines.proof.inputs import stage_inputs
from engines.runtime.torch import TorchStage
from export import precision as policies
from export.checks import check_graph
from export.exporter import OPSET
from export.passes.fuse_rotary import fuse_rotary
from export.passes.unfuse_attention import unfuse_attention
from export.stages import compared, stage
from ldlm import LDLM
from ldlm.errors import GraphCheckError

# Operators that moved heads or turned them, and are gone.
MOVED = {"Transpose", "Neg"}


def plain(folder: Path, precision: str = "fp32", name: str = "denoiser") -> ir.Model:
    return ir.load(graph_path(folder, precision, name))


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
    assert fuse_rotary(model) == small.config.denoiser_blocks == 2
    kinds = [node.op_type for node in model.graph]
    assert kinds.count("Attention") == 2
    assert kinds.count("RotaryEmbedding") == 4
    assert not MOVED & set(kinds)
    assert len(model.graph) < before - 30
    assert fuse_rotary(model) == 0
    got, expected = outputs(model, small, tmp_path / "fused.onnx")
    assert compare(got, expected).relative_l2 < 1e-5


def test_another_rotation_would_be_seen(small_artifacts: Path, small: LDLM, tmp_path: Path) -> None:
    """Pairs that stand beside one another in place of half a head apart."""
    model = plain(small_artifacts)
    fuse_rotary(model)
    for node in model.graph:
        if node.op_type == "RotaryEmbedding":
            node.attributes["interleaved"] = ir.AttrInt64("interleaved", 1)
    got, expected = outputs(model, small, tmp_path / "other.onnx")
    assert compare(got, expected).relative_l2 > 1e-3


def test_attention_on_rows_can_be_unfused(
    small_artifacts: Path, small: LDLM, tmp_path: Path
) -> None:
    model = plain(small_artifacts)
    fuse_rotary(model)
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


@pytest.mark.parametrize("change", [two_angles, other_sign, another_reader, causal, scaled])
def test_it_must_not_fire(small_artifacts: Path, change: Callable[[ir.Model], None]) -> None:
    model = plain(small_artifacts)
    change(model)
    before = [node.op_type for node in model.graph]
    assert fuse_rotary(model) == 0
    assert [node.op_type for node in model.graph] == before


@pytest.mark.parametrize(
    ("precision", "name"),
    [("fp16", "denoiser"), ("bf16", "denoiser_step"), ("fp32", "latent_decoder")],
)
def test_it_must_not_fire_elsewhere(small_artifacts: Path, precision: str, name: str) -> None:
    """Half attention keeps its layout, which is what the engines were tried with."""
    model = plain(small_artifacts, precision, name)
    before = [node.op_type for node in model.graph]
    assert fuse_rotary(model) == 0
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
    own = copy_graphs(small_artifacts, "fp32", tmp_path / "onnx")
    path, spec = own / "denoiser_step.onnx", stage("denoiser_step")
    rules = policies.POLICIES["fp32"]
    model = ir.load(path)
    for node in model.graph:
        if node.op_type == "Attention":
            node.attributes.pop("q_num_heads")
    ir.save(model, path)
    with pytest.raises(GraphCheckError, match="does not read whole rows"):
        check_graph(path, spec, small.config, small.denoiser, rules, OPSET)
