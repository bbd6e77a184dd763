"""The command line as a user meets it: real processes, right and wrong input."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from files_of import graph_path
from typer.testing import CliRunner

from engines import cli
from engines.artifacts import folder as folders
from engines.cli import main
from engines.cli._shared import progress
from export.stages import STAGES
from ldlm import files


def ldlm(
    *arguments: object, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from engines.cli import main; main()", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        check=False,
    )


def files_in(folder: Path) -> list[str]:
    """All but locks and remembered hashes, which say nothing."""
    names = (str(p.relative_to(folder)) for p in folder.rglob("*"))
    return sorted(name for name in names if not name.startswith(files.LOCK))


def test_help_names_every_command() -> None:
    shown = ldlm("--help")
    assert shown.returncode == 0
    assert all(command in shown.stdout for command in cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_explains_itself_and_refuses_other_words(command: str) -> None:
    shown = CliRunner().invoke(cli.app, [command, "--help"])
    assert shown.exit_code == 0
    module = importlib.import_module(f"engines.cli.{command}")
    summary = module.command.__doc__.partition("\n\n")[0]
    assert " ".join(summary.split()) in " ".join(shown.output.split())
    wrong = CliRunner().invoke(cli.app, [command, "--no-such-option"])
    assert wrong.exit_code == 2
    assert "--no-such-option" in wrong.output


def test_a_log_is_told_each_thing_once(capsys: pytest.CaptureFixture[str]) -> None:
    """TensorRT reports one phase a thousand times: that filled a log with 13,000 lines."""
    with progress() as tell:
        for left in range(1000):
            tell(f"build fp32 denoiser: Cloning network graph (2 of 18, about {left} s left)")
            tell("build fp16 denoiser: Timing graph nodes", left, 1000)
        tell("build fp32 denoiser: Timing graph nodes (2 of 18, about 9 s left)")
    assert capsys.readouterr().err.splitlines() == [
        "build fp32 denoiser: Cloning network graph",
        "build fp16 denoiser: Timing graph nodes",
        "build fp32 denoiser: Timing graph nodes",
    ]


def test_info_shows_the_published_numbers() -> None:
    shown = ldlm("info")
    assert shown.returncode == 0
    for number in ("306,011,162", "124,442,112", "8,264,580"):
        assert number in shown.stdout
    lines = json.loads(ldlm("info", "--json").stdout)
    assert {line["component"]: line["parameters"] for line in lines}["trained"] == 306_011_162


def test_info_counts_a_checkpoints_own_tensors(own_checkpoint: Path) -> None:
    lines = json.loads(ldlm("info", own_checkpoint, "--json").stdout)
    assert {line["component"]: line["parameters"] for line in lines}["trained"] == 2_403_594
    (own_checkpoint / "model.safetensors").write_bytes(b"x" * 100)
    assert "safetensors" in ldlm("info", own_checkpoint).stderr


def test_init_makes_a_self_contained_checkpoint(tmp_path: Path) -> None:
    made = ldlm("init", tmp_path / "new", "--preset", "small", "--seed", 3)
    assert made.returncode == 0, made.stderr
    assert files_in(tmp_path / "new") == ["config.json", "model.safetensors", "tokenizer.json"]
    again = ldlm("init", tmp_path / "new", "--preset", "small")
    assert again.returncode == 1
    assert "--force" in again.stderr
    assert ldlm("init", tmp_path / "new", "--preset", "small", "--force").returncode == 0


def test_the_same_text_from_both_runtimes(small_artifacts: Path, small_checkpoint: Path) -> None:
    """In float32, for the same seed, 64 steps."""
    common = ("sample", small_artifacts, "--steps", 64, "-n", 3, "--seed", 11, "--json", "--raw")
    ort = ldlm(*common)
    torch = ldlm(*common, "--runtime", "torch", "--checkpoint", small_checkpoint)
    assert ort.returncode == torch.returncode == 0, ort.stderr + torch.stderr
    assert json.loads(ort.stdout) == json.loads(torch.stdout)
    ids = json.loads(ort.stdout)["token_ids"]
    assert len({tuple(row) for row in ids}) == 3
    assert len(set(ids[0])) > 20  # no constant text
    batched = json.loads(ldlm(*common, "--batch-size", 3).stdout)
    assert batched["token_ids"] == ids
    other = json.loads(ldlm(*common[:-2], "--json", "--seed", 12).stdout)
    assert other["token_ids"] != ids


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("solver", ["euler", "ddpm", "ddim"])
def test_every_solver_and_precision_samples(
    small_artifacts: Path, precision: str, solver: str
) -> None:
    made = ldlm(
        "sample",
        small_artifacts,
        "--precision",
        precision,
        "--solver",
        solver,
        "--steps",
        25,
        "--length",
        9,
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout.strip()


WRONG = [
    (("convert", "{tmp}/a", "{checkpoint}", "--map", "{tmp}/m"), "--force"),
    (("init", "{artifacts}", "--preset", "small", "--force"), "in the way"),
    (("export", "{checkpoint}", "--out", "/dev/null/x"), "Not a directory"),
    (("sample", "{artifacts}", "--checkpoint", "{tmp}/nothing", "--steps", "20"), "no checkpoint"),
    (("sample", "{artifacts}", "--steps", "100000000000000"), "memory"),
    (("init", "{tmp}/x", "--preset", "huge"), "no such preset"),
    (("init", "{tmp}/x", "--preset", "small", "--seed", "-1"), "seed is out of range"),
    (("info", "{tmp}/nothing"), "no checkpoint at"),
    (("export", "{tmp}/nothing", "--out", "{tmp}/x"), "no checkpoint at"),
    (("export", "{checkpoint}", "--out", "{tmp}/x", "--precision", "fp12"), "no such precision"),
    (("export", "{checkpoint}", "--out", "{tmp}/x", "--precision", ""), "no precision given"),
    (("export", "{checkpoint}", "--out", "{tmp}/x", "--without-island", "norm"), "no such island"),
    (("build", "{tmp}/nothing"), "no artifacts at"),
    (("build", "{artifacts}", "--sm", "90"), "Hopper"),
    (("build", "{artifacts}", "--sm", "42"), "no such TensorRT-RTX target"),
    (("build", "{artifacts}", "--sm", "75", "--precision", "fp32"), "no float32 matrix product"),
    (("build", "{artifacts}", "--target", "cpu"), "no such build target"),
    (("build", "{artifacts}", "--batch", "1,1,65"), "is larger than the graph"),
    (("build", "{artifacts}", "--batch", "1,8"), "MIN,OPT,MAX"),
    (("build", "{artifacts}", "--length", "1,99,64"), "out of order"),
    (("build", "{artifacts}", "--precision", "fp16-without-residual"), "was not exported"),
    (("build", "{artifacts}", "--precision", "int8"), "rtx does not run"),
    (
        ("engines", "{checkpoint}", "--out", "{tmp}/x", "--precision", "fp32,int8"),
        "rtx does not run",
    ),
    (("verify", "{artifacts}", "--checkpoint", "{tmp}/nothing"), "no checkpoint at"),
    (("verify", "{tmp}", "--checkpoint", "{checkpoint}"), "no artifacts at"),
    (("verify", "{artifacts}", "--checkpoint", "{checkpoint}", "--sampler-steps", "5"), "unstable"),
    (("verify", "{artifacts}", "--checkpoint", "{checkpoint}", "--precision", "int8"), "was not"),
    (
        (
            "verify",
            "{artifacts}",
            "--checkpoint",
            "{checkpoint}",
            "--precision",
            "fp32",
            "--ablate",
        ),
        "no half precision",
    ),
    (
        ("export", "{checkpoint}", "--out", "{tmp}/x", "--without-island", "rms_norm"),
        "has no island",
    ),
    (("sample", "{tmp}/nothing"), "no artifacts at"),
    (("sample", "{artifacts}", "--length", "129"), "longer than the model"),
    (("sample", "{artifacts}", "--length", "0"), "length is not usable"),
    (("sample", "{artifacts}", "--steps", "5"), "unstable"),
    (("sample", "{artifacts}", "--steps", "0"), "needs steps"),
    (("sample", "{artifacts}", "-n", "65", "--batch-size", "65", "--steps", "20"), "1..64"),
    (("sample", "{artifacts}", "--provider", "tpu"), "no such provider"),
    (("sample", "{artifacts}", "--runtime", "tflite"), "no such runtime"),
    (("sample", "{artifacts}", "--precision", "int8"), "was not exported"),
    (("sample", "{artifacts}", "--solver", "heun", "--steps", "20"), "no such solver"),
    (("sample", "{artifacts}", "--grid", "0.5,0.9"), "time grid"),
    (("sample", "{artifacts}", "--grid", "a,b"), "time grid"),
    (("sample", "{artifacts}", "--grid", "0.9,0.5", "--steps", "20"), "own number of steps"),
    (("sample", "{artifacts}", "--seed", "-3", "--steps", "20"), "seed"),
    (("sample", "{artifacts}", "--runtime", "torch"), "needs the checkpoint"),
    (("convert", "{tmp}/x.pt", "{tmp}/y", "--map", "{tmp}/no.toml"), "not a mapping file"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=lambda v: str(v)[:60])
def test_wrong_input_gets_a_clear_word(
    small_checkpoint: Path,
    small_artifacts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    words: str,
) -> None:
    places = {"tmp": tmp_path, "checkpoint": small_checkpoint, "artifacts": small_artifacts}
    before = files_in(small_artifacts)
    monkeypatch.setattr("sys.argv", ["ldlm", *(text.format(**places) for text in arguments)])
    with pytest.raises(SystemExit) as caught:
        main()  # in this process: a process each takes a minute in all
    assert caught.value.code == 1
    shown = capsys.readouterr().err
    assert "error: " in shown
    assert words in shown
    assert files_in(tmp_path) == []
    assert files_in(small_artifacts) == before


def test_an_island_switched_off_by_name_misses_its_gate(
    small_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`export --without-island`, then `verify`, on one stage: the precision gate fails."""
    only = tuple(spec for spec in STAGES if spec.component == "token_decoder")
    monkeypatch.setattr("export.stages.STAGES", only)
    common = [str(tmp_path), "--precision", "fp16", "--without-island", "layer_norm"]
    monkeypatch.setattr("sys.argv", ["ldlm", "export", str(small_checkpoint), "--out", *common])
    with pytest.raises(SystemExit) as caught:
        main()
    assert not caught.value.code, capsys.readouterr().err
    assert graph_path(tmp_path, "fp16-without-layer_norm", "token_decoder").exists()
    verify = ["ldlm", "verify", str(tmp_path), "--checkpoint", str(small_checkpoint)]
    by_name = ["--precision", "fp16-without-layer_norm"]
    monkeypatch.setattr("sys.argv", [*verify, *by_name])
    with pytest.raises(SystemExit) as caught:
        main()
    shown = capsys.readouterr()
    assert caught.value.code == 1
    assert "'precision' in fp16-without-layer_norm" in shown.err
    assert "NO: " in shown.out.split("The four answers")[1]


