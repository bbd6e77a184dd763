"""manifest.json: what an artifacts folder holds, and what each file was made from.

Imports neither torch nor onnx: a deployment reads it. A file is used only after its sha256 has
been compared with the manifest's.
"""

import hashlib
import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Self

import msgspec

from engines.artifacts.digests import file_digest
from export.precision import POLICIES, Precision
from export.stages import STAGES, AxisRange, components, stages_of
from ldlm import files
from ldlm.config import LDLMConfig
from ldlm.errors import ArtifactError

SCHEMA = 3
MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"
PARITY, QUALITY = "parity.json", "quality.json"


@dataclass(frozen=True)
class FileEntry:
    """A file of the folder: its path relative to it, its sha256 and its size.

    Raises:
        ArtifactError: the path leaves the folder.
    """

    path: str
    sha256: str
    bytes: int

    def __post_init__(self) -> None:
        parts = PurePosixPath(self.path).parts
        if not parts or ".." in parts or PurePosixPath(self.path).is_absolute():
            raise ArtifactError("the manifest names a file outside its folder", got=self.path)

    @classmethod
    def of(cls, folder: Path, path: Path) -> Self:
        """Hash a file that is in the folder."""
        relative = path.relative_to(folder).as_posix()
        return cls(relative, files.sha256(path), path.stat().st_size)

    def under(self, place: str) -> Self:
        """The same file, after the folder that it is in got its place."""
        return replace(self, path=f"{place}/{self.path}")

    def is_kept(self, folder: Path) -> bool:
        """Whether the file is there, as it was made."""
        path = folder / self.path
        return path.is_file() and file_digest(path) == self.sha256

    def verified(self, folder: Path) -> Path:
        """The file's path, if it is there and unchanged.

        Raises:
            ArtifactError: it is missing, cut or changed.
        """
        path = folder / self.path
        if not path.is_file():
            problem, expected, got = "a file is missing", str(path), "no file"
        elif (size := path.stat().st_size) != self.bytes:
            problem = f"{path} is not the file that was made"
            expected, got = f"{self.bytes:,} bytes", f"{size:,} bytes"
        elif (found := files.sha256(path)) != self.sha256:
            problem = f"{path} has changed since it was made"
            expected, got = f"sha256 {self.sha256}", f"sha256 {found}"
        else:
            return path
        remedy = "make it again with ldlm export or ldlm build"
        raise ArtifactError(problem, expected=expected, got=got, remedy=remedy)


def read(entry: FileEntry, folder: Path) -> bytes:
    """A file's content, after the checks of `FileEntry.verified`; what was checked is returned."""
    path = folder / entry.path
    content = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        entry.verified(folder)  # says what is wrong with it
        raise ArtifactError(f"{path} changed while it was read", remedy="try again")
    return content


@dataclass(frozen=True)
class Entry:
    """What was made of a stage in a precision. Its names become parts of paths.

    Raises:
        ArtifactError: a name is not one component of a path, or the stage is none that we know.
    """

    stage: str
    precision: str

    def __post_init__(self) -> None:
        good = all(re.fullmatch(r"\w[\w+.-]*", name) for name in self.key)
        if not good or all(spec.name != self.stage for spec in STAGES):
            raise ArtifactError("the manifest holds an unusable name", got=", ".join(self.key))

    @property
    def key(self) -> tuple[str, ...]:
        """What it is the only one of."""
        return (self.stage, self.precision)


@dataclass(frozen=True)
class GraphEntry(Entry):
    """An exported ONNX graph and its external data.

    Attributes:
        made_from: what it depends on; see `engines.artifacts.ingredients.graph_ingredients`.
        evidence: what the checks counted in it.
    """

    graph: FileEntry
    data: FileEntry
    made_from: dict[str, str]
    seconds: float
    evidence: dict[str, Any]

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """The graph and its weights."""
        return (self.graph, self.data)

    def verified(self, folder: Path) -> Path:
        """The graph's path, if it and the data it reads are there and unchanged.

        Raises:
            ArtifactError: one of them is missing, cut or changed.
        """
        self.data.verified(folder)
        return self.graph.verified(folder)


@dataclass(frozen=True)
class EngineEntry(Entry):
    """A compiled engine: what it was made from, for which devices and shapes.

    Attributes:
        made_from: what it depends on; see `engines.artifacts.ingredients.engine_ingredients`.
        sms: compute capabilities it runs on, such as "sm89".
        refused: compute capabilities that were asked for and cannot be, with the reason.
        profiles: by name, in the engine's order: allowed sizes per dynamic axis.
        builder: the library that built it, its version, and the settings.
    """

    target: str
    engine: FileEntry
    made_from: dict[str, str]
    sms: tuple[str, ...]
    refused: dict[str, str]
    profiles: dict[str, dict[str, AxisRange]]
    builder: dict[str, str]
    seconds: float

    @property
    def key(self) -> tuple[str, ...]:
        """A stage has an engine per precision and target."""
        return (*super().key, self.target)

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """The engine."""
        return (self.engine,)

    def is_of(self, graph: GraphEntry) -> bool:
        """Whether it was made from this graph and these weights."""
        source = (graph.graph.sha256, graph.data.sha256)
        return (self.made_from.get("graph"), self.made_from.get("graph's weights")) == source


