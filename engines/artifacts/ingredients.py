"""What an artifact was made from: named ingredients, and whether they are still the same.

Imports neither torch nor TensorRT: to find that nothing has changed must cost next to nothing.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import engines
import export
import ldlm
from engines.compile.target import Profiles, Target
from export.precision import policy
from export.stages import stage
from ldlm import files
from ldlm.config import LDLMConfig

PACKAGES = {
    name: Path(str(module.__file__)).parent
    for name, module in (("ldlm", ldlm), ("export", export), ("engines", engines))
}

# What fills a stage with a checkpoint's tensors.
LOADER = ("ldlm.checkpoint", "ldlm.model")

GRAPH_TOOLS = ("torch", "onnx", "onnxscript", "onnx-ir", "numpy")
ENGINE_TOOLS = ("tensorrt-rtx", "tensorrt", "polygraphy")
PROOF_TOOLS = ("torch", "onnxruntime-gpu", "onnxruntime", "tensorrt-rtx", "numpy")

Ingredients = dict[str, str]


def graph_ingredients(
    weights: str, precision: str, checkpoint: str, config: LDLMConfig
) -> Ingredients:
    """All that an exported graph depends on.

    Args:
        weights: the stage, by its weights file.
        precision: a policy.
        checkpoint: sha256 of model.safetensors.
        config: of the model.

    Raises:
        ConfigError: no such stage or precision.
    """
    rules = [dataclasses.asdict(rule) for rule in policy(precision)]
    return {
        "weights": checkpoint,
        "config": text_digest(config.to_json()),
        "policy": text_digest(json.dumps(rules)),
        "code of the export": source_digest(closure("export.exporter")),
        "code of the stage": source_digest(sorted({*closure(stage(weights).module), *LOADER})),
        **tool_versions(GRAPH_TOOLS),
    }


def engine_ingredients(graph: str, data: str, target: Target, profiles: Profiles) -> Ingredients:
    """All that an engine depends on; `graph` and `data` are sha256."""
    ranges = {name: {a: str(r) for a, r in axes.items()} for name, axes in profiles.items()}
    return {
        "graph": graph,
        "graph's weights": data,
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
        graphs: what it speaks of; see `engines.proof.records.identity`.
        checkpoint: sha256 of model.safetensors.
        config: of the model.
    """
    modules = [m for package in PACKAGES for m in closure("engines.proof.verify", package)]
    return {
        "weights": checkpoint,
        "config": text_digest(config.to_json()),
        "graphs": text_digest(json.dumps(dict(sorted(graphs.items())))),
        "code of the proof": source_digest(modules),
        **tool_versions(PROOF_TOOLS),
    }


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


def text_digest(text: str) -> str:
    """sha256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def tool_versions(names: Iterable[str]) -> dict[str, str]:
    """Installed versions; what is not installed is left out."""
    found = {}
    for name in names:
        installed = installed_version(name)
        if installed is not None:
            found[name] = installed
    return found


def installed_version(package: str) -> str | None:
    """The version of an installed package, under any of its names, or None."""
    for name in (package, *(package + suffix for suffix in ("-cu13", "-cu12"))):
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return None


@cache
def closure(module: str, package: str | None = None) -> tuple[str, ...]:
    """The modules of one package that a module needs, itself among them, sorted.

    Args:
        module: where to start, such as "ldlm.denoiser".
        package: which package's modules; default: the module's own.
    """
    seen: set[str] = set()
    waiting = [module]
    own = module.partition(".")[0]
    while waiting:
        name = waiting.pop()
        # Within one package, what other packages import of it does not count.
        follow = package is not None or name.partition(".")[0] == own
        if name not in seen and follow:
            seen.add(name)
            waiting += _imports(name)
    kept = package or own
    return tuple(sorted(name for name in seen if name.partition(".")[0] == kept))


def source_digest(modules: Sequence[str]) -> str:
    """sha256 over the modules' syntax trees: no comments, no docstrings, no positions."""
    digest = text_digest("\n".join(f"{name} {_code(name).digest}" for name in modules))
    _remember()
    return digest


