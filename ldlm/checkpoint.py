"""Checkpoint folders: model.safetensors, config.json, tokenizer.json. Nothing is pickled.

The tensor names are the reference model's own (docs/model.md lists them); `ldlm convert`
brings checkpoints with other names into this form.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from ldlm import files
from ldlm.config import LDLMConfig
from ldlm.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"


@dataclass(frozen=True)
class TensorEntry:
    """What a safetensors header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]


def read_config(folder: Path) -> LDLMConfig:
    """The config of a checkpoint folder. Imports no torch.

    Raises:
        CheckpointError: the folder or its config.json is not there.
        ConfigError: the config is not one of an LDLM.
    """
    for path, what in ((folder, "checkpoint folder"), (folder / CONFIG, "config in it")):
        if not path.exists():
            raise CheckpointError(
                f"no checkpoint at {folder}",
                expected=f"a folder with {WEIGHTS}, {CONFIG} and {TOKENIZER}",
                got=f"no {what}",
                remedy="ldlm init makes one, ldlm convert brings one in",
            )
    text = files.read_text(folder / CONFIG, CheckpointError, "config")
    return LDLMConfig.from_json(text, source=str(folder / CONFIG))


def read_tokenizer(folder: Path) -> str | None:
    """The text of a checkpoint's tokenizer.json, or None where there is none."""
    path = folder / TOKENIZER
    return files.read_text(path, CheckpointError, "tokenizer") if path.exists() else None


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Names, dtypes and shapes in a safetensors file, without reading the tensors.

    Raises:
        CheckpointError: the file is not there, is not safetensors, or is cut short.
    """
    if not path.is_file():
        raise CheckpointError("no weights", expected=str(path), got="no such file")
    try:
        with safe_open(path, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: TensorEntry(tensor.get_dtype(), tuple(tensor.get_shape()))
                for name, tensor in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a readable safetensors file, or is damaged",
            got=str(error),
            remedy="copy it again",
        ) from error


def require_tensors(
    found: dict[str, TensorEntry], expected: dict[str, tuple[int, ...]], source: Path
) -> None:
    """Compare names, shapes and dtypes both ways.

    Raises:
        CheckpointError: naming the first missing, extra or wrong tensor and how many there are.
    """
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    for names, problem, got in (
        (missing, "lacks a tensor that the config asks for", "no such tensor"),
        (extra, "holds a tensor that the config does not know", "an extra tensor"),
    ):
        if names:
            raise CheckpointError(
                f"{source} {problem}",
                tensor=names[0],
                expected=expected.get(names[0], "only the model's tensors"),
                got=got + (f" (and {len(names) - 1} more like it)" if len(names) > 1 else ""),
                remedy="ldlm convert --map renames tensors",
            )
    for name, shape in expected.items():
        entry = found[name]
        if entry.shape != shape or entry.dtype != "F32":
            raise CheckpointError(
                f"{source} holds a tensor of another shape or dtype",
                tensor=name,
                expected=f"F32 {list(shape)}",
                got=f"{entry.dtype} {list(entry.shape)}",
                remedy="ldlm convert brings other dtypes to float32; a shape needs its own config",
            )


def write(
    folder: Path, config: LDLMConfig, tensors: dict[str, Tensor], tokenizer_json: str | None
) -> None:
    """Write a checkpoint folder, whole or not at all, in place of an older one.

    Raises:
        CheckpointError: something else than a checkpoint is at `folder`.
        DiskSpaceError: the disk is full.
    """
    from safetensors.torch import save_file

    require_replaceable(folder)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    files.require_space(folder, size + (1 << 20))
    with files.staging_folder(folder.parent) as staging:
        part = staging / "checkpoint"
        part.mkdir()
        try:
            save_file(tensors, part / WEIGHTS)
        except SafetensorError as error:  # it hides the OSError of a full disk in its text
            raise files.no_space(folder, f"{size:,}") from error
        (part / CONFIG).write_text(config.to_json(), "utf-8")
        if tokenizer_json is not None:
            (part / TOKENIZER).write_text(tokenizer_json, "utf-8")
        files.publish_folder(part, folder)


def require_replaceable(folder: Path) -> None:
    """Refuse to replace what is not a checkpoint, or holds more than one.

    Raises:
        CheckpointError: something is at `folder` that is not one of a checkpoint's three files.
    """
    file = next((p for p in (folder, *folder.parents) if p.exists() and not p.is_dir()), None)
    strange = [] if file is None else [f"a file at {file}"]
    if folder.is_dir():
        ours = {WEIGHTS, CONFIG, TOKENIZER}
        strange = sorted(path.name for path in folder.iterdir() if path.name not in ours)
    if folder.resolve() == Path.cwd():
        strange.append("the current folder")
    if strange:
        raise CheckpointError(
            f"{folder} is in the way",
            expected="nothing, or an older checkpoint and no other file",
            got=", ".join(strange[:5]),
            remedy="choose another folder",
        )


def require_new(folder: Path, *, force: bool) -> None:
    """Refuse to replace a checkpoint unasked, and anything else always.

    Raises:
        CheckpointError: as `require_replaceable`, or a checkpoint is there and `force` is not set.
    """
    require_replaceable(folder)
    if not force and folder.is_dir() and any(folder.iterdir()):
        raise CheckpointError(
            "there is a checkpoint already",
            got=folder,
            remedy="choose another folder, or --force to replace it",
        )
