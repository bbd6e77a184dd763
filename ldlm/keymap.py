"""Bringing in checkpoints whose tensors have other names, by a mapping file.

A mapping is TOML:

    preset = "base"                        # or a [config] table with the fields that differ
    ignore = ["ema.*"]                     # theirs that are left behind, as glob patterns
    [[tensor]]
    theirs = "net.layers.{i}.attn.to_qkv.weight"
    ours = "denoiser.blocks.{i}.qkv.weight"
    [[tensor]]
    theirs = ["dec.{i}.q.weight", "dec.{i}.k.weight", "dec.{i}.v.weight"]   # joined along dim 0
    ours = "latent_decoder.blocks.{i}.attention.qkv.weight"
    [[tensor]]
    theirs = "head.kernel"
    ours = "token_decoder.head.weight"
    transpose = true

`{name}` stands for one run of characters without a dot, `{name*}` for one with or without; the
same on both sides. Several names in `ours` split the tensor into equal parts along dim 0. Strict
both ways: every tensor of the model is filled exactly once, and every tensor of the source is
used or ignored.
"""

import fnmatch
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from safetensors.torch import load_file
from torch import Tensor

from ldlm import checkpoint
from ldlm.config import LDLMConfig, preset
from ldlm.errors import CheckpointError, ConfigError
from ldlm.model import skeleton

_PLACE = re.compile(r"\{([A-Za-z_]\w*)(\*?)\}", re.ASCII)

Name = Annotated[str, Meta(min_length=1, max_length=1000)]
Names = Name | tuple[Name, ...]  # in a file, one name may stand without its list


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A [[tensor]] table as the file has it."""

    theirs: Names
    ours: Names
    transpose: bool = False

    def __post_init__(self) -> None:
        for name in (*_tuple(self.theirs), *_tuple(self.ours)):
            if set(_PLACE.sub("", name)) & set("{}*"):
                raise ValueError(f"a place is written {{word}} or {{word*}}, not as in {name!r}")
        if not self.theirs or not self.ours:
            raise ValueError("theirs and ours name a tensor each")


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mapping file as it is written."""

    preset: str | None = None
    config: dict[str, Any] | None = None
    ignore: Names = ()
    tensor: tuple[_Table, ...] = ()


