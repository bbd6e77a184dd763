"""The parameter account: what each part owns, beside what is published.

Trained parameters are counted from the model's tensors. GPT-2 is not part of the model; its share
of the frozen count comes from the table of its tensors' shapes below.
"""

import math
from dataclasses import dataclass

from torch import nn

from ldlm.config import PRESETS, LDLMConfig
from ldlm.model import skeleton

# Published counts (seeds S0 and S4). The split between the four parts is a reconstruction that
# meets both published totals exactly; only the lines below are published.
PUBLISHED: dict[str, int] = {
    "perceiver attention": 3_540_608,
    "decoder MLP": 4_723_968,
    "residual scale": 2,
    "latent decoder block": 8_264_580,
    "latent decoder blocks": 49_587_480,
    "denoiser final norm": 768,
    "trained": 306_011_162,
    "frozen": 124_442_112,
}

# GPT-2 small, as (count, shape): embeddings, twelve blocks, final norm.
GPT2_BLOCKS = 12
GPT2_SHAPES: tuple[tuple[str, int, tuple[int, ...]], ...] = (
    ("wte", 1, (50257, 768)),
    ("wpe", 1, (1024, 768)),
    ("ln_1, ln_2 weight and bias", 4 * GPT2_BLOCKS, (768,)),
    ("attn.c_attn.weight", GPT2_BLOCKS, (768, 2304)),
    ("attn.c_attn.bias", GPT2_BLOCKS, (2304,)),
    ("attn.c_proj.weight", GPT2_BLOCKS, (768, 768)),
    ("attn.c_proj.bias", GPT2_BLOCKS, (768,)),
    ("mlp.c_fc.weight", GPT2_BLOCKS, (768, 3072)),
    ("mlp.c_fc.bias", GPT2_BLOCKS, (3072,)),
    ("mlp.c_proj.weight", GPT2_BLOCKS, (3072, 768)),
    ("mlp.c_proj.bias", GPT2_BLOCKS, (768,)),
    ("ln_f weight and bias", 2, (768,)),
)


@dataclass(frozen=True)
class ParameterCount:
    """One line of the account."""

    component: str
    calculation: str
    parameters: int
    published: int | None = None


def count(module: nn.Module) -> int:
    """Trained parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


def gpt2_parameters() -> int:
    """GPT-2 small's parameters, from the table of its shapes (124,439,808)."""
    return sum(number * math.prod(shape) for _, number, shape in GPT2_SHAPES)


def account(config: LDLMConfig) -> list[ParameterCount]:
    """Every component with its calculation; published values where the width is `base`'s."""
    model = skeleton(config)
    decoder, denoiser = model.latent_decoder, model.denoiser
    block = decoder.blocks[0]
    parts = {
        "latent encoder": model.latent_encoder,
        "latent decoder": decoder,
        "denoiser": denoiser,
        "token decoder": model.token_decoder,
    }
    rows = [
        ("perceiver attention", _sum_of(block.get_submodule("attention"))),
        ("decoder MLP", _sum_of(decoder.query_mlp)),
        ("residual scale", _sum_of(decoder.query_scale)),
        ("latent decoder block", _sum_of(block)),
        ("latent decoder blocks", _sum_of(decoder.blocks)),
        ("denoiser final norm", _sum_of(denoiser.final_norm)),
        *((name, _sum_of(part)) for name, part in parts.items()),
    ]
    rows.append(("trained", (" + ".join(parts), sum(count(part) for part in parts.values()))))

    gpt2, mask = gpt2_parameters(), decoder.mask_vector.numel()
    added = len(config.added_tokens) * config.d_model
    rows.append(
        (
            "frozen",
            (f"GPT-2 {gpt2:,} + added tokens {added:,} + mask {mask:,}", gpt2 + added + mask),
        )
    )
    # A config that changes the published totals is allowed; they stand beside its own.
    at_base = config.d_model == PRESETS["base"].d_model
    return [
        ParameterCount(name, calculation, number, PUBLISHED.get(name) if at_base else None)
        for name, (calculation, number) in rows
    ]


def _sum_of(module: nn.Module) -> tuple[str, int]:
    """A module's count and the sum that gives it: children, equal ones taken together."""
    terms: list[tuple[str, int]] = [
        (name, parameter.numel()) for name, parameter in module.named_parameters(recurse=False)
    ]
    for name, child in module.named_children():
        number = count(child)
        if isinstance(child, nn.ModuleList) and number:
            each = count(child[0])
            terms.append((f"{name} {len(child)} x {each:,} =", number))
        elif number:
            terms.append((name, number))
    if isinstance(module, nn.ModuleList):
        return f"{len(module)} x {count(module[0]):,}", count(module)
    return " + ".join(f"{name} {number:,}" for name, number in terms), count(module)
