"""The whole job at the published size: 306,011,162 parameters to verified engines and text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engines.artifacts import folder as folders
from ldlm import files

pytestmark = pytest.mark.base

AMPERE_ON = {"sm80", "sm86", "sm89", "sm120"}


def ldlm(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", "from engines.cli import main; main()", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_from_checkpoint_to_engines_and_text(tmp_path: Path) -> None:
    needed = 6_000_000_000
    if files.free_bytes(tmp_path) < needed:
        pytest.fail(f"the whole job at base needs {needed:,} free bytes in {tmp_path}")
    checkpoint, folder = tmp_path / "base", tmp_path / "artifacts"
    ldlm("init", checkpoint, "--preset", "base", "--seed", 0)
    ldlm("export", checkpoint, "--out", folder, "--precision", "fp32,fp16")
    parity = json.loads(ldlm("verify", folder, "--checkpoint", checkpoint, "--json"))
    shown = ldlm("build", folder)

    manifest = folders.load(folder)
    assert manifest.config.vocab_size == 50259
    held = {(e.precision, e.stage): e.evidence["parameter_bytes"] for e in manifest.graphs}
    # Stage parameters and tables: the sizes of section 5 of the model's account, 4 bytes each.
    assert held["fp32", "denoiser"] == pytest.approx(132_836_352 * 4, rel=2e-3)
    assert held["fp32", "latent_decoder"] == pytest.approx(55_097_882 * 4, rel=2e-3)
    assert held["fp32", "token_decoder"] == pytest.approx(66_915_072 * 4, rel=2e-3)

    assert parity["passed"] is True
    exact = [
        line
        for line in parity["measurements"]
        if line["question"] == "formula"
        or (line["question"], line["precision"]) == ("graph", "fp32")
    ]
    assert all(line["distance"] <= 1e-5 for line in exact)
    for stage in ("denoiser", "latent_decoder", "token_decoder_logits"):
        cases = {(line["batch"], line["length"]) for line in exact if line["stage"] == stage}
        assert cases == {(b, t) for b in (1, 3) for t in (1, 17, 128)}

    engines = {(e.precision, e.stage): e for e in manifest.engines}
    assert len(engines) == 8
    for (precision, stage), entry in engines.items():
        entry.engine.verified(folder)
        assert set(entry.sms) >= AMPERE_ON
        assert ("sm75" in entry.sms) == (precision == "fp16" and stage != "conditioning")
    assert "no float32 matrix product" in engines["fp16", "conditioning"].refused["sm75"]
    assert "pass" in shown
    assert "fail" not in shown

    sampled = [
        json.loads(ldlm("sample", folder, "--steps", 64, "--seed", 1, "--json", *runtime))
        for runtime in ((), ("--runtime", "torch", "--checkpoint", checkpoint))
    ]
    assert sampled[0] == sampled[1]
    assert len(sampled[0]["texts"][0]) > 20
    assert len(set(sampled[0]["token_ids"][0])) > 32
