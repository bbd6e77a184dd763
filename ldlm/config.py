"""The configuration of an LDLM and its presets. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

from ldlm.errors import ConfigError

# d_model, n_heads, n_positions, the block counts, mlp_ratio, softcap and norm_eps of `base` are
# published (seeds S0 and S4); see docs/model.md for which of the rest is reconstruction.


@dataclass(frozen=True, kw_only=True)
class LDLMConfig:
    """Sizes and constants of one LDLM.

    The defaults are the published model. Fields marked R are reconstruction choices of this
    project, kept as fields because the authors' code may differ.
    """

    d_model: int = 768
    n_heads: int = 12
    n_positions: int = 1024
    vocab_size: int = 50259  # R: GPT-2's 50257 and two added tokens explain the frozen count
    denoiser_blocks: int = 12
    encoder_blocks: int = 6
    decoder_blocks: int = 6
    token_blocks: int = 3
    mlp_ratio: int = 4
    softcap: float = 50.0
    norm_eps: float = 1e-5
    time_max_period: float = 10.0  # R
    rotary_base: float = 10000.0  # lineage
    position_scale: float | None = None  # R: None is d_model ** -0.5
    input_bias: bool = True  # R: bias on the denoiser's input projection
    token_final_norm: bool = False  # R: a LayerNorm before the token decoder's head
    sampler_steps: int = 1024
    t_min: float = 0.05  # R
    tangent_d: float = 3.0
    end_of_text: str = "<|endoftext|>"
    added_tokens: tuple[str, ...] = ("<|pad|>", "<|mask|>")  # R: names of the two added tokens

    def __post_init__(self) -> None:
        sizes = ("d_model", "n_heads", "n_positions", "vocab_size", "mlp_ratio", "sampler_steps")
        blocks = ("denoiser_blocks", "encoder_blocks", "decoder_blocks", "token_blocks")
        reals = ("softcap", "norm_eps", "tangent_d", "rotary_base", "time_max_period")
        for name in sizes + blocks:
            _require_number(name, getattr(self, name), int)
        for name in reals:
            _require_number(name, getattr(self, name), float)
        if self.d_model % self.n_heads or self.d_head % 2:
            raise ConfigError(
                "d_model does not split into heads of an even size",
                expected="d_model = n_heads * d_head with d_head even, for the rotary halves",
                got=f"d_model {self.d_model}, n_heads {self.n_heads}",
            )
        for name in ("input_bias", "token_final_norm"):
            _require(name, isinstance(getattr(self, name), bool), "true or false", self)
        words = isinstance(self.added_tokens, tuple) and all(
            isinstance(token, str) for token in self.added_tokens
        )
        _require("added_tokens", words, "a list of strings", self)
        _require("end_of_text", isinstance(self.end_of_text, str), "a string", self)
        if self.position_scale is not None:
            _require_number("position_scale", self.position_scale, float)
        _require_number("t_min", self.t_min, float)
        if not 0.0 < self.t_min < 1.0:
            raise ConfigError("t_min is outside the schedule", expected="(0, 1)", got=self.t_min)

    @property
    def d_head(self) -> int:
        """Features of one attention head (64 in `base`)."""
        return self.d_model // self.n_heads

    @property
    def modulation_rows(self) -> int:
        """Vectors of d_model that a denoiser call needs of its time (74 in `base`)."""
        return 6 * self.denoiser_blocks + 2

    @property
    def d_mlp(self) -> int:
        """Hidden features of every MLP (3072 in `base`)."""
        return self.d_model * self.mlp_ratio

    @property
    def p_scale(self) -> float:
        """What a position table is multiplied by when it is used."""
        return self.d_model**-0.5 if self.position_scale is None else self.position_scale

    def to_json(self) -> str:
        """The config as the text of a checkpoint's config.json."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_dict(cls, fields: dict[str, Any], *, source: str = "config.json") -> LDLMConfig:
        """Build a config from the fields of a JSON object.

        Raises:
            ConfigError: a field is unknown, missing or of the wrong kind.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        unknown, missing = sorted(set(fields) - known), sorted(known - set(fields))
        if unknown or missing:
            raise ConfigError(
                f"{source} does not have the fields of an LDLM configuration",
                expected=f"also {', '.join(missing)}" if missing else "only known fields",
                got=f"unknown {', '.join(unknown)}" if unknown else "a config without them",
            )
        tokens = fields["added_tokens"]
        return cls(
            **{**fields, "added_tokens": tuple(tokens) if isinstance(tokens, list) else tokens}
        )

    @classmethod
    def from_json(cls, text: str, *, source: str = "config.json") -> LDLMConfig:
        """Parse a config.json; errors as in `from_dict`."""
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{source} is not JSON", got=str(error)) from error
        if not isinstance(fields, dict):
            raise ConfigError(
                f"{source} is not a JSON object", expected="{...}", got=type(fields).__name__
            )
        return cls.from_dict(fields, source=source)


def _require(name: str, good: bool, expected: str, config: LDLMConfig) -> None:
    if not good:
        raise ConfigError(
            f"the configuration's {name} is not usable",
            expected=expected,
            got=repr(getattr(config, name)),
        )


def _require_number(name: str, value: object, kind: type) -> None:
    allowed = (int,) if kind is int else (int, float)
    good = isinstance(value, allowed) and not isinstance(value, bool)
    if not good or not math.isfinite(value) or value <= 0:  # type: ignore[arg-type,operator]
        raise ConfigError(
            f"the configuration's {name} is not usable",
            expected=f"a positive {'integer' if kind is int else 'number'}",
            got=repr(value),
        )


PRESETS: dict[str, LDLMConfig] = {
    # The published model: 306,011,162 trained parameters.
    "base": LDLMConfig(),
    # About 2 million parameters and every mechanism of `base`, for tests. Heads of 64 as there;
    # the vocabulary is the 256 bytes, end of text and the two added tokens.
    "small": LDLMConfig(
        d_model=128,
        n_heads=2,
        n_positions=128,
        vocab_size=259,
        denoiser_blocks=2,
        encoder_blocks=2,
        decoder_blocks=2,
        token_blocks=2,
    ),
}


def preset(name: str) -> LDLMConfig:
    """Look a preset up by name.

    Raises:
        ConfigError: no preset has this name.
    """
    if name not in PRESETS:
        raise ConfigError("no such preset", expected=" or ".join(PRESETS), got=name)
    return PRESETS[name]
