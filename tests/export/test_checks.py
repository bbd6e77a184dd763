"""Every graph check fails on the fault it is for."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from files_of import data_path, graph_path

from export.checks import check_graph
from export.exporter import OPSET
from export.precision import Precision, apply
from export.stages import STAGES, stage
from ldlm import LDLM
from ldlm.errors import GraphCheckError


def check(folder: Path, name: str, small: LDLM, policy: str = "fp16") -> object:
    spec = stage(name)
    chosen = Precision.of(policy)
    module = apply(spec.torch(small), spec.component, chosen)
    return check_graph(folder / f"{name}.onnx", spec, small.config, module, chosen, OPSET)


@pytest.fixture
def folder(small_artifacts: Path, tmp_path: Path) -> Path:
    """The fp16 graphs of all stages side by side, to damage."""
    for spec in STAGES:
        for path in (
            graph_path(small_artifacts, "fp16", spec.name),
            data_path(small_artifacts, "fp16", spec.name),
        ):
            shutil.copy(path, tmp_path)
    return tmp_path


def first(model: ir.Model, op_type: str) -> ir.Node:
    return next(node for node in model.graph if node.op_type == op_type)


def bypass(model: ir.Model, node: ir.Node) -> None:
    """Take a node out: its first input in place of its output."""
    ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])
    model.graph.remove(node, safe=True)


def lose_softcap(model: ir.Model) -> None:
    bypass(model, first(model, "Tanh"))


def cap_after_softmax(model: ir.Model) -> None:
    softmax = first(model, "Softmax")
    cap = softmax.inputs[0]
    softmax.replace_input_with(0, cap.producer().inputs[1] or cap)
    scores = next(n for n in model.graph if n.op_type == "Div" and n.outputs[0].uses())
    softmax.replace_input_with(0, scores.inputs[0])


def half_norm(model: ir.Model) -> None:
    """An island turned to half by another tool: the cast in front now gives float16."""
    first(model, "LayerNormalization").outputs[0].dtype = ir.DataType.FLOAT16


def half_softmax(model: ir.Model) -> None:
    first(model, "Softmax").outputs[0].dtype = ir.DataType.FLOAT16


def half_tanh(model: ir.Model) -> None:
    first(model, "Tanh").inputs[0].dtype = ir.DataType.FLOAT16


def mask_after_cap(model: ir.Model) -> None:
    """Something is added to the capped scores: a mask that the model does not have."""
    softmax = first(model, "Softmax")
    capped = softmax.inputs[0]
    added = ir.Node("", "Add", [capped, capped])
    added.outputs[0].name, added.outputs[0].dtype = "masked", capped.dtype
    model.graph.insert_before(softmax, added)
    softmax.replace_input_with(0, added.outputs[0])


def other_epsilon(model: ir.Model) -> None:
    """Of the next size: 12 millionths in place of 10."""
    node = first(model, "LayerNormalization")
    node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 1.2e-5)


def other_cap(model: ir.Model) -> None:
    """Only behind the tanh, where it scales what the softmax reads."""
    ((product, place),) = first(model, "Tanh").outputs[0].uses()
    cap = product.inputs[1 - place].const_value.numpy()
    twin = ir.Value(name="cap", const_value=ir.tensor(cap * 0.9, name="cap"))
    twin.dtype, twin.shape = product.inputs[1 - place].dtype, product.inputs[1 - place].shape
    model.graph.register_initializer(twin)
    product.replace_input_with(1 - place, twin)


def lose_norm(model: ir.Model) -> None:
    bypass(model, first(model, "LayerNormalization"))


def fixed_batch(model: ir.Model) -> None:
    model.graph.inputs[0].shape = ir.Shape([2, "length", 128])


def other_dtype(model: ir.Model) -> None:
    model.graph.inputs[0].dtype = ir.DataType.FLOAT16


def other_name(model: ir.Model) -> None:
    model.graph.inputs[0].name = "latents"


def other_opset(model: ir.Model) -> None:
    model.opset_imports[""] = 18


def foreign_domain(model: ir.Model) -> None:
    model.opset_imports["com.microsoft"] = 1


def doubled_weight(model: ir.Model) -> None:
    node = next(n for n in model.graph if n.op_type == "MatMul" and n.inputs[1].const_value)
    array = node.inputs[1].const_value.numpy().copy()
    twin = ir.Value(name="twin", const_value=ir.tensor(array, name="twin"))
    twin.dtype, twin.shape = node.inputs[1].dtype, node.inputs[1].shape
    model.graph.register_initializer(twin)
    node.replace_input_with(1, twin)


def lost_weight(model: ir.Model) -> None:
    value = max(model.graph.initializers.values(), key=lambda v: v.const_value.nbytes)
    value.const_value = ir.tensor(np.zeros(1, np.float16), name=value.name)


FAULTS: list[tuple[Callable[[ir.Model], None], str, str]] = [
    (lose_softcap, "latent_decoder", "another number of Tanh"),
    (cap_after_softmax, "latent_decoder", "not fed by the softcap"),
    (half_norm, "denoiser", "LayerNormalization is not in the dtype"),
    (half_softmax, "latent_decoder", "Softmax of the capped softmax is not in the dtype"),
    (half_tanh, "latent_decoder", "Tanh of the capped softmax is not in the dtype"),
    (mask_after_cap, "latent_decoder", "not fed by the softcap"),
    (other_epsilon, "denoiser", "another constant than the config"),
    (other_cap, "latent_decoder", "another constant than the config"),
    (lose_norm, "token_decoder", "another number of LayerNormalization"),
    (fixed_batch, "latent_decoder", "specialised to its example"),
    (other_dtype, "latent_decoder", "not as specified"),
    (other_name, "latent_decoder", "other inputs or outputs"),
    (other_opset, "latent_decoder", "another opset"),
    (foreign_domain, "latent_decoder", "operators of other domains"),
    (doubled_weight, "token_decoder", "parameters once each"),
    (lost_weight, "token_decoder", "parameters once each"),
]


@pytest.mark.parametrize(
    ("fault", "name", "words"), FAULTS, ids=lambda v: getattr(v, "__name__", "")
)
def test_a_fault_is_noticed(
    folder: Path, small: LDLM, fault: Callable[[ir.Model], None], name: str, words: str
) -> None:
    check(folder, name, small)
    path = folder / f"{name}.onnx"
    model = ir.load(path)
    fault(model)
    ir.save(model, path)
    with pytest.raises(GraphCheckError, match=words) as caught:
        check(folder, name, small)
    assert f"stage:    {name}" in str(caught.value)


def test_an_unused_input_is_noticed(folder: Path, small: LDLM) -> None:
    """What the exporter does when one tensor is the example of two inputs."""
    path = folder / "denoiser.onnx"
    model = ir.load(path)
    x_t, _, x0_prev = model.graph.inputs
    ir.convenience.replace_all_uses_with(x0_prev, x_t)
    ir.save(model, path)
    with pytest.raises(GraphCheckError, match="does not use an input") as caught:
        check(folder, "denoiser", small)
    assert "x0_prev" in str(caught.value)


def test_softcap_inside_an_attention_node_is_noticed(folder: Path, small: LDLM) -> None:
    """TensorRT refuses it, ONNX Runtime's CPU kernel is slow; it must be explicit nodes."""
    path = folder / "token_decoder.onnx"
    model = ir.load(path)
    first(model, "Attention").attributes["softcap"] = ir.AttrFloat32("softcap", 50.0)
    ir.save(model, path)
    with pytest.raises(GraphCheckError, match="carries a softcap"):
        check(folder, "token_decoder", small)


