"""sha256 of texts, of files, and of the code that something depends on.

Code counts as its syntax tree: a comment changes nothing. Imports neither torch nor TensorRT.
"""

import ast
import hashlib
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from ldlm import files

# The three packages lie side by side, in a checkout and where they are installed.
PACKAGES = {name: Path(__file__).parents[2] / name for name in ("ldlm", "export", "engines")}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def text_digest(text: str) -> str:
    """sha256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """sha256 of a file; a process reads each file once, unless it changes meanwhile."""
    stat = path.stat()
    state = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
    return _file_digest(os.path.realpath(path), state)


@cache
def _file_digest(path: str, _state: tuple[int, ...]) -> str:
    return files.sha256(Path(path))


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
        if name not in seen and (package or name.partition(".")[0] == own):
            seen.add(name)
            waiting += _code(name)[1]
    return tuple(sorted(name for name in seen if name.partition(".")[0] == (package or own)))


def source_digest(modules: Sequence[str]) -> str:
    """sha256 over the modules' syntax trees: no comments, no docstrings, no positions."""
    return text_digest("\n".join(f"{name} {_code(name)[0]}" for name in modules))


@cache
def _code(module: str) -> tuple[str, list[str]]:
    """A module's syntax tree as a hash, and which of our modules it imports, wherever in it."""
    tree = ast.parse(_path(module).read_bytes())
    imports: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:  # a module below, or a name in the module itself
                below = f"{node.module}.{alias.name}"
                imports.append(below if _is_ours(below) else node.module)
        elif isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            node.body.pop(0)
    return text_digest(ast.dump(tree)), [name for name in dict.fromkeys(imports) if _is_ours(name)]


def _path(module: str) -> Path:
    package, *parts = module.split(".")
    path = PACKAGES[package].joinpath(*parts)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES and _path(module).is_file()
