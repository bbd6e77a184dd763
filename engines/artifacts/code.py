"""The code that something depends on, as a hash of syntax trees: a comment changes nothing.

Imports neither torch nor TensorRT.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from engines.artifacts.digests import remembered, text_digest
from ldlm import files

# The three packages lie side by side, in a checkout and where they are installed.
PACKAGES = {name: Path(__file__).parents[2] / name for name in ("ldlm", "export", "engines")}


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
    return remembered(_memory_path())


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
