"""The proof: every exported graph against PyTorch, on sizes that differ from the example."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engines.artifacts.manifest import Manifest
from engines.proof import islands, taps
from engines.proof.ablate import ablate, half_ones
from engines.proof.drift import drift
from engines.proof.gates import CASES
from engines.proof.inputs import clamped
from engines.proof.questions import NOTHING_MORE, SAMPLER, ProofOptions
from engines.proof.records import (
    Ablation,
    Checkpoint,
    Measurement,
    Outcome,
    Proof,
    Scope,
    TapReport,
)
from engines.proof.sabotage.selftest import require_policies, self_test
from engines.proof.saved import identities, made_from
from engines.proof.stage import float64_limit, prove
from engines.proof.stress import stressed
from engines.proof.subject import Case, Subject
from export.exporter import export_stage
from export.precision import Precision
from export.stages import compared, components, stages_of
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
    precisions: Sequence[str],
    progress: Progress = lambda _: None,
    options: ProofOptions = NOTHING_MORE,
    stages: Sequence[str] | None = None,
) -> Proof:
    """Compare every graph of the given precisions with the reference model.

    Args:
        folder, manifest: the artifacts.
        model: the checkpoint they were made from, float32.
        precisions: which of the exported precisions.
        progress: told what is being done.
        options: what else to ask.
        stages: of which components, named by themselves or by a stage; None is all. The sampler
            is one of them, "sampler". Partial proofs are joined by `Proof.merged`.

    Raises:
        ArtifactError: a graph was not exported, or its files have changed.
        ConfigError, SamplerError: something is asked that cannot be.
    """
    chosen = options.components(stages)
    _require_possible(manifest, precisions, chosen, options)
    context = _Context(folder, manifest, model, progress, options)
    tough = stressed(model) if options.stress and chosen != [SAMPLER] else None
    proof = Proof()
    for component in chosen:
        if component == SAMPLER:
            proof = proof.merged(context.sampler(precisions))
            continue
        for name in precisions:
            proof = proof.merged(context.component(component, name, tough))
    return proof


def measure(
    model: LDLM,
    component: str,
    precision: Precision,
    paths: Mapping[str, Path],
    cases: Sequence[Case],
    checkpoint: Checkpoint,
) -> list[Measurement]:
    """Put all questions to the graphs of one component.

    Args:
        model: the reference; for "stress", the stressed one that the graphs were made from.
        component, precision: which.
        paths: the component's graphs, by stage.
        cases: (batch, length) of the inputs.
        checkpoint: what `model` is.
    """
    cases = list(dict.fromkeys(clamped(case, model.config) for case in cases))
    subject = Subject.of(model, component, precision, cases, checkpoint, paths)
    if checkpoint == "stress":
        subject = replace(subject, exact_limit=float64_limit(subject))
    return prove(subject)


def stress(
    folder: Path, tough: LDLM, component: str, precision: str, progress: Progress
) -> list[Measurement]:
    """Export a component of a stressed model, inside the folder for a while, and measure that.

    Raises:
        ExportError, DiskSpaceError: as the export.
    """
    progress(f"{component} {precision}, stress checkpoint")
    with files.staging_folder(folder) as staging:
        graphs = export_stage(tough, component, precision, staging)
        paths = {graph.spec.name: graph.path for graph in graphs}
        return measure(tough, component, Precision.of(precision), paths, STRESS_CASES, "stress")


def _require_possible(
    manifest: Manifest, precisions: Sequence[str], chosen: Sequence[str], options: ProofOptions
) -> None:
    """Refuse at once what would fail after minutes."""
    for name in precisions:
        for component in components() if SAMPLER in chosen else chosen:
            manifest.require_graphs(name, component)
    if SAMPLER in chosen:
        schedule = TangentSchedule(manifest.config.tangent_d, manifest.config.t_min)
        step_table(SampleRequest.solver, schedule, schedule.grid(options.sampler_steps))
    if options.self_test:
        require_policies(precisions)
    if options.ablate:
        half_ones(precisions)
    for name in precisions:
        if options.taps:
            Precision.of(name).require_floats("the taps are")
        if options.runtime:
            Precision.of(name).require(options.runtime)


@dataclass(frozen=True)
class _Context:
    """What every part of a proof is given; see `verify`."""

    folder: Path
    manifest: Manifest
    model: LDLM
    progress: Progress
    options: ProofOptions

    def component(self, component: str, name: str, tough: LDLM | None) -> Proof:
        """All that is asked of a component in a precision; of `tough` too, the stressed model."""
        model, options, progress = self.model, self.options, self.progress
        precision, scope = Precision.of(name), self._scope(name, component)
        paths = {s: self.manifest.graph(name, s).verified(self.folder) for s in scope.graphs}
        progress(f"{component} {name}")
        found = measure(model, component, precision, paths, CASES, "given")
        records = [
            r for s in stages_of(component) for r in islands.look(paths[s.name], s, precision)
        ]
        if tough is not None:
            found += stress(self.folder, tough, component, name, progress)
        reports: list[TapReport] = []
        outcomes: tuple[Outcome, ...] = ()
        rows: tuple[Ablation, ...] = ()
        if options.taps:
            progress(f"{component} {name}, taps")
            spec = compared(component)
            reports = taps.look(paths[spec.name], model, spec, precision)
            found += filter(None, map(taps.measurement, reports))
        if options.self_test:
            where = (self.folder, self.manifest, model, precision, component)
            outcomes = tuple(self_test(*where, progress))
        if options.runtime:
            found += self._engines(component, name)
        if options.ablate and precision.is_half:
            rows = tuple(ablate(model, precision, component, progress))
        parts = (tuple(found), tuple(records), tuple(reports), outcomes, rows)
        return Proof(*parts, scopes=(scope,))

    def sampler(self, precisions: Sequence[str]) -> Proof:
        """The whole sampler in every precision."""
        steps = self.options.sampler_steps
        length = min(SAMPLER_LENGTH, self.model.config.n_positions)
        where = (self.folder, self.manifest, self.model, precisions)
        found, curves = drift(*where, steps=steps, length=length, progress=self.progress)
        scopes = tuple(self._scope(name, SAMPLER) for name in precisions)
        return Proof(measurements=tuple(found), drift=tuple(curves), scopes=scopes)

    def _scope(self, precision: str, component: str) -> Scope:
        graphs = identities(self.manifest, precision, component)
        asked = self.options.asked(component)
        return Scope(precision, component, graphs, made_from(self.manifest, graphs), asked)

    def _engines(self, component: str, precision: str) -> Iterator[Measurement]:
        from engines.proof.engine import engine_questions
        from engines.runtime.trt import TrtRuntime

        runtime = TrtRuntime(self.options.runtime)
        subject = (self.folder, self.manifest, self.model, [precision])
        # Engines are built for a batch of 8 unless asked otherwise; the cases' own are below that.
        largest = max(batch for batch, _ in CASES)
        cases = list(dict.fromkeys(clamped(case, self.model.config, largest) for case in CASES))
        return engine_questions(*subject, runtime, [component], cases, self.progress)
