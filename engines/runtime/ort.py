"""A stage on ONNX Runtime, with the provider that was asked for or not at all."""

import contextlib
import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnxruntime as ort

from engines.memory import cores
from engines.runtime.stage import Array, GraphStage
from export.stages import StageSpec
from ldlm.config import LDLMConfig
from ldlm.errors import ArtifactError, ProviderError

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
CPU_REMEDY = "the CPU provider has no bf16: use fp32 or fp16, or --runtime evaluator"
CUDA_REMEDY = "use --provider cpu, or pip install 'onnxruntime-gpu[cuda,cudnn]'; see ldlm doctor"


class OrtStage(GraphStage):
    """One stage in ONNX Runtime.

    Args:
        path, spec, config: see `engines.runtime.stage.GraphStage`.
        provider: "cpu" or "cuda". Nothing else is used in its place.
        cuda_graphs: with "cuda", capture a graph per `run_options`; for bound buffers alone.

    Attributes:
        session: for a caller that binds buffers of its own.

    Raises:
        ProviderError: the provider is unknown, not installed, or does not start.
        ArtifactError: ONNX Runtime cannot load the file.
    """

    def __init__(
        self,
        path: Path,
        spec: StageSpec,
        config: LDLMConfig,
        *,
        provider: str = "cpu",
        cuda_graphs: bool = False,
    ) -> None:
        super().__init__(path, spec, config, provider)
        graphs = cuda_graphs and provider == "cuda"
        self._cuda_graphs = itertools.count() if graphs else None
        self._one_at_a_time = threading.Lock() if graphs else contextlib.nullcontext()
        self.session = open_session(str(path), spec.name, provider, cuda_graphs=graphs)

    def run_bound(self, binding: ort.IOBinding, options: ort.RunOptions) -> None:
        """Run on bound buffers. Sessions that replay CUDA graphs take one run at a time."""
        with self._one_at_a_time:
            self.session.run_with_iobinding(binding, options)

    def run_options(self) -> ort.RunOptions:
        """For one binding whose addresses stay: with CUDA graphs, it has one of its own."""
        options = ort.RunOptions()
        if self._cuda_graphs is not None:
            options.add_run_config_entry("gpu_graph_id", str(next(self._cuda_graphs)))
        return options

    def _run(self, feeds: dict[str, Any], outputs: Sequence[str]) -> dict[str, Array]:
        return dict(zip(outputs, self.session.run(list(outputs), feeds), strict=True))


def open_session(
    model: str | bytes, stage: str, device: str = "cpu", *, cuda_graphs: bool = False
) -> ort.InferenceSession:
    """A session on the provider that is asked for.

    Args:
        model: the path of the .onnx file, or its content.
        stage: its name, for messages.
        device, cuda_graphs: see `OrtStage`, also for what is raised.
    """
    if device not in PROVIDERS:
        raise ProviderError("no such provider", expected=" or ".join(PROVIDERS), got=device)
    wanted, on_cpu = PROVIDERS[device], device == "cpu"
    remedy = CUDA_REMEDY + "; --plain does without CUDA graphs" * cuda_graphs
    told: dict[str, Any] = {"stage": stage, "expected": wanted, "remedy": remedy}
    if wanted not in (available := ort.get_available_providers()):
        problem = "ONNX Runtime is installed without this provider"
        raise ProviderError(problem, got=", ".join(available), **told)
    options = ort.SessionOptions()
    options.log_severity_level = 4  # an error is raised, with the same words
    # By itself it would take every core of the machine, whatever a container's quota is.
    options.intra_op_num_threads = cores()
    provider_options = {}
    if not on_cpu:
        # ONNX Runtime would otherwise run what the device cannot on the CPU, with a warning.
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        if hasattr(ort, "preload_dlls"):
            ort.preload_dlls()  # CUDA's libraries, where they came as Python packages
        # Float32 means float32: the provider would use TF32.
        provider_options = {"use_tf32": "0"} | ({"enable_cuda_graph": "1"} if cuda_graphs else {})
    try:
        session = ort.InferenceSession(model, options, providers=[(wanted, provider_options)])
    except Exception as error:  # the library's exceptions share no base but this one
        problem = "ONNX Runtime could not load the stage"
        told |= {"got": str(error)[:1000]} | ({"remedy": CPU_REMEDY} if on_cpu else {})
        raise (ArtifactError if on_cpu else ProviderError)(problem, **told) from error
    if (active := session.get_providers())[0] != wanted:
        raise ProviderError("the provider asked for did not start", got=", ".join(active), **told)
    return session
