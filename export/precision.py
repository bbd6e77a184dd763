"""Precision policies, as data: which computation runs in which dtype, and why.

A policy is an ordered table of rules; the first that matches decides. What a rule can name are
the kinds that the model's modules carry (`ldlm.layers.Island.kind`, "linear"), their own or that
of a module around them, and modules themselves, by a pattern of their names. The policy is applied
to the PyTorch module before export: the same module, run in PyTorch, is the reference of its
precision. Imports no torch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ldlm.errors import ConfigError, ExportError

if TYPE_CHECKING:
    from torch import nn

ANY = "*"
# The dtype of products in integers: `export.quantised`. It is for CPUs, and not for TensorRT.
INTEGER = "int8"
HALVES = ("float16", "bfloat16")


@dataclass(frozen=True)
class Rule:
    """`what` in `stages` is computed in `dtype`, because of `reason`."""

    stages: tuple[str, ...]
    what: str
    dtype: str
    reason: str

    def applies(self, stage: str) -> bool:
        """Whether the rule speaks of this stage."""
        return ANY in self.stages or stage in self.stages


def _half(dtype: str) -> tuple[Rule, ...]:
    denoiser, latents, tokens = "denoiser", "latent_decoder", "token_decoder"
    f32 = "float32"
    return (
        Rule((denoiser,), "time_embedding", f32, "cos(t w) in half merges neighbouring steps"),
        Rule((ANY,), "layer_norm", f32, "squares of outliers pass 65504; S0: autocast off"),
        Rule((latents,), "rms_norm", f32, "the norm's sum of squares passes 65504"),
        Rule((latents,), "softcap_softmax", f32, "tanh and exp of scores lose their small steps"),
        Rule((ANY,), "residual", f32, "the sum over blocks must not lose small updates"),
        Rule((latents,), "capped_attention", dtype, "Q K^T and A V are bounded after the norms"),
        Rule((denoiser, tokens), "fused_attention", dtype, "one fused kernel has one dtype"),
        Rule((ANY,), "linear", dtype, "the weights, and the activations between them"),
    )


def _integer() -> tuple[Rule, ...]:
    denoiser, latents = "denoiser", "latent_decoder"
    f32 = "float32"
    return (
        Rule((denoiser,), "time_embedding", f32, "once for 64 steps: there is nothing to gain"),
        Rule((denoiser,), "*modulation", f32, "once for 64 steps: there is nothing to gain"),
        Rule((denoiser,), "input", f32, "half of the error comes from here and the output"),
        Rule((denoiser,), "output", f32, "half of the error comes from here and the input"),
        Rule((latents,), "*query_mlp.*", f32, "reads one constant vector: nothing to gain"),
        Rule((ANY,), "linear", INTEGER, "weights per output channel, activations per call"),
        Rule((ANY,), ANY, f32, "norms, attention, softcap and residuals, as in the reference"),
    )


POLICIES: dict[str, tuple[Rule, ...]] = {
    "fp32": (Rule((ANY,), ANY, "float32", "the reference's own precision"),),
    "fp16": _half("float16"),
    "bf16": _half("bfloat16"),
    "int8": _integer(),
}

# The rules that hold a computation in float32; each can be switched off for an experiment.
ISLANDS = (
    "time_embedding",
    "layer_norm",
    "rms_norm",
    "softcap_softmax",
    "residual",
)


# Between a policy's name and those of the islands that an experiment switches off.
WITHOUT = "-without-"


def policy(name: str) -> tuple[Rule, ...]:
    """Look a policy up by name: one of `POLICIES`, or what `experiment` makes of it.

    Raises:
        ConfigError: there is none of this name.
    """
    base, without, islands = name.partition(WITHOUT)
    if base not in POLICIES:
        raise ConfigError("no such precision", expected=" or ".join(POLICIES), got=name)
    return without_islands(POLICIES[base], islands.split("+")) if without else POLICIES[base]


def experiment(name: str, islands: Sequence[str]) -> str:
    """The name of a policy with islands switched off, such as `fp16-without-rms_norm`.

    Raises:
        ConfigError: there is no such policy, or an island is not one of its.
    """
    if not islands:
        return name
    without_islands(policy(name), islands)
    base, _, before = name.partition(WITHOUT)
    off = {*islands, *before.split("+")}
    return base + WITHOUT + "+".join(island for island in ISLANDS if island in off)


def islands_of(stage: str, rules: tuple[Rule, ...]) -> list[str]:
    """The islands that a half policy keeps in a stage; no other policy has any."""
    if not is_half(rules):
        return []
    return [
        rule.what
        for rule in rules
        if rule.what in ISLANDS and rule.applies(stage) and rule.dtype == "float32"
    ]


def is_experiment(name: str) -> bool:
    """Whether a policy's name says that islands are switched off."""
    return WITHOUT in name


