"""Taps: the names are the equations', and a file's values are found under them."""

from __future__ import annotations

import copy

import numpy as np
import numpy_reference as reference
import onnx_ir as ir
import pytest
import torch

from export.equations import TAPS, located, tapped
from export.passes.expose import expose
from export.stages import stage
from ldlm import LDLM
from ldlm.errors import GraphCheckError

EQUATIONS = [
    "r_bar", "z_bar", "p_a", "p_b", "q", "Q", "k_a", "k_b", "k", "K", "v_a", "v_b", "v",
    "S", "F", "A", "O", "o", "d_attn", "d_attn'", "r'",
    "r'_bar", "h", "g", "d_mlp", "d_mlp'", "r_next",
]  # fmt: skip # rows, as a table


def test_a_decoder_block_has_its_27_equations(small: LDLM) -> None:
    assert [tap.name for tap in TAPS["latent_decoder"].block] == EQUATIONS
    module = stage("latent_decoder").torch(small)
    names = list(located(module, "latent_decoder"))
    blocks = range(small.config.decoder_blocks)
    assert names == ["r_0", "z_p", *(f"{b}.{name}" for b in blocks for name in EQUATIONS)]


def test_every_tap_is_its_equation_in_float64(small: LDLM) -> None:
    """By name, against the block written out in NumPy."""
    config = small.config
    module = copy.deepcopy(stage("latent_decoder").torch(small)).double()
    z = np.random.default_rng(0).standard_normal((2, 5, config.d_model))
    with tapped(module, "latent_decoder") as names:
        _, *tensors = module(torch.from_numpy(z))
    taps = dict(zip(names, (t.numpy() for t in tensors), strict=True))
    constants = {"n_heads": config.n_heads, "cap": config.softcap, "eps": config.norm_eps}
    r = taps["r_0"]
    for index, block in enumerate(module.decoder.blocks):
        weights = {name: tensor.numpy() for name, tensor in block.state_dict().items()}
        expected = reference.decoder_block(r, taps["z_p"], weights, **constants)
        assert set(expected) == set(EQUATIONS)
        for name in EQUATIONS:
            got = taps[f"{index}.{name}"]
            assert got.shape == expected[name].shape, name
            distance = np.linalg.norm(got - expected[name]) / np.linalg.norm(expected[name])
            assert distance <= 1e-12, name
        r = taps[f"{index}.r_next"]


@pytest.mark.parametrize("weights", list(TAPS))
def test_taps_leave_the_module_as_it_was(small: LDLM, weights: str) -> None:
    """Every tap is found, all are different tensors, and no hook stays behind."""
    spec = stage(weights if weights != "token_decoder" else "token_decoder_logits")
    module = spec.torch(small)
    inputs = [torch.rand(t.shape(small.config, {"batch": 2, "length": 3})) for t in spec.inputs]
    plain = module(*inputs)
    with tapped(module, weights) as names:
        result, *tensors = module(*inputs)
        again = module(*inputs)
        others = module(*(1 - tensor for tensor in inputs))
    assert torch.equal(result, plain)
    assert len(names) == len(set(names)) == len(tensors)
    assert all(torch.equal(a, b) for a, b in zip(tensors, again[1:], strict=True))
    assert not torch.equal(tensors[-1], others[-1])  # each run has its own
    assert torch.equal(module(*inputs), plain)
    assert not any(m._forward_hooks for m in module.modules())
    flat = [tuple(t.flatten().tolist()) for t in tensors]
    reshaped = {"k", "v", "O"}  # heads split and merged hold the same numbers in another order
    single = [v for v, n in zip(flat, names, strict=True) if n.split(".")[-1] not in reshaped]
    assert len(set(single)) >= len(single) - 1  # the last block's sum is what the final norm reads


def chain(*op_types: str, extra: str | None = None) -> ir.Model:
    """x -> op -> op ... -> y, the first operator's result also an output where `extra` names it."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2]))
    value, nodes = x, []
    for op_type in op_types:
        nodes.append(ir.Node("", op_type, [value], num_outputs=1))
        value = nodes[-1].outputs[0]
    value.name = "y"
    outputs = [value]
    if extra is not None:
        nodes[0].outputs[0].name = extra
        outputs.append(nodes[0].outputs[0])
    graph = ir.Graph([x], outputs, nodes=nodes, opset_imports={"": 23}, name="chain")
    return ir.Model(graph, ir_version=10)


def test_expose_names_the_value_made_at_the_same_place() -> None:
    model = chain("Abs", "Neg")
    assert expose(model, chain("Abs", "Neg", extra="tap"), "stage") == {"tap": "tap"}
    assert [value.name for value in model.graph.outputs] == ["y", "tap"]
    assert model.graph.outputs[1].producer().op_type == "Abs"


def test_expose_takes_the_result_of_the_same_number() -> None:
    """Both parts of a Split are made at one place."""
    models = []
    for names in (["y"], ["y", "tap"]):
        x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2]))
        node = ir.Node("", "Split", [x], num_outputs=2)
        node.outputs[0].name, node.outputs[1].name = "y", "second"
        for value, name in zip(node.outputs, names, strict=False):
            value.name = name
        outputs = list(node.outputs)[: len(names)]
        graph = ir.Graph([x], outputs, nodes=[node], opset_imports={"": 23}, name="split")
        models.append(ir.Model(graph, ir_version=10))
    assert expose(*models, "stage") == {"tap": "tap"}
    assert models[0].graph.outputs[1].index() == 1


def test_expose_leaves_the_graphs_own_outputs_alone() -> None:
    model = chain("Abs")
    debug = chain("Abs")
    copied = ir.Node("", "Identity", [debug.graph.outputs[0]], num_outputs=1)
    copied.outputs[0].name = "tap"
    debug.graph.append(copied)
    debug.graph.outputs.append(copied.outputs[0])
    assert expose(model, debug, "stage") == {"tap": "y"}
    assert len(model.graph.outputs) == 1


@pytest.mark.parametrize("other", [("Abs",), ("Abs", "Exp"), ("Abs", "Neg", "Exp")])
def test_expose_refuses_other_operators(other: tuple[str, ...]) -> None:
    model = chain(*other)
    with pytest.raises(GraphCheckError, match="after tap") as caught:
        expose(model, chain("Abs", "Neg", extra="tap"), "denoiser")
    assert caught.value.details["stage"] == "denoiser"
    assert len(model.graph.outputs) == 1
