"""Integer products: their layer, the graph that comes of it, its checks, and rounding off."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from files_of import copy_graphs, graph_path
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import OrtStage, compare
from engines.proof.inputs import stage_inputs
from engines.proof.stage import rounding_off
from engines.runtime.torch import TorchStage
from export import precision
from export.checks import check_graph, check_shares
from export.exporter import OPSET
from export.passes.dequantise import dequantise
from export.quantised import LEVELS, QuantisedLinear
from export.stages import components, stage
from ldlm import LDLM
from ldlm.errors import GraphCheckError

RULES = precision.POLICIES["int8"]


@pytest.fixture(scope="module")
def folder(int8_artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every int8 graph of `small`, side by side. Do not change them."""
    return copy_graphs(int8_artifacts, "int8", tmp_path_factory.mktemp("graphs") / "int8")


def layer(rows: int, columns: int, seed: int = 0) -> torch.nn.Linear:
    generator = torch.Generator().manual_seed(seed)
    made = torch.nn.Linear(rows, columns)
    made.weight.data = torch.randn(columns, rows, generator=generator)
    return made.requires_grad_(False)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 40), st.integers(1, 30), st.integers(0, 99), st.floats(1e-3, 1e3))
def test_a_product_is_off_by_no_more_than_its_roundings(
    rows: int, columns: int, seed: int, size: float
) -> None:
    """Half a step of every activation, and of every weight."""
    linear = layer(rows, columns, seed)
    x = size * torch.randn(3, rows, generator=torch.Generator().manual_seed(seed))
    quantised = QuantisedLinear(linear)
    assert (quantised.codes.abs().amax(dim=0) == LEVELS).all()  # every channel has its own scale
    step = (x.amax().clamp(min=0) - x.amin().clamp(max=0)) / 255
    weight = linear.weight.T
    rounded = (quantised.codes * quantised.scales - weight).abs()
    assert (rounded <= 0.501 * quantised.scales).all()
    # The zero point is rounded too: an activation at the end of the range is off by a whole step.
    allowed = step * weight.abs().sum(0) + (x.abs() + step).sum(-1, True) * quantised.scales / 2
    assert ((quantised(x) - linear(x)).abs() <= 1.01 * allowed + 1e-6 * size).all()


def test_zeros_stay_zeros() -> None:
    """Neither a channel of zeros nor an activation of zeros divides by zero."""
    linear = layer(6, 4)
    linear.weight.data[2] = 0
    quantised = QuantisedLinear(linear)
    assert quantised.scales[2] == 1  # 0 / 0 as an integer is 0 on this CPU, and not on every one
    assert torch.equal(quantised(torch.randn(2, 6))[:, 2], linear.bias[2].expand(2))
    assert torch.equal(quantised(torch.zeros(2, 6)), linear.bias.expand(2, 4))


@pytest.mark.parametrize("sign", [1, -1])
def test_activations_of_one_sign_keep_their_size(sign: int) -> None:
    """Their range is from 0 on, as DynamicQuantizeLinear has it: from 10 to 11 it has no codes."""
    linear = layer(16, 4)
    x = sign * (10 + torch.rand(3, 16, generator=torch.Generator().manual_seed(0)))
    quantised = QuantisedLinear(linear)
    expected = x @ (quantised.codes * quantised.scales) + linear.bias
    assert (quantised(x) - expected).abs().max() <= 11 / 255 * linear.weight.abs().sum(1).max()


def test_the_largest_sums_do_not_saturate(tmp_path: Path) -> None:
    """Every product at its largest: uint8 255 times 63 of one sign, in ONNX Runtime on this CPU.

    With 8-bit weights a CPU without VNNI would saturate here, and tell nobody.
    """
    import onnxruntime as ort

    linear = torch.nn.Linear(512, 8, bias=False).requires_grad_(False)
    linear.weight.data.fill_(0.5)
    module = QuantisedLinear(linear).eval()
    # This CPU may have VNNI: two products fit into 16 bits on every other one, too.
    assert 2 * 255 * int(module.codes.abs().max()) <= np.iinfo(np.int16).max
    x = torch.ones(4, 512)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter itself, as in export.exporter.trace
        program = torch.onnx.export(
            module, (x,), dynamo=True, opset_version=OPSET, input_names=["x"], verbose=False
        )
    assert program is not None
    ir.save(program.model, tmp_path / "one.onnx")
    (y,) = ort.InferenceSession(str(tmp_path / "one.onnx")).run(None, {"x": x.numpy()})
    assert np.allclose(y, 256.0, rtol=1e-6)


def test_what_runs_in_integers(small: LDLM) -> None:
    found = {
        name: {
            d.module
            for d in precision.decide(stage(name).torch(small), name, RULES)
            if d.rule.dtype == precision.INTEGER
        }
        for name in components()
    }
    kept = {
        name: {
            module
            for module, child in stage(name).torch(small).named_modules()
            if isinstance(child, torch.nn.Linear)
        }
        - found[name]
        for name in components()
    }
    assert kept["denoiser"] == {
        "time.0", "time.2", "blocks.0.modulation", "blocks.1.modulation", "final_modulation",
        "input", "output",
    }  # fmt: skip # rows, as a table
    assert kept["latent_decoder"] == {"decoder.query_mlp.up", "decoder.query_mlp.down"}
    assert kept["token_decoder"] == set()
    assert {"blocks.0.qkv", "blocks.1.mlp.down"} <= found["denoiser"]


