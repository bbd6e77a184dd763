"""The proof: every exported graph against PyTorch, on sizes that differ from the example."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.artifacts.manifest import Manifest
from engines.proof import islands, taps
from engines.proof.ablate import ablate
from engines.proof.drift import drift
from engines.proof.gates import CASES
from engines.proof.questions import NOTHING_MORE, SAMPLER, ProofOptions
from engines.proof.records import Measurement, Proof, Record, Scope
from engines.proof.sabotage.selftest import self_test
from engines.proof.saved import scope_of
from engines.proof.stage import prove
from engines.proof.subject import Case, Subject
from export.precision import Precision
from export.stages import compared, components, stage
from ldlm.model import LDLM
from ldlm.sampler import SampleRequest
from ldlm.schedule import TangentSchedule
from ldlm.solvers import step_table

# Stress weights need graphs of their own. Large scores make single tokens noisy: the longest case
# is there for its number of tokens.
STRESS_CASES: tuple[Case, ...] = ((1, 17), (3, 128))

SAMPLER_LENGTH = 16


def verify(
    folder: Path,
    manifest: Manifest,
    model: LDLM,
    precisions: Sequence[str],
    progress: Callable[[str], None] = lambda _: None,
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
    options.require_possible(precisions)
    for name in precisions:
        for component in components() if SAMPLER in chosen else chosen:
            manifest.require_graphs(name, component)
    if SAMPLER in chosen:
        schedule = TangentSchedule(manifest.config.tangent_d, manifest.config.t_min)
        step_table(SampleRequest.solver, schedule, schedule.grid(options.sampler_steps))
    asked = _Asked(folder, manifest, model, progress, options)
    records: list[Record] = []
    for component in chosen:
        if component == SAMPLER:
            records += asked.of_sampler(precisions)
            continue
        for name in precisions:
            records += asked.of_component(component, name)
    return Proof.of(records)


def stress(subject: Subject, folder: Path) -> Iterator[Measurement]:
    """Export a component of a stressed model, inside a folder for a while, and prove that.

    Raises:
        ExportError, DiskSpaceError: as the export.
    """
    subject.progress(f"{subject.spec.component} {subject.precision}, stress checkpoint")
    with subject.stressed().exported(folder) as tough:
        yield from prove(tough.at(*STRESS_CASES))


@dataclass(frozen=True)
class _Asked:
    """What is asked, and of what; see `verify`."""

    folder: Path
    manifest: Manifest
    model: LDLM
    progress: Callable[[str], None]
    options: ProofOptions

    def of_component(self, component: str, name: str) -> Iterator[Record]:
        """All that is found about a component in a precision."""
        options, scope = self.options, self._scope(name, component)
        yield scope
        spec, precision, paths = compared(component), Precision.of(name), self._paths(scope)
        subject = Subject(self.model, spec, precision, paths, progress=self.progress)
        self.progress(f"{component} {name}")
        yield from prove(subject.at(*CASES))
        for part, path in subject.paths.items():
            yield from islands.look(path, stage(part), precision)
        if options.stress:
            yield from stress(subject, self.folder)
        if options.taps:
            self.progress(f"{component} {name}, taps")
            yield from taps.look(subject)
        if options.self_test:
            yield from self_test(subject)
        if options.runtime:
            from engines.proof.engine import engine_questions
            from engines.runtime.trt import TrtRuntime

            # Engines are built for a batch of 8 unless asked otherwise; the cases' are below that.
            built = subject.at(*CASES, largest=max(batch for batch, _ in CASES))
            runtime = TrtRuntime(options.runtime)
            yield from engine_questions(built, self.folder, self.manifest, runtime)
        if options.ablate:
            yield from ablate(subject)

    def of_sampler(self, precisions: Sequence[str]) -> Iterator[Record]:
        """All that is found about the whole sampler in every precision."""
        scopes = [self._scope(name, SAMPLER) for name in precisions]
        yield from scopes
        yield from drift(
            self.model,
            {scope.precision: self._paths(scope) for scope in scopes},
            steps=self.options.sampler_steps,
            length=min(SAMPLER_LENGTH, self.model.config.n_positions),
            progress=self.progress,
        )

    def _scope(self, precision: str, component: str) -> Scope:
        return scope_of(self.manifest, precision, component, self.options)

    def _paths(self, scope: Scope) -> dict[str, Path]:
        entries = {name: self.manifest.graph(scope.precision, name) for name in scope.graphs}
        return {name: entry.verified(self.folder) for name, entry in entries.items()}
