"""parity.json: what is written is read back, and what is not of the schema is no proof."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import io
import json
import math
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from engines.artifacts import folder as folders
from engines.artifacts.manifest import Manifest
from engines.cli import main
from engines.proof.questions import SAMPLER, ProofOptions, Question
from engines.proof.records import (
    UNDAMAGED,
    Ablation,
    Distances,
    Drift,
    IslandRecord,
    Measurement,
    Outcome,
    Proof,
    Record,
    TapReport,
)
from engines.proof.saved import Saved, read, reasons, save, scope_of
from engines.proof.update import Update, update
from engines.show.proof import tables
from engines.show.summary import summary_table
from ldlm.errors import ConfigError, ParityError

COMPONENTS = ("denoiser", "latent_decoder", "token_decoder")
LOGITS = "token_decoder_logits"


@pytest.fixture
def folder(small_artifacts: Path, tmp_path: Path) -> Path:
    """An artifacts folder of which nothing but the manifest is there."""
    shutil.copy(small_artifacts / "manifest.json", tmp_path)
    return tmp_path


@pytest.fixture
def manifest(folder: Path) -> Manifest:
    return folders.load(folder)


def proof_of(
    manifest: Manifest, precision: str, *components: str, options: ProofOptions | None = None
) -> Proof:
    """A proof with a record of every kind."""
    return Proof.of(
        record
        for component in components
        for record in records_of(manifest, precision, component, options or ProofOptions())
    )


def records_of(
    manifest: Manifest, precision: str, component: str, options: ProofOptions
) -> Iterator[Record]:
    yield scope_of(manifest, precision, component, options)
    where = ({"token_decoder": LOGITS}.get(component, component), precision)
    given = (*where, "given")
    if component == SAMPLER:
        yield Measurement(*given, Question.DRIFT, 1, 16, 1e-6, 1e-4)
        yield Drift(precision, (1e-7, math.inf, 2e-7))
        return
    detail = Distances(1e-6, 1e-6, 1e-7, 1.0, 0, 100)
    yield Measurement(*given, Question.GRAPH, 1, 17, 1e-7, 1e-5, detail)
    yield Measurement(*given, Question.TAPS, 2, 17, 1e-7, 1e-5, None, "0.A")
    yield IslandRecord(*where, "onnx", "Softmax", "float32", {"float32": 2})
    yield TapReport(*where, "formula", (2, 17), {"0.A": 1e-7, "out": 2e-7}, None)
    yield Outcome(*where, "SiLU dropped", ("graph", "checks"))
    yield Outcome(*where, UNDAMAGED, ())
    yield Ablation(*given, ("layer_norm",), math.inf, 1e-3)


def whole(manifest: Manifest, *precisions: str) -> Proof:
    proof = Proof()
    for name in precisions:
        options = ProofOptions(sampler_steps=3, taps=True)
        proof = proof.merged(proof_of(manifest, name, *COMPONENTS, SAMPLER, options=options))
    return proof


def shown(proof: Proof, width: int = 140) -> str:
    console = Console(width=width, file=io.StringIO())
    for table in tables(proof):
        console.print(table)
    return console.file.getvalue()


def test_what_is_written_is_read_back(folder: Path, manifest: Manifest) -> None:
    proof = whole(manifest, "fp32", "fp16")
    assert save(folder, manifest, proof) == proof
    assert read(folder) == Saved(proof, "")
    assert pickle.loads(pickle.dumps(proof)) == proof
    document = json.loads((folder / "parity.json").read_text())
    assert document["schema"] == 1
    assert document["passed"] is True
    assert document["measurements"][0]["question"] == "graph"
    assert document["measurements"][0]["passed"] is True
    assert document["drift"][0]["errors"][1] is None  # not finite
    assert document["ablation"][0]["passed"] is False  # an experiment, not a gate


def test_what_is_not_finite_fails_and_is_none() -> None:
    for distance, limit in ((math.nan, 1.0), (math.inf, 1.0), (0.0, math.inf), (0.2, 0.1)):
        found = Measurement("denoiser", "fp16", "given", Question.KL, 0, 0, distance, limit)
        assert found.passed is False
        assert Proof((found,)).passed is False
    assert found.share == 2
    none = Measurement("denoiser", "fp16", "given", Question.KL, 0, 0, math.nan, 1.0)
    assert (none.distance, none.share) == (None, math.inf)


def test_a_record_may_not_claim_what_it_does_not_say() -> None:
    good = {"stage": "denoiser", "precision": "fp16", "damage": "x", "noticed_by": ["graph"]}
    assert msgspec.convert({**good, "passed": True}, Outcome).passed
    with pytest.raises(msgspec.ValidationError, match="not what the record says"):
        msgspec.convert({**good, "noticed_by": [], "passed": True}, Outcome)


def test_questions_explain_themselves() -> None:
    assert Question("loop file") is Question.LOOP_FILE
    assert all(question.text for question in Question)
    exact = {question.value for question in Question if question.of_formula}
    assert exact == {"graph", "formula", "update", "engine update", "taps"}


def test_a_component_proved_alone_is_part_of_a_proof(manifest: Manifest) -> None:
    proof = proof_of(manifest, "fp16", "denoiser")
    proof.require_passed()
    assert proof.passed is False  # the precision is not verified before all of it was
    for component in ("token_decoder", "latent_decoder"):
        proof = proof.merged(proof_of(manifest, "fp16", component))
    assert proof.passed is True
    assert proof == proof_of(manifest, "fp16", *COMPONENTS)  # whichever came first
    worse = Measurement("denoiser", "fp16", "given", Question.KL, 0, 0, 1.0, 0.1)
    again = Proof((worse,), scopes=(scope_of(manifest, "fp16", "denoiser"),))
    proof = proof.merged(again)
    assert [m for m in proof.measurements if m.stage == "denoiser"] == [worse]
    assert {m.stage for m in proof.measurements} == {"denoiser", "latent_decoder", LOGITS}
    assert not [outcome for outcome in proof.self_test if outcome.stage == "denoiser"]


def test_reasons_are_those_of_every_component(manifest: Manifest) -> None:
    saved = Saved(proof_of(manifest, "fp16", "denoiser"), "")
    options = ProofOptions()
    assert reasons(saved, manifest, "fp16", options, ["denoiser"]) == ()
    assert reasons(saved, manifest, "fp16", options, ["denoiser_step"]) == ()
    assert reasons(saved, manifest, "fp16", options) == ("not verified yet: latent_decoder",)
    assert reasons(saved, manifest, "fp16", options, ["latent_decoder"]) == ("not verified yet",)
    assert reasons(saved, manifest, "bf16", options) == ("not verified yet",)


def test_a_proof_stands_until_something_it_depends_on_changes(manifest: Manifest) -> None:
    asked = ProofOptions(stress=True, sampler_steps=64)
    proof = proof_of(manifest, "fp16", *COMPONENTS, SAMPLER, options=asked)
    saved = Saved(proof, "")

    def why(**options: Any) -> tuple[str, ...]:
        return reasons(saved, manifest, "fp16", ProofOptions(**options))

    assert why() == why(stress=True) == why(sampler_steps=64) == ()
    assert why(taps=True) == ("not asked yet: taps",)
    assert why(sampler_steps=32) == ("not asked yet: sampler_steps 32",)
    assert why(runtime="rtx") != ()
    nothing = Saved[Proof](None, "not verified yet: parity.json ...")
    assert reasons(nothing, manifest, "fp16", asked) == (nothing.problem,)
    wrong = IslandRecord("denoiser", "fp16", "onnx", "Tanh", "float32", {"float16": 1})
    failed = Saved(msgspec.structs.replace(proof, islands=(wrong,), passed=None), "")
    again = reasons(failed, manifest, "fp16", asked)
    assert again == ("a gate failed the last time",)
    assert reasons(failed, manifest, "fp16", asked, ["token_decoder"]) == ()
    manifest.checkpoint = "0" * 64
    assert why() == ("weights changed",)


def test_other_precisions_stay_while_their_graphs_are_the_same(
    folder: Path, manifest: Manifest
) -> None:
    save(folder, manifest, whole(manifest, "fp32", "fp16", "bf16"))
    entry = manifest.graph("bf16", "denoiser")
    other = dataclasses.replace(entry.graph, sha256="0" * 64)
    manifest.put_graph(dataclasses.replace(entry, graph=other))
    kept = save(folder, manifest, proof_of(manifest, "fp32", *COMPONENTS))
    left = {(s.precision, s.component) for s in kept.scopes}
    every = {(p, c) for p in ("fp32", "fp16", "bf16") for c in (*COMPONENTS, SAMPLER)}
    assert every - left == {("bf16", "denoiser"), ("bf16", SAMPLER)}
    assert {record.key for record in kept.measurements} == left
    assert kept.passed is False  # bf16 is not whole any more


def test_what_can_be_asked_for() -> None:
    options = ProofOptions(sampler_steps=4)
    assert options.components() == [*COMPONENTS, SAMPLER]
    assert options.components(["token_decoder_logits", "conditioning"]) == [
        "denoiser", "token_decoder",
    ]  # fmt: skip # rows, as a table
    assert options.components([SAMPLER]) == [SAMPLER]
    for name in ("nothing", SAMPLER):
        with pytest.raises(ConfigError, match="nothing to prove"):
            ProofOptions().components([name])


ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    7,
    1.5,
    -0.5,
    1e308,
    10**30,
    "",
    "e:100:x",
    "a[/b]",
    "\x00[red]",
    "fp16-without-x",
    [],
    {},
    [[]],
    [None],
    ["x", "x"],
    {"x": "y"},
    {"9999999.x": 1.0},
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every field; of a list, of its first and last items."""
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*path, key))
    elif isinstance(value, list):
        for index in sorted({0, len(value) - 1} if value else ()):
            yield from places(value[index], (*path, index))


