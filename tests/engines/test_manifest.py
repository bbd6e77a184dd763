"""The manifest: what is in the folder, and nothing that leaves it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from engines.artifacts import folder as folders
from engines.artifacts.build import Build
from engines.artifacts.export import Export
from engines.artifacts.manifest import FileEntry, Manifest
from engines.compile.target import Target
from engines.show.summary import summary_table
from engines.tensorrt.profiles import profiles
from ldlm import LDLM, PRESETS, files
from ldlm.errors import ArtifactError, DiskSpaceError, EngineBuildError
from ldlm.initialise import initialise


def silent(*_: object) -> None:
    pass


def test_every_file_has_its_hash(small_artifacts: Path) -> None:
    manifest = folders.load(small_artifacts)
    entries = [f for e in manifest.graphs for f in (e.graph, e.data)]
    entries += [e.engine for e in manifest.engines]
    assert manifest.tokenizer is not None
    listed = {e.path: e.sha256 for e in [*entries, manifest.tokenizer]}
    on_disk = {
        path.relative_to(small_artifacts).as_posix(): files.sha256(path)
        for path in small_artifacts.rglob("*")
        if path.is_file() and path.name != "manifest.json" and not path.name.startswith(".")
    }
    assert listed == on_disk
    assert {"torch", "onnx", "tensorrt-rtx"} <= manifest.tools.keys()
    assert {rule["what"] for rule in manifest.policies["fp16"]} >= {"layer_norm", "linear"}


def test_round_trip(small_artifacts: Path, tmp_path: Path) -> None:
    manifest = folders.load(small_artifacts)
    manifest.save(tmp_path)
    assert folders.load(tmp_path) == manifest


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "onnx/../../x", ""])
def test_no_path_leaves_the_folder(path: str) -> None:
    with pytest.raises(ArtifactError, match="outside its folder"):
        FileEntry(path, "0" * 64, 1)


@pytest.mark.parametrize("name", ["../../x", "a/b", "", ".hidden"])
def test_names_are_no_paths(small_artifacts: Path, name: str) -> None:
    """A precision becomes a folder and part of a lock's name."""
    manifest = folders.load(small_artifacts)
    with pytest.raises(ArtifactError, match="unusable name"):
        dataclasses.replace(manifest.graphs[0], precision=name)
    with pytest.raises(ArtifactError, match="unusable name"):
        dataclasses.replace(manifest.engines[0], target=name)
    with pytest.raises(ArtifactError, match="unusable name"):
        dataclasses.replace(manifest.engines[0], stage="denoisers")


def test_a_precision_that_is_not_whole_is_not_taken_unasked(small_artifacts: Path) -> None:
    manifest = folders.load(small_artifacts)
    keep = [e for e in manifest.graphs if (e.precision, e.stage) != ("bf16", "denoiser")]
    manifest.graphs = keep
    assert manifest.precisions() == ["fp32", "fp16"]
    summary_table(small_artifacts, manifest)


def test_the_summary_has_one_row_for_the_two_engines_of_the_denoiser(small_artifacts: Path) -> None:
    def row(manifest: Manifest) -> tuple[str, str]:
        columns = [
            list(map(str, c.cells)) for c in summary_table(small_artifacts, manifest).columns
        ]
        place = list(zip(columns[0], columns[1], strict=True)).index(("denoiser", "fp16"))
        return columns[3][place], columns[4][place]

    manifest = folders.load(small_artifacts)
    sizes = {e.stage: e.engine.bytes for e in manifest.engines if e.precision == "fp16"}
    whole = sizes["conditioning"] + sizes["denoiser_step"]
    size, where = row(manifest)
    assert size == f"{whole / 1e6:,.1f}"
    lines = where.splitlines()
    assert lines[0] == "rtx 80 86 89 120 121"  # Turing can have a step, and no conditioning
    assert len(lines) == 2
    assert "not sm75" in lines[1]
    manifest.engines = [e for e in manifest.engines if e.stage != "conditioning"]
    size, where = row(manifest)
    assert size == f"{sizes['denoiser_step'] / 1e6:,.1f}"
    assert where.splitlines()[1] == "not built: conditioning"


def test_another_configuration_is_another_model(
    small_artifacts: Path, own_checkpoint: Path
) -> None:
    """The same weights with another softcap have the same shapes and the same sha256."""
    manifest = folders.load(small_artifacts)
    folders.require_origin(manifest, own_checkpoint)
    path = own_checkpoint / "config.json"
    path.write_text(path.read_text().replace('"softcap": 50.0', '"softcap": 30.0'))
    with pytest.raises(ArtifactError, match="another configuration"):
        folders.require_origin(manifest, own_checkpoint)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is damaged"),
        ("{}", "is damaged"),
        ("[]", "is damaged"),
        ('{"schema": 2}', "made by an older version"),
        ('{"schema": 99}', "made by another version"),
    ],
)
def test_damaged_manifests(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ArtifactError, match=words):
        folders.load(tmp_path)


