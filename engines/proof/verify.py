"""The proof: every exported graph against PyTorch, on sizes that differ from the example."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from engines.artifacts.manifest import Manifest
from engines.proof import islands, taps
from engines.proof.drift import drift
from engines.proof.gates import CASES
from engines.proof.questions import NOTHING_MORE, SAMPLER, ProofOptions
from engines.proof.records import Measurement, Proof, Record
from engines.proof.sabotage.selftest import self_test
from engines.proof.saved import scope_of
from engines.proof.stage import prove
from engines.proof.stress import stressed
from engines.proof.subject import Case, Subject
from export.precision import Precision
from export.stages import SAMPLED, compared, components, stage
from ldlm.model import LDLM
from ldlm.sampler import SampleRequest
from ldlm.schedule import TangentSchedule
from ldlm.solvers import step_table

# Stress weights need graphs of their own. Large scores make single tokens noisy: the longest case
# is there for its number of tokens.
STRESS_CASES: tuple[Case, ...] = ((1, 17), (3, 128))


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
    tough = stressed(model) if options.stress and chosen != [SAMPLER] else None
    records: list[Record] = []
    for component in chosen:
        for name in precisions:
            scope = scope_of(manifest, name, component, options)
            paths = {s: manifest.graph(name, s).verified(folder) for s in scope.graphs}
            spec = stage(SAMPLED[0]) if component == SAMPLER else compared(component)
            subject = Subject(model, spec, Precision.of(name), paths, progress=progress)
            progress(f"{component} {name}")
            records.append(scope)
            if component == SAMPLER:
                records += drift(subject, options.sampler_steps)
            else:
                records += _component(subject, folder, manifest, options, tough)
    return Proof.of(records)


def _component(
    subject: Subject, folder: Path, manifest: Manifest, options: ProofOptions, tough: LDLM | None
) -> Iterator[Record]:
    """All that is asked of a component in a precision; `tough` is the stressed model, or None."""
    yield from prove(subject.at(*CASES))
    for name, path in subject.paths.items():
        yield from islands.look(path, stage(name), subject.precision)
    if tough is not None:
        yield from stress(subject, tough, folder)
    if options.taps:
        yield from taps.look(subject)
    if options.self_test:
        yield from self_test(subject)
    if options.runtime:
        from engines.proof.engine import engine_questions
        from engines.runtime.trt import TrtRuntime

        # Engines are built for a batch of 8 unless asked otherwise; the cases' own are below that.
        subject = subject.at(*CASES, largest=max(batch for batch, _ in CASES))
        yield from engine_questions(subject, folder, manifest, TrtRuntime(options.runtime))
    if options.ablate:
        yield from islands.ablate(subject)


def stress(subject: Subject, tough: LDLM, folder: Path) -> Iterator[Measurement]:
    """Prove a component of a stressed model, exported inside a folder; see `Subject.exported`."""
    subject.tell("stress checkpoint")
    with subject.stressed(tough).exported(folder) as exported:
        yield from prove(exported.at(*STRESS_CASES))