def mutations(document: Any) -> Iterator[tuple[str, Any]]:
    """Every field in turn removed, renamed, or replaced by what does not belong there."""
    for path in places(document):
        if not path:
            yield from ((repr(odd), odd) for odd in ODD)
            continue
        for odd in (*ODD, "remove", "rename"):
            changed = copy.deepcopy(document)
            home = changed
            for key in path[:-1]:
                home = home[key]
            if odd in ("remove", "rename"):
                value = home.pop(path[-1])
                if odd == "rename" and isinstance(home, dict):
                    home[f"{path[-1]} "] = value
            else:
                home[path[-1]] = odd
            yield f"{path} -> {odd!r}", changed


def use_everything(folder: Path, manifest: Manifest, *, printed: bool = True) -> bool:
    """Call all that reads parity.json; whether it was of the schema. Printing takes the time."""
    saved = read(folder)
    assert (saved.content is None) == saved.problem.startswith("not verified yet: parity.json ")
    why = reasons(saved, manifest, "fp16", ProofOptions(taps=True))
    console = Console(width=100, file=io.StringIO())
    summary = summary_table(folder, manifest)
    if printed:
        console.print(summary)
    if saved.content is None:
        assert why == (saved.problem,)
        assert "parity.json" in console.file.getvalue()
        return False
    assert all(table.columns for table in tables(saved.content))
    if printed:
        shown(saved.content)
    with contextlib.suppress(ParityError):
        saved.content.require_passed()
    saved.content.merged(saved.content)
    return True


