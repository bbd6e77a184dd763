"""Only what has changed is made again, and it is said why."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import stub_export
from files_of import data_path, engine_path

from engines.artifacts import digests, ingredients
from engines.artifacts import folder as folders
from engines.artifacts.build import Build
from engines.artifacts.digests import closure, source_digest
from engines.artifacts.export import Export
from engines.artifacts.ingredients import Decision
from engines.artifacts.manifest import FileEntry
from engines.compile.target import Target
from engines.tensorrt.profiles import profiles
from export.precision import POLICIES, Precision
from ldlm import LDLM, PRESETS
from ldlm.initialise import initialise

CONFIG = PRESETS["small"]
STAGES = ("denoiser", "latent_decoder", "token_decoder")


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins of `stub_export`, for this test alone."""
    for name in ("export.exporter", "ldlm.model", "engines.compile.rtx"):
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name))
    stub_export.install()


@pytest.fixture
def made(stubbed: None, own_checkpoint: Path, tmp_path: Path) -> Path:
    """Artifacts of the small checkpoint, in two precisions, with engines; made in no time."""
    folder = tmp_path / "made"
    export(own_checkpoint, folder)
    build(folder)
    return folder


def export(checkpoint: Path, folder: Path) -> list[Decision]:
    return Export(checkpoint, folder, ["fp32", "fp16"]).run(lambda _: None)


def build(folder: Path, sms: tuple[str, ...] = ("sm89",), **options: object) -> list[Decision]:
    ranges = profiles(CONFIG, **options)  # type: ignore[arg-type]
    return Build(folder, Target(sms), ranges).run(None, lambda *_: None)


def why(decisions: list[Decision]) -> set[tuple[str, ...]]:
    return {decision.reasons for decision in decisions}


def test_with_nothing_changed_nothing_is_made_or_written(made: Path, own_checkpoint: Path) -> None:
    def times() -> dict[Path, int]:
        return {p: p.stat().st_mtime_ns for p in made.rglob("*")}

    before = times()
    assert why(export(own_checkpoint, made)) == {()}
    assert why(build(made)) == {()}
    assert times() == before