@pytest.mark.parametrize("name", ["denoiser", "latent_decoder", "token_decoder_logits"])
def test_the_graph_is_the_modules(folder: Path, small: LDLM, name: str) -> None:
    """ONNX Runtime's integers are the module's, as long as nothing else rounds before them.

    A float32 sum in another order may move an activation to the next code, and what follows with
    it: two roundings of one thing, each with the quantisation's error, and mostly the same.
    """
    spec = stage(name)
    module = precision.apply(spec.torch(small), spec.component, RULES)
    arrays = stage_inputs(spec, small.config, 2, 17)
    expected = TorchStage(small, spec)(*arrays)
    emulated = TorchStage(small, spec, module)(*arrays)
    got = OrtStage(folder / f"{name}.onnx", spec, small.config)(*arrays)
    error = compare(emulated, expected).relative_l2
    assert 1e-3 < error < 0.1
    assert compare(got, emulated).relative_l2 < 0.5 * error


@pytest.mark.parametrize("name", ["denoiser", "latent_decoder", "token_decoder_logits"])
def test_rounding_off_leaves_the_formula(folder: Path, small: LDLM, name: str) -> None:
    spec = stage(name)
    arrays = stage_inputs(spec, small.config, 2, 17)
    with rounding_off(ir.load(folder / f"{name}.onnx")) as wide:
        left = {node.op_type for node in ir.load(wide).graph}
        got = OrtStage(wide, spec, small.config)(*arrays)
    assert not left & {"MatMulInteger", "DynamicQuantizeLinear"}
    module = precision.apply(spec.torch(small), spec.component, RULES)
    reference = TorchStage(small, spec, precision.without_rounding(module))(*arrays)
    assert compare(got, reference).relative_l2 < 1e-5
    assert compare(got, TorchStage(small, spec)(*arrays)).relative_l2 > 1e-4  # weights are rounded


def test_dequantise_counts_and_must_not_fire_elsewhere(folder: Path, small_artifacts: Path) -> None:
    graph = ir.load(folder / "denoiser_step.onnx")
    products = sum(node.op_type == "MatMulInteger" for node in graph.graph)
    assert dequantise(graph) == products > 0
    assert dequantise(graph) == 0
    other = ir.load(graph_path(small_artifacts, "fp16", "denoiser_step"))
    before = [node.op_type for node in other.graph]
    assert dequantise(other) == 0
    assert [node.op_type for node in other.graph] == before


def first(model: ir.Model, op_type: str) -> ir.Node:
    return next(node for node in model.graph if node.op_type == op_type)


def no_zero_point(model: ir.Model) -> None:
    node = first(model, "MatMulInteger")
    node.resize_inputs(2)


def anothers_zero_point(model: ir.Model) -> None:
    nodes = [node for node in model.graph if node.op_type == "MatMulInteger"]
    other = nodes[1].inputs[2]
    assert other is not nodes[2].inputs[2]
    nodes[2].replace_input_with(2, other)


def a_weight_that_is_computed(model: ir.Model) -> None:
    """Codes that are no constant of the file."""
    node = first(model, "MatMulInteger")
    copied = ir.Node("", "Identity", inputs=[node.inputs[1]])
    copied.outputs[0].name, copied.outputs[0].dtype = "copied", ir.DataType.INT8
    model.graph.insert_before(node, copied)
    node.replace_input_with(1, copied.outputs[0])


def a_product_in_floats(model: ir.Model) -> None:
    """One layer left as it was: what a converter does that gives up quietly."""
    node = first(model, "MatMulInteger")
    source = node.inputs[0].producer()
    codes = node.inputs[1].const_value.numpy().astype(np.float32)
    weight = ir.Value(
        name="kept", shape=ir.Shape(codes.shape), type=ir.TensorType(ir.DataType.FLOAT)
    )
    weight.const_value = ir.tensor(codes, name="kept")
    model.graph.register_initializer(weight)
    product = ir.Node("", "MatMul", inputs=[source.inputs[0], weight])
    product.outputs[0].name, product.outputs[0].dtype = "kept_product", ir.DataType.FLOAT
    model.graph.insert_before(node, product)
    node.outputs[0].replace_all_uses_with(product.outputs[0])
    model.graph.remove(node, safe=True)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (no_zero_point, "or other inputs"),
        (a_weight_that_is_computed, "no int8 weight"),
        (anothers_zero_point, "another zero point"),
        (a_product_in_floats, "another number of integer products"),
    ],
)
def test_a_check_fails_on_its_fault(
    folder: Path, small: LDLM, tmp_path: Path, fault: Callable[[ir.Model], None], message: str
) -> None:
    own = Path(shutil.copytree(folder, tmp_path / "own"))
    spec = stage("denoiser")
    module = precision.apply(spec.torch(small), spec.component, RULES)
    path = own / "denoiser.onnx"

    def check() -> None:
        check_graph(path, spec, small.config, module, RULES, OPSET)

    check()
    model = ir.load(path)
    fault(model)
    ir.save(model, path, external_data="denoiser.onnx.data")
    with pytest.raises(GraphCheckError, match=message):
        check()


def test_a_product_that_the_loop_lost_is_noticed(folder: Path, small: LDLM) -> None:
    spec = stage("denoiser")
    module = precision.apply(spec.torch(small), spec.component, RULES)
    evidence = {
        name: check_graph(folder / f"{name}.onnx", stage(name), small.config, module, RULES, OPSET)
        for name in ("denoiser", "denoiser_step", "conditioning")
    }
    check_shares("denoiser", evidence)
    assert evidence["denoiser_step"]["integer_products"] == 8
    evidence["denoiser_step"]["integer_products"] -= 1
    with pytest.raises(GraphCheckError, match="all its integer products"):
        check_shares("denoiser", evidence)
