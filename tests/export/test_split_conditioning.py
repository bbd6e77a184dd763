"""The denoiser's graph in two, and the solver's update at the end of a step."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from files_of import data_path, graph_path
from numpy.typing import NDArray

from engines import compare
from engines.runtime.ort import OrtStage
from engines.runtime.stage import named
from export.passes.solver_update import next_step, solver_update
from export.passes.split_conditioning import (
    conditioning_graph,
    require_tables,
    rows_of,
    step_graph,
)
from export.precision import Precision
from export.stages import DYNAMIC, LOOP, TABLE_STEPS, StageSpec, stage
from ldlm import LDLM
from ldlm.errors import GraphCheckError

Array = NDArray[Any]

PRECISIONS = ("fp32", "fp16", "bf16")


def for_steps(name: str, steps: int) -> StageSpec:
    """A stage of the loop with a table of another length."""
    spec = stage(name)
    inputs = tuple(
        replace(t, axes=tuple(steps if axis == TABLE_STEPS else axis for axis in t.axes))
        for t in spec.inputs
    )
    return replace(spec, inputs=inputs)


TIMES = np.linspace(1.0, 0.05, TABLE_STEPS, dtype=np.float32)
SHAPE = (3, 17, 128)


def load(folder: Path, name: str, precision: str = "fp32") -> ir.Model:
    return ir.load(graph_path(folder, precision, name))


def run(model: ir.Model, **feeds: Array) -> list[Array]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    content = ir.to_proto(ir.external_data.load_to_model(model)).SerializeToString()
    return ort.InferenceSession(content, options).run(None, feeds)


def ort_stage(folder: Path, small: LDLM, name: str) -> OrtStage:
    return OrtStage(graph_path(folder, "fp32", name), stage(name), small.config)


def drawn(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.fixture(scope="module")
def rows(small_artifacts: Path, small: LDLM) -> Array:
    """The conditioning of 64 times."""
    return ort_stage(small_artifacts, small, "conditioning")(TIMES)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_modulation_is_a_row_and_every_norm_reads_two(
    small_artifacts: Path, small: LDLM, precision: str
) -> None:
    """The norms are a float32 island in every precision."""
    config = small.config
    model = load(small_artifacts, "denoiser", precision)
    assert conditioning_graph(model, for_steps("conditioning", 8)) == config.modulation_rows == 14
    model = load(small_artifacts, "denoiser", precision)
    norms = 2 * config.denoiser_blocks + 1
    assert step_graph(model, for_steps("denoiser_step", 8)) == norms
    assert solver_update(model, for_steps("denoiser_step", 8)) == 1


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", LOOP)
def test_inputs_and_outputs_are_the_specs(
    small_artifacts: Path, small: LDLM, name: str, precision: str
) -> None:
    graph, spec = load(small_artifacts, name, precision).graph, stage(name)
    for values, tensors in ((graph.inputs, spec.inputs), (graph.outputs, spec.outputs)):
        found = [(v.name, v.dtype.numpy().name, [str(d) for d in v.shape]) for v in values]
        assert found == [
            (t.name, t.dtype, [str(d) for d in t.shape(small.config, {a: a for a in DYNAMIC})])
            for t in tensors
        ]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_weights_go_to_one_side_or_the_other(small_artifacts: Path, precision: str) -> None:
    """But for the norms' gammas, which are in the rows; small shape constants may be in both."""
    whole, early, late = (
        {v.name for v in load(small_artifacts, name, precision).graph.initializers.values()}
        for name in ("denoiser", *LOOP)
    )
    weights = {name for name in whole if "." in name}
    of_time = {name for name in weights if re.match(r"time\.|.*modulation\.|.*norm\d?\.", name)}
    assert of_time
    assert {name for name in early if "." in name} == of_time
    assert {name for name in late if "." in name} == weights - of_time


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_norms_of_a_step_read_their_gain_and_bias_from_the_table(
    small_artifacts: Path, precision: str
) -> None:
    graph = load(small_artifacts, "denoiser_step", precision).graph
    norms = [node for node in graph if node.op_type == "LayerNormalization"]
    for node in norms:
        sources = [value.producer() for value in node.inputs[1:]]
        assert [source.op_type for source in sources] == ["Split", "Split"]
        assert sources[0] is sources[1]
        assert sources[0].inputs[0].producer().inputs[0].producer().op_type == "Gather"
        assert {use.node.op_type for use in node.outputs[0].uses()} <= {"MatMul", "Cast"}
    assert not {"Cos", "Sin", "Sigmoid", "Gemm"} & {node.op_type for node in graph}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", LOOP)
