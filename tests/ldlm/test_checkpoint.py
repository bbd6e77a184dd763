"""Checkpoints: exact round trips, and a clear word for each way they can be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ldlm import LDLM, PRESETS, files
from ldlm import checkpoint as checkpoints
from ldlm.errors import CheckpointError, ConfigError, DiskSpaceError, LDLMError
from ldlm.initialise import DRAWS, initialise

Header = dict[str, Any]


def test_round_trip_is_exact(small: LDLM, small_checkpoint: Path) -> None:
    loaded = LDLM.from_checkpoint(small_checkpoint)
    assert loaded.config == small.config
    assert loaded.tokenizer_json == small.tokenizer_json
    theirs = small.state_dict()
    assert loaded.state_dict().keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in loaded.state_dict().items())
    assert sorted(p.name for p in small_checkpoint.iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip # rows, as a table
    t = torch.tensor([0.5])
    x = torch.randn(1, 3, small.config.d_model)
    assert torch.equal(loaded.denoiser(x, t, x), small.denoiser(x, t, x))


def damage(folder: Path, change: str) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "denoiser.blocks.0.qkv.weight"
    if change == "missing":
        del tensors[name]
    elif change == "extra":
        tensors["denoiser.blocks.9.qkv.weight"] = tensors[name].clone()
    elif change == "shape":
        tensors[name] = tensors[name].T.contiguous()
    elif change == "dtype":
        tensors[name] = tensors[name].half()
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("missing", ["lacks a tensor", "denoiser.blocks.0.qkv.weight", "expected: ", "384, 128"]),
        ("extra", ["does not know", "denoiser.blocks.9.qkv.weight", "an extra tensor"]),
        ("shape", ["another shape", "denoiser.blocks.0.qkv.weight", "[384, 128]", "[128, 384]"]),
        ("dtype", ["denoiser.blocks.0.qkv.weight", "F32", "F16"]),
    ],
)
def test_wrong_tensors_are_named(own_checkpoint: Path, change: str, words: list[str]) -> None:
    damage(own_checkpoint, change)
    with pytest.raises(CheckpointError) as caught:
        LDLM.from_checkpoint(own_checkpoint)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("size", [0, 4, 8, 100, -1])
def test_a_cut_file_is_named(own_checkpoint: Path, size: int) -> None:
    path = own_checkpoint / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:size])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        LDLM.from_checkpoint(own_checkpoint)


def test_no_checkpoint_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        LDLM.from_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="no config in it"):
        LDLM.from_checkpoint(tmp_path)


def test_a_wrong_config_is_named(own_checkpoint: Path) -> None:
    path = own_checkpoint / "config.json"
    fields = json.loads(path.read_text())
    for text in (json.dumps({**fields, "softcup": 50.0}), json.dumps({**fields, "n_heads": 3})):
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            LDLM.from_checkpoint(own_checkpoint)
        assert str(path) in str(caught.value)


def test_a_config_may_leave_out_what_has_a_default(small: LDLM, own_checkpoint: Path) -> None:
    path = own_checkpoint / "config.json"
    fields = json.loads(path.read_text())
    del fields["position_scale"]
    path.write_text(json.dumps(fields))
    assert LDLM.from_checkpoint(own_checkpoint).config == small.config
    del fields["d_model"]  # 768 by default, and the weights are of 128
    path.write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="another shape"):
        LDLM.from_checkpoint(own_checkpoint)


def test_saving_keeps_what_is_not_a_checkpoint(small: LDLM, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="in the way"):
        small.save_checkpoint(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_failed_save_leaves_the_old_checkpoint(
    small: LDLM, own_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {p.name: p.read_bytes() for p in own_checkpoint.iterdir()}
    monkeypatch.setattr("ldlm.files.free_bytes", lambda _: 1000)
    with pytest.raises(DiskSpaceError, match="1,000 bytes free"):
        small.save_checkpoint(own_checkpoint)
    monkeypatch.undo()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(DiskSpaceError):
        small.save_checkpoint(own_checkpoint)
    assert {p.name: p.read_bytes() for p in own_checkpoint.iterdir()} == before
    assert [p.name for p in own_checkpoint.parent.iterdir()] == [own_checkpoint.name]


def test_space_for_the_weights_is_asked_for(
    small: LDLM, own_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is free holds the config and the tokenizer, and not the weights beside them."""

    def never(*_: object) -> None:
        raise AssertionError("begun on a disk that cannot hold it")

    monkeypatch.setattr("ldlm.files.free_bytes", lambda _: 1 << 20)
    monkeypatch.setattr("safetensors.torch.save_file", never)
    with pytest.raises(DiskSpaceError, match="1,048,576 bytes free"):
        small.save_checkpoint(own_checkpoint)


