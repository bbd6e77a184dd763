"""The stages of generation, as data.

Example inputs, dynamic shapes, graph checks, TensorRT profiles, input checks and runtime buffers
are all derived from this table. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ldlm.config import LDLMConfig
from ldlm.errors import ConfigError

if TYPE_CHECKING:
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
    """A stage's input or output.

    Attributes:
        name: in `forward`, in ONNX and in the engine alike.
        axes: names of DYNAMIC or of fields of the config, or sizes.
        dtype: as NumPy names it.
        like: of an input, what it is in generation: how the proof draws it; see
            `engines.proof.inputs`.
    """

    name: str
    axes: tuple[str | int, ...]
    dtype: str = "float32"
    like: str = "noise"

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
        component: the part of the model whose weights it reads; stages of one component share a
            weights file, and are exported together.
        counts: how many nodes of an operator its graph has; operators that are not named are free.
        module: the module of ldlm that defines it: code that it depends on.
        build: its module in PyTorch, which shares the model's tensors; None where there is none.
        source: of a derived stage, the traced one whose graph the passes change.
        passes: names of `export.passes.PASSES`, in order.
        compiled: whether TensorRT engines are built of it.
        whole: whether its graph holds all parameters of the component; stages that do not hold
            them between them.
    """

    name: str
    summary: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    component: str
    counts: Callable[[LDLMConfig], dict[str, int]]
    module: str
    build: Callable[[LDLM], nn.Module] | None = None
    source: str | None = None
    passes: tuple[str, ...] = ()
    compiled: bool = False
    whole: bool = True

    def __post_init__(self) -> None:
        derived = self.source is not None
        if derived != bool(self.passes) or not (derived or self.build):
            raise ConfigError(
                "a stage is either traced or derived",
                expected="build, or source and passes",
                got=self.name,
            )

    @property
    def traced(self) -> bool:
        """Whether its graph is traced from its module, and compared equation by equation."""
        return self.source is None

    def torch(self, model: LDLM) -> nn.Module:
        """Its module in PyTorch.

        Raises:
            ConfigError: PyTorch has none: passes make this graph.
        """
        if self.build is None:
            raise ConfigError("a stage without a module in PyTorch", got=self.name)
        return self.build(model)

    @property
    def data(self) -> str:
        """Name of the external data file that its graph reads."""
        return f"{self.component}.onnx.data"

    @property
    def dynamic(self) -> bool:
        """Whether a size of its inputs is the caller's choice."""
        return any(axis in DYNAMIC for tensor in self.inputs for axis in tensor.axes)

    def input(self, name: str) -> TensorSpec:
        """An input by its name."""
        return next(tensor for tensor in self.inputs if tensor.name == name)


def _denoiser(model: LDLM) -> nn.Module:
    return model.denoiser


def _latent_decoder(model: LDLM) -> nn.Module:
    from ldlm.latent_decoder import LatentsToHidden

    return LatentsToHidden(model.latent_decoder, model.latent_mean, model.latent_std)


def _tokens(model: LDLM) -> nn.Module:
    from ldlm.token_decoder import GreedyTokens

    return GreedyTokens(model.token_decoder)


def _logits(model: LDLM) -> nn.Module:
    return model.token_decoder


def _denoiser_counts(config: LDLMConfig) -> dict[str, int]:
    blocks = config.denoiser_blocks
    return {"LayerNormalization": 2 * blocks + 1, "Attention": blocks, "Tanh": 0, "Softmax": 0}


def _latent_decoder_counts(config: LDLMConfig) -> dict[str, int]:
    """One Tanh and one Softmax per capped attention; a norm per block and the query's own."""
    blocks = config.decoder_blocks
    return {"LayerNormalization": blocks + 1, "Attention": 0, "Tanh": blocks, "Softmax": blocks}


def _token_decoder_counts(config: LDLMConfig) -> dict[str, int]:
    blocks = config.token_blocks
    norms = 2 * blocks + config.token_final_norm
    return {"LayerNormalization": norms, "Attention": blocks, "Tanh": 0, "Softmax": 0}


_STATE = (BATCH, LENGTH, WIDTH)
_MODULATIONS = (TABLE_STEPS, ROWS, WIDTH)

