"""`ldlm export` and a stand-in for `ldlm build` that take a fraction of a second.

Run as a program: `python stub_export.py CHECKPOINT FOLDER PRECISIONS [LOG]`. Only what makes the
files' content is replaced; keys, locks, staging and commits are the product's own. Imports no
torch, so that a process can be killed at every moment in a test; see `killed_export`.
"""

from __future__ import annotations

import os
import sys
import time
import types
from pathlib import Path
from typing import Any

from engines.artifacts.build import Build
from engines.artifacts.digests import text_digest
from engines.artifacts.export import Export
from engines.compile.target import Target
from engines.tensorrt.profiles import profiles
from export.stages import stages_of
from ldlm import checkpoint as checkpoints
from ldlm import files
from ldlm.config import PRESETS

PART, DELAY = 20_000, 0.002  # bytes at a time, and seconds between


def content(weights: str, precision: str, name: str) -> bytes:
    """What a file holds: a function of what it was made from."""
    return (f"{weights} {precision} {name} ".encode() * 2000)[: 5 * PART]


def write_slowly(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for start in range(0, len(data), PART):
            file.write(data[start : start + PART])
            file.flush()
            time.sleep(DELAY)


def install(log: Path | None = None) -> None:
    """Put the stand-ins where the product looks for the real ones."""

    class Model:
        @classmethod
        def from_checkpoint(cls, folder: Path) -> Model:
            model = cls()
            model.weights = files.sha256(folder / checkpoints.WEIGHTS)  # type: ignore[attr-defined]
            return model

    def note(what: str) -> None:
        if log is not None:
            with log.open("a") as file:
                file.write(f"{what} {os.getpid()}\n")

    def export_stage(model: Any, weights: str, precision: str, folder: Path) -> list[Any]:
        note(f"export {precision} {weights}")
        specs = stages_of(weights)
        for data in {folder / spec.data for spec in specs}:
            write_slowly(data, content(model.weights, precision, data.name))
        graphs = []
        for spec in specs:
            path = folder / f"{spec.name}.onnx"
            write_slowly(path, content(model.weights, precision, path.name))
            data = folder / spec.data
            graphs.append(types.SimpleNamespace(spec=spec, path=path, data=data, evidence={}))
        return graphs

    def build_engine(path: Path, spec: Any, *_: Any, sms: Any, **__: Any) -> Any:
        note(f"build {path.parts[-3]} {spec.name}")
        time.sleep(0.02)
        plan = text_digest(path.read_bytes().decode() + str(sms)).encode() * 1000
        return types.SimpleNamespace(
            plan=plan, sms=tuple(sms), refused={}, builder={"version": "1.7"}, seconds=0.0
        )

    for name, members in (
        ("export.exporter", {"export_stage": export_stage}),
        ("ldlm.model", {"LDLM": Model}),
        ("engines.compile.rtx", {"build_engine": build_engine}),
    ):
        module = types.ModuleType(name)
        vars(module).update(members)
        sys.modules[name] = module


def run(checkpoint: Path, folder: Path, precisions: list[str]) -> None:
    Export(checkpoint, folder, precisions).run(lambda _: None)
    ranges = profiles(PRESETS["small"])
    Build(folder, Target(("sm89",)), ranges).run(precisions, lambda *_: None)


if __name__ == "__main__":
    install(Path(sys.argv[4]) if len(sys.argv) > 4 else None)
    run(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(","))