def test_a_checkpoint_is_replaced_only_by_force(own_checkpoint: Path, tmp_path: Path) -> None:
    checkpoints.require_new(own_checkpoint, force=True)
    checkpoints.require_new(tmp_path / "nothing", force=False)
    with pytest.raises(CheckpointError, match="a checkpoint already"):
        checkpoints.require_new(own_checkpoint, force=False)


def test_saving_replaces_an_older_checkpoint(small: LDLM, own_checkpoint: Path) -> None:
    other = initialise(LDLM(small.config), seed=1)
    other.save_checkpoint(own_checkpoint)
    loaded = LDLM.from_checkpoint(own_checkpoint)
    assert torch.equal(loaded.denoiser.output.weight, other.denoiser.output.weight)
    assert loaded.tokenizer_json is None  # nothing of the old one is left
    assert [p.name for p in own_checkpoint.parent.iterdir()] == [own_checkpoint.name]


def test_initialisation_draws_every_tensor(small: LDLM) -> None:
    """Nothing that parity multiplies by is 0 or 1, and a seed is a seed."""
    for name, tensor in small.state_dict().items():
        assert tensor.std() > 0.005, name
        assert torch.count_nonzero(tensor) >= 0.999 * tensor.numel(), name
    again = initialise(LDLM(PRESETS["small"]), seed=0).state_dict()
    other = initialise(LDLM(PRESETS["small"]), seed=1).state_dict()
    name = "denoiser.output.weight"
    assert all(torch.equal(value, again[key]) for key, value in small.state_dict().items())
    assert not torch.equal(small.state_dict()[name], other[name])
    assert all(draw.reason for draw in DRAWS)


def test_draws_have_their_mean_and_deviation(small: LDLM) -> None:
    """Weights that keep the variance of what they multiply; and no two tensors are alike."""
    state = small.state_dict()
    for name in ("denoiser.blocks.0.mlp.up.weight", "denoiser.blocks.0.mlp.down.weight"):
        weight = state[name]
        assert float(weight.std()) == pytest.approx(weight.shape[1] ** -0.5, rel=0.02)
    for name, mean, std in (("latent_std", 1.0, 0.1), ("latent_mean", 0.0, 0.1)):
        assert float(state[name].mean()) == pytest.approx(mean, abs=0.04)
        assert float(state[name].std()) == pytest.approx(std, rel=0.25)
    twins = [state[f"token_decoder.blocks.{i}.q.weight"] for i in range(2)]
    assert abs(float((twins[0] * twins[1]).sum() / twins[0].norm() / twins[1].norm())) < 0.05


def test_constructors_give_the_papers_start() -> None:
    model = LDLM(PRESETS["small"])
    state = model.state_dict()
    zero = [n for n in state if "modulation" in n or n.startswith("denoiser.output")]
    assert zero
    assert all(not torch.any(state[name]) for name in zero + [n for n in state if "scale" in n])
    assert all(torch.all(v == 1) for n, v in state.items() if n.endswith(("gain", "norm1.weight")))
    assert torch.any(state["denoiser.blocks.0.out.weight"])
    assert torch.all(state["latent_std"] == 1)  # the latents as they are
    assert not torch.any(state["latent_mean"])


def test_header_is_read_without_the_tensors(small_checkpoint: Path) -> None:
    entries = checkpoints.read_header(small_checkpoint / "model.safetensors")
    assert entries["latent_mean"] == checkpoints.TensorEntry("F32", (128,))


def with_header(content: bytes, change: Callable[[Header], Header | bytes]) -> bytes:
    """The same file with a changed header, as an object or as its text."""
    length = int.from_bytes(content[:8], "little")
    header = change(json.loads(content[8 : 8 + length]))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def one(**change: object) -> Callable[[Header], Header]:
    """A change of one tensor's entry."""
    return lambda header: {**header, "latent_mean": {**header["latent_mean"], **change}}