def test_lost_external_data_is_noticed(folder: Path, small: LDLM) -> None:
    """Case 13."""
    (folder / "latent_decoder.onnx.data").rename(folder / "renamed.data")
    with pytest.raises(GraphCheckError, match="not in one file"):
        check(folder, "latent_decoder", small)


def test_a_second_weights_file_is_noticed(folder: Path, small: LDLM) -> None:
    """The graph's tensors lie in its component's file and in another one."""
    path = folder / "latent_decoder.onnx"
    model = ir.load(path)
    value = max(model.graph.initializers.values(), key=lambda v: v.const_value.nbytes)
    moved = value.const_value
    shutil.copy(folder / moved.location, folder / "other.data")
    value.const_value = ir.ExternalTensor(
        "other.data",
        moved.offset,
        moved.length,
        moved.dtype,
        shape=moved.shape,
        name=moved.name,
        base_dir=folder,
    )
    ir.save(model, path)
    with pytest.raises(GraphCheckError, match="not in one file") as caught:
        check(folder, "latent_decoder", small)
    assert "other.data" in caught.value.details["got"]


def test_a_policy_that_was_not_applied_is_noticed(folder: Path, small: LDLM) -> None:
    """The fp16 files do not pass as fp32: their parameters are in another dtype."""
    with pytest.raises(GraphCheckError, match="parameters once each"):
        check(folder, "token_decoder", small, policy="fp32")