def test_the_loops_graphs_bring_no_weights_of_their_own(
    small_artifacts: Path, name: str, precision: str
) -> None:
    path = graph_path(small_artifacts, precision, name)
    assert path.stat().st_size < 100_000
    initializers = onnx.load(path, load_external_data=False).graph.initializer
    places = [e.value for i in initializers for e in i.external_data if e.key == "location"]
    assert set(places) == {"denoiser.onnx.data"}
    assert data_path(small_artifacts, precision, name).name == "denoiser.onnx.data"


def torch_rows(small: LDLM) -> list[torch.Tensor]:
    """The same vectors from the modules, in the order in which the denoiser uses them."""
    denoiser, found = small.denoiser, []
    c = denoiser.time(torch.from_numpy(TIMES))
    for block in denoiser.blocks:
        shift1, scale1, gate1, shift2, scale2, gate2 = block.modulation(c).chunk(6, dim=-1)
        found += [block.norm1.weight * (1 + scale1), shift1, gate1]
        found += [block.norm2.weight * (1 + scale2), shift2, gate2]
    shift, scale = denoiser.final_modulation(c).chunk(2, dim=-1)
    return [*found, denoiser.final_norm.weight * (1 + scale), shift]


def test_the_rows_are_what_the_modules_compute(rows: Array, small: LDLM) -> None:
    expected = torch_rows(small)
    assert rows.shape == (TABLE_STEPS, len(expected), small.config.d_model)
    for i, row in enumerate(expected):
        assert compare(rows[:, i], row.numpy()).relative_l2 < 1e-5


def step(call: OrtStage, rows: Array, number: int, table: Array) -> list[Array]:
    x, x0_prev, noise = (drawn(*SHAPE, seed=seed) for seed in (1, 2, 3))
    feeds = named(call.spec, (x, x0_prev, np.array([number]), rows, table, noise))
    found = call.run(feeds)
    return [found["x_next"], found["x0_hat"], x, noise]


@pytest.mark.parametrize("number", [0, 21, TABLE_STEPS - 1])
def test_a_step_is_the_denoiser_at_the_time_of_its_row(
    small_artifacts: Path, small: LDLM, rows: Array, number: int
) -> None:
    table = drawn(TABLE_STEPS, 3)
    call = ort_stage(small_artifacts, small, "denoiser_step")
    x_next, x0_hat, x, noise = step(call, rows, number, table)
    t = np.full(SHAPE[0], TIMES[number])
    expected = ort_stage(small_artifacts, small, "denoiser")(x, t, drawn(*SHAPE, seed=2))
    assert compare(x0_hat, expected).relative_l2 < 1e-5
    A, B, C = table[number]
    assert np.array_equal(x_next, A * x + B * x0_hat + C * noise)


def test_a_step_reads_its_own_row_alone(small_artifacts: Path, small: LDLM, rows: Array) -> None:
    table = drawn(TABLE_STEPS, 3)
    call = ort_stage(small_artifacts, small, "denoiser_step")
    expected = step(call, rows, 5, table)[0]
    others = np.arange(TABLE_STEPS) != 5
    rows, table = rows.copy(), table.copy()
    rows[others], table[others] = np.nan, np.nan
    assert np.array_equal(step(call, rows, 5, table)[0], expected)


