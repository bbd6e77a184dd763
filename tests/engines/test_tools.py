"""doctor, inspect and gc: what people ask about a machine and about a folder."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import numpy as np
import pytest
from files_of import data_path, engine_path, graph_path
from rich.console import Console

from engines import doctor
from engines.artifacts import folder as folders
from engines.artifacts import manifest as manifests
from engines.artifacts.collect import Leftover, collect, drop, leftovers
from engines.artifacts.ingredients import Decision
from engines.artifacts.inspect import describe
from engines.doctor import examine
from engines.show.findings import findings_table
from engines.show.summary import decisions_table, description_table, leftovers_table
from ldlm.errors import ArtifactError, ProviderError

ROOT = Path(__file__).parents[2]


def finding(what: str) -> doctor.Finding:
    (found,) = [f for f in examine() if f.what == what]
    return found


def gpu(monkeypatch: pytest.MonkeyPatch, sm: str = "") -> None:
    def opened() -> SimpleNamespace:
        if not sm:
            raise ProviderError("no usable GPU", got="cudaSetDevice: no device")
        return SimpleNamespace(name=f"GPU {sm}", sm=sm)

    monkeypatch.setattr("engines.tensorrt.device.Cuda", opened)


def test_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch)
    assert finding("GPU").level == doctor.PARTLY
    assert "no device" in finding("GPU").found
    assert finding("torch").level == doctor.GOOD
    assert finding("onnxruntime cpu").level == doctor.GOOD
    assert "tried" in finding("onnxruntime cpu").found
    rtx = finding("TensorRT-RTX")
    assert rtx.level == doctor.PARTLY
    assert "builds for SM 75 80 86 89 120 121; runs none here" in rtx.means
    for found in examine():
        assert found.means
        if found.level != doctor.GOOD and found.what not in ("memory", "disk"):
            assert found.remedy, found.what


def test_gpus_that_rtx_knows_and_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, "sm89")
    assert finding("TensorRT-RTX").level == doctor.GOOD
    assert "GPU sm89" in finding("GPU").found
    gpu(monkeypatch, "sm90")
    assert finding("TensorRT-RTX").level == doctor.PARTLY
    assert "Hopper" in finding("TensorRT-RTX").remedy


def test_a_provider_is_tried_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 14: CUDA is listed by the package and does not start without a GPU."""
    gpu(monkeypatch)
    found = finding("onnxruntime cuda")
    if found.level == doctor.GOOD:
        pytest.skip("a GPU is here, and the provider starts")
    assert "nothing falls back" in found.means


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        ("flags : fpu avx2 fma", doctor.PARTLY),
        ("flags : fpu avx2 avx512_vnni", doctor.GOOD),
        ("", doctor.PARTLY),
    ],
)
def test_whether_int8_can_be_faster(
    monkeypatch: pytest.MonkeyPatch, flags: str, level: str
) -> None:
    monkeypatch.setattr(doctor.files, "read_if_possible", lambda _: flags.encode())
    found = doctor._integers()
    assert found.level == level
    assert bool(found.remedy) == (level == doctor.PARTLY)
    assert ("not known" in found.means) == (not flags)


def test_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_version", lambda _: None)
    for what in ("torch", "TensorRT-RTX", "TensorRT", "GPU", "onnxruntime"):
        found = finding(what)
        assert "not installed" in found.found
        assert "pip install" in found.remedy


def test_too_little_memory_or_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ldlm.files.free_bytes", lambda _: 10**9)
    assert finding("disk").level == doctor.PARTLY
    assert "PRESET=small" in finding("disk").means
    monkeypatch.setattr(doctor, "MEMORY", 1e15)
    assert finding("memory").level == doctor.PARTLY


def test_the_doctor_does_not_import_torch() -> None:
    code = "import sys, engines.doctor as d\nd.examine()\nsys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_folder_shows_what_it_was_made_from(small_artifacts: Path) -> None:
    document = describe(small_artifacts)
    graph = document["graphs"]["fp16/denoiser"]
    assert {"weights", "policy", "code of the stage", "torch"} <= graph["made_from"].keys()
    engine = document["engines"]["fp16/rtx/denoiser_step"]
    assert list(engine["sms"]) == ["sm75", "sm80", "sm86", "sm89", "sm120", "sm121"]
    assert "latency" in engine["profiles"]
    engine = document["engines"]["fp16/rtx/conditioning"]
    assert list(engine["sms"]) == ["sm80", "sm86", "sm89", "sm120", "sm121"]
    assert engine["profiles"] == {}
    json.dumps(document)


def test_an_onnx_file_shows_its_islands(small_artifacts: Path) -> None:
    path = graph_path(small_artifacts, "fp16", "latent_decoder")
    document = describe(path)
    assert document["opset"] == 23
    assert document["inputs"] == {"z": "FLOAT [batch, length, 128]"}
    assert document["dtypes"]["LayerNormalization"].keys() == {"FLOAT -> FLOAT"}
    assert document["nodes"]["Tanh"] == 2
    assert document["parameters"] > 500_000
    assert document["external data"] == ["latent_decoder.onnx.data"]
    assert document["manifest"]["file"] == "as it was made"


