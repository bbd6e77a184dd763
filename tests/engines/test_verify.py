"""The first proof holds on good files and fails on damaged ones."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from files_of import graph_path

from engines.artifacts import folder as folders
from engines.artifacts.export import Export
from engines.artifacts.manifest import FileEntry
from engines.evaluator.half import HalfProducts
from engines.proof.records import Proof
from engines.proof.saved import current, save
from engines.proof.subject import ALL
from engines.proof.verify import verify
from engines.show.proof import answers_table, islands_table, parity_table, tables
from engines.show.summary import summary_table, verdict
from ldlm import LDLM
from ldlm.errors import ParityError


@pytest.fixture(scope="module")
def parity(small: LDLM, small_artifacts: Path) -> Proof:
    return verify(small_artifacts, folders.load(small_artifacts), small, ["fp32", "fp16", "bf16"])


def test_every_line_passes(parity: Proof) -> None:
    assert not parity.failures()
    parity.require_passed()
    stages = {"denoiser", "latent_decoder", "token_decoder_logits"}
    half = [(q, p) for q in ("graph", "formula", "precision") for p in ("fp16", "bf16")]
    for question, precision in (("graph", "fp32"), ("file", "fp16"), *half):
        lines = [
            ln for ln in parity.measurements if (ln.question, ln.precision) == (question, precision)
        ]
        assert {ln.stage for ln in lines} == stages
        every = {(b, t) for b in (1, 3) for t in (1, 17, 128)}
        pooled = question != "formula" and precision != "fp32"
        assert {(ln.batch, ln.length) for ln in lines} == ({ALL} if pooled else every)
    exact = [ln for ln in parity.measurements if (ln.question, ln.precision) == ("graph", "fp32")]
    exact += [ln for ln in parity.measurements if ln.question == "formula"]
    assert {ln.limit for ln in exact} == {1e-5}
    assert all(record.passed for record in parity.islands)


def test_half_is_worse_than_float32_and_near_autocast(parity: Proof) -> None:
    """The gates measure something: half rounds, and its limit is of the size of its error."""
    for line in parity.measurements:
        if line.question == "precision":
            assert line.distance > 1e-4
            assert line.limit < 3 * line.distance


def save_damaged(folder: Path, stage: str, precision: str, model: ir.Model) -> None:
    """Write a damaged graph and enter it in the manifest, as a faulty exporter would."""
    path = graph_path(folder, precision, stage)
    ir.save(model, path)
    manifest = folders.load(folder)
    old = manifest.graph(precision, stage)
    manifest.put_graph(dataclasses.replace(old, graph=FileEntry.of(folder, path)))
    manifest.save(folder)


def first(model: ir.Model, op_type: str) -> ir.Node:
    return next(node for node in model.graph if node.op_type == op_type)


def tanh_gelu(model: ir.Model) -> None:
    first(model, "Gelu").attributes["approximate"] = ir.AttrString("approximate", "tanh")


def swapped_inputs(model: ir.Model) -> None:
    concat = first(model, "Concat")
    a, b = concat.inputs
    concat.replace_input_with(0, b)
    concat.replace_input_with(1, a)


# Two faults through the whole of verify; tests/engines/test_proof.py has all the others.
DAMAGE: list[tuple[Callable[[ir.Model], None], str]] = [
    (tanh_gelu, "latent_decoder"),
    (swapped_inputs, "denoiser"),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("damage", "stage"), DAMAGE, ids=lambda v: getattr(v, "__name__", ""))
def test_a_damaged_formula_is_noticed(
    small: LDLM,
    own_artifacts: Path,
    precision: str,
    damage: Callable[[ir.Model], None],
    stage: str,
) -> None:
    model = ir.load(graph_path(own_artifacts, precision, stage))
    damage(model)
    save_damaged(own_artifacts, stage, precision, model)
    found = verify(own_artifacts, folders.load(own_artifacts), small, [precision])
    question = "graph" if precision == "fp32" else "formula"
    assert {ln.question for ln in found.failures() if ln.stage == stage} >= {question}
    with pytest.raises(ParityError, match="measurements fail"):
        found.require_passed()


def test_wrong_ids_are_noticed(small: LDLM, own_artifacts: Path) -> None:
    model = ir.load(graph_path(own_artifacts, "fp32", "token_decoder"))
    argmax = first(model, "ArgMax")
    argmax.op_type = "ArgMin"
    save_damaged(own_artifacts, "token_decoder", "fp32", model)
    found = verify(own_artifacts, folders.load(own_artifacts), small, ["fp32"])
    assert {ln.question for ln in found.failures()} == {"tokens"}


def test_weights_of_another_seed_are_noticed(small: LDLM, small_artifacts: Path) -> None:
    other = copy.deepcopy(small)
    other.token_decoder.head.weight.mul_(1.0001)
    found = verify(small_artifacts, folders.load(small_artifacts), other, ["fp32"])
    assert {ln.stage for ln in found.failures()} == {"token_decoder_logits"}


@pytest.mark.long(ci=True)
def test_an_overflowing_checkpoint_fails_and_says_why(small: LDLM, tmp_path: Path) -> None:
    """When autocast overflows too, there is nothing to be held to: a failure, with a remedy."""
    loud = copy.deepcopy(small)
    for name in ("gate", "up"):
        getattr(loud.token_decoder.blocks[0], name).weight.mul_(400)
    loud.save_checkpoint(tmp_path / "loud")
    folder = tmp_path / "artifacts"
    Export(tmp_path / "loud", folder, ["fp16"]).run(lambda _: None)
    manifest = folders.load(folder)
    found = verify(folder, manifest, loud, ["fp16"], stages=["token_decoder"])
    assert {"graph", "precision"} <= {ln.question for ln in found.failures()}
    assert not [ln for ln in found.failures() if ln.question == "formula"]
    with pytest.raises(ParityError, match="own error to be finite"):
        found.require_passed()
    assert save(folder, manifest, found).passed is False
    assert parity_table(found).row_count > 0


def test_parity_json_and_the_tables(parity: Proof, own_artifacts: Path) -> None:
    manifest = folders.load(own_artifacts)
    proof = save(own_artifacts, manifest, parity)
    assert proof.passed is True
    assert summary_table(own_artifacts, manifest).row_count == 9
    # graph 3 x 3, formula and precision 2 x 3, file 3, tokens 3, kl 2
    # loop and update 3, loop file 1
    assert parity_table(proof).row_count == 9 + 12 + 3 + 3 + 2 + 2 * 3 + 1
    whats = {(r.stage, r.source, r.what) for r in parity.islands}
    assert islands_table(proof).row_count == len(whats)
    assert answers_table(proof).row_count == 9
    assert len(list(tables(proof))) == 3
    assert verdict(current(proof, manifest), "fp16", "token_decoder")[2].plain == "pass"
    # A proof of other files than the present ones is no proof.
    entry = manifest.graph("fp16", "token_decoder")
    other = dataclasses.replace(entry.graph, sha256="0" * 64)
    manifest.put_graph(dataclasses.replace(entry, graph=other))
    assert verdict(current(proof, manifest), "fp16", "token_decoder")[2].plain == "not verified"


def test_components_proved_apart_make_the_same_proof(
    parity: Proof, small: LDLM, small_artifacts: Path
) -> None:
    """What processes side by side would find, joined in whichever order they end."""
    manifest = folders.load(small_artifacts)
    parts = [
        verify(small_artifacts, manifest, small, ["bf16"], stages=[name])
        for name in ("token_decoder", "denoiser_step", "latent_decoder")
    ]
    joined = functools.reduce(Proof.merged, pickle.loads(pickle.dumps(parts)), Proof())
    assert joined == parity.only({(s.precision, s.component) for s in joined.scopes})
    assert joined.passed is True
    assert not any(part.passed for part in parts)  # none of them is a precision


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_products_round_as_a_device_does(dtype: torch.dtype) -> None:
    """Inputs and result in half, the sum in float32."""
    torch.manual_seed(0)
    x, w = torch.randn(3, 512), torch.randn(7, 512)
    expected = (x.to(dtype).float() @ w.to(dtype).float().T).to(dtype)
    with HalfProducts(dtype) as mode:
        cast = F.linear(x, w)
        assert (x @ w.T).dtype == dtype
        assert F.layer_norm(x, (512,)).dtype == torch.float32
        assert torch.softmax(x, -1).dtype == torch.float32
    assert mode.products == 2
    assert torch.equal(cast, expected)
    with HalfProducts() as mode:
        assert torch.equal(F.linear(x.to(dtype), w.to(dtype)), expected)
        assert F.linear(x, w).dtype == torch.float32  # float32 is left alone
    assert mode.products == 1


def test_half_products_reach_every_product_of_the_model(small: LDLM) -> None:
    x = torch.randn(1, 3, small.config.d_model)
    with HalfProducts(torch.float16) as mode:
        small.denoiser(x, torch.tensor([0.5]), x)
    assert mode.products == 2 + 1 + 2 * (1 + 1 + 1 + 1 + 2) + 2  # time, input, blocks, final
    with HalfProducts(torch.float16) as mode:
        small.latent_decoder(x)
    assert mode.products == 2 + 2 * (2 + 2 + 1 + 2)  # query MLP; qkv, kv, two products, out, MLP