def test_a_wrong_row_is_noticed(small_artifacts: Path, small: LDLM, rows: Array) -> None:
    table = drawn(TABLE_STEPS, 3)
    call = ort_stage(small_artifacts, small, "denoiser_step")
    expected = step(call, rows, 5, table)[1]
    for i in range(rows.shape[1]):
        wrong = rows.copy()
        wrong[5, i] *= 1.01
        assert compare(step(call, wrong, 5, table)[1], expected).relative_l2 > 1e-5


def test_the_update_is_appended_and_leaves_the_estimate_alone(
    small_artifacts: Path, rows: Array
) -> None:
    model = load(small_artifacts, "denoiser")
    step_graph(model, stage("denoiser_step"))
    x, x0_prev, noise = (drawn(*SHAPE, seed=seed) for seed in (1, 2, 3))
    feeds, table = (
        {"x0_prev": x0_prev, "step": np.array([9]), "modulations": rows},
        drawn(TABLE_STEPS, 3),
    )
    (before,) = run(model, x_t=x, **feeds)
    solver_update(model, stage("denoiser_step"))
    x_next, after = run(model, x=x, coefficients=table, noise=noise, **feeds)
    assert np.array_equal(before, after)
    A, B, C = table[9]
    assert np.array_equal(x_next, A * x + B * after + C * noise)


def test_the_number_of_the_next_step_is_one_more(small_artifacts: Path, rows: Array) -> None:
    model = load(small_artifacts, "denoiser")
    step_graph(model, stage("denoiser_step"))
    next_step(model, stage("denoiser_step"))
    x, x0_prev = drawn(*SHAPE, seed=1), drawn(*SHAPE, seed=2)
    _, number = run(model, x_t=x, x0_prev=x0_prev, step=np.array([9]), modulations=rows)
    assert number.tolist() == [10]


def test_a_norm_without_its_bias_is_refused() -> None:
    """What a change of the pattern would leave: a gain of its own, and a product after it."""
    model = handmade(EARLY + PLAIN + "y = Neg(z)")
    with pytest.raises(GraphCheckError, match="gain and bias from the table"):
        require_tables(model.graph, stage("denoiser_step"), Precision.of("fp32"))
    step_graph(model, for_steps("denoiser_step", 3))
    require_tables(model.graph, stage("denoiser_step"), Precision.of("fp32"))


# Where it must not fire

SIGNATURE = "(float[batch,length,4] x, float[batch] t) => (float[batch,length,4] y)"
EARLY = "u = Unsqueeze(t, last) s = Mul(u, w) scale = Add(s, one) shift = Mul(u, v) "
NORM = "n = LayerNormalization<axis=-1>(x, gamma) "
PLAIN = NORM + "p = Mul(n, scale) z = Add(p, shift) "
HALF = (
    "u = Unsqueeze(t, last) u16 = Cast<to=10>(u) scale = Mul(u16, w16) shift = Mul(u16, v16) "
    "x16 = Cast<to=10>(x) n = LayerNormalization<axis=-1>(x16, gamma16) p = Mul(n, scale) "
    "z = Add(p, shift) y = Cast<to=1>(z)"
)
NORMS_TO_LEAVE = {
    "the norm is read by another": EARLY + PLAIN + "y = Add(z, n)",
    "the product is read by another": EARLY + PLAIN + "y = Add(z, p)",
    "the scale is read by another": EARLY + PLAIN + "y = Mul(z, scale)",
    "the shift is read by another": EARLY + PLAIN + "y = Mul(z, shift)",
    "the shift is a constant": EARLY + NORM + "p = Mul(n, scale) z = Add(p, v) y = Mul(z, shift)",
    "a difference": EARLY + NORM + "p = Mul(n, scale) z = Sub(p, shift) y = Neg(z)",
    "no norm": EARLY + "p = Mul(x, scale) z = Add(p, shift) y = Neg(z)",
    "a norm with a bias": EARLY + PLAIN.replace("(x, gamma)", "(x, gamma, v)") + "y = Neg(z)",
    "a half norm": HALF,
}