def test_no_mutation_of_parity_json_is_an_error(folder: Path, manifest: Manifest) -> None:
    """What is not of the schema is "not verified yet", with a reason, wherever it is read."""
    path = folder / "parity.json"
    save(folder, manifest, proof_of(manifest, "fp16", "token_decoder", SAMPLER))
    document = json.loads(path.read_text())
    assert use_everything(folder, manifest)
    refused = accepted = 0
    for what, changed in mutations(document):
        path.write_text(json.dumps(changed))
        saved = read(folder)
        if saved.content is None:  # what follows from that is the same for all
            assert saved.problem.startswith("not verified yet: parity.json "), what
            refused += 1
            continue
        try:
            use_everything(folder, manifest, printed=accepted % 10 == 0)
        except Exception as error:
            raise AssertionError(f"{what}: {error!r}") from error
        accepted += 1
    assert refused > 1500
    assert refused > 4 * accepted


@pytest.mark.parametrize("content", [
    b"", b"{", b"null", b"\xff\xfe", b"[" * 200_000, b'{"schema": 9}',
    b'{"schema": 1, "lines": []}', b'{"passed": true, "graphs": {}, "lines": []}',
    b'{"drift": NaN}', b'"\\ud800"',
])  # fmt: skip # rows, as a table
def test_a_damaged_or_older_parity_json_is_no_proof(
    folder: Path, manifest: Manifest, content: bytes
) -> None:
    (folder / "parity.json").write_bytes(content)
    assert not use_everything(folder, manifest)
    kept = save(folder, manifest, whole(manifest, "fp16"))  # and it is replaced
    assert read(folder).content == kept


