"""Taps: every equation's intermediate by its name, in PyTorch and in the exported file.

Where each intermediate is found is data: a submodule of the block, and its result or one of its
inputs. Forward hooks pick them up, in eager and under torch.export alike, so the model's code
knows nothing of taps. Imports no torch.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from export.stages import StageSpec

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch import nn

    from ldlm.config import LDLMConfig


@dataclass(frozen=True)
class Tap:
    """One intermediate.

    Attributes:
        name: the symbol of its equation.
        equation: what it is, for tables.
        module: the submodule where it is found.
        port: None for the module's result, or the place among its inputs.
        part: (i, n): the i-th of n equal parts of the last dimension.
        call: which of the module's calls in one forward.
    """

    name: str
    equation: str
    module: str
    port: int | None = None
    part: tuple[int, int] | None = None
    call: int = 0

    def read(self, inputs: tuple[Any, ...], result: Any) -> Any:
        """The tensor, from what went through the module."""
        tensor = result if self.port is None else inputs[self.port]
        return tensor if self.part is None else tensor.chunk(self.part[1], dim=-1)[self.part[0]]


@dataclass(frozen=True)
class Taps:
    """The taps of a stage: before its blocks, in each block, and after them.

    Attributes:
        blocks: the submodule that lists the blocks.
    """

    blocks: str
    before: tuple[Tap, ...]
    block: tuple[Tap, ...]
    after: tuple[Tap, ...] = ()


# The 27 equations of a latent decoder's block, in the order and with the letters of S4.
_LATENT_DECODER = Taps(
    blocks="decoder.blocks",
    before=(
        Tap("r_0", "(1 + s_q) MLP(m) + P", "decoder.blocks.0", 0),
        Tap("z_p", "z + P", "decoder.blocks.0", 1),
    ),
    block=(
        Tap("r_bar", "RMSNorm_a(r)", "attention.state_norm"),
        Tap("z_bar", "RMSNorm_b(z_p)", "attention.latents_norm"),
        Tap("p_a", "r_bar W_QKV", "attention.qkv"),
        Tap("p_b", "z_bar W_KV", "attention.kv"),
        Tap("q", "p_a, part 1 of 3", "attention.qkv", part=(0, 3)),
        Tap("Q", "RMSNorm_Q(q)", "attention.query_norm"),
        Tap("k_a", "p_a, part 2 of 3", "attention.qkv", part=(1, 3)),
        Tap("k_b", "p_b, part 1 of 2", "attention.kv", part=(0, 2)),
        Tap("k", "[k_b ; k_a]", "attention.key_norm", 0),
        Tap("K", "RMSNorm_K(k)", "attention.key_norm"),
        Tap("v_a", "p_a, part 3 of 3", "attention.qkv", part=(2, 3)),
        Tap("v_b", "p_b, part 2 of 2", "attention.kv", part=(1, 2)),
        Tap("v", "[v_b ; v_a]", "attention.attend", 2),
        Tap("S", "Q K^T", "attention.attend.softmax", 0),
        Tap("F", "c tanh(S / (c sqrt(d_head)))", "attention.attend.softmax.softcap"),
        Tap("A", "softmax(F)", "attention.attend.softmax"),
        Tap("O", "A V", "attention.attend"),
        Tap("o", "merge heads(O)", "attention.out", 0),
        Tap("d_attn", "o W_O", "attention.out"),
        Tap("d_attn'", "(1 + s_a) d_attn", "attention_scale"),
        Tap("r'", "r + d_attn'", "mlp", 0),
        Tap("r'_bar", "LayerNorm(r')", "mlp.norm"),
        Tap("h", "r'_bar W1 + b1", "mlp.up"),
        Tap("g", "h Phi(h)", "mlp.down", 0),
        Tap("d_mlp", "g W2 + b2", "mlp.down"),
        Tap("d_mlp'", "(1 + s_m) d_mlp", "mlp_scale"),
        Tap("r_next", "r' + d_mlp'", ""),
    ),
)

# What the two stages with rotary attention share, from q, k and v on.
_ROTARY_ATTENTION = (
    Tap("Q", "rotary(q)", "attention.attend", 0),
    Tap("K", "rotary(k)", "attention.attend", 1),
    Tap("O", "softmax(Q K^T / sqrt(d_head)) V", "attention.attend"),
    Tap("o", "merge heads(O)", "out", 0),
    Tap("d_attn", "o W_O", "out"),
)

_DENOISER = Taps(
    blocks="blocks",
    before=(
        Tap("c", "SiLU(W2 SiLU(W1 e + b1) + b2)", "time"),
        Tap("x_0", "[x_t ; x0_prev] W + b", "input"),
    ),
    block=(
        Tap("sh1", "c W + b, part 1 of 6", "modulate", 1),
        Tap("sc1", "part 2", "modulate", 2),
        Tap("g1", "part 3", "residual", 2),
        Tap("sh2", "part 4", "modulate", 1, call=1),
        Tap("sc2", "part 5", "modulate", 2, call=1),
        Tap("g2", "part 6", "residual", 2, call=1),
        Tap("x_bar", "LayerNorm(x)", "norm1"),
        Tap("u", "x_bar (1 + sc1) + sh1", "qkv", 0),
        Tap("p", "u W_qkv", "qkv"),
        Tap("q", "p, part 1 of 3", "attention", 0),
        Tap("k", "p, part 2 of 3", "attention", 1),
        Tap("v", "p, part 3 of 3", "attention", 2),
        *_ROTARY_ATTENTION,
        Tap("x'", "x + g1 d_attn", "norm2", 0),
        Tap("x'_bar", "LayerNorm(x')", "norm2"),
        Tap("u'", "x'_bar (1 + sc2) + sh2", "mlp", 0),
        Tap("h", "u' W1 + b1", "mlp.up"),
        Tap("g", "GELU_tanh(h)", "mlp.down", 0),
        Tap("d_mlp", "g W2 + b2", "mlp.down"),
        Tap("x_next", "x' + g2 d_mlp", ""),
    ),
    after=(
        Tap("sh", "c W + b, part 1 of 2", "modulate", 1),
        Tap("sc", "part 2", "modulate", 2),
        Tap("x_bar", "LayerNorm(x_12)", "final_norm"),
        Tap("y", "x_bar (1 + sc) + sh", "output", 0),
    ),
)

_TOKEN_DECODER = Taps(
    blocks="blocks",
    before=(),
    block=(
        Tap("u", "LayerNorm(x)", "norm1"),
        Tap("q", "u W_q", "q"),
        Tap("k", "u W_k", "k"),
        Tap("v", "u W_v", "v"),
        *_ROTARY_ATTENTION,
        Tap("x'", "x + d_attn", "norm2", 0),
        Tap("u'", "LayerNorm(x')", "norm2"),
        Tap("gate", "u' W_gate", "gate"),
        Tap("up", "u' W_up", "up"),
        Tap("g", "SiLU(gate) * up", "down", 0),
        Tap("d_mlp", "g W_down", "down"),
        Tap("x_next", "x' + d_mlp", ""),
    ),
)

TAPS: dict[str, Taps] = {
    "denoiser": _DENOISER,
    "latent_decoder": _LATENT_DECODER,
    "token_decoder": _TOKEN_DECODER,
}


def located(module: nn.Module, component: str) -> dict[str, tuple[str, Tap]]:
    """Every tap of a stage: its full name -> (path of the submodule, tap), in order.

    In a block the name has the block's index before it: `3.r_bar`.
    """
    taps = TAPS[component]
    found = {tap.name: (tap.module, tap) for tap in taps.before}
    for name, _ in module.get_submodule(taps.blocks).named_children():
        for tap in taps.block:
            path = ".".join(part for part in (taps.blocks, name, tap.module) if part)
            found[f"{name}.{tap.name}"] = (path, tap)
    return found | {tap.name: (tap.module, tap) for tap in taps.after}


@contextlib.contextmanager
def tapped(module: nn.Module, component: str) -> Iterator[list[str]]:
    """While this holds, the module returns (its output, every tap in order).

    Args:
        module: a stage's module.
        component: the component of the stage.

    Yields:
        The taps' full names.
    """
    taken: defaultdict[str, list[Any]] = defaultdict(list)
    places = located(module, component)

    def take(name: str, tap: Tap, _module: Any, inputs: Any, result: Any) -> None:
        taken[name].append(tap.read(inputs, result))

    def give(_module: Any, _inputs: Any, result: Any) -> tuple[Any, ...]:
        tensors = [taken[name][tap.call] for name, (_, tap) in places.items()]
        taken.clear()
        return (result, *tensors)

    hooks = [
        module.get_submodule(path).register_forward_hook(partial(take, name, tap))
        for name, (path, tap) in places.items()
    ]
    hooks.append(module.register_forward_hook(give))
    try:
        yield list(places)
    finally:
        for hook in hooks:
            hook.remove()


def tapped_graph(
    path: Path, module: nn.Module, spec: StageSpec, config: LDLMConfig
) -> tuple[ir.Model, dict[str, str]]:
    """An exported file with every tap as an output.

    A debug graph is exported from the module with the taps as outputs; it tells which value of
    the file is which. What is then run is the file's own operators and component.

    Args:
        path: the .onnx file.
        module: the stage's module with the file's precision policy applied.
        spec, config: the stage and its sizes.

    Returns:
        The graph, and its output's name for every tap.

    Raises:
        GraphCheckError: the file's operators are not those of the model.
    """
    import onnx_ir as ir

    from export.exporter import trace
    from export.passes.expose import expose

    with tapped(module, spec.component) as names:
        debug = trace(module, spec, config, extra=names)
    graph = ir.load(path)
    return graph, expose(graph, debug, spec.name)
