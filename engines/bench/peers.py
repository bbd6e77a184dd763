"""Who is measured: one sampler behind every name, the same weights and the same noise.

A peer is built and run in a process of its own (`engines.bench.worker`): ONNX Runtime's threads
spin after a call, and would slow whoever shares its process.
"""

import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engines.artifacts import folder as folders
from engines.artifacts.manifest import Manifest
from engines.runtime.load import load_stages
from engines.tensorrt.library import LIBRARIES
from ldlm.errors import ConfigError
from ldlm.sampler import DenoiserLoop, Stages

MATMUL = "matmul"

# PyTorch eager in float32, in bfloat16 throughout, and compiled; ONNX Runtime on the plain graphs,
# called step by step, and on the loop's; the engines.
PEERS = ("torch", "torch-bf16", "torch-compile", "ort-plain", "ort", *LIBRARIES)


def default_peers(manifest: Manifest, batches: Sequence[int]) -> list[str]:
    """Who is measured unless asked otherwise; int8 takes no batch but 1."""
    int8 = "int8" in manifest.precisions() and set(batches) == {1}
    return [*(peer for peer in PEERS if peer not in LIBRARIES), *(["ort:int8"] if int8 else [])]


def parse(name: str) -> tuple[str, str]:
    """`ort:fp16` -> ("ort", "fp16"); without a precision fp32.

    Raises:
        ConfigError: no such peer, or the reference in a precision of ours.
    """
    kind, _, precision = name.partition(":")
    if kind not in PEERS or (kind.startswith("torch") and precision):
        known = f"{', '.join(PEERS)}; all but torch's as name:precision"
        raise ConfigError("no such peer", expected=known, got=name)
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
    runtime, plain = kind.removesuffix("-plain"), kind.endswith("-plain")
    return load_stages(folder, manifest, runtime=runtime, precision=precision, plain=plain)


def _torch(kind: str, checkpoint: Path, manifest: Manifest) -> Stages:
    import torch

    from export.stages import SAMPLED, stage
    from ldlm.model import LDLM

    folders.require_origin(manifest, checkpoint)
    # Past the limit torch.compile would run eagerly, and say so on stderr alone.
    torch._dynamo.config.recompile_limit = 1024
    model = LDLM.from_checkpoint(checkpoint).eval().requires_grad_(False)
    dtype = torch.bfloat16 if kind == "torch-bf16" else torch.float32

    def call(name: str) -> Callable[..., Any]:
        module: Any = stage(name).torch(model).to(dtype)
        if kind == "torch-compile":
            module = torch.compile(module, dynamic=False)

        def run(*inputs: Any) -> Any:
            with torch.no_grad():  # torch.compile guards against a change to inference_mode
                output = module(*(torch.as_tensor(x).to(dtype) for x in inputs))
            return output.float() if output.is_floating_point() else output

        return run

    denoiser, latents, tokens = map(call, SAMPLED)
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
