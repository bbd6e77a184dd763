"""The evaluator: ONNX's own cases, agreement with onnx.reference, and honest half precision."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from files_of import graph_path
from ml_dtypes import bfloat16
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test.case.node import collect_testcases
from onnx.reference import ReferenceEvaluator

from engines import OrtStage, compare
from engines.evaluator.graph import Evaluator
from engines.evaluator.ops import OPERATORS
from engines.proof.inputs import stage_inputs
from engines.runtime.torch import EvaluatorStage
from export.stages import STAGES, stage
from ldlm import LDLM
from ldlm.errors import ArtifactError

HALVES = {"fp16": (np.float16, TensorProto.FLOAT16), "bf16": (bfloat16, TensorProto.BFLOAT16)}


# Making the cases, and ONNX's reference on overflowing input, warn of what they are meant to do.
OVERFLOWS = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("precision", HALVES)
def test_a_bias_is_added_before_the_product_is_rounded(precision: str) -> None:
    """As in Gemm: TensorRT makes the same layers, and one kernel, of both ways to write it."""
    dtype, element = HALVES[precision]
    rng = np.random.default_rng(0)
    x, weight, bias, other = (
        rng.standard_normal(shape).astype(dtype) for shape in ((9, 64), (64, 32), (32,), (9, 32))
    )
    feeds = {"x": x, "other": other}

    def run(*nodes: onnx.NodeProto) -> np.ndarray:
        constants = [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(bias, "b")]
        inputs = [helper.make_tensor_value_info(n, element, a.shape) for n, a in feeds.items()]
        outputs = [helper.make_tensor_value_info("y", element, other.shape)]
        graph = helper.make_graph(list(nodes), "one", inputs, outputs, constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
        return Evaluator(ir.from_proto(onnx.shape_inference.infer_shapes(model)).graph).run(feeds)[
            "y"
        ]

    product = helper.make_node("MatMul", ["x", "w"], ["p"])
    biased = run(product, helper.make_node("Add", ["p", "b"], ["y"]))
    assert np.array_equal(biased, run(helper.make_node("Gemm", ["x", "w", "b"], ["y"])))
    assert np.array_equal(biased, run(product, helper.make_node("Add", ["b", "p"], ["y"])))
    exact = x.astype(np.float32) @ weight.astype(np.float32)
    rounded_twice = exact.astype(dtype).astype(np.float32) + bias.astype(np.float32)
    assert not np.array_equal(biased, rounded_twice.astype(dtype))
    # What is no constant vector is no bias: the product is a tensor of its own, and rounded.
    summed = run(product, helper.make_node("Add", ["p", "other"], ["y"]))
    total = exact.astype(dtype).astype(np.float32) + other.astype(np.float32)
    assert np.array_equal(summed, total.astype(dtype))


@pytest.mark.long
@OVERFLOWS
def test_onnx_backend_cases(capsys: pytest.CaptureFixture[str]) -> None:
    """Every case of the ONNX project whose operators the evaluator implements."""
    ran: Counter[str] = Counter()
    for case in collect_testcases(None):
        operators = {(node.domain, node.op_type) for node in case.model.graph.node}
        if not operators or any(
            d not in ("", "ai.onnx") or o not in OPERATORS for d, o in operators
        ):
            continue
        evaluator = Evaluator(ir.from_proto(case.model).graph)
        for inputs, outputs in case.data_sets:
            names = [value.name for value in case.model.graph.input]
            got = evaluator.run(dict(zip(names, map(_array, inputs), strict=True)))
            for found, wanted in zip(got.values(), map(_array, outputs), strict=True):
                _same(found, wanted, case)
        ran.update(o for _, o in operators)
    assert ran.keys() == OPERATORS.keys()
    assert ran.total() > 400
    with capsys.disabled():
        print(f"\nONNX backend cases passed by the evaluator: {dict(ran)}")  # noqa: T201


def _array(value: object) -> np.ndarray:
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)


def _same(found: np.ndarray, wanted: np.ndarray, case) -> None:  # type: ignore[no-untyped-def]
    assert found.shape == wanted.shape, case.name
    if wanted.dtype.kind in "SOU":
        assert (found.astype(str) == wanted.astype(str)).all(), case.name
        return
    assert found.dtype == wanted.dtype, case.name
    a, b = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    np.testing.assert_allclose(a, b, rtol=case.rtol, atol=case.atol, err_msg=case.name)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


# op: (attributes, float inputs, other inputs, units in the last place allowed)
# 0 where one rounding of an exact result leaves no choice; elsewhere the reference rounds sums and
# inner steps in another order, and the bound says how far apart that may be.
X = normal(4, 96)
CASES: dict[str, tuple[dict[str, object], list[np.ndarray], list[np.ndarray], float]] = {
    "Add": ({}, [X, normal(4, 96, seed=1)], [], 0),
    "Mul": ({}, [X, normal(4, 96, seed=1)], [], 0),
    "Div": ({}, [X, normal(4, 96, seed=1)], [], 0),
    "Neg": ({}, [X], [], 0),
    "Max": ({}, [X, normal(4, 96, seed=1)], [], 0),
    "Clip": ({}, [X, np.float32(-0.5), np.float32(0.5)], [], 0),
    "Concat": ({"axis": 1}, [X, X], [], 0),
    "Transpose": ({"perm": [1, 0]}, [X], [], 0),
    "Reshape": ({}, [X], [np.array([8, 48])], 0),
    "Squeeze": ({}, [X[None]], [np.array([0])], 0),
    "Unsqueeze": ({}, [X], [np.array([0])], 0),
    "Expand": ({}, [X], [np.array([2, 4, 96])], 0),
    "Slice": ({}, [X], [np.array([1]), np.array([3]), np.array([0])], 0),
    "Gather": ({"axis": 0}, [X], [np.array([2, -1, 0])], 0),
    "Split": ({"num_outputs": 2, "axis": 1}, [X], [], 0),
    "ArgMax": ({"axis": -1}, [X], [], 0),
    "Shape": ({}, [X], [], 0),
    "Cast": ({"to": TensorProto.FLOAT}, [X], [], 0),
    "Cos": ({}, [X], [], 1),
    "Sin": ({}, [X], [], 1),
    "Tanh": ({}, [X], [], 1),
    "Sigmoid": ({}, [X], [], 2),
    "Gelu": ({}, [X], [], 16),
    "MatMul": ({}, [X, normal(96, 8, seed=1, scale=0.1)], [], 4),
    "Gemm": ({}, [X, normal(96, 8, seed=1, scale=0.1), normal(8, seed=2)], [], 4),
    "Softmax": ({}, [X], [], 4),
    "ReduceL2": ({}, [X], [np.array([-1])], 4),
    "LayerNormalization": ({}, [X, normal(96, seed=1)], [], 8),
    "Attention": ({}, [normal(1, 2, 6, 32, seed=s) for s in range(3)], [], 8),
}


@pytest.mark.parametrize("half", HALVES)
# RotaryEmbedding is ONNX's reference itself.
@pytest.mark.parametrize("op_type", sorted(OPERATORS.keys() - {"Constant", "RotaryEmbedding"}))
def test_operators_agree_with_onnx_reference(op_type: str, half: str) -> None:
    """To the last bit where accumulation order allows, else within the stated bound."""
    attributes, floats, others, ulps = CASES[op_type]
    dtype, elem = HALVES[half]
    arrays = [array.astype(dtype) for array in floats] + [a.astype(np.int64) for a in others]
    names = [f"x{i}" for i in range(len(arrays))]
    count = 2 if op_type == "Split" else 1
    node = helper.make_node(op_type, names, [f"y{i}" for i in range(count)], **attributes)
    kinds = [elem] * len(floats) + [TensorProto.INT64] * len(others)
    made = helper.make_graph(
        [node],
        "one",
        [
            helper.make_tensor_value_info(n, k, a.shape)
            for n, k, a in zip(names, kinds, arrays, strict=True)
        ],
        [onnx.ValueInfoProto(name=name) for name in node.output],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 23)])
    feeds = dict(zip(names, arrays, strict=True))
    got = Evaluator(ir.from_proto(model).graph).run(feeds)
    wanted = ReferenceEvaluator(model).run(None, feeds)
    for found, reference in zip(got.values(), wanted, strict=True):
        a, b = np.asarray(found, np.float64), np.asarray(reference, np.float64)
        assert found.dtype == reference.dtype
        unit = {np.float16: 2.0**-10, bfloat16: 2.0**-7}[dtype]
        # Units in the last place of the larger one, and of the largest for what cancels.
        spacing = unit * np.maximum(np.abs(b), np.abs(b).max() / 8 if ulps else 0)
        assert np.all(np.abs(a - b) <= ulps * spacing)


@OVERFLOWS
def test_a_half_norm_overflows_here_and_not_in_onnx_runtime(tmp_path: Path) -> None:
    """x ~ N(0, 600^2): the squares pass 65504, and the result is all zeros, as on a device."""
    import onnxruntime

    x = normal(4, 256, scale=600).astype(np.float16)
    gain = np.ones(256, np.float16)
    node = helper.make_node("LayerNormalization", ["x", "g"], ["y"])
    made = helper.make_graph(
        [node],
        "norm",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT16, x.shape),
            helper.make_tensor_value_info("g", TensorProto.FLOAT16, gain.shape),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, x.shape)],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    feeds = {"x": x, "g": gain}
    ours = Evaluator(ir.from_proto(model).graph).run(feeds)["y"]
    assert not np.any(ours)
    assert np.array_equal(ours, ReferenceEvaluator(model).run(None, feeds)[0])
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    assert np.abs(session.run(None, feeds)[0]).mean() > 0.5  # it hides what a device would show


@pytest.mark.parametrize("spec", STAGES, ids=lambda s: s.name)
def test_float32_graphs_run_as_in_onnx_runtime(small: LDLM, small_artifacts: Path, spec) -> None:  # type: ignore[no-untyped-def]
    path = graph_path(small_artifacts, "fp32", spec.name)
    arrays = stage_inputs(spec, small.config, 2, 13)
    ours, theirs = (made(path, spec, small.config)(*arrays) for made in (EvaluatorStage, OrtStage))
    assert ours.dtype == theirs.dtype
    assert compare(ours, theirs).relative_l2 <= 1e-6


def test_unknown_operators_are_refused_by_name(small_artifacts: Path) -> None:
    model = ir.load(graph_path(small_artifacts, "fp32", "denoiser"))
    next(node for node in model.graph if node.op_type == "Gelu").op_type = "Mish"
    with pytest.raises(ArtifactError, match="Mish"):
        Evaluator(model.graph)


def test_a_result_of_another_dtype_is_refused(small: LDLM, small_artifacts: Path) -> None:
    """What rounds is what the graph declares: a cast that is not declared does not pass."""
    model = ir.load(graph_path(small_artifacts, "fp16", "denoiser"))
    cast = next(n for n in model.graph if n.op_type == "Cast")
    cast.attributes["to"] = ir.AttrInt64("to", int(ir.DataType.DOUBLE))
    arrays = stage_inputs(stage("denoiser"), small.config, 1, 3)
    feeds = dict(zip(("x_t", "t", "x0_prev"), arrays, strict=True))
    with pytest.raises(ArtifactError, match="not of the dtype"):
        Evaluator(model.graph).run(feeds)
