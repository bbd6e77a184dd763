"""The decoder's constants folded: what each pass finds, what it leaves, and that it is noticed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from files_of import graph_path
from numpy.typing import NDArray

from engines import compare
from export.passes.fold import fold, folds
from export.stages import DYNAMIC, sharing, stage
from ldlm import LDLM
from ldlm.config import LDLMConfig

Array = NDArray[Any]

PASSES = tuple(folds(128))
PRODUCTS = PASSES[:-1]  # those that change the weights of products


def expected(config: LDLMConfig) -> dict[str, int]:
    """How often each pass fires on a latent decoder."""
    blocks = config.decoder_blocks
    return {
        "norm gains": 2 * blocks,  # state_norm and latents_norm
        "key gains": blocks,  # one capped attention
        "softcap scale": blocks,
        "residual scales": 2 * blocks + 1,  # attention and MLP, and once the query MLP
        # P * scale, r_0, and of the first block the queries and the state's keys and values
        "positions": 5,
    }


def load(folder: Path, name: str = "latent_decoder", precision: str = "fp32") -> ir.Model:
    return ir.load(graph_path(folder, precision, name))


def run(model: ir.Model, **feeds: Array) -> Array:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    content = ir.to_proto(ir.external_data.load_to_model(model)).SerializeToString()
    return ort.InferenceSession(content, options).run(None, feeds)[0]


def drawn(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def of_type(model: ir.Model, op_type: str) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == op_type]


def scaled_by(model: ir.Model, *shape: int) -> list[ir.Node]:
    """Products with a constant of a shape."""
    return [
        node
        for node in of_type(model, "Mul")
        if any(v.const_value is not None and v.shape == shape for v in node.inputs)
    ]


def readers(node: ir.Node) -> set[str]:
    return {use.node.op_type for use in node.outputs[0].uses()}


def makers(*nodes: ir.Node) -> list[str]:
    """What makes the inputs of nodes, but for constants."""
    made = [value.producer() for node in nodes for value in node.inputs]
    return [node.op_type for node in made if node is not None]


def test_how_often_each_fires(small_artifacts: Path, small: LDLM) -> None:
    assert fold(load(small_artifacts), small.config.n_positions) == expected(small.config)


@pytest.mark.parametrize("name", PASSES)
def test_each_alone_computes_the_same(small_artifacts: Path, small: LDLM, name: str) -> None:
    model = load(small_artifacts)
    assert folds(small.config.n_positions)[name](model) == expected(small.config)[name]
    for batch, length in ((1, 1), (3, 17), (2, small.config.n_positions)):
        z = drawn(batch, length, small.config.d_model)
        before = run(load(small_artifacts), z=z)
        assert compare(run(model, z=z), before).relative_l2 < 1e-5


def test_the_exported_graph_computes_the_same(small_artifacts: Path) -> None:
    for batch, length in ((1, 1), (3, 17), (2, 64), (2, 128)):
        z = drawn(batch, length, 128)
        plain = run(load(small_artifacts), z=z)
        folded = run(load(small_artifacts, "latent_decoder_folded"), z=z)
        assert compare(folded, plain).relative_l2 < 1e-5


def test_every_folded_constant_counts(small_artifacts: Path) -> None:
    """One that is 1 % off is noticed by the comparison above, whichever it is."""
    z = drawn(2, 17, 128)
    plain = run(load(small_artifacts), z=z)
    model = load(small_artifacts, "latent_decoder_folded")
    names = "gained|query_gain|scaled|all_positions"
    folded = [v for name, v in model.graph.initializers.items() if re.search(names, name)]
    for value in folded:
        right = value.const_value
        wrong = right.numpy().copy()
        wrong[..., ::2] *= 1.01  # not of all: the norm of the keys would take a common factor out
        value.const_value = ir.tensor(wrong, name=value.name)
        assert compare(run(model, z=z), plain).relative_l2 > 1e-5, value.name
        value.const_value = right
    # Of block 0 the state's product is among the positions, and so are its queries.
    assert len(folded) == 3 + 1 + 2 * 3 + 5


PATTERNS: dict[str, Callable[[ir.Model, LDLMConfig], list[ir.Node]]] = {
    "norm gains": lambda m, c: [n for n in scaled_by(m, c.d_model) if "MatMul" in readers(n)],
    "key gains": lambda m, c: [n for n in scaled_by(m, c.d_head) if "Transpose" in readers(n)],
    "softcap scale": lambda m, c: [n for n in of_type(m, "Tanh") if makers(n) == ["Div"]],
    "residual scales": lambda m, c: [n for n in scaled_by(m) if {*makers(n)} & {"Add", "MatMul"}],
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_what_was_folded_is_gone(small_artifacts: Path, small: LDLM, name: str) -> None:
    apply, found = folds(small.config.n_positions)[name], PATTERNS[name]
    model = load(small_artifacts)
    assert len(found(model, small.config)) == expected(small.config)[name]
    apply(model)
    assert not found(model, small.config)
    assert apply(model) == 0


def test_the_first_state_is_computed_no_more(small_artifacts: Path) -> None:
    """The query MLP and the first block's norms of the state and of the queries are gone."""
    model = load(small_artifacts)
    kinds = ("Gelu", "LayerNormalization", "ReduceL2")
    assert [len(of_type(model, kind)) for kind in kinds] == [3, 3, 7]
    folds(128)["positions"](model)
    assert [len(of_type(model, kind)) for kind in kinds] == [2, 2, 5]
    tables = {name for name in model.graph.initializers if "all_positions" in name}
    assert {node.inputs[0].name for node in of_type(model, "Slice")} == tables
    assert not any(re.search("query_mlp|mask_vector", name) for name in model.graph.initializers)