@pytest.mark.parametrize(
    "change",
    [
        lambda header: one(data_offsets=[o + 4 for o in header["latent_mean"]["data_offsets"]])(
            header
        ),
        one(dtype="F128"),
        one(dtype="F16"),
        one(shape=[-128]),
        one(shape=[2**62, 2**62]),
        one(shape="128"),
        lambda header: {**header, "latent_mean": 5},
        lambda header: {**header, "more": header["latent_mean"]},
        lambda header: {n: entry for n, entry in header.items() if n != "latent_mean"},
        lambda _: b"[1]",
        lambda _: b'{"a":' * 100_000,
        lambda _: b"\xff\xfe",
    ],
)
def test_a_wrong_header_is_named(
    own_checkpoint: Path, change: Callable[[Header], Header | bytes]
) -> None:
    path = own_checkpoint / "model.safetensors"
    path.write_bytes(with_header(path.read_bytes(), change))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a readable"):
        checkpoints.read_header(path)


def test_headers_of_dtypes_that_numpy_lacks(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.tensor(1.0)}, path)
    assert checkpoints.read_header(path) == {
        "a": checkpoints.TensorEntry("BF16", (2, 3)),
        "b": checkpoints.TensorEntry("F32", ()),
    }


@pytest.mark.parametrize("content", [b"", b"\x80\x04 a pickle", bytes([255] * 100), b"a" * 8])
def test_what_is_no_safetensors_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="copy it again"):
        checkpoints.read_header(path)
    for missing in (tmp_path / "nothing", tmp_path):
        with pytest.raises(CheckpointError, match="no weights"):
            checkpoints.read_header(missing)


def test_text_files_that_are_no_text(own_checkpoint: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        content = (own_checkpoint / name).read_bytes()
        (own_checkpoint / name).write_bytes(b"\xff\xfe\x00")
        with pytest.raises(CheckpointError, match="not a readable"):
            LDLM.from_checkpoint(own_checkpoint)
        (own_checkpoint / name).write_bytes(content)


@pytest.mark.parametrize("extra", ["optimizer.bin", "subfolder"])
def test_a_checkpoint_with_other_files_is_not_replaced(
    small: LDLM, own_checkpoint: Path, extra: str
) -> None:
    """What hub downloads look like: a config.json and files that are not ours."""
    (own_checkpoint / extra).mkdir() if extra == "subfolder" else (
        own_checkpoint / extra
    ).write_bytes(b"years of work")
    with pytest.raises(CheckpointError, match=extra):
        small.save_checkpoint(own_checkpoint)
    assert (own_checkpoint / extra).exists()


def test_a_file_in_the_path_is_named(small: LDLM, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(CheckpointError, match="a file at"):
            small.save_checkpoint(folder)


def test_a_failed_replacement_puts_the_old_one_back(
    small: LDLM, own_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {p.name: p.read_bytes() for p in own_checkpoint.iterdir()}
    rename = Path.rename

    def fail_on_new(self: Path, target: Path) -> Path:
        if self.name == "checkpoint" and target == own_checkpoint:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    folder = own_checkpoint.rename(own_checkpoint.parent / "mine")
    own_checkpoint = folder
    monkeypatch.setattr(Path, "rename", fail_on_new)
    monkeypatch.setattr(files, "_exchange", lambda *_: False)  # a system without it
    with pytest.raises(OSError, match="Input/output"):
        small.save_checkpoint(folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_an_older_checkpoint_and_a_new_one_change_places(
    small: LDLM, own_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At no moment is there none: nothing is renamed away first."""
    before = (own_checkpoint / "model.safetensors").stat().st_ino

    def never(path: Path, target: Path) -> Path:
        raise AssertionError(f"{path} was moved to {target}")

    monkeypatch.setattr(Path, "rename", never)
    small.save_checkpoint(own_checkpoint)
    assert (own_checkpoint / "model.safetensors").stat().st_ino != before
    assert not list(own_checkpoint.parent.glob(".partial*"))


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    import os

    dead, alive = tmp_path / ".partial-999999999-x", tmp_path / f".partial-{os.getppid()}-y"
    dead.mkdir()
    alive.mkdir()
    with files.staging_folder(tmp_path):
        assert not dead.exists()
        assert alive.exists()


def test_errors_are_one_family() -> None:
    error = CheckpointError("wrong", stage="s", tensor="t", expected=1, got=2, remedy="r")
    assert isinstance(error, LDLMError)
    assert str(error).splitlines() == [
        "wrong", "  stage:    s", "  tensor:   t", "  expected: 1", "  got:      2",
        "  remedy:   r",
    ]  # fmt: skip # rows, as a table
