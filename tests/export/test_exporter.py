"""Exported files, read back: what was asked for is what is there."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from files_of import graph_path

from export import STAGES, export_stage
from export.exporter import example_inputs, require_own_names
from export.passes.argmax_tail import argmax_tail
from export.passes.widen import HALF, widen
from export.stages import stage
from ldlm import LDLM, PRESETS
from ldlm.errors import ConfigError, DiskSpaceError, ExportError, GraphCheckError

PRECISIONS = ("fp32", "fp16")
NAMES = {"batch": "batch", "length": "length"}


def load(folder: Path, precision: str, name: str) -> onnx.ModelProto:
    return onnx.load(graph_path(folder, precision, name), load_external_data=False)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("spec", STAGES, ids=lambda s: s.name)
def test_files_are_valid_onnx(small_artifacts: Path, precision: str, spec) -> None:  # type: ignore[no-untyped-def]
    path = graph_path(small_artifacts, precision, spec.name)
    onnx.checker.check_model(str(path), full_check=True)
    model = load(small_artifacts, precision, spec.name)
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 23)]
    tensors = {tensor.name: tensor for tensor in (*spec.inputs, *spec.outputs)}
    for value in (*model.graph.input, *model.graph.output):
        dims = [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        assert tuple(dims) == tensors[value.name].shape(PRESETS["small"], NAMES)
    # float32 in and out in every precision, ids in int64
    kinds = {v.type.tensor_type.elem_type for v in (*model.graph.input, *model.graph.output)}
    assert kinds <= {onnx.TensorProto.FLOAT, onnx.TensorProto.INT64}


@pytest.mark.fault(20)
def test_the_exporter_gives_another_opset_than_asked_for(
    small: LDLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 20: torch writes 18 for 16 and raises nothing; the file is read back and refused."""
    monkeypatch.setattr("export.exporter.OPSET", 16)
    with pytest.raises(GraphCheckError, match="another opset") as caught:
        export_stage(small, "token_decoder", "fp32", tmp_path)
    assert caught.value.details["expected"] == "16"
    assert caught.value.details["got"] == "18"
    assert not list(tmp_path.iterdir())


@pytest.mark.fault(12)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_both_token_decoders_share_one_weights_file(
    small: LDLM, small_artifacts: Path, precision: str
) -> None:
    """Case 12: and it is as large as the parameters that it holds, once."""
    folder = graph_path(small_artifacts, precision, "token_decoder").parent
    assert {p.name for p in folder.glob("token*")} == {
        "token_decoder.onnx", "token_decoder_logits.onnx", "token_decoder.onnx.data",
    }  # fmt: skip # rows, as a table
    ids, logits = (
        load(small_artifacts, precision, n) for n in ("token_decoder", "token_decoder_logits")
    )
    parameters = sum(p.numel() for p in small.token_decoder.parameters())
    size = (folder / "token_decoder.onnx.data").stat().st_size
    width = 4 if precision == "fp32" else 2
    # The rotary tables, and in half precision the norms, stand in float32 beside them.
    assert width * parameters <= size <= 1.1 * width * parameters
    assert [n.op_type for n in ids.graph.node].count("ArgMax") == 1
    assert [n.op_type for n in logits.graph.node].count("ArgMax") == 0


def test_files_say_nothing_of_the_machine(small_artifacts: Path) -> None:
    here = str(Path(__file__).parents[2]).encode()
    for path in (small_artifacts / "onnx").rglob("*.onnx"):
        content = path.read_bytes()
        assert here not in content
        assert b"site-packages" not in content
        assert b".py" not in content


def test_export_is_repeatable(small: LDLM, small_artifacts: Path, tmp_path: Path) -> None:
    """Case 17: the same input gives the same bytes."""
    for graph in export_stage(small, "token_decoder", "fp16", tmp_path):
        for path in (graph.path, graph.data):
            theirs = graph_path(small_artifacts, "fp16", "token_decoder").with_name(path.name)
            digests = [hashlib.sha256(p.read_bytes()).hexdigest() for p in (path, theirs)]
            assert digests[0] == digests[1], path.name
    assert not list(tmp_path.glob(".partial*"))


