"""What decides whether a text is right: a Python file of the user's own."""

import importlib.util
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from ldlm.errors import ConfigError


@dataclass(frozen=True)
class Judge:
    """What decides about a text.

    Attributes:
        accepts: whether a text is right.
        seen: the texts that the model was trained on.
    """

    accepts: Callable[[str], bool]
    seen: Collection[str]


def load_judge(path: Path) -> Judge:
    """A judge from a Python file that defines `accepts(text)` and `seen()`.

    `accepts` says whether a text is right; `seen` returns the texts that were trained on. The file
    is executed: it is the user's own.

    Raises:
        ConfigError: it is not there, does not run, or does not define both.
    """
    spec = importlib.util.spec_from_file_location("judge", path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise ConfigError("no judge there", expected="a Python file, *.py", got=path)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # a judge may have files beside it
    try:
        spec.loader.exec_module(module)
        judge = Judge(module.accepts, frozenset(module.seen()))
        judge.accepts("")
    except Exception as error:  # whatever a user's file raises
        raise ConfigError(
            f"{path} is not a usable judge",
            expected="a file that defines accepts(text) -> bool and seen() -> texts",
            got=f"{type(error).__name__}: {error}",
            remedy="mend the file, or install what it imports",
        ) from error
    finally:
        sys.path.remove(str(path.parent))
    return judge