STAGES: tuple[StageSpec, ...] = (
    StageSpec(
        name="conditioning",
        summary="what depends on the times alone, once for 64 steps",
        inputs=(TensorSpec("t", (TABLE_STEPS,), like="times of a table"),),
        outputs=(TensorSpec("modulations", _MODULATIONS),),
        component="denoiser",
        counts=lambda _: {"LayerNormalization": 0, "Attention": 0, "Tanh": 0, "Softmax": 0},
        source="denoiser",
        module="ldlm.denoiser",
        passes=("conditioning_graph",),
        compiled=True,
        whole=False,
    ),
    StageSpec(
        name="denoiser_step",
        summary="x_next, x0_hat and the next step's number: the denoiser and the solver's update",
        inputs=(
            TensorSpec("x", _STATE, like="latents"),
            TensorSpec("x0_prev", _STATE),
            TensorSpec("step", (1,), "int64", like="number of a step"),
            TensorSpec("modulations", _MODULATIONS, like="modulations"),
            TensorSpec("coefficients", (TABLE_STEPS, 3), like="coefficients"),
            TensorSpec("noise", _STATE),
        ),
        outputs=(
            TensorSpec("x_next", _STATE),
            TensorSpec("x0_hat", _STATE),
            TensorSpec("next_step", (1,), "int64"),
        ),
        component="denoiser",
        counts=_denoiser_counts,
        source="denoiser",
        module="ldlm.denoiser",
        passes=("step_graph", "fuse_rotary", "solver_update", "next_step"),
        compiled=True,
        whole=False,
    ),
    StageSpec(
        name="denoiser",
        summary="x0_hat from x_t, t and x0_prev",
        inputs=(
            TensorSpec("x_t", _STATE, like="noisy latents"),
            TensorSpec("t", (BATCH,), like="times"),
            TensorSpec("x0_prev", _STATE, like="estimate"),
        ),
        outputs=(TensorSpec("x0_hat", _STATE),),
        component="denoiser",
        counts=_denoiser_counts,
        module="ldlm.denoiser",
        build=_denoiser,
    ),
    StageSpec(
        name="latent_decoder",
        summary="hidden states from latents",
        inputs=(TensorSpec("z", _STATE, like="latents"),),
        outputs=(TensorSpec("h_hat", _STATE),),
        component="latent_decoder",
        counts=_latent_decoder_counts,
        module="ldlm.latent_decoder",
        build=_latent_decoder,
        compiled=True,
    ),
    StageSpec(
        name="token_decoder",
        summary="token ids from hidden states, deployed",
        inputs=(TensorSpec("h_hat", _STATE, like="latents"),),
        outputs=(TensorSpec("token_ids", (BATCH, LENGTH), "int64"),),
        component="token_decoder",
        counts=_token_decoder_counts,
        module="ldlm.token_decoder",
        build=_tokens,
        source="token_decoder_logits",
        passes=("argmax_tail",),
        compiled=True,
    ),
    StageSpec(
        name="token_decoder_logits",
        summary="logits from hidden states, compared",
        inputs=(TensorSpec("h_hat", _STATE, like="latents"),),
        outputs=(TensorSpec("logits", (BATCH, LENGTH, VOCAB)),),
        component="token_decoder",
        counts=_token_decoder_counts,
        module="ldlm.token_decoder",
        build=_logits,
    ),
)

# What a sampler calls: step by step, or in a loop of its own and then the decoders.
SAMPLED: tuple[str, str, str] = ("denoiser", "latent_decoder", "token_decoder")
LOOP: tuple[str, str] = ("conditioning", "denoiser_step")


def components() -> list[str]:
    """What is exported in one piece each: one entry per weights file."""
    return list(dict.fromkeys(spec.component for spec in STAGES))


def stages_of(component: str) -> list[StageSpec]:
    """The stages that read this component's weights."""
    return [spec for spec in STAGES if spec.component == component]


def compiled(component: str | None = None) -> list[str]:
    """The stages, of this component or of all, that engines are built of."""
    return [s.name for s in STAGES if s.compiled and component in (None, s.component)]


def compared(component: str) -> StageSpec:
    """Of the stages of a component, the traced one."""
    return next(spec for spec in stages_of(component) if spec.traced)


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