@pytest.mark.parametrize("change", [{"softcup": 1.0}, {"d_model": -1}, {"n_heads": 3}])
def test_a_manifest_of_no_usable_config(own_artifacts: Path, change: dict[str, float]) -> None:
    path = own_artifacts / "manifest.json"
    document = json.loads(path.read_text())
    document["config"].update(change)
    path.write_text(json.dumps(document))
    with pytest.raises(ArtifactError, match="is damaged"):
        folders.load(own_artifacts)


def test_no_artifacts_there(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no artifacts at"):
        folders.load(tmp_path)


def test_artifacts_do_not_overwrite_something_else(small_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ArtifactError, match="in the way"):
        Export(small_checkpoint, tmp_path, ["fp32"]).run(silent)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_engines_know_the_graph_they_came_from(own_artifacts: Path, small_artifacts: Path) -> None:
    """A graph that changed drops its engines from the manifest."""
    manifest = folders.load(own_artifacts)
    entry = manifest.graph("fp32", "denoiser_step")
    manifest.put_graph(entry)
    assert len(manifest.engines) == 12
    changed = dataclasses.replace(entry, data=dataclasses.replace(entry.data, sha256="0" * 64))
    manifest.put_graph(changed)
    assert len(manifest.engines) == 11
    with pytest.raises(ArtifactError, match="exported anew"):
        manifest.put_engine(
            next(
                e
                for e in folders.load(small_artifacts).engines
                if (e.precision, e.stage) == ("fp32", "denoiser_step")
            )
        )


def test_a_manifest_deletes_nothing_outside_its_folder(
    own_artifacts: Path, small: LDLM, tmp_path: Path
) -> None:
    """A path that leaves the folder is refused before another checkpoint's export cleans up."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    path = own_artifacts / "manifest.json"
    document = json.loads(path.read_text())
    document["engines"][0]["engine"]["path"] = "../victim"
    path.write_text(json.dumps(document))
    other = initialise(LDLM(small.config), seed=1)
    other.save_checkpoint(tmp_path / "other")
    with pytest.raises(ArtifactError, match="outside its folder"):
        Export(tmp_path / "other", own_artifacts, ["fp16"]).run(silent)
    assert victim.read_text() == "mine"


def test_an_interrupted_first_export_can_be_repeated(
    small_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "artifacts"
    monkeypatch.setattr("export.exporter.export_stage", stop)
    with pytest.raises(KeyboardInterrupt):
        Export(small_checkpoint, folder, ["fp16"]).run(silent)
    assert folders.load(folder).graphs == []
    with pytest.raises(KeyboardInterrupt):  # and not "in the way"
        Export(small_checkpoint, folder, ["fp16"]).run(silent)


def test_two_writers_lose_nothing(own_artifacts: Path) -> None:
    """Each reads, changes and writes the manifest under one lock."""
    from concurrent.futures import ThreadPoolExecutor

    def write(index: int) -> None:
        with folders.updated(own_artifacts) as manifest:
            manifest.runs[str(index)] = {"seconds": float(index)}

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(32)))
    assert {str(i) for i in range(32)} <= folders.load(own_artifacts).runs.keys()


def test_no_disk_space_for_the_engine(own_artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before the build, and while writing; the older engine stays as it was."""
    with folders.updated(own_artifacts) as manifest:
        manifest.engines = []
    before = {p: p.read_bytes() for p in own_artifacts.rglob("*") if p.is_file()}
    build = Build(own_artifacts, Target(("sm89",)), profiles(PRESETS["small"]))
    monkeypatch.setattr("ldlm.files.free_bytes", lambda _: 100)
    with pytest.raises(DiskSpaceError, match=r"conditioning\.engine") as caught:
        build.run(["fp16"], silent)
    assert "100 bytes free" in str(caught.value)
    monkeypatch.undo()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(DiskSpaceError):
        build.run(["fp16"], silent)
    monkeypatch.undo()
    assert {p: p.read_bytes() for p in own_artifacts.rglob("*") if p.is_file()} == before


def test_an_explicit_target_must_be_met(own_artifacts: Path) -> None:
    before = json.loads((own_artifacts / "manifest.json").read_text())
    with pytest.raises(EngineBuildError, match="sm75"):
        Build(own_artifacts, Target(["sm75"]), profiles(PRESETS["small"])).run(["fp16"], silent)
    assert json.loads((own_artifacts / "manifest.json").read_text()) == before


def test_precisions_are_looked_up_before_anything_is_built(own_artifacts: Path) -> None:
    build = Build(own_artifacts, Target(("sm89",)), profiles(PRESETS["small"]))
    with pytest.raises(ArtifactError, match="was not exported"):
        build.run(["fp16", "fp16-without-residual"], silent)
