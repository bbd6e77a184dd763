"""A stage on ONNX Runtime, with the provider that was asked for or not at all."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnxruntime as ort

from engines.artifacts.manifest import Manifest
from engines.memory import cores
from engines.runtime.stage import Array, RuntimeStage
from export.stages import AxisRange, StageSpec, graph_ranges, stage
from ldlm.config import LDLMConfig
from ldlm.errors import ArtifactError, ProviderError

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
CPU_REMEDY = "the CPU provider has no bf16: use fp32 or fp16, or --runtime evaluator"
OPTIMISATION = {
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,  # what is deployed
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "none": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
}


class OrtStage(RuntimeStage):
    """One stage in ONNX Runtime.

    Args:
        path: the .onnx file.
        spec, config: what its inputs must look like.
        provider: "cpu" or "cuda". Nothing else is used in its place.
        optimisation: graph optimisation level; "all" is what is deployed.
        threads: intra-op threads; None is one per core that may be used.
        ranges: allowed sizes of the dynamic axes; None is what the graph was exported for.
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
        optimisation: str = "all",
        threads: int | None = None,
        ranges: Mapping[str, AxisRange] | None = None,
        cuda_graphs: bool = False,
    ) -> None:
        super().__init__(spec, config, ranges or graph_ranges(config), provider)
        graphs = cuda_graphs and provider == "cuda"
        self._cuda_graphs = itertools.count() if graphs else None
        self._one_at_a_time = threading.Lock() if graphs else contextlib.nullcontext()
        self.session = _open(path, spec, provider, optimisation, threads, graphs)

    @classmethod
    def from_artifacts(
        cls, folder: Path, manifest: Manifest, stage_name: str, precision: str, **options: Any
    ) -> OrtStage:
        """A stage of an artifacts folder, after its files were compared with the manifest.

        Raises:
            ArtifactError: the graph was not exported, or a file is missing or changed.
            ProviderError: as the constructor.
        """
        entry = manifest.graph(precision, stage_name)
        parts = [folder / entry.graph.path, folder / entry.data.path]
        before = [_identity(path) for path in parts]
        entry.verified(folder)
        made = cls(parts[0], stage(stage_name), manifest.config, **options)
        if [_identity(path) for path in parts] != before:
            raise ArtifactError(
                "the graph was replaced while it was loaded", stage=stage_name, remedy="try again"
            )
        return made

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


def _identity(path: Path) -> tuple[int, ...]:
    """What changes when a file is replaced or written to; nothing of one that is not there."""
    with contextlib.suppress(FileNotFoundError):
        found = path.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns
    return ()


def _open(
    path: Path,
    spec: StageSpec,
    provider: str,
    optimisation: str,
    threads: int | None,
    cuda_graphs: bool,
) -> ort.InferenceSession:
    if provider not in PROVIDERS:
        raise ProviderError("no such provider", expected=" or ".join(PROVIDERS), got=provider)
    wanted = PROVIDERS[provider]
    remedy = "use --provider cpu, or pip install 'onnxruntime-gpu[cuda,cudnn]'; see ldlm doctor"
    if cuda_graphs:
        remedy += "; --plain does without CUDA graphs"
    told: dict[str, Any] = {"stage": spec.name, "expected": wanted}
    if wanted not in (available := ort.get_available_providers()):
        problem = "ONNX Runtime is installed without this provider"
        raise ProviderError(problem, got=", ".join(available), remedy=remedy, **told)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = OPTIMISATION[optimisation]
    # By itself it would take every core of the machine, whatever a container's quota is.
    options.intra_op_num_threads = threads or cores()
    provider_options = {}
    if provider == "cuda":
        # Float32 means float32: the provider would use TF32.
        provider_options = {"use_tf32": "0"} | ({"enable_cuda_graph": "1"} if cuda_graphs else {})
        # ONNX Runtime would otherwise run what the device cannot on the CPU, with a warning.
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        if hasattr(ort, "preload_dlls"):
            ort.preload_dlls()  # CUDA's libraries, where they came as Python packages
    try:
        session = ort.InferenceSession(str(path), options, providers=[(wanted, provider_options)])
    except Exception as error:  # the library's exceptions share no base but this one
        kind = ArtifactError if provider == "cpu" else ProviderError
        helps = CPU_REMEDY if provider == "cpu" else remedy
        problem, got = "ONNX Runtime could not load the stage", str(error)[:1000]
        raise kind(problem, got=got, remedy=helps, **told) from error
    if (active := session.get_providers())[0] != wanted:
        problem = "the provider asked for did not start"
        raise ProviderError(problem, got=", ".join(active), remedy=remedy, **told)
    return session
