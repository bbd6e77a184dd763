"""Who is measured: one sampler behind every name, the same weights and the same noise.

A peer is built and run in a process of its own (`engines.bench.worker`): ONNX Runtime's threads
spin after a call, and would slow whoever shares its process.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engines.artifacts import folder as folders
from engines.artifacts.manifest import Manifest
from ldlm.errors import ConfigError
from ldlm.sampler import DenoiserLoop, Stages

MATMUL = "matmul"

# What a peer is, for tables. A precision other than the one given is the name's second part.
PEERS: dict[str, str] = {
    "torch": "PyTorch eager, float32",
    "torch-bf16": "PyTorch eager, weights and activations bf16",
    "torch-compile": "torch.compile, float32",
    "ort-plain": "ONNX Runtime, the plain graphs, called step by step",
    "ort": "ONNX Runtime, the loop's graphs",
    "rtx": "TensorRT-RTX engines",
    "trt": "TensorRT engines",
}


def default_peers(manifest: Manifest, batches: Sequence[int]) -> list[str]:
    """Who is measured unless asked otherwise; int8 takes no batch but 1."""
    found = ["torch", "torch-bf16", "torch-compile", "ort-plain", "ort"]
    int8 = "int8" in manifest.precisions() and set(batches) == {1}
    return [*found, "ort:int8"] if int8 else found


def parse(name: str) -> tuple[str, str]:
    """`ort:fp16` -> ("ort", "fp16"); without a precision fp32.

    Raises:
        ConfigError: no such peer, or the reference in a precision of ours.
    """
    kind, _, precision = name.partition(":")
    if kind not in PEERS or (kind.startswith("torch") and precision):
        known = ", ".join(PEERS)
        raise ConfigError(
            "no such peer", expected=f"{known}; all but torch's as name:precision", got=name
        )
    return kind, precision or "fp32"


def load(name: str, folder: Path, checkpoint: Path) -> Stages:
    """Build a peer in this process.

    Raises:
        ConfigError, ArtifactError, ProviderError: it cannot run here.
    """
    kind, precision = parse(name)
    manifest = folders.load(folder)
    if kind.startswith("torch"):
        return _torch(kind, checkpoint, manifest)
    from engines.runtime.load import load_stages

    return load_stages(
        folder,
        manifest,
        runtime=kind.removesuffix("-plain"),
        precision=precision,
        plain=kind.endswith("-plain"),
    )


def _torch(kind: str, checkpoint: Path, manifest: Manifest) -> Stages:
    import torch

    from export.stages import SAMPLED, stage
    from ldlm.model import LDLM

    folders.require_origin(manifest, checkpoint)
    # Past the limit torch.compile would run eagerly, and say so on stderr alone.
    torch._dynamo.config.recompile_limit = 1024
    model = LDLM.from_checkpoint(checkpoint).eval().requires_grad_(False)
    dtype = torch.bfloat16 if kind == "torch-bf16" else torch.float32
    calls = []
    for name in SAMPLED:
        module: Any = stage(name).torch(model).to(dtype)
        calls.append(torch.compile(module, dynamic=False) if kind == "torch-compile" else module)

    def call(module: Any) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            with torch.no_grad():  # torch.compile guards against a change to inference_mode
                output = module(*(torch.as_tensor(x).to(dtype) for x in inputs))
            return output.float() if output.is_floating_point() else output

        return run

    denoiser, latents, tokens = map(call, calls)
    return Stages(manifest.config, DenoiserLoop(denoiser, torch.from_numpy), latents, tokens)


def matmul_rate(size: int = 2048) -> float:
    """FLOP/s of the machine's own float32 matrix product: the best of NumPy and PyTorch.

    Of NumPy alone, where PyTorch is not installed.
    """
    a = np.random.default_rng(0).standard_normal((size, size), np.float32)
    products: list[Callable[[], Any]] = [lambda: a @ a]
    if importlib.util.find_spec("torch") is not None:
        import torch

        t = torch.from_numpy(a)
        products.append(lambda: t @ t)
    seconds = []
    for product in products:
        for _ in range(3):
            started = time.perf_counter()
            product()
            seconds.append(time.perf_counter() - started)
    return float(2 * size**3 / min(seconds))
