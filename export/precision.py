"""Precisions, as data: which computation runs in which dtype, and why.

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

# The runtimes that can run a precision, by the dtype of its products. ONNX Runtime's CPU provider
# has no products of bfloat16; TensorRT takes no dynamic integers; PyTorch is the reference.
RUNTIMES: dict[str, tuple[str, ...]] = {
    "float32": ("ort", "torch", "evaluator", "rtx", "trt"),
    "float16": ("ort", "evaluator", "rtx", "trt"),
    "bfloat16": ("evaluator", "rtx", "trt"),
    INTEGER: ("ort",),
}

# The rules that hold a computation in float32; each can be switched off for an experiment.
ISLANDS = (
    "time_embedding",
    "layer_norm",
    "rms_norm",
    "softcap_softmax",
    "residual",
)

# Between a precision's name and those of the islands that an experiment switches off.
WITHOUT = "-without-"


@dataclass(frozen=True)
class Rule:
    """`what` in `components` is computed in `dtype`, because of `reason`."""

    components: tuple[str, ...]
    what: str
    dtype: str
    reason: str

    def applies(self, component: str) -> bool:
        """Whether the rule speaks of this component."""
        return ANY in self.components or component in self.components


@dataclass(frozen=True)
class Precision:
    """A precision, made once from its name (`Precision.of`) and passed on.

    Attributes:
        name: such as "fp16", or "fp16-without-rms_norm" for an experiment.
        rules: its policy.
    """

    name: str
    rules: tuple[Rule, ...]

    def __str__(self) -> str:
        return self.name

    @classmethod
    def of(cls, name: str | Precision) -> Precision:
        """Look a precision up: one of `POLICIES`, or what `without` makes of it.

        Raises:
            ConfigError: there is none of this name.
        """
        if isinstance(name, Precision):
            return name
        base, without, islands = name.partition(WITHOUT)
        if base not in POLICIES:
            raise ConfigError("no such precision", expected=" or ".join(POLICIES), got=name)
        return POLICIES[base].without(islands.split("+")) if without else POLICIES[base]

    def without(self, islands: Sequence[str]) -> Precision:
        """The precision with the named islands computed in half: for experiments only.

        Raises:
            ConfigError: it has no island of a name.
        """
        known = {rule.what for rule in self.rules}
        for name in islands:
            if name not in ISLANDS:
                raise ConfigError("no such island", expected=", ".join(ISLANDS), got=name)
            if name not in known or not self.is_half:
                raise ConfigError(
                    "this precision has no island to switch off",
                    expected="a half precision",
                    got=f"{self} without {name}",
                    remedy="add --precision fp16 or bf16",
                )
        base, _, before = self.name.partition(WITHOUT)
        off = [name for name in ISLANDS if name in {*islands, *before.split("+")}]
        rules = tuple(
            replace(rule, dtype=self.products, reason="switched off for an experiment")
            if rule.what in off
            else rule
            for rule in self.rules
        )
        return Precision(base + WITHOUT + "+".join(off), rules) if off else self

    @property
    def products(self) -> str:
        """The dtype of the weights of its products."""
        return next(rule.dtype for rule in self.rules if rule.what in (ANY, "linear"))

    @property
    def is_float32(self) -> bool:
        """Whether all of it is float32, the reference's own precision."""
        return self.products == "float32"

    @property
    def is_half(self) -> bool:
        """Whether its products are in a half precision."""
        return self.products in ("float16", "bfloat16")

    @property
    def is_integer(self) -> bool:
        """Whether its products are in integers."""
        return self.products == INTEGER

    @property
    def is_experiment(self) -> bool:
        """Whether islands are switched off."""
        return WITHOUT in self.name

    def islands(self, component: str) -> list[str]:
        """What a half precision keeps in float32 in a component; no other one has islands."""
        if not self.is_half:
            return []
        return [
            rule.what
            for rule in self.rules
            if rule.what in ISLANDS and rule.applies(component) and rule.dtype == "float32"
        ]

    def dtype(self, component: str, what: str) -> str:
        """The dtype that it gives to a kind of computation in a component."""
        rules = (rule for rule in self.rules if rule.applies(component))
        return next(rule.dtype for rule in rules if rule.what in (ANY, what))

    def runs_on(self, runtime: str) -> bool:
        """Whether a runtime ("ort", "torch", "evaluator", "rtx", "trt") can run it."""
        return runtime in RUNTIMES[self.products]

    def require(self, runtime: str) -> None:
        """Refuse a runtime that cannot run it.

        Raises:
            ConfigError: with the runtimes that can, and the precisions that it can run.
        """
        if not self.runs_on(runtime):
            others = [name for name, other in POLICIES.items() if other.runs_on(runtime)]
            raise ConfigError(
                f"{runtime} does not run this precision",
                expected=" or ".join(others),
                got=self.name,
                remedy=f"{self} runs on: {', '.join(RUNTIMES[self.products])}",
            )

    def require_floats(self, what: str) -> None:
        """Refuse products in integers for what is for the float precisions.

        Raises:
            ConfigError: naming what is not for them.
        """
        if self.is_integer:
            floats = [name for name, other in POLICIES.items() if not other.is_integer]
            raise ConfigError(
                f"{what} for the float precisions",
                expected=" or ".join(floats),
                got=self.name,
                remedy="name others with --precision",
            )


def precisions(names: Sequence[str | Precision]) -> list[Precision]:
    """Several precisions; see `Precision.of`."""
    return [Precision.of(name) for name in names]


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


POLICIES: dict[str, Precision] = {
    name: Precision(name, rules)
    for name, rules in (
        ("fp32", (Rule((ANY,), ANY, "float32", "the reference's own precision"),)),
        ("fp16", _half("float16")),
        ("bf16", _half("bfloat16")),
        ("int8", _integer()),
    )
}


@dataclass(frozen=True)
class Decision:
    """What a policy decided for one module."""

    module: str
    kind: str
    rule: Rule


def decide(module: nn.Module, component: str, precision: Precision) -> list[Decision]:
    """The deciding rule of every module that has a dtype to decide.

    Args:
        module: a stage's module.
        component: of the stage.
        precision: whose rules decide.

    Raises:
        ExportError: a module that no rule decides, or a rule that decides nothing.
    """
    rules = [rule for rule in precision.rules if rule.applies(component)]
    decisions = []
    for name, kinds in _with_kinds(module):
        rule = next((r for r in rules if r.what in kinds or fnmatchcase(name, r.what)), None)
        if rule is None:
            raise ExportError(
                "no precision rule decides a computation",
                stage=component,
                tensor=name,
                got=kinds[-1],
            )
        decisions.append(Decision(name, kinds[-1], rule))
    idle = [rule.what for rule in rules if all(d.rule != rule for d in decisions)]
    if idle:
        raise ExportError("a precision rule matches nothing", stage=component, got=", ".join(idle))
    return decisions


def apply(module: nn.Module, component: str, precision: Precision) -> nn.Module:
    """A copy of a stage's module in which every computation has the dtype its rule gives.

    Raises:
        ExportError: as `decide`.
    """
    import torch

    from export.quantised import QuantisedLinear

    decisions = decide(module, component, precision)
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
