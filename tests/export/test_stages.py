"""Stages as data: shapes, ranges, and what a wrong input is told."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engines.runtime.stage import RuntimeStage, Shaped, named
from export.stages import (
    LOOP,
    SAMPLED,
    STAGES,
    AxisRange,
    TensorSpec,
    compiled,
    components,
    example_sizes,
    graph_ranges,
    stage,
    stages_of,
)
from ldlm import LDLM, PRESETS
from ldlm.errors import ConfigError, StageInputError

CONFIG = PRESETS["base"]
GOOD = {
    "x_t": Shaped("float32", (2, 7, 768)),
    "t": Shaped("float32", (2,)),
    "x0_prev": Shaped("float32", (2, 7, 768)),
}


class Checks(RuntimeStage):
    """A stage that checks its inputs and computes nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(stage(name), CONFIG)

    def _run(self, feeds: dict[str, object], outputs: object) -> dict[str, np.ndarray]:
        raise NotImplementedError


def test_names_that_runtimes_share() -> None:
    table = {s.name: ([t.name for t in s.inputs], [t.name for t in s.outputs]) for s in STAGES}
    assert table == {
        "conditioning": (["t"], ["modulations"]),
        "denoiser_step": (
            ["x", "x0_prev", "step", "modulations", "coefficients", "noise"],
            ["x_next", "x0_hat", "next_step"],
        ),
        "denoiser": (["x_t", "t", "x0_prev"], ["x0_hat"]),
        "latent_decoder": (["z"], ["h_hat"]),
        "token_decoder": (["h_hat"], ["token_ids"]),
        "token_decoder_logits": (["h_hat"], ["logits"]),
    }
    assert components() == ["denoiser", "latent_decoder", "token_decoder"]
    assert compiled() == ["conditioning", "denoiser_step", "latent_decoder", "token_decoder"]
    assert compiled("denoiser") == list(LOOP)
    assert [stage(name).component for name in SAMPLED] == components()


@pytest.mark.parametrize("component", components())
def test_one_stage_of_a_component_is_traced_and_the_others_come_from_it(component: str) -> None:
    (traced,) = (spec for spec in stages_of(component) if spec.traced)
    for spec in stages_of(component):
        assert spec.traced or (spec.source == traced.name and spec.passes)


def test_a_stage_that_is_neither_traced_nor_derived_is_refused() -> None:
    for change in ({"build": None}, {"source": "denoiser"}, {"passes": ("argmax_tail",)}):
        with pytest.raises(ConfigError, match="either traced or derived"):
            replace(stage("latent_decoder"), **change)


def test_a_stage_of_one_shape_says_so() -> None:
    assert [spec.name for spec in STAGES if not spec.dynamic] == ["conditioning"]


def test_shapes_come_from_the_config() -> None:
    assert stage("denoiser").inputs[0].shape(CONFIG, example_sizes(CONFIG)) == (2, 24, 768)
    assert stage("token_decoder_logits").outputs[0].shape(CONFIG, example_sizes(CONFIG)) == (
        2,
        24,
        50259,
    )
    ranges = {"batch": AxisRange(1, 1, 64), "length": AxisRange(1, 256, 1024)}
    assert graph_ranges(CONFIG) == ranges


def test_the_latent_decoder_undoes_the_latents_normalisation(small: LDLM) -> None:
    """In PyTorch and in ONNX it is this one module: no comparison of the two would notice."""
    z = torch.randn(2, 3, small.config.d_model, generator=torch.Generator().manual_seed(0))
    expected = small.latent_decoder(z * small.latent_std + small.latent_mean)
    assert torch.equal(stage("latent_decoder").torch(small)(z), expected)


def test_good_inputs_pass() -> None:
    assert Checks("denoiser").check(GOOD) == {"batch": 2, "length": 7}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"t": ("float64", (2,))}, ["tensor:   t", "float32 [2]", "float64 [2]"]),
        ({"t": ("float32", (3,))}, ["tensor:   t", "float32 [2]", "float32 [3]"]),
        ({"x0_prev": ("float32", (2, 8, 768))}, ["x0_prev", "[2, 7, 768]", "[2, 8, 768]"]),
        ({"x_t": ("float32", (2, 768))}, ["tensor:   x_t"]),
        ({"x_t": ("float32", (2, 7, 512))}, ["tensor:   x_t", "768", "512"]),
        ({"extra": ("float32", (1,))}, ["other inputs"]),
        ({"x_t": (">f4", (2, 7, 768))}, ["tensor:   x_t", "float32 [2, 7, 768]", ">f4"]),
    ],
)
def test_wrong_inputs_are_named(
    change: dict[str, tuple[str, tuple[int]]], words: list[str]
) -> None:
    with pytest.raises(StageInputError) as caught:
        Checks("denoiser").check(GOOD | {name: Shaped(*found) for name, found in change.items()})
    assert all(word in str(caught.value) for word in [*words, "denoiser"])


@pytest.mark.parametrize(
    ("shape", "axis"), [((1, 1025, 768), "length"), ((65, 1, 768), "batch"), ((0, 1, 768), "batch")]
)
def test_sizes_outside_the_range_are_named(shape: tuple[int, ...], axis: str) -> None:
    with pytest.raises(StageInputError, match=f"the {axis} is outside"):
        Checks("latent_decoder").check({"z": Shaped("float32", shape)})


@pytest.mark.parametrize("values", [(0, 1, 2), (2, 1, 3), (1, 4, 3)])
def test_axis_ranges_are_ordered(values: tuple[int, int, int]) -> None:
    """TensorRT itself accepts min > opt > max and fails later, without a word."""
    with pytest.raises(ConfigError, match="out of order"):
        AxisRange(*values)


def test_unknown_stage() -> None:
    with pytest.raises(ConfigError, match="denoiser or latent_decoder"):
        stage("encoder")


def test_what_is_no_array_is_refused_in_words() -> None:
    run = Checks("latent_decoder")
    z = np.zeros((1, 2, 768), np.float32)
    assert run.checked({"z": z})["z"] is z
    with pytest.raises(StageInputError, match=r">f4 \[1, 2, 768\]"):
        run.checked({"z": z.astype(">f4")})
    for value, kind in (([1.0, 2.0], "builtins.list"), (None, "builtins.NoneType")):
        with pytest.raises(StageInputError, match=r"no NumPy array[\s\S]*numpy.asarray") as caught:
            run.checked({"z": value})
        assert caught.value.details["got"] == kind
    with pytest.raises(StageInputError, match="2 of them"):
        named(run.spec, (1, 2))


def test_inputs_have_a_place_in_generation() -> None:
    """Each is drawn by what it is; a kind that the proof does not know is noticed here."""
    from engines.proof.inputs import LIKE

    assert {tensor.like for spec in STAGES for tensor in spec.inputs} <= LIKE.keys()
    assert TensorSpec("x", ()).like in LIKE
