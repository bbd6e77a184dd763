"""Primitives: what they compute, and in which dtype."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ldlm.layers import (
    BiaslessLayerNorm,
    LayerNorm,
    Linear,
    NormedMLP,
    Residual,
    ResidualScale,
    RMSNorm,
    Rotary,
    rotate,
    softcap,
)

SHAPES = [6, [6], (6,), torch.Size([6]), [2, 6], (3, 2, 6), np.int64(6)]


@pytest.mark.fault(9)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_norm_without_bias_takes_every_normalized_shape(shape: object) -> None:
    """Case 9: gain-only norms, all forms of normalized_shape."""
    norm = BiaslessLayerNorm(shape, eps=1e-3, device="cpu", dtype=torch.float64)  # type: ignore[arg-type]
    assert norm.weight.dtype == torch.float64
    assert torch.all(norm.weight == 1)
    assert dict(norm.named_parameters()).keys() == {"weight"}
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(4, 3, 2, 6, dtype=torch.float64)
    dims = tuple(range(-len(norm.normalized_shape), 0))
    variance = x.var(dims, unbiased=False, keepdim=True)
    expected = norm.weight * (x - x.mean(dims, keepdim=True)) / torch.sqrt(variance + 1e-3)
    torch.testing.assert_close(norm(x), expected)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_layer_norm_shapes(shape: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(shape)))
    norm = BiaslessLayerNorm(shape[-count:])
    x = torch.randn(shape)
    torch.testing.assert_close(norm(x), F.layer_norm(x, shape[-count:]))


@pytest.mark.parametrize("kind", [BiaslessLayerNorm, LayerNorm, RMSNorm])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("half_module", [False, True])
def test_norms_stay_in_float32(
    kind: type, dtype: torch.dtype, autocast: bool, half_module: bool
) -> None:
    """The island: large half input, float32 result, whatever is around it."""
    norm = kind(64)
    if half_module:
        norm = norm.to(dtype)
    # Values that bfloat16 and float16 hold, whose squares pass 65504.
    x = torch.randn(3, 64).mul(600).to(dtype)
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        y = norm(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, kind(64)(x.float()))
    assert norm(x.double()).dtype == torch.float64


def test_norms_stay_in_float32_under_torch_export() -> None:
    class Half(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = Linear(8, 8).half()
            self.norm = BiaslessLayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.linear(x))

    module = Half()
    x = torch.randn(2, 8)
    plain = torch.export.export(module, (x,)).module()
    assert plain(x).dtype == torch.float32
    torch.testing.assert_close(plain(x), module(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = torch.export.export(module, (x,)).module()
        assert cast(x).dtype == torch.float32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_norms_stay_in_float32_under_cuda_autocast() -> None:
    norm = BiaslessLayerNorm(64, device="cuda", dtype=torch.float16)
    with torch.autocast("cuda", dtype=torch.float16):
        y = norm(torch.randn(3, 64, device="cuda", dtype=torch.float16).mul(600))
    assert y.dtype == torch.float32
    assert torch.isfinite(y).all()


@pytest.mark.fault(10)
def test_a_small_eps_does_not_become_0_in_half() -> None:
    """Case 10: an eps of 1e-8 is 0 in float16; here it never is half."""
    norm = BiaslessLayerNorm(4, eps=1e-8, dtype=torch.float16)
    assert torch.equal(norm(torch.zeros(1, 4).half()), torch.zeros(1, 4))
    rms = RMSNorm(4, eps=1e-8).half()
    assert torch.isfinite(rms(torch.zeros(1, 4).half())).all()


def test_rms_norm_takes_the_larger_of_norm_and_eps() -> None:
    """A max, not a sum under the root: below eps, x / eps; above it, eps does nothing."""
    norm = RMSNorm(4, eps=1e-2)
    small = torch.full((1, 4), 1e-4)
    torch.testing.assert_close(norm(small), small / 1e-2)
    large = torch.full((1, 4), 0.1)
    torch.testing.assert_close(norm(large), torch.ones(1, 4))
    assert torch.equal(norm(torch.zeros(1, 4)), torch.zeros(1, 4))


@pytest.mark.fault(4)
def test_a_softcap_lost_or_in_another_order_shows_with_a_small_cap() -> None:
    """Case 4: what is invisible at cap 50 on small scores is not at cap 2."""
    S, root = torch.linspace(-3, 3, 50, dtype=torch.float64), 4.0
    wrong = {
        "lost": lambda cap: S / root,
        "the cap alone": lambda cap: cap * torch.tanh(S / cap) / root,
        "not multiplied back": lambda cap: torch.tanh(S / (cap * root)) * 50.0,
    }
    for name, formula in wrong.items():
        assert (formula(2.0) - softcap(S, 2.0, 16)).norm() / softcap(S, 2.0, 16).norm() > 0.02, name
    lost = (wrong["lost"](50.0) - softcap(S, 50.0, 16)).norm() / softcap(S, 50.0, 16).norm()
    assert lost < 1e-4


def test_softcap_divides_before_and_multiplies_after() -> None:
    """F = cap tanh(S / (cap sqrt(d_head))) (S4)."""
    S = torch.tensor([[-300.0, 0.3, 3.0, 300.0]], dtype=torch.float64)
    expected = torch.tensor([[2 * np.tanh(s / (2 * 4)) for s in S[0].tolist()]])
    torch.testing.assert_close(softcap(S, 2.0, 16), expected.double())
    assert softcap(S, 2.0, 16).abs().max() <= 2.0
    torch.testing.assert_close(softcap(S[:, 1:3], 1e6, 16), S[:, 1:3] / 4)


def test_residual_scale_has_one_number_for_masked_and_one_for_unmasked() -> None:
    scale = ResidualScale()
    x = torch.ones(1, 2, 3)
    assert torch.equal(scale(x), x)  # both start at 0
    with torch.no_grad():
        scale.scale.copy_(torch.tensor([1.0, 3.0]))
    assert torch.equal(scale(x), 2 * x)
    mixed = scale(x, torch.tensor([[True, False]]))
    assert mixed[0, :, 0].tolist() == [2.0, 4.0]


def test_residual_stream_is_float32_in_half_surroundings() -> None:
    residual = Residual()
    stream, update = torch.full((1, 1, 2), 1024.0), torch.full((1, 1, 2), 0.25).half()
    assert torch.equal(residual(stream, update), stream + 0.25)  # lost in float16
    gated = residual(stream, update, torch.full((1, 1, 2), 2.0).half())
    assert torch.equal(gated, stream + 0.5)


def test_mlp_uses_the_exact_gelu() -> None:
    mlp = NormedMLP(8, 32, 1e-5).double()
    assert sum(p.numel() for p in mlp.parameters()) == 2 * 8 + 8 * 32 + 32 + 32 * 8 + 8
    x = torch.randn(5, 8, dtype=torch.float64)
    h = mlp.up(mlp.norm(x))
    exact = mlp.down(h * 0.5 * (1 + torch.erf(h / 2**0.5)))
    torch.testing.assert_close(mlp(x), exact)
    assert not torch.allclose(mlp(x), mlp.down(F.gelu(h, approximate="tanh")), atol=1e-8)


def test_the_norm_inside_an_mlp_has_the_configs_epsilon() -> None:
    """That of the presets is also the default; here it is another."""
    x = torch.randn(5, 8)
    torch.testing.assert_close(NormedMLP(8, 32, 0.5).norm(x), F.layer_norm(x, (8,), eps=0.5))


def test_rotary_tables_are_rounded_once() -> None:
    """Angles are float64: at position 1000, float32 has 4 digits behind the point."""
    half, base = 32, 10000.0
    angles = np.outer(np.arange(1024), base ** (-np.arange(half) / half))
    for table, function in zip(Rotary(64, 1024, base)(1024), (np.cos, np.sin), strict=True):
        expected = function(np.tile(angles, 2)).astype(np.float32)
        assert np.array_equal(table.numpy(), expected)


def test_rotary_depends_on_distance_alone() -> None:
    tables = Rotary(8, 64, 10000.0)(64)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    q, k = q.expand(1, 1, 64, 8), k.expand(1, 1, 64, 8)
    scores = rotate(q, tables) @ rotate(k, tables).transpose(-1, -2)
    for shift in (1, 7):
        diagonal = torch.diagonal(scores[0, 0], offset=shift)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(scores[0, 0, 0, 1], scores[0, 0, 0, 7])


def test_norms_run_on_the_meta_device() -> None:
    assert BiaslessLayerNorm(8, device="meta")(torch.empty(2, 8, device="meta")).shape == (2, 8)


def test_linear_casts_to_its_own_weight() -> None:
    assert Linear(4, 4).half()(torch.randn(2, 4)).dtype == torch.float16
    assert Linear(4, 4)(torch.randn(2, 4).double()).dtype == torch.float32