@dataclass
class Manifest:
    """The whole folder.

    Attributes:
        name: of the checkpoint folder it came from.
        checkpoint: sha256 of its model.safetensors.
        config: of the model.
        policies: the rules of each exported precision.
        tools: versions of what made the files.
        runs: wall seconds and peak memory of the last run of each command.
    """

    name: str
    checkpoint: str
    config: LDLMConfig
    tokenizer: FileEntry | None = None
    policies: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    tools: dict[str, str] = field(default_factory=dict)
    graphs: list[GraphEntry] = field(default_factory=list)
    engines: list[EngineEntry] = field(default_factory=list)
    runs: dict[str, dict[str, float]] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def origin(self) -> tuple[str, LDLMConfig]:
        """The checkpoint that it is of, and its configuration."""
        return (self.checkpoint, self.config)

    def precisions(self) -> list[str]:
        """What was exported whole, in order; experiments must be asked for by name.

        Raises:
            ArtifactError: nothing else was.
        """
        names = dict.fromkeys(entry.precision for entry in self.graphs)
        whole = {spec.name for component in components() for spec in stages_of(component)}
        there = {name: {e.stage for e in self.graphs if e.precision == name} for name in names}
        found = [n for n in names if there[n] >= whole and not Precision.of(n).is_experiment]
        if not found:
            raise ArtifactError(
                "no precision was exported",
                expected=" or ".join(POLICIES),
                got=", ".join(names) or "nothing",
                remedy="ldlm export; an experiment is asked for by --precision",
            )
        return found

    def find_graph(self, precision: str, stage: str) -> GraphEntry | None:
        """The entry of a graph, or None where it was not exported."""
        return next((e for e in self.graphs if e.key == (stage, precision)), None)

    def graph(self, precision: str, stage: str) -> GraphEntry:
        """The entry of a graph.

        Raises:
            ArtifactError: it was not exported.
        """
        entry = self.find_graph(precision, stage)
        if entry is None:
            known = sorted({e.precision for e in self.graphs})
            raise ArtifactError(
                "this graph was not exported",
                stage=stage,
                expected=", ".join(known) or "nothing exported",
                got=f"{precision}, exported without it" if precision in known else precision,
                remedy="ldlm export with this precision: what is there already is kept",
            )
        return entry

    def require_graphs(self, precision: str, component: str) -> None:
        """Refuse a precision that lacks a graph of a component.

        Raises:
            ArtifactError: naming the first that was not exported.
        """
        for spec in stages_of(component):
            self.graph(precision, spec.name)

    def drop(self, precision: str) -> None:
        """Take out what is of a precision."""
        self.graphs = [e for e in self.graphs if e.precision != precision]
        self.engines = [e for e in self.engines if e.precision != precision]
        self.policies.pop(precision, None)

    def put_graph(self, entry: GraphEntry) -> None:
        """Add or replace a graph's entry; engines of another version of it are dropped."""
        self.graphs = [e for e in self.graphs if e.key != entry.key] + [entry]
        self.engines = [e for e in self.engines if e.key[:2] != entry.key or e.is_of(entry)]

    def put_engine(self, entry: EngineEntry) -> None:
        """Add or replace an engine's entry.

        Raises:
            ArtifactError: its graph is no longer the one that it was made from.
        """
        graph = self.graph(entry.precision, entry.stage)
        if not entry.is_of(graph):
            raise ArtifactError(
                "the graph was exported anew while its engine was built",
                stage=entry.stage,
                remedy="run ldlm build again",
            )
        self.engines = [e for e in self.engines if e.key != entry.key] + [entry]

    def engine(self, precision: str, stage: str, target: str) -> EngineEntry | None:
        """The entry of an engine, or None where it was not built."""
        return next((e for e in self.engines if e.key == (stage, precision, target)), None)

    def entries(self) -> list[GraphEntry | EngineEntry]:
        """All that was made."""
        return [*self.graphs, *self.engines]

    def files(self) -> list[FileEntry]:
        """All files that it speaks of, each once."""
        files = [file for entry in self.entries() for file in entry.files]
        files += [self.tokenizer] if self.tokenizer is not None else []
        return list({file.path: file for file in files}.values())

    def listed(self) -> set[str]:
        """The paths of all files that it speaks of."""
        return {entry.path for entry in self.files()}

    def save(self, folder: Path) -> None:
        """Write manifest.json, whole or not at all."""
        text = json.dumps(msgspec.to_builtins(self), indent=2)
        files.write_whole(folder / MANIFEST, f"{text}\n".encode())


def json_schema() -> dict[str, Any]:
    """The JSON schema of manifest.json, from the classes above."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"manifest.json of an artifacts folder, schema version {SCHEMA}",
        **msgspec.json.schema(Manifest),
    }
