"""A stage on ONNX Runtime, with the provider that was asked for or not at all."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnxruntime as ort

from engines.artifacts.manifest import Manifest
from engines.runtime.stage import Array, RuntimeStage
from export.stages import AxisRange, StageSpec, graph_ranges, stage
from ldlm.config import LDLMConfig
from ldlm.errors import ArtifactError, ProviderError

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
# Float32 means float32: CUDA's provider would use TF32.
PROVIDER_OPTIONS: dict[str, dict[str, str]] = {"cpu": {}, "cuda": {"use_tf32": "0"}}
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
        threads: intra-op threads; None is one per core.
        ranges: allowed sizes of the dynamic axes; None is what the graph was exported for.
        cuda_graphs: with "cuda", capture a graph per `run_options`; for bound buffers alone.

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
        self._cuda_graphs = itertools.count() if cuda_graphs and provider == "cuda" else None
        graphs = self._cuda_graphs is not None
        self._one_at_a_time = threading.Lock() if graphs else contextlib.nullcontext()
        chosen = dict(PROVIDER_OPTIONS.get(provider, {}))
        if self._cuda_graphs is not None:
            chosen["enable_cuda_graph"] = "1"
        self._session = _open(path, spec, provider, chosen, optimisation, threads)

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
        before = [path.stat() if path.exists() else None for path in parts]
        entry.verified(folder)
        made = cls(parts[0], stage(stage_name), manifest.config, **options)
        after = [path.stat() if path.exists() else None for path in parts]
        if [_identity(stat) for stat in before] != [_identity(stat) for stat in after]:
            raise ArtifactError(
                "the graph was replaced while it was loaded", stage=stage_name, remedy="try again"
            )
        return made

    def run_bound(self, binding: ort.IOBinding, options: ort.RunOptions) -> None:
        """Run on bound buffers. Sessions that replay CUDA graphs take one run at a time."""
        with self._one_at_a_time:
            self._session.run_with_iobinding(binding, options)

    @property
    def session(self) -> ort.InferenceSession:
        """The session, for a caller that binds buffers of its own."""
        return self._session

    def run_options(self) -> ort.RunOptions:
        """For one binding whose addresses stay: with CUDA graphs, it has one of its own."""
        options = ort.RunOptions()
        if self._cuda_graphs is not None:
            options.add_run_config_entry("gpu_graph_id", str(next(self._cuda_graphs)))
        return options

    def _run(self, feeds: dict[str, Any], outputs: Sequence[str]) -> dict[str, Array]:
        return dict(zip(outputs, self._session.run(list(outputs), feeds), strict=True))


def _identity(stat: os.stat_result | None) -> tuple[int, ...]:
    """What changes when a file is replaced or written to."""
    return () if stat is None else (stat.st_ino, stat.st_size, stat.st_mtime_ns)


def _open(
    path: Path,
    spec: StageSpec,
    provider: str,
    provider_options: Mapping[str, str],
    optimisation: str,
    threads: int | None,
) -> ort.InferenceSession:
    if provider not in PROVIDERS:
        raise ProviderError("no such provider", expected=" or ".join(PROVIDERS), got=provider)
    wanted = PROVIDERS[provider]
    remedy = "use --provider cpu, or pip install 'onnxruntime-gpu[cuda,cudnn]'; see ldlm doctor"
    if "enable_cuda_graph" in provider_options:
        remedy += "; --plain does without CUDA graphs"
    available = ort.get_available_providers()
    if wanted not in available:
        raise ProviderError(
            "ONNX Runtime is installed without this provider",
            stage=spec.name,
            expected=wanted,
            got=", ".join(available),
            remedy=remedy,
        )
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = OPTIMISATION[optimisation]
    if threads is not None:
        options.intra_op_num_threads = threads
    if provider == "cuda" and hasattr(ort, "preload_dlls"):
        ort.preload_dlls()  # CUDA's libraries, where they came as Python packages
    if provider != "cpu":
        # ONNX Runtime would otherwise run what the device cannot on the CPU, with a warning.
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        chosen = [(wanted, dict(provider_options))]
        session = ort.InferenceSession(str(path), options, providers=chosen)
    except Exception as error:  # the library's exceptions share no base but this one
        kind = ArtifactError if provider == "cpu" else ProviderError
        raise kind(
            "ONNX Runtime could not load the stage",
            stage=spec.name,
            expected=wanted,
            got=str(error)[:1000],
            remedy=CPU_REMEDY if provider == "cpu" else remedy,
        ) from error
    active = session.get_providers()
    if active[0] != wanted:
        raise ProviderError(
            "the provider asked for did not start",
            stage=spec.name,
            expected=wanted,
            got=", ".join(active),
            remedy=remedy,
        )
    return session