def test_the_exported_file_is_as_specified(small_artifacts: Path, small: LDLM) -> None:
    spec, sizes = stage("latent_decoder_folded"), {axis: axis for axis in DYNAMIC}
    path = graph_path(small_artifacts, "fp32", spec.name)
    model = ir.load(path)
    values = (*model.graph.inputs, *model.graph.outputs)
    found = [(value.name, [str(d) for d in value.shape]) for value in values]
    tensors = [(t.name, t.shape(small.config, sizes)) for t in (*spec.inputs, *spec.outputs)]
    assert found == [(name, [str(d) for d in shape]) for name, shape in tensors]
    assert makers(*of_type(model, "Tanh")) == 2 * ["MatMul"]
    constants = onnx.load(path, load_external_data=False).graph.initializer
    places = [e.value for c in constants for e in c.external_data if e.key == "location"]
    assert set(places) == {"latent_decoder_folded.onnx.data"} == {spec.data}


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp16-without-rms_norm"])
def test_there_is_no_folded_decoder_in_half(small_artifacts: Path, precision: str) -> None:
    """Half weights that take up a factor would be rounded a second time."""
    assert [spec.name for spec in sharing("latent_decoder", precision)] == ["latent_decoder"]
    assert "latent_decoder_folded" in [s.name for s in sharing("latent_decoder", "fp32")]
    files = small_artifacts.rglob("latent_decoder_folded*")
    assert {path.parents[1].name for path in files} == {"fp32"}


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_half_weights_are_left(small_artifacts: Path, name: str, precision: str) -> None:
    model = load(small_artifacts, precision=precision)
    before = ir.to_proto(model).SerializeToString()
    assert folds(128)[name](model) == 0
    assert ir.to_proto(model).SerializeToString() == before


INPUTS = {"x": "float", "q": "float", "k": "float", "x16": "float16", "k16": "float16"}
CONSTANTS: dict[str, Array] = {"gain": drawn(4, seed=1), "gain2": drawn(4, seed=2)}
CONSTANTS |= {"W": drawn(4, 3), "bias": drawn(3, seed=3), "scale": np.array(1.1, np.float32)}
CONSTANTS |= {"cap": np.array(3, np.float32), "P": drawn(16, 4)}
CONSTANTS |= {f"{name}16": array.astype(np.float16) for name, array in CONSTANTS.items()}
CONSTANTS |= {"one_gain": drawn(1), "gains": drawn(5, 4), "scales": drawn(3), "caps": drawn(5)}
CONSTANTS |= {"zero": np.array([0]), "one": np.array([1]), "i0": np.array(0), "i1": np.array(1)}

TURN = "Transpose<perm=[0, 2, 1]>"
SCALED = "m = MatMul(x, W) a = Add(m, bias) y = Mul(a, scale)"
KEYS = f"a = Mul(q, gain) b = Mul(k, gain2) t = {TURN}(b) y = MatMul(a, t)"
CAPPED = f"a = Mul(q, gain) t = {TURN}(k) m = MatMul(a, t) d = Div(m, cap) y = Tanh(d)"
TABLE = "n = Shape<start=1, end=2>(x) p = Slice(P, zero, n, zero, one) "


def also(body: str, name: str) -> str:
    """A value of the body with another reader."""
    return body.replace("y =", "o =") + f" r = ReduceSum({name}) y = Add(o, r)"


def half(body: str) -> str:
    """The body with half inputs and constants."""
    return re.sub(r"\b(q|x|k|gain2?|W|bias|scale|cap)\b", r"\g<1>16", body.replace("q", "x"))