@dataclasses.dataclass(frozen=True)
class Code:
    """A module's syntax tree, as a hash, and the names that it imports, as (module, name)."""

    digest: str
    imports: tuple[tuple[str, str], ...]


@cache
def _code(module: str) -> Code:
    """Analyse a module, or remember what an analysis of the same text found."""
    content = _path(module).read_bytes()
    key = hashlib.sha256(content).hexdigest()
    memory = _memory()
    if key not in memory:
        tree = ast.parse(content)
        names = tuple(_imported(tree))
        for node in ast.walk(tree):
            body: list[Any] | None = getattr(node, "body", None)
            if isinstance(body, list) and body and _is_docstring(body[0]):
                body.pop(0)
        memory[key] = [text_digest(ast.dump(tree)), names]
        _unsaved.append(key)
    digest, names = memory[key]
    return Code(digest, tuple((module, name) for module, name in names))


_unsaved: list[str] = []  # analysed in this process and not yet on disk


def _memory_path() -> Path:
    """By Python's version, whose trees differ, and by the text of this file."""
    own = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    return files.cache_folder() / f"code-{sys.version_info[0]}.{sys.version_info[1]}-{own}.json"


@cache
def _memory() -> dict[str, Any]:
    """Analyses by the hash of the text, so that they cannot be out of date."""
    return _remembered(_memory_path())


def _remembered(path: Path) -> dict[str, Any]:
    """The JSON object that an earlier process left; empty where there is nothing usable."""
    try:
        known = json.loads(files.read_if_possible(path))
    except ValueError:
        return {}
    return known if isinstance(known, dict) else {}


def _remember() -> None:
    """Keep new analyses; where that cannot be, the next process does them again."""
    if _unsaved:
        _unsaved.clear()
        files.write_if_possible(_memory_path(), json.dumps(_memory()).encode())


def _is_docstring(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _path(module: str) -> Path:
    package, *parts = module.split(".")
    path = PACKAGES[package].joinpath(*parts)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.module, alias.name) for alias in node.names)


@cache
def _imports(module: str) -> tuple[str, ...]:
    """Modules of the three packages that a module imports, wherever in it."""
    found = (_source(base, name) for base, name in _code(module).imports)
    return tuple(dict.fromkeys(name for name in found if _is_ours(name)))


def _source(module: str, name: str) -> str:
    """Where `from module import name` finds it: a module below, or the module itself."""
    below = f"{module}.{name}"
    return below if name and _is_ours(below) else module


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES and _path(module).is_file()


class Digests:
    """sha256 of files, remembered by size, times and inode, so that no file is read twice.

    Args:
        folder: where the memory is kept; losing it costs time, never correctness.
    """

    NAME = ".digests.json"
    SETTLED = 0.1  # seconds: a file younger than this could change within its timestamp

    def __init__(self, folder: Path) -> None:
        self._path = folder / self.NAME
        self._known: dict[str, list[Any]] = _remembered(self._path)
        self._changed = False

    def of(self, path: Path) -> str:
        """The sha256 of a file that is there."""
        stat = path.stat()
        state = self._state(stat)
        key = str(path.resolve())
        entry = self._known.get(key)
        if isinstance(entry, list) and len(entry) == 5 and entry[:4] == state:
            return str(entry[4])
        digest = files.sha256(path)
        if time.time() - max(stat.st_mtime, stat.st_ctime) > self.SETTLED:
            self._known[key] = [*state, digest]
            self._changed = True
        return digest

    def note(self, path: Path, digest: str) -> None:
        """Take note of a file of ours that was hashed and has just been moved to its place.

        However young it is: to change it unseen, another process would have to write to it within
        the clock tick in which it was moved.
        """
        self._known[str(path.resolve())] = [*self._state(path.stat()), digest]
        self._changed = True

    @staticmethod
    def _state(stat: os.stat_result) -> list[int]:
        return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]

    def is_same(self, path: Path, digest: str) -> bool:
        """Whether the file is there and has this sha256."""
        return path.is_file() and self.of(path) == digest

    def save(self) -> None:
        """Keep what was learned, where the folder exists."""
        if self._changed and self._path.parent.is_dir():
            files.write_if_possible(self._path, json.dumps(self._known).encode())
            self._changed = False