def test_files_that_are_not_what_they_were(own_artifacts: Path, tmp_path: Path) -> None:
    engine = engine_path(own_artifacts, "fp16", "conditioning")
    assert describe(engine)["manifest"]["sms"][0] == "sm80"
    engine.write_bytes(b"other")
    assert describe(engine)["manifest"]["file"] == "CHANGED SINCE"
    (data_path(own_artifacts, "fp16", "denoiser")).unlink()
    graph = describe(graph_path(own_artifacts, "fp16", "denoiser"))
    assert graph["external data"] == ["denoiser.onnx.data (missing)"]
    stray = tmp_path / "stray.engine"
    stray.write_bytes(b"?")
    assert describe(stray)["manifest"] == "none above this file"
    for path, words in ((tmp_path / "no", "no "), (tmp_path / "x.onnx", "not a readable")):
        if path.suffix:
            path.write_bytes(b"\x00nothing")
        with pytest.raises(ArtifactError, match=words):
            describe(path)


def test_a_damaged_graph_is_named(small_artifacts: Path, tmp_path: Path) -> None:
    """Whatever bytes are wrong, what comes is a description or one kind of error."""
    source = graph_path(small_artifacts, "fp32", "latent_decoder")
    content = source.read_bytes()
    path = tmp_path / "damaged.onnx"
    random = np.random.default_rng(0)
    refused = 0
    for number in range(100):
        damaged = bytearray(content[: random.integers(1, len(content))] if number % 2 else content)
        for place in random.integers(0, len(damaged), 40):
            damaged[place] = random.integers(0, 256)
        path.write_bytes(damaged)
        try:
            json.dumps(describe(path))
        except ArtifactError:
            refused += 1
    assert refused > 20


def test_names_in_tables_are_no_markup(tmp_path: Path) -> None:
    """A folder may be called what rich would take for a style or a face."""
    name = "a[/b]e:100:x"
    path = tmp_path / f"{name}.engine"
    document = {"of": name, "runs": {name: "[red]"}}
    console = Console(width=200, file=io.StringIO())
    console.print(description_table(path, document))
    left = Leftover(path, 5, f"in {name}")
    console.print(leftovers_table(tmp_path, [left], deleted=False))
    console.print(decisions_table(name, [Decision(name, (name,))]))
    console.print(findings_table([doctor.Finding(doctor.GOOD, name, name, name)]))
    text = "".join(console.file.getvalue().split())  # a title is as wide as its table
    assert text.count(name) == 3 + 2 + 3 + 3
    assert "[red]" in text


def test_the_published_schema_is_that_of_the_code(small_artifacts: Path) -> None:
    published = json.loads((ROOT / "docs" / "manifest.schema.json").read_text("utf-8"))
    assert published == json.loads(json.dumps(manifests.json_schema())), (
        "ldlm inspect --schema > docs/manifest.schema.json"
    )
    document = json.loads((small_artifacts / "manifest.json").read_text("utf-8"))
    jsonschema.validate(document, published)
    document["graphs"][0]["graph"]["bytes"] = "many"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, published)


def test_a_precision_that_is_not_needed(own_artifacts: Path) -> None:
    found = drop(own_artifacts, "bf16", delete=False)
    assert len(found) == 6 + 3 + 4  # graphs, their weights, engines
    assert folders.load(own_artifacts).precisions() == ["fp32", "fp16", "bf16"]
    assert drop(own_artifacts, "bf16", delete=True) == found
    assert not any(item.path.exists() for item in found)
    manifest = folders.load(own_artifacts)
    assert manifest.precisions() == ["fp32", "fp16"]
    assert "bf16" not in manifest.policies
    assert len(manifest.engines) == 8
    with pytest.raises(ArtifactError, match="nothing is there in this precision"):
        drop(own_artifacts, "bf16", delete=True)


def test_gc_takes_what_belongs_to_nothing(own_artifacts: Path) -> None:
    kept = {p for p in own_artifacts.rglob("*") if p.is_file()}
    stray = own_artifacts / "engines" / "fp16" / "rtx" / "conditioning-0" / "conditioning.engine"
    stray.parent.mkdir()
    stray.write_bytes(b"x" * 100)
    torn = own_artifacts / ".partial-999999999-abc"
    torn.mkdir()
    (torn / "half.onnx").write_bytes(b"y" * 50)
    alive = own_artifacts / f".partial-{os.getpid()}-abc"
    alive.mkdir()
    mine = own_artifacts / "notes.txt"
    mine.write_text("years of work")
    found = leftovers(own_artifacts)
    assert {item.path: item.bytes for item in found} == {stray: 100, torn: 50}
    assert stray.exists(), "a dry run"
    assert collect(own_artifacts) == found
    assert not stray.parent.exists()
    assert not torn.exists()
    assert alive.exists()
    assert mine.exists()
    assert kept <= {p for p in own_artifacts.rglob("*") if p.is_file()}
    assert leftovers(own_artifacts) == []