def test_the_real_commands_do_not_import_torch_for_nothing(
    own_artifacts: Path, small_checkpoint: Path
) -> None:
    """export and build in one process; the small artifacts were never verified."""
    script = (
        "import sys\n"
        "from engines.cli import app\n"
        "for line in sys.argv[1:]:\n"
        "    app(line.split(), standalone_mode=False)\n"
        "heavy = {'torch', 'onnx', 'onnxruntime', 'tensorrt_rtx'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    lines = [
        f"export {small_checkpoint} --out {own_artifacts} --precision fp32,fp16,bf16 --explain",
        f"build {own_artifacts} --precision fp32,fp16,bf16 --explain",
    ]
    done = subprocess.run(
        [sys.executable, "-c", script, *lines], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("nothing that it depends on has changed") == 21


def test_other_weights_make_everything_again(
    made: Path, own_checkpoint: Path, tmp_path: Path
) -> None:
    """Case 15: nothing of the older checkpoint stays beside the new files."""
    initialise(LDLM(CONFIG), seed=1).save_checkpoint(tmp_path / "other")
    done = Export(tmp_path / "other", made, ["fp16"]).run(lambda _: None)
    assert why(done) == {("weights changed",)}
    manifest = folders.load(made)
    assert {e.precision for e in manifest.graphs} == {"fp16"}
    assert manifest.engines == []
    assert not list(made.rglob("*.engine"))
    assert [path.name for path in (made / "onnx").iterdir()] == ["fp16"]
    assert len(list((made / "onnx" / "fp16").iterdir())) == 3
    for entry in manifest.graphs:
        entry.verified(made)
    assert why(build(made)) == {("not built yet",)}


def test_other_targets_or_profiles_make_engines_alone(made: Path, own_checkpoint: Path) -> None:
    assert why(build(made, ("sm80", "sm89"))) == {("targets: sm89 -> sm80 sm89",)}
    others = build(made, ("sm80", "sm89"), batch=(1, 2, 4))
    assert why([d for d in others if "conditioning" not in d.what]) == {("profiles changed",)}
    assert why([d for d in others if "conditioning" in d.what]) == {()}  # it has one shape
    assert why(export(own_checkpoint, made)) == {()}


def test_another_tool_makes_what_it_made_again(
    made: Path, own_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def newer(package: str) -> Callable[[str], str]:
        return lambda name: "99.0" if name == package else original(name)

    original = ingredients.version
    monkeypatch.setattr(ingredients, "version", newer("tensorrt-rtx"))
    assert why(export(own_checkpoint, made)) == {()}
    ((reason,),) = why(build(made))
    assert reason.startswith("tensorrt-rtx: ")
    assert reason.endswith("-> 99.0")
    monkeypatch.setattr(ingredients, "version", newer("torch"))
    ((reason,),) = why(export(own_checkpoint, made))
    assert reason.startswith("torch: ")


def test_a_policy_that_changed(
    made: Path, own_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POLICIES, "fp16", Precision("fp16", POLICIES["fp32"].rules))
    found = {d.what.partition(" ")[0]: d.reasons for d in export(own_checkpoint, made)}
    assert found == {"fp32": (), "fp16": ("policy changed",)}


def test_a_file_that_was_touched_is_made_again(made: Path, own_checkpoint: Path) -> None:
    """Even where its size and its time of change were put back."""
    path = data_path(made, "fp16", "denoiser")
    content, stat = path.read_bytes(), path.stat()
    path.write_bytes(b"x" + content[1:])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    found = [d for d in export(own_checkpoint, made) if d.reasons]
    assert [d.what for d in found] == ["fp16 denoiser"]
    assert "is not the file that was made" in found[0].reasons[0]
    engine = engine_path(made, "fp16", "denoiser_step")
    engine.unlink()
    assert [d.what for d in build(made) if d.reasons] == ["fp16 denoiser_step"]


def test_an_engine_that_is_compiled_no_more_goes_with_the_next(made: Path) -> None:
    manifest = folders.load(made)
    entry = manifest.engine("fp16", "denoiser_step", "rtx")
    source = manifest.graph("fp16", "denoiser")
    path = made / "engines" / "fp16" / "rtx" / "denoiser-0" / "denoiser.engine"
    path.parent.mkdir()
    path.write_bytes(b"older")
    origin = {"graph": source.graph.sha256, "graph's weights": source.data.sha256}
    with folders.updated(made) as manifest:
        manifest.put_engine(
            dataclasses.replace(
                entry, stage="denoiser", engine=FileEntry.of(made, path), made_from=origin
            )
        )
    assert why(build(made)) == {()}
    assert path.exists()
    build(made, ("sm80",))
    assert not path.exists()
    assert len(folders.load(made).engines) == 8


def test_a_tokenizer_that_changed_is_all_that_is_written(made: Path, own_checkpoint: Path) -> None:
    path = own_checkpoint / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    (before,) = made.glob("tokenizer-*")
    assert why(export(own_checkpoint, made)) == {()}
    (after,) = made.glob("tokenizer-*")
    assert after != before
    assert (after / "tokenizer.json").read_text() == path.read_text()
    assert len(folders.load(made).engines) == 8


def test_a_file_is_read_once_unless_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"one")
    link.symlink_to(path)
    first = digests.file_digest(path)
    monkeypatch.setattr("ldlm.files.sha256", lambda _: "read again")
    assert digests.file_digest(path) == digests.file_digest(link) == first
    stat = path.stat()
    other = tmp_path / "other"
    other.write_bytes(b"two")
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(path)
    assert digests.file_digest(path) == "read again"


def test_what_older_versions_remembered_is_ignored(made: Path, own_checkpoint: Path) -> None:
    """A folder may hold nothing else yet: it is ours all the same."""
    fresh = made.with_name("fresh")
    for folder in (made, fresh):
        folder.mkdir(exist_ok=True)
        (folder / ".digests.json").write_text('{"a": [1, 2, 3, 4, "0"]}')
    assert why(export(own_checkpoint, made)) == {()}
    assert why(export(own_checkpoint, fresh)) == {("not exported yet",)}


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the packages' code that a test may edit."""
    copies = {
        name: Path(shutil.copytree(path, tmp_path / name))
        for name, path in digests.PACKAGES.items()
    }
    monkeypatch.setattr(digests, "PACKAGES", copies)
    clear()
    yield tmp_path
    clear()


def clear() -> None:
    for function in (digests.closure, digests._code):
        function.cache_clear()


def codes() -> dict[str, str]:
    """The digest of the code that each stage depends on."""
    return {name: source_digest(closure(f"ldlm.{name}")) for name in STAGES}


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    clear()


@pytest.mark.parametrize(
    ("module", "old", "new", "changed"),
    [
        ("token_decoder", "def forward(", "# a comment\n    def forward(", set()),
        ("token_decoder", '"""', '"""Another docstring. ', set()),
        ("token_decoder", "import Tensor, nn\n", "import Tensor, nn\n\n\n", set()),
        ("token_decoder", "return ", "return 2 * ", {"token_decoder"}),
        ("denoiser", "return ", "return 2 * ", {"denoiser"}),
        ("layers", "return ", "return 2 * ", set(STAGES)),
        ("sampler", "return ", "return 2 * ", set()),
    ],
)
def test_code_counts_where_it_is_used(
    sources: Path, module: str, old: str, new: str, changed: set[str]
) -> None:
    """A comment changes nothing; a forward changes all that depends on it, and nothing else."""
    before = codes()
    edit(sources / "ldlm" / f"{module}.py", old, new)
    after = codes()
    assert {name for name in STAGES if before[name] != after[name]} == changed


def test_the_exporter_counts_for_every_graph(sources: Path) -> None:
    before = source_digest(closure("export.exporter"))
    edit(sources / "export" / "passes" / "argmax_tail.py", "import onnx_ir", "import os, onnx_ir")
    assert source_digest(closure("export.exporter")) != before
    assert "export.equations" not in closure("export.exporter")
