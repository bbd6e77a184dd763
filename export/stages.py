"""The stages of generation, as data.

Example inputs, dynamic shapes, TensorRT profiles, input checks and runtime buffers are all
derived from these tables. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from export.precision import policy, product_dtype
from ldlm.config import LDLMConfig
from ldlm.errors import ConfigError, StageInputError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import nn

    from ldlm.model import LDLM

BATCH, LENGTH, WIDTH, VOCAB = "batch", "length", "d_model", "vocab_size"
ROWS = "modulation_rows"
DYNAMIC = (BATCH, LENGTH)

# Steps whose conditioning is one table: a loop of any length runs through tables of this size.
TABLE_STEPS = 64

MAX_BATCH = 64  # in the graph; engine profiles go to 8 unless asked (float32 logits: 13 GB at 64)


def example_sizes(config: LDLMConfig) -> dict[str, int]:
    """Sizes of the export example: neither 1 nor the largest; the proof runs at other lengths."""
    return {BATCH: 2, LENGTH: min(24, max(2, 3 * config.n_positions // 4))}


@dataclass(frozen=True)
class AxisRange:
    """Smallest, most likely and largest size of a dynamic axis."""

    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.opt <= self.max:
            raise ConfigError(
                "an axis range is out of order", expected="1 <= min <= opt <= max", got=str(self)
            )

    def __str__(self) -> str:
        return f"{self.min}..{self.max}, best at {self.opt}"


@dataclass(frozen=True)
class TensorSpec:
    """A stage's input or output: its name in `forward`, in ONNX and in the engine alike."""

    name: str
    axes: tuple[str | int, ...]
    dtype: str = "float32"

    def shape(self, config: LDLMConfig, dynamic: Mapping[str, Any]) -> tuple[Any, ...]:
        """Sizes of the axes: dynamic ones from the mapping, named ones from the config."""
        return tuple(
            a if isinstance(a, int) else dynamic[a] if a in DYNAMIC else getattr(config, a)
            for a in self.axes
        )


@dataclass(frozen=True)
class StageSpec:
    """One stage.

    Attributes:
        name: of the stage and of its file.
        summary: what it computes, for tables.
        inputs, outputs: its tensors, in order; the first output is what is compared.
        weights: the stage whose weights file it uses.
        module: the module of ldlm that defines it.
        role: "plain": traced from the model, and compared equation by equation. The others are
            derived from its graph: "ids" has another end, "loop" is what a sampler's loop calls,
            "folded" is the same function with its constants folded, with weights of its own.
        capped: the config field that counts its capped attentions, if it has any.
    """

    name: str
    summary: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    weights: str
    module: str
    role: str = "plain"
    capped: str | None = None

    def build(self, model: LDLM) -> nn.Module:
        """The torch module of this stage; shares the model's tensors."""
        from ldlm.latent_decoder import LatentsToHidden
        from ldlm.token_decoder import GreedyTokens

        modules: dict[str, nn.Module] = {
            "denoiser": model.denoiser,
            "latent_decoder": LatentsToHidden(
                model.latent_decoder, model.latent_mean, model.latent_std
            ),
            "token_decoder": GreedyTokens(model.token_decoder),
            "token_decoder_logits": model.token_decoder,
        }
        if self.name not in modules:
            raise ConfigError("a stage without a module of its own", got=self.name)
        return modules[self.name]

    @property
    def data(self) -> str:
        """Name of the external data file that its graph reads."""
        return f"{self.name if self.role == 'folded' else self.weights}.onnx.data"

    @property
    def dynamic(self) -> bool:
        """Whether a size of its inputs is the caller's choice."""
        return any(axis in DYNAMIC for tensor in self.inputs for axis in tensor.axes)

    def capped_attentions(self, config: LDLMConfig) -> int:
        """How many attentions of this stage cap their scores."""
        return getattr(config, self.capped) if self.capped else 0


_STATE = (BATCH, LENGTH, WIDTH)

