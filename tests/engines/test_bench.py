"""The benchmark: peers in processes of their own, in turn, and figures that follow from seconds."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engines.artifacts import folder as folders
from engines.bench import measure
from engines.bench.measure import bench, flops
from engines.bench.peers import Case, Timing, Worker, default_peers, loop, parse, prepare, timed
from engines.cli import app
from engines.show.findings import bench_table
from ldlm import LDLM, PRESETS
from ldlm.errors import BenchError, ConfigError
from ldlm.noise import NoiseStream
from ldlm.sampler import LoopStep, Stages, Steps
from ldlm.solvers import StepTable

SMALL, BASE = PRESETS["small"], PRESETS["base"]


@pytest.fixture(scope="module")
def printed(small_artifacts: Path, small_checkpoint: Path, tmp_path_factory) -> tuple[str, Path]:  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.mktemp("bench")
    result = CliRunner().invoke(
        app,
        [
            *("bench", str(small_artifacts), "--checkpoint", str(small_checkpoint)),
            *("--peers", "torch,ort-plain,ort,ort:fp16", "--what", "step,latent_decoder"),
            *("--length", "8,32", "--rounds", "1", "--seconds", "0.02"),
            *("--out", str(folder / "bench.json")),
        ],
    )
    assert result.exit_code == 0, result.output
    return result.stdout, folder


def test_int8_is_measured_where_it_can_be(int8_artifacts: Path, small_artifacts: Path) -> None:
    with_it, without = folders.load(int8_artifacts), folders.load(small_artifacts)
    assert default_peers(with_it, [1]) == [*default_peers(without, [1]), "ort:int8"]
    assert default_peers(with_it, [1, 8]) == default_peers(without, [1])


def test_the_last_line_is_the_document(printed: tuple[str, Path]) -> None:
    text, folder = printed
    document = json.loads(text.splitlines()[-1])
    assert document == json.loads((folder / "bench.json").read_text())
    assert [(r["what"], r["length"], r["peer"]) for r in document["rows"]] == [
        (what, length, peer)
        for what in ("step", "latent_decoder")
        for length in (8, 32)
        for peer in ("torch", "ort-plain", "ort", "ort:fp16")
    ]
    for row in document["rows"]:
        assert 0 < row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"]
        assert row["peak_gb"] > 0
        assert (row["outside"] is not None) == (row["what"] == "step")
        assert row["peer"] != "torch" or row["ratio"] == 1.0
    assert document["machine"]["matmul_gflops"] > 0


def test_the_table_has_a_row_per_case_and_peer(printed: tuple[str, Path]) -> None:
    text, _ = printed
    document = json.loads(text.splitlines()[-1])
    assert bench_table(document).row_count == len(document["rows"])


def test_figures_follow_from_seconds() -> None:
    slow = [Timing([0.4, 0.4, 0.4], 0.1, 10)]
    fast = [Timing([0.1, 0.2, 0.3], 0.02, 2 * 10**9), Timing([0.2], 0.04, 10)]
    case = Case("step", 2, 64)
    rows = measure._rows(case, {"torch": slow, "ort": fast}, BASE, rate=1e12)
    assert [row["ratio"] for row in rows] == [1.0, 2.0]
    assert rows[1]["p50_ms"] == 200.0
    assert rows[1]["outside"] == 0.03
    assert rows[1]["peak_gb"] == 2.0
    assert rows[1]["tokens_per_second"] == round(2 * 64 / (1024 * 0.2), 2)
    assert rows[1]["of_matmul_rate"] == round(flops(case, BASE) / 0.2 / 1e12, 3)


def test_operations_are_those_of_the_weights(small: LDLM) -> None:
    """Two per weight of the step and position, and two products of scores per block."""
    model, T = small.denoiser, 32
    used = [model.input, model.output]
    used += [layer for b in model.blocks for layer in (b.qkv, b.out, b.mlp.up, b.mlp.down)]
    weights = sum(layer.weight.numel() for layer in used)
    scores = SMALL.denoiser_blocks * 2 * T * SMALL.d_model
    assert flops(Case("step", 3, T), SMALL) == 2 * 3 * T * (weights + scores)
    blocks = small.latent_decoder.blocks
    linears = [m for m in blocks.modules() if hasattr(m, "weight") and m.weight.ndim == 2]
    first = blocks[0].attention.qkv.weight.numel()  # a constant for every sample
    scores = SMALL.decoder_blocks * 2 * 2 * T * SMALL.d_model
    expected = sum(m.weight.numel() for m in linears) - first + scores
    assert flops(Case("latent_decoder", 1, T), SMALL) == 2 * T * expected


@pytest.mark.parametrize("name", ["tflite", "torch:fp16", "ort-fast", ""])
def test_peers_that_are_not_there(name: str) -> None:
    with pytest.raises(ConfigError, match="no such peer"):
        parse(name)
    assert parse("ort:fp16") == ("ort", "fp16")
    assert parse("rtx") == ("rtx", "fp32")


@pytest.mark.parametrize(
    ("peers", "cases", "rounds", "words"),
    [
        ([], [Case("step", 1, 8)], 1, "nothing to measure"),
        (["ort"], [], 1, "nothing to measure"),
        (["ort"], [Case("step", 1, 8)], 0, "nothing to measure"),
        (["ort", "ort"], [Case("step", 1, 8)], 1, "named twice"),
        (["ort"], [Case("step", 1, 129)], 1, "size cannot be measured"),
        (["ort"], [Case("step", 65, 8)], 1, "size cannot be measured"),
        (["ort"], [Case("encoder", 1, 8)], 1, "step or latent_decoder"),
        (["ort:int8"], [Case("step", 8, 8)], 1, "every sample by itself"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(
    small_artifacts: Path,
    tmp_path: Path,
    peers: list[str],
    cases: list[Case],
    rounds: int,
    words: str,
) -> None:
    with pytest.raises(ConfigError, match=words):
        bench(small_artifacts, tmp_path, peers, cases, rounds=rounds)


@pytest.fixture
def worker() -> Generator[Worker, None, None]:
    made = Worker("ort")
    yield made
    made.close()


@pytest.mark.parametrize(
    ("peer", "words"),
    [("ort:fp16-without-layer_norm", "was not exported"), ("torch", "no checkpoint")],
)
def test_a_peer_that_does_not_run_says_why(
    small_artifacts: Path, tmp_path: Path, worker: Worker, peer: str, words: str
) -> None:
    with pytest.raises(BenchError, match=words) as caught:
        worker.ask(prepare, peer, small_artifacts, tmp_path / "nothing")
    assert caught.value.details["tensor"] == "ort"


def test_a_process_that_dies_is_an_error(worker: Worker) -> None:
    worker._process.kill()
    with pytest.raises(BenchError, match="its process ended: without a word"):
        worker.ask(time.sleep, 60)


def test_a_dying_process_is_quoted(worker: Worker) -> None:
    """What it said last, on stdout or on stderr, and nothing of it on ours."""
    worker.ask(os.write, 2, b"the last words")
    with pytest.raises(BenchError, match="its process ended: the last words"):
        worker.ask(os._exit, 3)


def test_what_a_library_raises_is_said(worker: Worker) -> None:
    with pytest.raises(BenchError, match="ZeroDivisionError"):
        worker.ask(divmod, 1, 0)


def test_what_a_library_prints_is_not_the_commands_output(
    worker: Worker, capfd: pytest.CaptureFixture[str]
) -> None:
    worker.ask(os.write, 1, b"noise of native code")
    worker.ask(print, "noise of Python")
    worker.close()
    assert capfd.readouterr() == ("", "")


def test_a_process_at_work_is_ended(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is stopped in the middle of a turn does not wait for what hangs."""
    worker._pool.submit(time.sleep, 600)
    join = worker._process.join
    monkeypatch.setattr(worker._process, "join", lambda *_: join(0.2))
    worker.close()
    join(60)
    assert worker._process not in multiprocessing.active_children()


