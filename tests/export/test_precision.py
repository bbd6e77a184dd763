"""Precision policies: every computation decided, by a rule with a reason."""

from __future__ import annotations

import pytest
import torch

from export.precision import POLICIES, Precision, Rule, apply, decide, without_rounding
from export.stages import STAGES, stage
from ldlm import LDLM
from ldlm.errors import ConfigError, ExportError
from ldlm.layers import Island, Linear


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("spec", [s for s in STAGES if s.build], ids=lambda s: s.name)
def test_every_computation_is_decided(small: LDLM, name: str, spec) -> None:  # type: ignore[no-untyped-def]
    module = spec.torch(small)
    decisions = {d.module for d in decide(module, spec.component, Precision.of(name))}
    expected = {n for n, m in module.named_modules() if isinstance(m, Island | Linear)}
    assert decisions == expected
    assert all(rule.reason for rule in Precision.of(name).rules)


def test_fp16_is_the_stated_table(small: LDLM) -> None:
    """Which kinds end up in which dtype, per stage."""
    found = {}
    for name in ("denoiser", "latent_decoder", "token_decoder"):
        decisions = decide(stage(name).torch(small), name, POLICIES["fp16"])
        found[name] = {(d.kind, d.rule.dtype) for d in decisions}
    common = {("layer_norm", "float32"), ("residual", "float32"), ("linear", "float16")}
    assert found["denoiser"] == common | {
        ("time_embedding", "float32"), ("linear", "float32"), ("fused_attention", "float16"),
    }  # fmt: skip # rows, as a table
    assert found["latent_decoder"] == common | {
        ("rms_norm", "float32"), ("softcap_softmax", "float32"), ("capped_attention", "float16"),
    }  # fmt: skip # rows, as a table
    assert found["token_decoder"] == common | {("fused_attention", "float16")}
    time = decide(stage("denoiser").torch(small), "denoiser", POLICIES["fp16"])
    inside = {d.module: d.rule.what for d in time if d.module.startswith("time")}
    assert set(inside.values()) == {"time_embedding"}


def test_applying_a_policy_leaves_the_model_alone(small: LDLM) -> None:
    module = apply(stage("latent_decoder").torch(small), "latent_decoder", POLICIES["fp16"])
    dtypes = {type(m).__name__: m.weight.dtype for m in module.modules() if hasattr(m, "weight")}
    assert dtypes == {"Linear": torch.float16, "LayerNorm": torch.float32}
    assert all(p.dtype == torch.float32 for p in small.parameters())
    z = torch.randn(1, 4, small.config.d_model)
    assert module(z).dtype == torch.float32
    assert not torch.equal(module(z), stage("latent_decoder").torch(small)(z))


def test_without_rounding_keeps_the_rounded_weights(small: LDLM) -> None:
    half = apply(stage("denoiser").torch(small), "denoiser", POLICIES["fp16"])
    wide = without_rounding(half)
    assert all(p.dtype == torch.float32 for p in wide.parameters())
    name = "blocks.0.qkv.weight"
    weight = small.denoiser.state_dict()[name]
    assert torch.equal(wide.state_dict()[name], weight.half().float())
    assert not torch.equal(wide.state_dict()[name], weight)
    islands = [module for module in wide.modules() if isinstance(module, Island)]
    assert torch.float16 in {m.compute_dtype for m in half.modules() if isinstance(m, Island)}
    assert {island.compute_dtype for island in islands} == {torch.float32}


def test_rules_that_do_not_fit_are_errors(small: LDLM) -> None:
    module = stage("token_decoder").torch(small)
    rule = Rule(("token_decoder",), "rms_norm", "float32", "none there")
    idle = Precision("idle", (rule, *POLICIES["fp32"].rules))
    with pytest.raises(ExportError, match="matches nothing"):
        decide(module, "token_decoder", idle)
    with pytest.raises(ExportError, match="no precision rule"):
        decide(module, "token_decoder", Precision("short", POLICIES["fp16"].rules[:-1]))
    with pytest.raises(ConfigError, match="fp32 or fp16"):
        Precision.of("fp8")


def test_a_precision_is_a_value_made_from_its_name() -> None:
    fp16 = Precision.of("fp16")
    assert Precision.of(fp16) is fp16
    assert (fp16.products, fp16.is_half, fp16.is_integer, fp16.is_float32) == (
        "float16",
        True,
        False,
        False,
    )
    experiment = fp16.without(["rms_norm"]).without(["layer_norm"])
    assert str(experiment) == "fp16-without-layer_norm+rms_norm"
    assert Precision.of(str(experiment)) == experiment
    assert experiment.islands("latent_decoder") == ["softcap_softmax", "residual"]
    assert experiment.dtype("denoiser", "layer_norm") == "float16"
    assert Precision.of("bf16-without-residual").dtype("denoiser", "residual") == "bfloat16"
    for name, islands in (("fp32", ["rms_norm"]), ("int8", ["residual"]), ("fp16", ["gelu"])):
        with pytest.raises(ConfigError, match="island"):
            Precision.of(name).without(islands)


@pytest.mark.parametrize(
    ("name", "runtime"),
    [("bf16", "ort"), ("int8", "rtx"), ("int8", "evaluator"), ("fp16", "torch")],
)
def test_a_runtime_that_cannot_run_it_is_refused(name: str, runtime: str) -> None:
    with pytest.raises(ConfigError, match=f"{runtime} does not run") as caught:
        Precision.of(name).require(runtime)
    assert name in caught.value.details["remedy"]
    assert name not in caught.value.details["expected"].split(" or ")