def test_a_folder_in_its_place_is_no_proof(folder: Path, manifest: Manifest) -> None:
    (folder / "parity.json").mkdir()
    assert not use_everything(folder, manifest)


def test_numbers_are_whole_in_a_narrow_window(manifest: Manifest) -> None:
    text = shown(whole(manifest, "fp32", "bf16"), width=80)
    for word in ("1e-07", "1e-05", "1.0000000", "distance", "max abs"):
        assert word in text
    assert "…" not in text


def test_what_cannot_be_written_is_not_lost(
    folder: Path,
    manifest: Manifest,
    small_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A full disk after an hour of measuring: the result is shown first, and the exit is 1."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    proof = proof_of(manifest, "fp32", "denoiser")
    monkeypatch.setattr("engines.proof.verify.verify", lambda *_: proof)
    monkeypatch.setattr("ldlm.files.publish", full)
    arguments = ["verify", str(folder), "--checkpoint", str(small_checkpoint), "--json",
                 "--precision", "fp32", "--stage", "denoiser"]  # fmt: skip # rows, as a table
    monkeypatch.setattr("sys.argv", ["ldlm", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    shown = capsys.readouterr()
    assert caught.value.code == 1
    assert msgspec.json.decode(shown.out, type=Proof) == proof
    assert "error: " in shown.err
    assert not (folder / "parity.json").exists()


def test_what_has_not_changed_is_not_measured(
    folder: Path, manifest: Manifest, small_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def verified(*arguments: Any) -> Proof:
        *_, names, _progress, _options, stages = arguments
        calls.append(names)
        return proof_of(manifest, names[0], *(stages or COMPONENTS))

    monkeypatch.setattr("engines.proof.verify.verify", verified)
    told: list[str] = []

    def bring(stages: list[str] | None = None, **options: Any) -> Update:
        found = update(
            folder, small_checkpoint, ["fp16"], stages=stages, say=told.append, **options
        )
        found.save()
        return found

    assert bring(["denoiser"]).proof.passed is False
    assert bring(["denoiser"]).new == Proof()
    assert "nothing has changed" in told[-1]
    assert bring().proof.passed is True  # the others are missing: all of it is measured
    assert bring().new == Proof()
    assert len(bring(again=True).new.scopes) == 3
    assert calls == 3 * [["fp16"]]
    assert folders.load(folder).runs["verify"].keys() == {"seconds", "peak_gb"}