def test_every_process_is_ended_when_a_peer_fails(small_artifacts: Path, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no checkpoint"):
        bench(small_artifacts, tmp_path, ["ort", "torch"], [Case("step", 1, 8)])
    assert multiprocessing.active_children() == []


def test_a_question_it_cannot_answer(small_artifacts: Path, tmp_path: Path, worker: Worker) -> None:
    with pytest.raises(BenchError, match="outside what was built"):
        worker.ask(timed, "ort", small_artifacts, tmp_path, Case("step", 65, 8), 2)


def test_seconds_are_of_steps_not_of_the_way_there() -> None:
    """What is done once, before the loop or within its first step, is in no figure of a step."""

    def made(table: StepTable) -> Steps:
        time.sleep(0.2)

        def run(noise: NoiseStream) -> Generator[LoopStep, None, None]:
            time.sleep(0.2)
            for _ in table.t:
                time.sleep(0.002)
                yield LoopStep(0.001, noise.draw, noise.draw)

        return run

    peer = Stages(PRESETS["small"], made, print, print)
    found = loop(peer, Case("step", 1, 8), 7)
    assert len(found.seconds) == 7
    assert max(found.seconds) < 0.1
    assert found.outside is not None
    assert 0.4 < found.outside < 1


def test_a_worker_answers_for_the_steps_asked(
    small_artifacts: Path, tmp_path: Path, worker: Worker
) -> None:
    found = worker.ask(timed, "ort", small_artifacts, tmp_path, Case("step", 1, 8), 70)
    assert len(found.seconds) == 70
    assert found.outside is not None
    assert 0 < found.outside < 1
    assert found.peak > 0