def test_examples_are_independent_tensors(small: LDLM) -> None:
    x_t, t, x0_prev = example_inputs(stage("denoiser"), small.config)
    assert len({tensor.data_ptr() for tensor in (x_t, t, x0_prev)}) == 3
    assert not torch.equal(x_t, x0_prev)


def test_nothing_is_written_when_the_export_fails(
    small: LDLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "onnx"
    for name, precision in (("encoder", "fp32"), ("token_decoder", "fp64")):
        with pytest.raises(ConfigError):
            export_stage(small, name, precision, folder)
    monkeypatch.setattr("ldlm.files.free_bytes", lambda _: 1_000_000)
    with pytest.raises(DiskSpaceError):
        export_stage(small, "token_decoder", "fp32", folder)
    assert not folder.exists()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_widen_leaves_no_half_tensor(small_artifacts: Path, precision: str) -> None:
    import onnx_ir as ir

    assert set(HALF) == {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
    model = ir.load(graph_path(small_artifacts, precision, "denoiser"))
    before = [v.dtype for v in model.graph.initializers.values()]
    assert any(dtype in HALF for dtype in before)
    assert widen(model) > 0
    values = [*model.graph.initializers.values(), *(o for n in model.graph for o in n.outputs)]
    assert not any(value.dtype in HALF for value in values)
    casts = [n.attributes["to"].as_int() for n in model.graph if n.op_type == "Cast"]
    assert not {ir.DataType(to) for to in casts} & set(HALF)
    assert widen(model) == 0


def test_argmax_tail_skips_the_cast(small_artifacts: Path) -> None:
    import onnx_ir as ir

    path = graph_path(small_artifacts, "fp16", "token_decoder_logits")
    model = ir.load(path)
    assert model.graph.outputs[0].producer().op_type == "Cast"
    assert argmax_tail(model, stage("token_decoder")) == 1
    argmax = model.graph.outputs[0].producer()
    assert argmax.op_type == "ArgMax"
    assert argmax.inputs[0].dtype == ir.DataType.FLOAT16
    assert argmax.inputs[0].producer().op_type == "MatMul"


def test_the_island_is_on_both_sides_of_every_norm(small_artifacts: Path) -> None:
    """Case 2: dtypes around each norm, read from the final file by ONNX's own inference."""
    for name, norms in (("denoiser", 5), ("latent_decoder", 3), ("token_decoder", 4)):
        path = graph_path(small_artifacts, "fp16", name)
        graph = onnx.shape_inference.infer_shapes(onnx.load(path), strict_mode=True).graph
        types = {v.name: v.type.tensor_type.elem_type for v in (*graph.value_info, *graph.input)}
        types |= {i.name: i.data_type for i in graph.initializer}
        found = [n for n in graph.node if n.op_type == "LayerNormalization"]
        assert len(found) == norms
        for node in found:
            around = {types[value] for value in (*node.input, node.output[0]) if value}
            assert around == {onnx.TensorProto.FLOAT}
    assert np.float16 in {onnx.helper.tensor_dtype_to_np_dtype(t).type for t in types.values()}


def test_an_output_with_the_name_of_a_parameter_is_refused(small: LDLM) -> None:
    """In ONNX the two would be one value: `positions` is a parameter of the latent decoder."""
    spec = stage("latent_decoder")
    module = spec.torch(small).decoder
    require_own_names(module, spec)
    taken = replace(spec, outputs=(replace(spec.outputs[0], name="positions"),))
    with pytest.raises(ExportError, match="the name of a parameter") as caught:
        require_own_names(module, taken)
    assert caught.value.details["tensor"] == "positions"