@pytest.mark.parametrize(
    "arguments",
    [("sample",), ("frobnicate",), ("init", "x", "--bogus"), ("engines", "x", "--workers", "0")],
)
def test_wrong_usage_is_2(arguments: tuple[str, ...], tmp_path: Path) -> None:
    assert ldlm(*arguments, cwd=tmp_path).returncode == 2
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("after", [1.5, 5.0])
def test_sigterm_leaves_nothing_behind(
    small_checkpoint: Path, tmp_path: Path, after: float
) -> None:
    """Stopped in the middle of an export: no temporary folder, and the same command works again."""
    command = [
        "export",
        str(small_checkpoint),
        "--out",
        str(tmp_path / "out"),
        "--precision",
        "fp32",
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", "from engines.cli import main; main()", *command],
        stderr=subprocess.DEVNULL,
    )
    time.sleep(after)
    process.terminate()
    assert process.wait() == 128 + 15
    assert not [name for name in files_in(tmp_path) if ".partial" in name]
    again = ldlm(*command)
    assert again.returncode == 0, again.stderr
    assert folders.load(tmp_path / "out").precisions() == ["fp32"]


def test_sample_refuses_artifacts_of_another_checkpoint(
    small_artifacts: Path, tmp_path: Path
) -> None:
    ldlm("init", tmp_path / "other", "--preset", "small", "--seed", 9)
    got = ldlm("sample", small_artifacts, "--steps", 20, "--checkpoint", tmp_path / "other")
    assert got.returncode == 1
    assert "made from another checkpoint" in got.stderr


def test_verify_refuses_another_checkpoint(small_artifacts: Path, tmp_path: Path) -> None:
    ldlm("init", tmp_path / "other", "--preset", "small", "--seed", 9)
    got = ldlm("verify", small_artifacts, "--checkpoint", tmp_path / "other")
    assert got.returncode == 1
    assert "made from another checkpoint" in got.stderr


def test_a_corrupted_checkpoint_exports_nothing(own_checkpoint: Path, tmp_path: Path) -> None:
    path = own_checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    got = ldlm("export", own_checkpoint, "--out", tmp_path / "out")
    assert got.returncode == 1
    assert "is damaged" in got.stderr
    assert not (tmp_path / "out").exists()


def test_artifacts_that_were_changed_are_not_sampled(own_artifacts: Path) -> None:
    path = own_artifacts / folders.load(own_artifacts).tokenizer.path
    path.write_text(path.read_text() + " ")
    got = ldlm("sample", own_artifacts, "--steps", 20)
    assert got.returncode == 1
    assert "not the file that was made" in got.stderr
