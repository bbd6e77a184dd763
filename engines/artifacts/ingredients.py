"""What an artifact was made from: named ingredients, and whether they are still the same.

Imports neither torch nor TensorRT: to find that nothing has changed must cost next to nothing.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from engines.artifacts.digests import PACKAGES, closure, source_digest, text_digest
from engines.artifacts.manifest import EngineEntry, GraphEntry
from engines.compile.target import Target
from engines.tensorrt.profiles import Profiles
from export.precision import Precision
from export.stages import stage
from ldlm.config import LDLMConfig

# What fills a stage with a checkpoint's tensors.
LOADER = ("ldlm.checkpoint", "ldlm.model")

GRAPH_TOOLS = ("torch", "onnx", "onnxscript", "onnx-ir", "numpy")
ENGINE_TOOLS = ("tensorrt-rtx", "tensorrt")
PROOF_TOOLS = ("torch", "onnxruntime-gpu", "onnxruntime", "tensorrt-rtx", "numpy")

Ingredients = dict[str, str]


def origin_ingredients(checkpoint: str, config: LDLMConfig) -> Ingredients:
    """What everything depends on: sha256 of model.safetensors, and the model's configuration."""
    return {"weights": checkpoint, "config": text_digest(config.to_json())}


def graph_ingredients(component: str, precision: str, origin: Ingredients) -> Ingredients:
    """All that a component's graphs depend on; `origin` is of `origin_ingredients`.

    Raises:
        ConfigError: no such component or precision.
    """
    rules = [dataclasses.asdict(rule) for rule in Precision.of(precision).rules]
    return {
        **origin,
        "policy": text_digest(json.dumps(rules)),
        "code of the export": source_digest(closure("export.exporter")),
        "code of the stage": source_digest(sorted({*closure(stage(component).module), *LOADER})),
        **tool_versions(GRAPH_TOOLS),
    }


def engine_ingredients(graph: GraphEntry, target: Target, profiles: Profiles) -> Ingredients:
    """All that an engine depends on."""
    ranges = {name: {a: str(r) for a, r in axes.items()} for name, axes in profiles.items()}
    return {
        "graph": graph.graph.sha256,
        "graph's weights": graph.data.sha256,
        "targets": target.asked,
        "profiles": json.dumps(ranges),
        "code of the build": source_digest([m for top in target.modules for m in closure(top)]),
        **tool_versions(target.tools),
    }


def proof_ingredients(
    graphs: Mapping[str, str], checkpoint: str, config: LDLMConfig
) -> Ingredients:
    """All that a proof depends on, beside what was asked.

    Args:
        graphs: what it speaks of; see `engines.proof.saved.identity`.
        checkpoint, config: see `origin_ingredients`.
    """
    modules = [m for package in PACKAGES for m in closure("engines.proof.verify", package)]
    return {
        **origin_ingredients(checkpoint, config),
        "graphs": text_digest(json.dumps(dict(sorted(graphs.items())))),
        "code of the proof": source_digest(modules),
        **tool_versions(PROOF_TOOLS),
    }


def stale(
    entries: Iterable[GraphEntry | EngineEntry | None],
    missing: str,
    folder: Path,
    made_from: Ingredients,
) -> tuple[str, ...]:
    """Why something must be made, in words; empty if what is there is what would come out.

    Args:
        entries: of what is there; None is nothing, for which `missing` is the reason.
        missing: see `entries`.
        folder: the artifacts.
        made_from: what it would be made from now.
    """
    for entry in entries:
        if entry is None:
            return (missing,)
        if changed := changes(entry.made_from, made_from):
            return changed
        for file in entry.files:
            if not file.is_kept(folder):
                return (f"{file.path} is not the file that was made",)
    return ()


def changes(old: Mapping[str, str], new: Mapping[str, str]) -> tuple[str, ...]:
    """What differs, in words; empty if nothing does."""
    found = []
    for name in dict.fromkeys([*new, *old]):
        before, after = old.get(name, "absent"), new.get(name, "absent")
        if before != after:
            short = max(len(before), len(after)) <= 40
            found.append(f"{name}: {before} -> {after}" if short else f"{name} changed")
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class Decision:
    """Whether a file was made, and why.

    Attributes:
        what: the file, in words.
        reasons: what has changed since it was made; empty: it was kept.
    """

    what: str
    reasons: tuple[str, ...]


def latest(decisions: Iterable[Decision]) -> list[Decision]:
    """The last Decision on each file, in the order of the first ones."""
    return list({decision.what: decision for decision in decisions}.values())


def tool_versions(names: Iterable[str]) -> dict[str, str]:
    """Installed versions; what is not installed is left out."""
    found = {name: installed_version(name) for name in names}
    return {name: installed for name, installed in found.items() if installed is not None}


def installed_version(package: str) -> str | None:
    """The version of an installed package, under any of its names, or None."""
    for name in (package, *(package + suffix for suffix in ("-cu13", "-cu12"))):
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return None