@dataclass(frozen=True)
class TensorRule:
    """One [[tensor]] table of a mapping file."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    transpose: bool


@dataclass(frozen=True)
class KeyMap:
    """A parsed mapping file."""

    config: LDLMConfig
    rules: tuple[TensorRule, ...]
    ignore: tuple[str, ...]


def read_map(path: Path) -> KeyMap:
    """Parse a mapping file.

    Raises:
        ConfigError: it is missing, no TOML, or has fields that a mapping does not have.
    """
    try:
        found = tomllib.loads(path.read_text("utf-8"))
        document = msgspec.convert(found, _Document)
    except (OSError, ValueError, RecursionError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"{path} is not a mapping file",
            expected="preset or [config], ignore, and [[tensor]] tables; see docs/model.md",
            got=str(error),
        ) from error
    if document.config is not None and document.preset is None:
        config = LDLMConfig.from_dict(document.config, source=str(path))
    elif document.config is None and document.preset is not None:
        config = preset(document.preset)
    else:
        raise ConfigError(
            f"{path} is not a mapping file",
            expected="either preset or [config]",
            got="neither of them" if document.preset is None else "both of them",
        )
    rules = (TensorRule(_tuple(t.theirs), _tuple(t.ours), t.transpose) for t in document.tensor)
    return KeyMap(config, tuple(rules), _tuple(document.ignore))


def convert(source: Path, keymap: KeyMap, target: Path, tokenizer_json: str | None) -> None:
    """Read a .safetensors file, or a folder of them, and write a checkpoint folder.

    Raises:
        CheckpointError: the source is missing, damaged, pickled, or does not fit the mapping.
    """
    here, there = source.resolve(), target.resolve()
    if there == here or there in here.parents:
        raise CheckpointError(
            "the target would replace the source", expected="another folder", got=target
        )
    theirs = _read_source(source)
    ours = rename(theirs, keymap)
    shapes = skeleton(keymap.config).shapes()
    entries = {
        name: checkpoint.TensorEntry("F32", tuple(tensor.shape)) for name, tensor in ours.items()
    }
    checkpoint.require_tensors(entries, shapes, source)
    checkpoint.write(target, keymap.config, ours, tokenizer_json)


def rename(theirs: dict[str, Tensor], keymap: KeyMap) -> dict[str, Tensor]:
    """Apply a mapping to a source's tensors; float32 results.

    Raises:
        CheckpointError: a rule matches nothing, a tensor is filled twice, or one is left over.
    """
    used: set[str] = set()
    ours: dict[str, Tensor] = {}
    for rule in keymap.rules:
        groups = _groups(rule, theirs)
        if not groups:
            raise CheckpointError(
                "a mapping rule matches no tensor of the source",
                expected=" + ".join(rule.theirs),
                got="no such tensor",
                remedy="correct the rule or remove it",
            )
        for sources, targets in groups:
            used.update(sources)
            for name, tensor in zip(
                targets, _transform(rule, sources, targets, theirs), strict=True
            ):
                if name in ours:
                    raise CheckpointError("two mapping rules fill the same tensor", tensor=name)
                ours[name] = tensor
    left = [
        name
        for name in theirs
        if name not in used and not any(fnmatch.fnmatchcase(name, p) for p in keymap.ignore)
    ]
    if left:
        raise CheckpointError(
            "the mapping leaves tensors of the source unused",
            tensor=left[0],
            expected="every tensor mapped or listed in ignore",
            got=f"{len(left)} unused",
        )
    return ours


def _tuple(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _groups(rule: TensorRule, theirs: dict[str, Tensor]) -> list[tuple[list[str], list[str]]]:
    """The (sources, targets) that a rule stands for, one for every value of its places."""
    matcher = re.compile(_pattern(rule.theirs[0]))
    found = []
    for key in theirs:
        match = matcher.fullmatch(key)
        if match:
            values = match.groupdict()
            sources = [_fill(name, values) for name in rule.theirs]
            for name in sources:
                if name not in theirs:
                    raise CheckpointError(
                        "a mapping rule joins a tensor that the source lacks", tensor=name
                    )
            found.append((sources, [_fill(name, values) for name in rule.ours]))
    return found


def _pattern(name: str) -> str:
    """A source name with its places, as a regular expression."""
    # The split gives text, place, star, text, place, star, ..., text.
    text, *rest = _PLACE.split(name)
    pieces, seen = [re.escape(text)], set()
    for place, star, after in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        run = ".+" if star else "[^.]+"
        group = f"(?P={place})" if place in seen else f"(?P<{place}>{run})"
        pieces += [group, re.escape(after)]
        seen.add(place)
    return "".join(pieces)


def _fill(name: str, values: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        if match.group(1) not in values:
            raise ConfigError(
                "a mapping rule uses a place that its first source name does not have",
                expected=", ".join(values) or "no places",
                got=match.group(0),
            )
        return values[match.group(1)]

    return _PLACE.sub(value, name)


def _transform(
    rule: TensorRule, sources: list[str], targets: list[str], theirs: dict[str, Tensor]
) -> list[Tensor]:
    parts = [theirs[name].to(torch.float32) for name in sources]
    fits = all(part.ndim == 2 if rule.transpose else part.ndim > 0 for part in parts)
    parts = [part.T for part in parts] if fits and rule.transpose else parts
    if not fits or len({part.shape[1:] for part in parts}) != 1:
        raise CheckpointError(
            "tensors cannot be joined or transposed",
            tensor=" + ".join(sources),
            expected="shapes that differ in the first dimension alone; a matrix to transpose",
            got=[list(part.shape) for part in parts],
        )
    tensor = torch.cat(parts)
    if tensor.shape[0] % len(targets):
        raise CheckpointError(
            "a tensor does not split into equal parts",
            tensor=" + ".join(sources),
            expected=f"a first dimension that {len(targets)} divides",
            got=list(tensor.shape),
        )
    return [part.contiguous() for part in tensor.chunk(len(targets))]


def _read_source(source: Path) -> dict[str, Tensor]:
    paths = sorted(source.glob("*.safetensors")) if source.is_dir() else [source]
    if not paths or not all(path.is_file() for path in paths):
        raise CheckpointError("no weights to convert", expected="safetensors", got=str(source))
    theirs: dict[str, Tensor] = {}
    for path in paths:
        if path.suffix != ".safetensors":
            raise CheckpointError(
                "only safetensors files are read; pickled ones can run code",
                expected="a .safetensors file",
                got=str(path),
                remedy="save the state dict with safetensors.torch.save_file first",
            )
        names = checkpoint.read_header(path)
        twice = sorted(theirs.keys() & names.keys())
        if twice:
            raise CheckpointError(
                "two files of the source hold a tensor of one name", tensor=twice[0], got=path.name
            )
        theirs.update(load_file(path))
    return theirs