WHOLE = {
    "norm gains": "a = Mul(x, gain) y = MatMul(a, W)",
    "key gains": KEYS,
    "softcap scale": CAPPED,
    "residual scales": SCALED,
    "positions": TABLE + "y = Add(x, p)",
}
BROKEN = {
    "norm gains": {
        "half": half(WHOLE["norm gains"]),
        "a half product": "a = Mul(x, gain) r = Cast<to=10>(a) y = MatMul(r, W16)",
        "another reader": also(WHOLE["norm gains"], "a"),
        "on the right": f"a = Mul(x, gain) t = {TURN}(x) y = MatMul(t, a)",
        "a weight of the data": f"a = Mul(x, gain) t = {TURN}(q) y = MatMul(a, t)",
        "a gain per position": "a = Mul(x, gains) y = MatMul(a, W)",
    },
    "key gains": {
        "half": half(KEYS),
        "keys alone": f"b = Mul(k, gain2) t = {TURN}(b) y = MatMul(q, t)",
        "queries alone": f"a = Mul(q, gain) t = {TURN}(k) y = MatMul(a, t)",
        "another reader of keys": also(KEYS, "b"),
        "another reader of queries": also(KEYS, "a"),
        "a gain per position": KEYS.replace("gain2", "gains"),
        "gains of two sizes": KEYS.replace("gain2", "one_gain"),
    },
    "softcap scale": {
        "half": half(CAPPED),
        "no scores": "d = Div(x, cap) y = Tanh(d)",
        "queries without a gain": f"t = {TURN}(k) m = MatMul(q, t) d = Div(m, cap) y = Tanh(d)",
        "another reader of scores": also(CAPPED, "m"),
        "another reader of the quotient": also(CAPPED, "d"),
        "another reader of queries": also(CAPPED, "a"),
        "a cap per key": CAPPED.replace("cap", "caps"),
        "the inverse": CAPPED.replace("(m, cap)", "(cap, m)"),
    },
    "residual scales": {
        "half": half(SCALED),
        "a scale per feature": SCALED.replace("scale", "scales"),
        "another reader of the product": also(SCALED, "m"),
        "another reader of the sum": also(SCALED, "a"),
        "no product": "y = Mul(x, scale)",
        "something in between": "m = MatMul(x, W) a = Relu(m) y = Mul(a, scale)",
        "a bias of the data": "m = MatMul(x, W) v = MatMul(q, W) a = Add(m, v) y = Mul(a, scale)",
        "a weight of the data": f"t = {TURN}(q) m = MatMul(x, t) y = Mul(m, scale)",
    },
    "positions": {
        "half": TABLE.replace("(P", "(P16") + "z = Cast<to=10>(x) y = Add(z, p)",
        "half in between": TABLE + "h = Cast<to=10>(p) z = Cast<to=10>(x) y = Add(z, h)",
        "a softmax over positions": TABLE + "p2 = Softmax<axis=0>(p) y = Add(x, p2)",
        "a mean over positions": TABLE + "e = ReduceMean(p, zero) p2 = Sub(p, e) y = Add(x, p2)",
        "a value for every pair": TABLE + "h = Transpose(p) pp = MatMul(p, h) y = MatMul(pp, x)",
        "numbers": TABLE + "e = Squeeze(n) r = Range(i0, e, i1) y = Gather<axis=1>(x, r)",
    },
}
# What onnx does not infer of a Slice to the length, and torch's exporter says.
SHAPES = {"p": ["length", 4], "p2": ["length", 4], "pp": ["length", "length"]}


def handmade(body: str) -> ir.Model:
    used = set(re.findall(r"\w+", body))
    inputs = ", ".join(f"{INPUTS[i]}[batch,length,4] {i}" for i in INPUTS if i in used)
    text = f'<ir_version: 10, opset_import: ["": 23]> g ({inputs}) => (y) {{ {body} }}'
    model = onnx.parser.parse_model(text)
    for name in sorted(used & set(CONSTANTS)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(CONSTANTS[name], name))
    found = ir.from_proto(onnx.shape_inference.infer_shapes(model, strict_mode=True))
    for value in (value for node in found.graph for value in node.outputs):
        if value.name in SHAPES:
            value.shape = ir.Shape(SHAPES[value.name])
    return found


def result(model: ir.Model) -> Array:
    values = {str(value.name): value.dtype.numpy() for value in model.graph.inputs}
    return run(model, **{name: drawn(2, 5, 4).astype(dtype) for name, dtype in values.items()})


@pytest.mark.parametrize("name", PASSES)
def test_a_handmade_pattern_is_found(name: str) -> None:
    """The patterns that those below break."""
    model = handmade(WHOLE[name])
    before = result(model)
    assert folds(16)[name](model) == 1
    assert compare(result(model), before).relative_l2 < 1e-5


@pytest.mark.parametrize(("name", "why"), [(name, why) for name in PASSES for why in BROKEN[name]])
def test_a_broken_pattern_is_left(name: str, why: str) -> None:
    model = handmade(BROKEN[name][why])
    graph, before = ir.to_proto(model).SerializeToString(), result(model)
    assert folds(16)[name](model) == 0
    assert ir.to_proto(model).SerializeToString() == graph
    assert np.array_equal(result(model), before)