def handmade(body: str) -> ir.Model:
    text = f'<ir_version: 10, opset_import: ["": 23]> g {SIGNATURE} {{ {body} }}'
    model = onnx.parser.parse_model(text)
    constants = {"w": drawn(4, seed=1), "v": drawn(4, seed=2), "gamma": drawn(4, seed=3)}
    constants |= {f"{name}16": array.astype(np.float16) for name, array in constants.items()}
    constants |= {"last": np.array([1, 2]), "first": np.array([1])}
    constants |= {"one": np.float32(1), "pair": drawn(2, 4)}
    for name in set(re.findall(r"\w+", body)) & set(constants):
        model.graph.initializer.append(onnx.numpy_helper.from_array(constants[name], name))
    return ir.from_proto(onnx.shape_inference.infer_shapes(model, strict_mode=True))


def halves_agree(body: str) -> int:
    """How many norms read the table; what the two halves compute is what the whole does."""
    x, t = drawn(2, 5, 4), np.array([0.25, 0.5, 0.75], np.float32)
    early, late = handmade(body), handmade(body)
    conditioning_graph(early, for_steps("conditioning", 3))
    fired = step_graph(late, for_steps("denoiser_step", 3))
    (rows,) = run(early, t=t)
    for number in range(3):
        (expected,) = run(handmade(body), x=x, t=np.full(2, t[number]))
        (got,) = run(late, x=x, step=np.array([number]), modulations=rows)
        assert compare(got, expected).relative_l2 < 1e-5
    return fired


def test_a_handmade_norm_is_found() -> None:
    """The pattern that those below break."""
    assert halves_agree(EARLY + PLAIN + "y = Neg(z)") == 1


def test_a_norm_of_the_step_keeps_its_epsilon() -> None:
    """Of a size that shows; that of `small` is also ONNX's default."""
    plain = PLAIN.replace("axis=-1", "axis=-1, epsilon=0.5")
    assert halves_agree(EARLY + plain + "y = Neg(z)") == 1


@pytest.mark.parametrize("name", NORMS_TO_LEAVE)
def test_a_norm_that_is_not_plainly_modulated_keeps_its_gain(name: str) -> None:
    assert halves_agree(NORMS_TO_LEAVE[name]) == 0


SPLITS = ((conditioning_graph, "conditioning"), (step_graph, "denoiser_step"))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "u = Unsqueeze(t, first) s = Mul(u, w) y = Add(x, s)",
            "one vector",
        ),
        ("u = Unsqueeze(t, last) s = Mul(u, pair) m = MatMul(s, x) y = Add(x, m)", "one vector"),
        ("y = Mul(x, t)", "one vector"),
        ("s = Mul(t, t) y = Neg(x)", "nothing of the graph"),
        ("y = Neg(x)", "nothing of the graph"),
    ],
)
def test_a_graph_that_does_not_split_is_refused(body: str, words: str) -> None:
    for split, name in SPLITS:
        with pytest.raises(GraphCheckError, match=words):
            split(handmade(body), for_steps(name, 3))


def test_vectors_of_an_unknown_width_are_refused() -> None:
    model = handmade(EARLY + PLAIN + "y = Neg(z)")
    rows_of(model.graph, "t")[0].value.shape = ir.Shape(["batch", 1, "width"])
    for split, name in SPLITS:
        with pytest.raises(GraphCheckError, match="width"):
            split(model, for_steps(name, 3))


def test_what_the_time_and_the_state_make_together_is_no_row() -> None:
    graph = handmade(EARLY + PLAIN + "y = Neg(z)").graph
    assert [row.value.name for row in rows_of(graph, "t")] == ["scale", "shift"]
