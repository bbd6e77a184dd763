"""The configuration of an LDLM and its presets. Imports no torch."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import msgspec.inspect as kinds
from msgspec import Meta

from ldlm.errors import ConfigError

# d_model, n_heads, n_positions, the block counts, mlp_ratio, softcap and norm_eps of `base` are
# published (seeds S0 and S4); see docs/model.md for which of the rest is reconstruction.

Blocks = Annotated[int, Meta(ge=1, le=1024)]
Token = Annotated[str, Meta(min_length=1, max_length=128)]


class LDLMConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes and constants of one LDLM.

    The defaults are the published model. Fields marked R are reconstruction choices of this
    project, kept as fields because the authors' code may differ.

    The bounds refuse mistakes, sizes that no machine holds, and constants that float32 would
    turn into 0 or infinity; they are no recommendation. They hold in Python as in a file. 50 is
    kept as 50.0, so that equal configs have one text and one hash.

    Raises:
        ConfigError: a field is outside its bounds, or two do not fit together.
    """

    d_model: Annotated[int, Meta(ge=2, le=65_536)] = 768
    n_heads: Annotated[int, Meta(ge=1, le=1024)] = 12
    n_positions: Annotated[int, Meta(ge=1, le=1_048_576)] = 1024
    # R: GPT-2's 50257 and two added tokens explain the frozen count
    vocab_size: Annotated[int, Meta(ge=1, le=4_194_304)] = 50259
    denoiser_blocks: Blocks = 12
    encoder_blocks: Blocks = 6
    decoder_blocks: Blocks = 6
    token_blocks: Blocks = 3
    mlp_ratio: Annotated[int, Meta(ge=1, le=64)] = 4
    softcap: Annotated[float, Meta(ge=1e-3, le=1e6)] = 50.0
    norm_eps: Annotated[float, Meta(ge=1e-12, le=1.0)] = 1e-5
    time_max_period: Annotated[float, Meta(ge=1e-6, le=1e6)] = 10.0  # R
    rotary_base: Annotated[float, Meta(ge=1.0, le=1e9)] = 10000.0  # lineage
    # R: None is d_model ** -0.5
    position_scale: Annotated[float, Meta(ge=1e-6, le=1e3)] | None = None
    input_bias: bool = True  # R: bias on the denoiser's input projection
    token_final_norm: bool = False  # R: a LayerNorm before the token decoder's head
    sampler_steps: Annotated[int, Meta(ge=1, le=1_000_000)] = 1024
    t_min: Annotated[float, Meta(gt=0.0, lt=1.0)] = 0.05  # R
    tangent_d: Annotated[float, Meta(ge=1e-3, le=1e3)] = 3.0
    end_of_text: Token = "<|endoftext|>"
    # R: names of the two added tokens
    added_tokens: Annotated[tuple[Token, ...], Meta(max_length=4096)] = ("<|pad|>", "<|mask|>")

    def __post_init__(self) -> None:
        # msgspec compares with the bounds when it decodes, not when Python constructs.
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            try:
                msgspec.structs.force_setattr(self, name, msgspec.convert(value, kind))
            except msgspec.ValidationError as error:
                raise ConfigError(
                    f"the configuration's {name} is not usable",
                    expected=_words(kinds.type_info(kind)),
                    got=_shown(value),
                ) from error
        if self.d_model % self.n_heads or self.d_head % 2:
            raise ConfigError(
                "d_model does not split into heads of an even size",
                expected="d_model = n_heads * d_head with d_head even, for the rotary halves",
                got=f"d_model {self.d_model}, n_heads {self.n_heads}",
            )

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
        """The config as the text of a checkpoint's config.json. Keys of artifacts hash it."""
        return json.dumps(msgspec.structs.asdict(self), indent=2) + "\n"

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], *, source: str = "config.json") -> LDLMConfig:
        """Build a config from the fields of a JSON object.

        A field that is left out has its default. This is safe for the sizes, because each shows
        in the shape of a tensor, which is compared when the weights are read.

        Raises:
            ConfigError: a field is unknown or not usable; `source` stands in the message.
        """
        unknown = [name for name in fields if name not in _KINDS]
        if unknown:
            raise ConfigError(
                f"{source} has fields that an LDLM configuration does not have",
                expected="no fields but " + ", ".join(_KINDS),
                got=_shown(unknown),
            )
        try:
            return cls(**fields)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error.problem}", **error.details) from error

    @classmethod
    def from_json(cls, text: str, *, source: str = "config.json") -> LDLMConfig:
        """Parse a config.json; errors as in `from_dict`."""
        try:
            fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
            raise ConfigError(
                f"{source} is not a JSON object of the fields of an LDLM configuration",
                expected="{...}",
                got=str(error),
            ) from error
        return cls.from_dict({n: _value(raw) for n, raw in fields.items()}, source=source)


_KINDS: dict[str, Any] = {field.name: field.type for field in msgspec.structs.fields(LDLMConfig)}


def _value(raw: msgspec.Raw) -> object:
    """A field's value, or its text where Python cannot hold it; no field takes that type."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return raw


def _shown(value: object) -> str:
    """A value in a message: short, and without an error of its own at any size or depth."""
    if isinstance(value, msgspec.Raw):
        text = bytes(value).decode("utf-8", "replace")
        return text if len(text) <= 40 else text[:40] + "..."
    try:
        return reprlib.repr(value)
    except ValueError:  # Python prints no integer of more than 4300 digits
        return f"{type(value).__name__}, too long to print"


def _words(kind: kinds.Type) -> str:
    """What a field may be, from its type: "an integer, >= 1, <= 64"."""
    match kind:
        case kinds.UnionType(types=types):
            return " or ".join(_words(one) for one in types)
        case kinds.VarTupleType(item_type=item, max_length=most):
            return f"a list of at most {most}, each {_words(item)}"
        case kinds.StrType(min_length=least, max_length=most):
            return f"a string of {least} to {most} characters"
        case kinds.IntType() | kinds.FloatType():
            signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
            bounds = ((sign, getattr(kind, name)) for name, sign in signs.items())
            word = "an integer" if isinstance(kind, kinds.IntType) else "a number"
            return ", ".join([word, *(f"{s} {bound}" for s, bound in bounds if bound is not None)])
        case kinds.BoolType():
            return "true or false"
    return "null"


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
