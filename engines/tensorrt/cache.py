"""What TensorRT learned on a GPU, kept in the user's cache folder; it may be deleted."""

import logging
from pathlib import Path
from typing import Any

from engines.tensorrt.device import Cuda
from ldlm import files

log = logging.getLogger(__name__)


def cache_file(what: str, version: str, device: Cuda) -> Path:
    """A file in the user's cache folder, for one GPU and one version of a library."""
    gpu = "".join(c if c.isalnum() else "-" for c in f"{device.name}-{device.sm}")
    return files.cache_folder() / f"{what}-{version}-{gpu}.cache"


class RuntimeCache:
    """The kernels that TensorRT-RTX compiled on this device for an engine, kept on disk.

    Attributes:
        path: the file; one that cannot be used is replaced, and the log says so.
    """

    def __init__(self, engine_sha256: str, version: str, device: Cuda) -> None:
        self.path = cache_file(engine_sha256[:16], version, device)
        self._cache: Any = None
        self._saved = b""

    def attach(self, settings: Any) -> None:
        """Let a context use it; call before the context is made."""
        self._cache = settings.create_runtime_cache()
        self._saved = files.read_if_possible(self.path)
        if self._saved and not self._cache.deserialize(self._saved):
            log.warning("%s is of no use here; kernels are compiled anew", self.path)
            self._saved = b""
        settings.set_runtime_cache(self._cache)

    def save(self) -> None:
        """Write what has been compiled since, if anything was."""
        content = bytes(self._cache.serialize()) if self._cache is not None else b""
        if content and content != self._saved:
            files.write_if_possible(self.path, content)
            self._saved = content
