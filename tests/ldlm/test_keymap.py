"""Bringing in checkpoints with other names: exact, and strict both ways."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ldlm import LDLM, PRESETS, LDLMConfig
from ldlm.errors import CheckpointError, ConfigError, LDLMError
from ldlm.keymap import KeyMap, TensorRule, convert, read_map, rename

MAP = """
preset = "small"
ignore = ["ema.*"]

[[tensor]]
theirs = "net.{name*}"
ours = "{name*}"

[[tensor]]
theirs = ["split.{i}.q", "split.{i}.k", "split.{i}.v"]
ours = "denoiser.blocks.{i}.qkv.weight"

[[tensor]]
theirs = "joined.{i}.qkv"
ours = ["token_decoder.blocks.{i}.q.weight", "token_decoder.blocks.{i}.k.weight", "token_decoder.blocks.{i}.v.weight"]

[[tensor]]
theirs = "head.kernel"
ours = "token_decoder.head.weight"
transpose = true
"""  # noqa: E501


def foreign(model: LDLM) -> dict[str, torch.Tensor]:
    """The same tensors under other names: some split, some joined, one transposed."""
    ours = dict(model.state_dict())
    theirs = {"ema.step": torch.zeros(1)}
    for i in range(2):
        parts = ours.pop(f"denoiser.blocks.{i}.qkv.weight").chunk(3)
        theirs.update({f"split.{i}.{n}": p.clone() for n, p in zip("qkv", parts, strict=True)})
        parts = [ours.pop(f"token_decoder.blocks.{i}.{n}.weight") for n in "qkv"]
        theirs[f"joined.{i}.qkv"] = torch.cat(parts)
    theirs["head.kernel"] = ours.pop("token_decoder.head.weight").T.contiguous()
    return theirs | {f"net.{name}": tensor for name, tensor in ours.items()}


@pytest.fixture
def source(small: LDLM, tmp_path: Path) -> Path:
    path = tmp_path / "theirs.safetensors"
    save_file(foreign(small), path)
    return path


@pytest.fixture
def mapping(tmp_path: Path) -> Path:
    path = tmp_path / "map.toml"
    path.write_text(MAP)
    return path


def test_every_tensor_arrives(small: LDLM, source: Path, mapping: Path, tmp_path: Path) -> None:
    convert(source, read_map(mapping), tmp_path / "ours", small.tokenizer_json)
    loaded = LDLM.from_checkpoint(tmp_path / "ours").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in small.state_dict().items())


def test_half_sources_become_float32(
    small: LDLM, source: Path, mapping: Path, tmp_path: Path
) -> None:
    save_file({name: value.bfloat16() for name, value in foreign(small).items()}, source)
    convert(source, read_map(mapping), tmp_path / "ours", None)
    assert LDLM.from_checkpoint(tmp_path / "ours").denoiser.output.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('ignore = ["ema.*"]', "", "unused"),
        ('theirs = "head.kernel"', 'theirs = "head.kernal"', "matches no tensor"),
        ("transpose = true", "", "another shape"),
        ('ours = "token_decoder.head.weight"', 'ours = "token_decoder.tail.weight"', "lacks"),
        ('ours = "token_decoder.head.weight"', 'ours = "latent_mean"', "same tensor"),
        ("split.{i}.k", "split.{i}.x", "joins a tensor"),
        ('ours = "denoiser.blocks.{i}.qkv', 'ours = "denoiser.blocks.{j}.qkv', "place"),
        ('preset = "small"', 'preset = "smal"', "no such preset"),
        ('preset = "small"', "", "not a mapping file"),
        ("transpose = true", "transposed = true", "not a mapping file"),
        ("[[tensor]]", "[[tensor]", "not a mapping file"),
    ],
)
def test_mistakes_are_named(
    source: Path, mapping: Path, tmp_path: Path, old: str, new: str, words: str
) -> None:
    mapping.write_text(MAP.replace(old, new, 1))
    with pytest.raises(LDLMError, match=words):
        convert(source, read_map(mapping), tmp_path / "ours", None)
    assert not (tmp_path / "ours").exists()


def renamed(theirs: str, ours: tuple[str, ...], source: dict[str, torch.Tensor]) -> list[str]:
    rule = TensorRule((theirs,), ours, transpose=False)
    return sorted(rename(source, KeyMap(PRESETS["small"], (rule,), ())))


def test_a_tensor_splits_into_equal_parts_alone() -> None:
    assert renamed("a", ("x", "y"), {"a": torch.zeros(4, 2)}) == ["x", "y"]
    with pytest.raises(CheckpointError, match="equal parts"):
        renamed("a", ("x", "y"), {"a": torch.zeros(5, 2)})


def test_a_place_without_a_star_holds_no_dot() -> None:
    source = {"a.0.w": torch.zeros(1), "a.b.c.w": torch.zeros(1)}
    assert renamed("a.{i*}.w", ("{i*}",), source) == ["0", "b.c"]
    with pytest.raises(CheckpointError, match="unused") as caught:
        renamed("a.{i}.w", ("{i}",), source)
    assert caught.value.details["tensor"] == "a.b.c.w"


def test_one_string_is_one_pattern(
    small: LDLM, source: Path, mapping: Path, tmp_path: Path
) -> None:
    """ "ema.*" taken letter by letter would contain "*", which ignores everything."""
    mapping.write_text(MAP.replace('["ema.*"]', '"ema.*"'))
    save_file(foreign(small) | {"junk": torch.zeros(1)}, source)
    with pytest.raises(CheckpointError, match="unused"):
        convert(source, read_map(mapping), tmp_path / "ours", None)


def test_two_files_with_one_name_are_refused(
    small: LDLM, source: Path, mapping: Path, tmp_path: Path
) -> None:
    save_file({"ema.step": torch.ones(1)}, tmp_path / "zz.safetensors")
    with pytest.raises(CheckpointError, match="of one name"):
        convert(tmp_path, read_map(mapping), tmp_path / "x" / "ours", None)


def test_the_source_is_not_replaced(source: Path, mapping: Path) -> None:
    for target in (source.parent, source):
        with pytest.raises(CheckpointError, match="replace the source"):
            convert(source, read_map(mapping), target, None)
    assert source.exists()


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ('theirs = []\nours = "latent_mean"', "name a tensor each"),
        ('theirs = "net.latent_mean"\nours = []', "name a tensor each"),
        ('theirs = ""\nours = "latent_mean"', "theirs"),
        ('theirs = ["net.a", ""]\nours = "latent_mean"', "theirs"),
        ('theirs = 5\nours = "latent_mean"', "theirs"),
        ('theirs = ["net.a", 5]\nours = "latent_mean"', "theirs"),
        ('theirs = {a = "b"}\nours = "latent_mean"', "theirs"),
        ('theirs = 1979-05-27\nours = "latent_mean"', "theirs"),
        ('ours = "latent_mean"', "theirs"),
        ('theirs = "net.latent_mean"', "ours"),
        ('theirs = "a"\nours = "b"\ntranspose = "false"', "transpose"),
        ('theirs = "a"\nours = "b"\ntranspose = 1', "transpose"),
        ('theirs = "a"\nours = "b"\ntranspose = []', "transpose"),
        ('theirs = "a"\nours = "b"\ntransposed = true', "transposed"),
        ('theirs = "net.{0}"\nours = "{0}"', "a place is written"),
        ('theirs = "{1}"\nours = "latent_mean"', "a place is written"),
        ('theirs = "net.{i"\nours = "latent_mean"', "a place is written"),
        ('theirs = "net.{i\u00b2}"\nours = "latent_mean"', "a place is written"),
        ('theirs = "net.*"\nours = "latent_mean"', "a place is written"),
        ('theirs = "net.a"\nours = "{}"', "a place is written"),
    ],
)
def test_odd_rules_are_named(mapping: Path, table: str, words: str) -> None:
    mapping.write_text(f'preset = "small"\n[[tensor]]\n{table}\n')
    with pytest.raises(ConfigError, match=words) as caught:
        read_map(mapping)
    assert f"{mapping} is not a mapping file" in str(caught.value)
    assert "$.tensor[0]" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "preset = []",
        "preset = 5",
        "preset = false",
        'preset = ""',
        "config = []",
        'config = "base"',
        'preset = "small"\n[config]\nd_model = 128',
        "config = {}\npreset = 'small'",
        'preset = "small"\nignore = 5',
        'preset = "small"\nignore = [[]]',
        'preset = "small"\ntensor = "a"',
        'preset = "small"\ntensor = {}',
        'preset = "small"\ntensor = [5]',
        'preset = "small"\nmore = 1',
        "[config]\nd_model = " + "9" * 400,
        "[config]\nd_model = " + "9" * 5000,
        "[config]\nd_model = " + "[" * 100_000,
        "[config]\nd_model = " + "[" * 300 + "]" * 300,
        "[config]\nd_model" + ".a" * 3000 + " = 1",
        "a" + ".a" * 3000 + " = 1",
        "[config]\nsoftcap = nan",
        "[config]\nsoftcap = 1e999",
        "[config]\nsoftcup = 50.0",
        "[config]\nt_min = 1979-05-27",
    ],
    ids=lambda text: text[:40],
)
def test_odd_files_are_named(mapping: Path, text: str) -> None:
    mapping.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_map(mapping)
    assert len(str(caught.value)) < 1000


def test_a_config_table_gives_what_differs(mapping: Path) -> None:
    mapping.write_text('[config]\nd_model = 512\nn_heads = 8\nadded_tokens = ["<|pad|>"]\n')
    expected = LDLMConfig(d_model=512, n_heads=8, added_tokens=("<|pad|>",))
    assert read_map(mapping).config == expected
    mapping.write_text("config = {}")
    assert read_map(mapping).config == PRESETS["base"]


def test_no_character_of_a_name_is_a_pattern(mapping: Path, tmp_path: Path) -> None:
    """A dot is a dot, and a place of one name has one value."""
    tensors = {name: torch.ones(1) for name in ("net.1.a.1", "net.1.a.2", "netx1xax1", "net.+")}
    mapping.write_text('preset = "small"\n[[tensor]]\ntheirs = "net.{i}.a.{i}"\nours = "x.{i}"\n')
    keymap = dataclasses.replace(read_map(mapping), ignore=("netx*", "net.1.a.2", "net.+"))
    assert rename(tensors, keymap).keys() == {"x.1"}
    mapping.write_text('preset = "small"\n[[tensor]]\ntheirs = "net.+"\nours = "x"\n')
    keymap = dataclasses.replace(read_map(mapping), ignore=("net*1*",))
    assert rename(tensors, keymap).keys() == {"x"}


def test_tensors_that_cannot_be_joined(mapping: Path, tmp_path: Path) -> None:
    mapping.write_text('preset = "small"\n[[tensor]]\ntheirs = ["a", "b"]\nours = "latent_mean"\n')
    for a in (torch.zeros(3, 4), torch.tensor(1.0)):
        save_file({"a": a, "b": torch.zeros(3, 5)}, tmp_path / "x.safetensors")
        with pytest.raises(CheckpointError, match="cannot be joined"):
            convert(tmp_path / "x.safetensors", read_map(mapping), tmp_path / "ours", None)


def test_pickles_are_not_read(mapping: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"x": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match="run code"):
        convert(path, read_map(mapping), tmp_path / "ours", None)
    with pytest.raises(CheckpointError, match="no weights"):
        convert(tmp_path / "nothing", read_map(mapping), tmp_path / "ours", None)
    with pytest.raises(ConfigError, match="not a mapping file"):
        read_map(tmp_path / "nothing.toml")
