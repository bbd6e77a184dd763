"""parity.json: read, merged and written, and whether what it says still holds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec

from engines.artifacts import ingredients
from engines.artifacts.manifest import PARITY, GraphEntry, Manifest
from engines.proof.questions import NOTHING_MORE, SAMPLER, ProofOptions
from engines.proof.records import Proof, Scope
from export.stages import SAMPLED, stages_of
from ldlm import files

T = TypeVar("T")


class Saved(NamedTuple, Generic[T]):
    """What a file holds, or None and why."""

    content: T | None
    problem: str


def read_json(path: Path, schema: type[T], missing: str) -> Saved[T]:
    """A JSON file of a schema; whatever else is there is a problem in words, never an error."""
    if not path.exists():
        return Saved(None, missing)
    try:
        return Saved(msgspec.json.decode(path.read_bytes(), type=schema), "")
    except (OSError, ValueError, RecursionError) as error:
        return Saved(None, f"{missing}: {path.name} cannot be used: {error}")


def write_json(path: Path, content: msgspec.Struct) -> None:
    """Write a record, whole or not at all.

    Raises:
        DiskSpaceError, OSError: it cannot be written.
    """
    with files.disk_errors(path):
        files.write_whole(path, msgspec.json.format(msgspec.json.encode(content), indent=1))


def read(folder: Path) -> Saved[Proof]:
    """parity.json."""
    return read_json(folder / PARITY, Proof, "not verified yet")


def save(folder: Path, manifest: Manifest, new: Proof) -> Proof:
    """Write a proof to parity.json; what else was proved stays while its graphs are the same.

    Returns:
        What was written.

    Raises:
        DiskSpaceError, OSError: it cannot be written.
    """
    with files.locked(folder):
        proof = current(read(folder).content or Proof(), manifest).merged(new)
        write_json(folder / PARITY, proof)
    return proof


def current(proof: Proof, manifest: Manifest) -> Proof:
    """Of a proof, what speaks of the present graphs."""
    return proof.only({s.key for s in proof.scopes if s.graphs == identities(manifest, *s.key)})


def identity(entry: GraphEntry) -> str:
    """What a measurement speaks of: the graph and the weights it reads."""
    return f"{entry.graph.sha256}+{entry.data.sha256}"


def identities(manifest: Manifest, precision: str, component: str) -> dict[str, str]:
    """The identities of the graphs of a component, or of SAMPLER, in a precision, by stage."""
    names = SAMPLED if component == SAMPLER else [spec.name for spec in stages_of(component)]
    entries = {name: manifest.find_graph(precision, name) for name in names}
    return {name: identity(entry) for name, entry in entries.items() if entry is not None}


def scope_of(
    manifest: Manifest, precision: str, component: str, options: ProofOptions = NOTHING_MORE
) -> Scope:
    """What a proof of the present graphs speaks of, and all that it depends on."""
    graphs = identities(manifest, precision, component)
    made_from = ingredients.proof_ingredients(graphs, manifest.checkpoint, manifest.config)
    return Scope(precision, component, graphs, made_from, options.asked(component))


def reasons(
    saved: Saved[Proof],
    manifest: Manifest,
    precision: str,
    options: ProofOptions,
    stages: Sequence[str] | None = None,
) -> tuple[str, ...]:
    """Why a precision must be verified again; empty if the proof would say the same.

    Args:
        saved: parity.json, as `read` gives it.
        manifest: of the present files.
        precision, options, stages: what is asked now; see `engines.proof.verify.verify`.
    """
    if options.runtime:
        return ("engines are compared whenever it is asked",)
    proof = saved.content or Proof()
    scopes = {scope.key: scope for scope in proof.scopes}
    keys = [(precision, component) for component in options.components(stages)]
    if not any(key in scopes for key in keys):
        return (saved.problem or "not verified yet",)
    for key in keys:
        if key not in scopes:
            return (f"not verified yet: {key[1]}",)
        before, present = scopes[key], scope_of(manifest, *key, options)
        if changed := ingredients.changes(before.made_from, present.made_from):
            return changed
        if missing := [name for name in present.asked if name not in before.asked]:
            return (f"not asked yet: {', '.join(missing)}",)
    passed = all(record.passed for record in proof.only(keys).gated())
    return () if passed else ("a gate failed the last time",)
