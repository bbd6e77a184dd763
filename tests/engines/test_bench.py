"""The benchmark: peers in processes of their own, in turn, and figures that follow from seconds."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engines.artifacts import folder as folders
from engines.bench import measure
from engines.bench.measure import Case, Samples, Worker, bench, flops
from engines.bench.peers import Peer, default_peers, parse
from engines.bench.worker import loop
from engines.cli import app
from engines.show.bench import bench_table
from ldlm import LDLM, PRESETS
from ldlm.errors import BenchError, ConfigError
from ldlm.noise import NoiseStream
from ldlm.sampler import Run, Stages, Tick
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


def test_the_table_has_a_row_per_peer_and_case(printed: tuple[str, Path]) -> None:
    document = json.loads(printed[0].splitlines()[-1])
    assert bench_table(document).row_count == len(document["rows"])


def test_figures_follow_from_seconds() -> None:
    slow, fast = Samples(), Samples()
    slow.add({"seconds": [0.4, 0.4, 0.4], "peak": 10, "outside": 0.1, "prepared": 1.0})
    fast.add({"seconds": [0.1, 0.2, 0.3], "peak": 2 * 10**9, "outside": 0.02, "prepared": 2.0})
    fast.add({"seconds": [0.2], "peak": 10, "outside": 0.04, "prepared": 2.0})
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
    small_artifacts: Path, tmp_path: Path, peers: list[str], cases: list[Case], rounds: int,
    words: str,
) -> None:  # fmt: skip
    with pytest.raises(ConfigError, match=words):
        bench(small_artifacts, tmp_path, peers, cases, rounds=rounds)


def test_a_peer_that_does_not_run_says_why(small_artifacts: Path, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="was not exported"):
        Worker("ort:fp16-without-layer_norm", small_artifacts, tmp_path)
    with pytest.raises(BenchError, match="no checkpoint"):
        Worker("torch", small_artifacts, tmp_path / "nothing")


def test_a_process_that_dies_is_an_error(small_artifacts: Path, tmp_path: Path) -> None:
    worker = Worker("ort", small_artifacts, tmp_path)
    worker._process.kill()
    with pytest.raises(BenchError, match="its process ended"):
        worker.ask(what="step", batch=1, length=8, d_model=128, steps=2)


def test_a_question_it_cannot_answer(small_artifacts: Path, tmp_path: Path) -> None:
    worker = Worker("ort", small_artifacts, tmp_path)
    with pytest.raises(BenchError, match="outside what was built"):
        worker.ask(what="step", batch=65, length=8, d_model=128, steps=2)


def test_seconds_are_of_steps_not_of_the_way_there() -> None:
    """What is done once, before the loop or within its first step, is in no figure of a step."""
    inside = [0.0]

    def made(table: StepTable) -> Run:
        time.sleep(0.2)

        def run(noise: NoiseStream, tick: Tick) -> None:
            time.sleep(0.2)
            for _ in table.t:
                time.sleep(0.002)
                inside[0] += 0.001
                tick()

        return run

    peer = Peer(Stages(None, print, print, loop=made), lambda: inside[0])
    answer = loop(peer, batch=1, length=8, d_model=4, steps=7)
    assert len(answer["seconds"]) == 7
    assert max(answer["seconds"]) < 0.1
    assert answer["prepared"] >= 0.2
    assert 0.4 < answer["outside"] < 1


def test_a_worker_answers_for_the_steps_asked(small_artifacts: Path, tmp_path: Path) -> None:
    worker = Worker("ort", small_artifacts, tmp_path)
    answer = worker.ask(what="step", batch=1, length=8, d_model=128, steps=70)
    worker.close()
    assert len(answer["seconds"]) == 70
    assert 0 < answer["outside"] < 1


def test_half_a_line_of_a_dying_worker_is_no_answer(
    small_artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker("ort", small_artifacts, tmp_path)
    whole = worker._output
    monkeypatch.setattr(worker, "_output", io.StringIO('{"seconds": [0.'))
    with pytest.raises(BenchError, match="its process ended"):
        worker.ask(what="step", batch=1, length=8, d_model=128, steps=2)
    whole.close()
