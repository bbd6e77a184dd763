"""Polygraphy on our artifacts, as the documents show it: a second opinion that needs no GPU."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from files_of import graph_path

from ldlm import PRESETS

pytest.importorskip("polygraphy", reason="of the [build] extra")

TOOL = Path(sysconfig.get_path("scripts")) / "polygraphy"


def polygraphy(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, TOOL, *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_it_inspects_a_graph(small_artifacts: Path) -> None:
    graph = graph_path(small_artifacts, "fp16", "latent_decoder")
    found = polygraphy("inspect", "model", graph, "--show", "layers")
    assert found.returncode == 0, found.stderr
    assert "z [dtype=float32, shape=('batch', 'length', 128)]" in found.stdout
    assert found.stdout.count("[Op: Tanh]") == PRESETS["small"].decoder_blocks


def test_it_compares_two_precisions(small_artifacts: Path, tmp_path: Path) -> None:
    """Within what half precision costs, and not within less: a comparison that can fail."""
    inputs, outputs = tmp_path / "in.json", tmp_path / "out.json"

    def run(precision: str, *arguments: object) -> int:
        graph = graph_path(small_artifacts, precision, "latent_decoder")
        return polygraphy("run", graph, "--onnxrt", *arguments).returncode

    made = ("--input-shapes", "z:[2,16,128]", "--save-inputs", inputs, "--save-outputs", outputs)
    assert run("fp32", *made) == 0
    known = ("--load-inputs", inputs, "--load-outputs", outputs, "--rtol", 0, "--atol")
    assert run("fp16", *known, 0.05) == 0
    assert run("fp16", *known, 1e-6) != 0
