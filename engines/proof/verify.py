"""The proof: every exported graph against PyTorch, on sizes that differ from the example."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from engines.artifacts import ingredients
from engines.artifacts.manifest import Manifest
from engines.proof import islands, taps
from engines.proof.ablate import ablate, half_ones
from engines.proof.drift import drift
from engines.proof.gates import CASES
from engines.proof.inputs import clamped, stage_inputs
from engines.proof.records import NOTHING_MORE, Extra, Line, Parity, identities
from engines.proof.sabotage.selftest import require_policies, self_test
from engines.proof.stage import float64_limit, prove
from engines.proof.stress import stress_inputs, stressed
from engines.proof.subject import Case, Subject
from engines.runtime.torch import TorchStage
from export.precision import Precision
from export.stages import MAX_BATCH, compared, components, stages_of
from ldlm import files
from ldlm.model import LDLM
from ldlm.sampler import SampleRequest
from ldlm.schedule import TangentSchedule
from ldlm.solvers import step_table

Progress = Callable[[str], None]

# Stress weights need graphs of their own. Large scores make single tokens noisy: the longest case
# is there for its number of tokens.
STRESS_CASES: tuple[Case, ...] = ((1, 17), (3, 128))


SAMPLER_LENGTH = 16


def verify(
    folder: Path,
    manifest: Manifest,
    model: LDLM,
    precisions: list[str],
    progress: Progress = lambda _: None,
    extra: Extra = NOTHING_MORE,
) -> Parity:
    """Compare every graph of the given precisions with the reference model.

    Args:
        folder, manifest: the artifacts.
        model: the checkpoint they were made from, float32.
        precisions: which of the exported precisions.
        progress: told what is being done.
        extra: what else to ask.

    Raises:
        ArtifactError: a graph was not exported, or its files have changed.
        ConfigError, SamplerError: something is asked that cannot be.
    """
    _require_possible(manifest, precisions, extra)
    parity = Parity([], {})
    for name in precisions:
        graphs = identities(manifest, name)
        parity.graphs |= graphs
        parity.made_from[name] = ingredients.proof_ingredients(
            graphs, manifest.checkpoint, manifest.config
        )
        parity.asked[name] = extra.asked()
    for weights in components():
        for name in precisions:
            specs = stages_of(weights)
            paths = {s.name: manifest.graph(name, s.name).verified(folder) for s in specs}
            progress(f"{weights} {name}")
            parity.lines += _prove(model, weights, name, paths, _cases(model, CASES), "given")
            for spec in specs:
                parity.islands += islands.look(paths[spec.name], spec, Precision.of(name))
    if extra.stress:
        parity.lines += _stress(folder, model, precisions, progress)
    _ask_more(parity, folder, manifest, model, precisions, progress, extra)
    return parity


def _require_possible(manifest: Manifest, precisions: list[str], extra: Extra) -> None:
    """Refuse at once what would fail after minutes."""
    for name in precisions:
        for weights in components():
            manifest.require_graphs(name, weights)
    if extra.sampler_steps:
        schedule = TangentSchedule(manifest.config.tangent_d, manifest.config.t_min)
        step_table(SampleRequest.solver, schedule, schedule.grid(extra.sampler_steps))
    if extra.self_test:
        require_policies(precisions)
    if extra.taps:
        for name in precisions:
            Precision.of(name).require_floats("the taps are")
    if extra.ablate:
        half_ones(precisions)
    if extra.runtime:
        for name in precisions:
            Precision.of(name).require(extra.runtime)


def _ask_more(
    parity: Parity, folder: Path, manifest: Manifest, model: LDLM, precisions: list[str],
    progress: Progress, extra: Extra,
) -> None:  # fmt: skip
    subject = (folder, manifest, model, precisions)
    if extra.taps:
        reports = taps.look(*subject, components(), progress)
        parity.taps = [dataclasses.asdict(report) for report in reports]
        parity.lines += [line for report in reports if (line := report.line()) is not None]
    if extra.self_test:
        parity.self_test = [outcome.record() for outcome in self_test(*subject, progress)]
    if extra.sampler_steps:
        length = min(SAMPLER_LENGTH, model.config.n_positions)
        lines, parity.drift = drift(
            *subject, steps=extra.sampler_steps, length=length, progress=progress
        )
        parity.lines += lines
    if extra.runtime:
        from engines.proof.engine import engine_lines
        from engines.runtime.trt import TrtRuntime

        runtime = TrtRuntime(extra.runtime)
        # Engines are built for a batch of 8 unless asked otherwise; the cases' own are below that.
        fitting = _cases(model, CASES, largest=max(batch for batch, _ in CASES))
        parity.lines += engine_lines(*subject, runtime, fitting, progress)
    if extra.ablate:
        parity.ablation = [
            row.record() for row in ablate(model, precisions, components(), progress)
        ]


def _prove(
    model: LDLM,
    weights: str,
    precision: str,
    paths: Mapping[str, Path],
    cases: list[Case],
    kind: str,
) -> list[Line]:
    """All questions about one weights file; `paths` by the names of its stages."""
    spec = compared(weights)
    reference = TorchStage(model, spec)
    inputs = {case: stage_inputs(spec, model.config, *case) for case in cases}
    if kind == "stress":
        inputs = {case: stress_inputs(spec, arrays) for case, arrays in inputs.items()}
    expected = {case: reference(*arrays) for case, arrays in inputs.items()}
    names = {spec.name: "graph", "token_decoder": "ids"}
    roles = {names.get(name, name): path for name, path in paths.items()}
    subject = Subject(model, spec, Precision.of(precision), kind, roles, inputs, expected)
    if kind == "stress":
        limit = float64_limit(model, spec, inputs, expected)
        subject = replace(subject, exact_limit=limit)
    return prove(subject)


def _stress(folder: Path, model: LDLM, precisions: list[str], progress: Progress) -> list[Line]:
    from export.exporter import export_stage

    tough = stressed(model)
    lines: list[Line] = []
    for name in precisions:
        for weights in components():
            progress(f"{weights} {name}, stress weights")
            with files.staging_folder(folder) as staging:
                graphs = export_stage(tough, weights, name, staging)
                paths = {graph.spec.name: graph.path for graph in graphs}
                lines += _prove(tough, weights, name, paths, _cases(model, STRESS_CASES), "stress")
    return lines


def _cases(model: LDLM, cases: tuple[Case, ...], largest: int = MAX_BATCH) -> list[Case]:
    return list(dict.fromkeys(clamped(case, model.config, largest) for case in cases))