def is_half(rules: tuple[Rule, ...]) -> bool:
    """Whether a policy computes its products in a half precision."""
    return product_dtype(rules) in HALVES


def is_integer(rules: tuple[Rule, ...]) -> bool:
    """Whether a policy computes its products in integers."""
    return product_dtype(rules) == INTEGER


def require_floats(names: Sequence[str], problem: str, remedy: str) -> None:
    """Refuse precisions with products in integers, for what is not for them.

    Raises:
        ConfigError: with this problem and remedy, naming the first.
    """
    for name in names:
        if is_integer(policy(name)):
            floats = [other for other, rules in POLICIES.items() if not is_integer(rules)]
            raise ConfigError(problem, expected=" or ".join(floats), got=name, remedy=remedy)


def product_dtype(rules: tuple[Rule, ...]) -> str:
    """The dtype that a policy gives to the weights of its products."""
    return next(rule.dtype for rule in rules if rule.what in (ANY, "linear"))


def without_islands(rules: tuple[Rule, ...], names: Sequence[str]) -> tuple[Rule, ...]:
    """A policy in which the named islands are computed in half: for experiments only.

    Raises:
        ConfigError: the policy has no island of a name.
    """
    known = {rule.what for rule in rules}
    for name in names:
        if name not in ISLANDS:
            raise ConfigError("no such island", expected=", ".join(ISLANDS), got=name)
        if name not in known or not is_half(rules):
            raise ConfigError(
                "this precision has no island to switch off",
                expected="a half precision",
                got=f"{product_dtype(rules)} without {name}",
                remedy="add --precision fp16 or bf16",
            )
    dtype = product_dtype(rules)
    return tuple(
        replace(rule, dtype=dtype, reason="switched off for an experiment")
        if rule.what in names
        else rule
        for rule in rules
    )


@dataclass(frozen=True)
class Decision:
    """What a policy decided for one module."""

    module: str
    kind: str
    rule: Rule


def decide(module: nn.Module, stage: str, rules: tuple[Rule, ...]) -> list[Decision]:
    """The deciding rule of every module that has a dtype to decide.

    Args:
        module: a stage's module.
        stage: the name of its weights' stage.
        rules: a policy.

    Raises:
        ExportError: a module that no rule decides, or a rule that decides nothing.
    """
    rules = tuple(rule for rule in rules if rule.applies(stage))
    decisions = []
    for name, kinds in _with_kinds(module):
        rule = next((r for r in rules if r.what in kinds or fnmatchcase(name, r.what)), None)
        if rule is None:
            raise ExportError(
                "no precision rule decides a computation", stage=stage, tensor=name, got=kinds[-1]
            )
        decisions.append(Decision(name, kinds[-1], rule))
    idle = [rule.what for rule in rules if all(d.rule != rule for d in decisions)]
    if idle:
        raise ExportError("a precision rule matches nothing", stage=stage, got=", ".join(idle))
    return decisions


def apply(module: nn.Module, stage: str, rules: tuple[Rule, ...]) -> nn.Module:
    """A copy of a stage's module in which every computation has the dtype its rule gives.

    Raises:
        ExportError: as `decide`.
    """
    import torch

    from export.quantised import QuantisedLinear

    decisions = decide(module, stage, rules)
    module = copy.deepcopy(module)
    for decision in decisions:
        dtype = getattr(torch, decision.rule.dtype)
        target = module.get_submodule(decision.module)
        if decision.rule.dtype == INTEGER and isinstance(target, torch.nn.Linear):
            module.set_submodule(decision.module, QuantisedLinear(target))
        elif decision.kind == "linear":
            target.to(dtype)
        else:
            object.__setattr__(target, "compute_dtype", dtype)
            own = [*target.parameters(recurse=False), *target.buffers(recurse=False)]
            for tensor in own:
                tensor.data = tensor.data.to(dtype)
    return module


def without_rounding(module: nn.Module) -> nn.Module:
    """A float32 copy of a module with a policy applied; its weights keep their rounded values."""
    import torch

    from export.quantised import QuantisedLinear

    module = copy.deepcopy(module).float()
    for child in module.modules():
        if hasattr(child, "compute_dtype"):
            object.__setattr__(child, "compute_dtype", torch.float32)
        if isinstance(child, QuantisedLinear):
            child.rounds = False
    return module


def _with_kinds(module: nn.Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every module that has a kind, with the kinds around it, outermost first."""
    kinds_at: dict[str, tuple[str, ...]] = {}
    for name, child in module.named_modules():
        parent = name.rpartition(".")[0]
        around = kinds_at.get(parent, ()) if name else ()
        kind = getattr(child, "kind", None)
        kinds_at[name] = (*around, kind) if kind else around
        if kind:
            yield name, kinds_at[name]
