"""ldlm engines: export, proof and build of every component, side by side or one after the other."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx_ir as ir
import pytest
from files_of import graph_path

from engines import Artifacts
from engines.artifacts import folder as folders
from engines.artifacts.ingredients import Decision
from engines.artifacts.manifest import FileEntry
from engines.pipeline import Asked, make_engines
from engines.proof.saved import read
from export.stages import compiled, components
from ldlm import files
from ldlm.errors import ConfigError, ParityError


def make(
    checkpoint: Path, folder: Path, *precisions: str, workers: int = 1, **words: str
) -> dict[str, list[Decision]]:
    asked = Asked(checkpoint, folder, precisions, workers=workers, **words)  # type: ignore[arg-type]
    return make_engines(asked, lambda _: None)


def test_only_what_is_missing_is_done(own_artifacts: Path, small_checkpoint: Path) -> None:
    """These were exported and built, and never verified."""
    made = make(small_checkpoint, own_artifacts, "fp32")
    names = [f"fp32 {component}" for component in components()]
    assert made["verify"] == [Decision(name, ("not verified yet",)) for name in names]
    assert made["export"] == [Decision(name, ()) for name in names]
    assert [decision.reasons for decision in made["build"]] == [()] * len(compiled())
    again = make(small_checkpoint, own_artifacts, "fp32")
    assert again["verify"] == [Decision(name, ()) for name in names]
    other = make(small_checkpoint, own_artifacts, "fp32", sms="89")
    assert other["verify"] == again["verify"]
    assert {decision.reasons for decision in other["build"]} == {("targets changed",)}


def test_a_gate_that_fails_stops_what_comes_after_it(
    own_artifacts: Path, small_checkpoint: Path
) -> None:
    path = graph_path(own_artifacts, "fp32", "latent_decoder")
    model = ir.load(path)
    next(n for n in model.graph if n.op_type == "Gelu").attributes["approximate"] = ir.AttrString(
        "approximate", "tanh"
    )
    ir.save(model, path)
    with folders.updated(own_artifacts) as manifest:
        for entry in list(manifest.graphs):
            if (entry.precision, entry.stage) == ("fp32", "latent_decoder"):
                place = path.parent.relative_to(own_artifacts).as_posix()
                file = FileEntry.of(path.parent, path).under(place)
                manifest.put_graph(type(entry)(**{**vars(entry), "graph": file}))
    with pytest.raises(ParityError, match="'graph' in fp32"):
        make(small_checkpoint, own_artifacts, "fp32")
    proof = read(own_artifacts).content
    assert proof is not None
    assert not proof.passed
    manifest = Artifacts(own_artifacts).manifest
    assert manifest.engine("fp32", "latent_decoder", "rtx") is None, "no engine of a failed graph"


@pytest.mark.parametrize(
    ("precision", "words"), [("int8", "rtx does not run"), ("fp12", "no such precision")]
)
def test_what_cannot_be_is_refused_before_anything_is_made(
    small_checkpoint: Path, tmp_path: Path, precision: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make(small_checkpoint, tmp_path / "out", "fp32", precision)
    assert not (tmp_path / "out").exists()


@pytest.mark.long(ci=True)
def test_side_by_side_gives_the_files_of_one_after_the_other(
    small_checkpoint: Path, small_artifacts: Path, tmp_path: Path
) -> None:
    """In two worker processes; and another checkpoint's folder is replaced as a whole."""
    folder = Path(shutil.copytree(small_artifacts, tmp_path / "out"))
    with folders.updated(folder) as manifest:
        manifest.checkpoint = "0" * 64
    made = make(small_checkpoint, folder, "fp32", workers=2)
    assert [decision.what for decision in made["verify"]] == [f"fp32 {c}" for c in components()]
    assert all(decision.reasons for kind in made.values() for decision in kind)
    mine, theirs = Artifacts(folder).manifest, Artifacts(small_artifacts).manifest
    for entry in mine.graphs:
        assert entry.graph.sha256 == theirs.graph(entry.precision, entry.stage).graph.sha256
        assert entry.data.sha256 == theirs.graph(entry.precision, entry.stage).data.sha256
    assert {entry.precision for entry in mine.graphs} == {"fp32"}
    assert len(mine.engines) == len(compiled())
    assert Artifacts(folder).check() == len(mine.files())
    assert not list(folder.glob(f"{files.PARTIAL}*"))