STAGES: tuple[StageSpec, ...] = (
    StageSpec(
        name="conditioning",
        summary="what depends on the times alone, once for 64 steps",
        inputs=(TensorSpec("t", (TABLE_STEPS,)),),
        outputs=(TensorSpec("modulations", (TABLE_STEPS, ROWS, WIDTH)),),
        weights="denoiser",
        module="ldlm.denoiser",
        role="loop",
    ),
    StageSpec(
        name="denoiser_step",
        summary="x_next, x0_hat and the next step's number: the denoiser and the solver's update",
        inputs=(
            TensorSpec("x", _STATE),
            TensorSpec("x0_prev", _STATE),
            TensorSpec("step", (1,), "int64"),
            TensorSpec("modulations", (TABLE_STEPS, ROWS, WIDTH)),
            TensorSpec("coefficients", (TABLE_STEPS, 3)),
            TensorSpec("noise", _STATE),
        ),
        outputs=(
            TensorSpec("x_next", _STATE),
            TensorSpec("x0_hat", _STATE),
            TensorSpec("next_step", (1,), "int64"),
        ),
        weights="denoiser",
        module="ldlm.denoiser",
        role="loop",
    ),
    StageSpec(
        name="denoiser",
        summary="x0_hat from x_t, t and x0_prev",
        inputs=(
            TensorSpec("x_t", _STATE),
            TensorSpec("t", (BATCH,)),
            TensorSpec("x0_prev", _STATE),
        ),
        outputs=(TensorSpec("x0_hat", _STATE),),
        weights="denoiser",
        module="ldlm.denoiser",
    ),
    StageSpec(
        name="latent_decoder",
        summary="hidden states from latents",
        inputs=(TensorSpec("z", _STATE),),
        outputs=(TensorSpec("h_hat", _STATE),),
        weights="latent_decoder",
        module="ldlm.latent_decoder",
        capped="decoder_blocks",
    ),
    StageSpec(
        name="latent_decoder_folded",
        summary="hidden states from latents, constants folded; float32 alone",
        inputs=(TensorSpec("z", _STATE),),
        outputs=(TensorSpec("h_hat", _STATE),),
        weights="latent_decoder",
        module="ldlm.latent_decoder",
        role="folded",
        capped="decoder_blocks",
    ),
    StageSpec(
        name="token_decoder",
        summary="token ids from hidden states, deployed",
        inputs=(TensorSpec("h_hat", _STATE),),
        outputs=(TensorSpec("token_ids", (BATCH, LENGTH), "int64"),),
        weights="token_decoder",
        module="ldlm.token_decoder",
        role="ids",
    ),
    StageSpec(
        name="token_decoder_logits",
        summary="logits from hidden states, compared",
        inputs=(TensorSpec("h_hat", _STATE),),
        outputs=(TensorSpec("logits", (BATCH, LENGTH, VOCAB)),),
        weights="token_decoder",
        module="ldlm.token_decoder",
    ),
)

# What is exported in one piece: one entry per weights file.
DEPLOYED: tuple[str, ...] = tuple(dict.fromkeys(spec.weights for spec in STAGES))

# What an engine is compiled of: of the denoiser, what the sampler's loop calls.
COMPILED: tuple[str, ...] = ("conditioning", "denoiser_step", "latent_decoder", "token_decoder")


def sharing(weights: str, precision: str) -> list[StageSpec]:
    """The stages that a precision has of these weights.

    Nothing is folded into half or integer weights: they would be rounded a second time.
    """
    folds = product_dtype(policy(precision)) == "float32"
    return [s for s in STAGES if s.weights == weights and (folds or s.role != "folded")]


def compiled(weights: str) -> list[str]:
    """The stages over these weights that engines are built of."""
    return [name for name in COMPILED if stage(name).weights == weights]


def compared(weights: str) -> StageSpec:
    """Of the stages that share these weights, the plain one."""
    return next(spec for spec in STAGES if spec.weights == weights and spec.role == "plain")


def stage(name: str) -> StageSpec:
    """Look a stage up by name.

    Raises:
        ConfigError: there is none of this name.
    """
    for spec in STAGES:
        if spec.name == name:
            return spec
    raise ConfigError("no such stage", expected=" or ".join(s.name for s in STAGES), got=name)


def graph_ranges(config: LDLMConfig) -> dict[str, AxisRange]:
    """The sizes that an exported graph takes."""
    return {
        BATCH: AxisRange(1, 1, MAX_BATCH),
        LENGTH: AxisRange(1, min(256, config.n_positions), config.n_positions),
    }


def checked_feeds(
    spec: StageSpec,
    config: LDLMConfig,
    ranges: Mapping[str, AxisRange],
    inputs: Sequence[NDArray[Any]],
) -> dict[str, NDArray[Any]]:
    """Arrays in the spec's order, by their names, after `check_inputs`.

    Raises:
        StageInputError: naming the first input that does not fit.
    """
    names = [tensor.name for tensor in spec.inputs]
    feeds = dict(zip(names, inputs, strict=False)) if len(inputs) == len(names) else {}
    found = {name: (array.dtype.name, array.shape) for name, array in feeds.items()}
    check_inputs(spec, config, ranges, found)
    return feeds


def check_inputs(
    spec: StageSpec,
    config: LDLMConfig,
    ranges: Mapping[str, AxisRange],
    found: Mapping[str, tuple[str, tuple[int, ...]]],
) -> None:
    """Check (dtype, shape) of every input against the spec and the allowed ranges.

    Raises:
        StageInputError: naming the first input that does not fit.
    """
    names = [tensor.name for tensor in spec.inputs]
    if list(found) != names:
        raise StageInputError(
            "other inputs than the stage takes", stage=spec.name, expected=names, got=list(found)
        )
    sizes: dict[str, int] = {}
    for tensor in spec.inputs:
        dtype, shape = found[tensor.name]
        if len(shape) == len(tensor.axes):
            for axis, size in zip(tensor.axes, shape, strict=True):
                sizes.setdefault(str(axis), size)
        dynamic = {axis: sizes.get(axis, axis) for axis in DYNAMIC}
        expected = tensor.shape(config, dynamic)
        if dtype != tensor.dtype or shape != expected:
            raise StageInputError(
                "an input has the wrong dtype or shape",
                stage=spec.name,
                tensor=tensor.name,
                expected=f"{tensor.dtype} {list(expected)}",
                got=f"{dtype} {list(shape)}",
            )
    for axis, allowed in ranges.items():
        size = sizes.get(axis, allowed.min)
        if not allowed.min <= size <= allowed.max:
            raise StageInputError(
                f"the {axis} is outside what was built",
                stage=spec.name,
                expected=f"{allowed.min}..{allowed.max}",
                got=size,
                remedy=f"use a smaller {axis}, or build with a larger range",
            )
