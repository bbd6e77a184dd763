"""manifest.json: what an artifacts folder holds, and what each file was made from.

Imports neither torch nor onnx: a deployment reads it. A file is used only after its sha256 has
been compared with the manifest's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from export.precision import is_experiment
from export.stages import AxisRange
from ldlm import files
from ldlm.config import LDLMConfig
from ldlm.errors import ArtifactError

SCHEMA = 1
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
    def of(cls, folder: Path, path: Path) -> FileEntry:
        """Hash a file that is in the folder."""
        relative = path.relative_to(folder).as_posix()
        return cls(relative, files.sha256(path), path.stat().st_size)

    def verified(self, folder: Path) -> Path:
        """The file's path, if it is there and unchanged.

        Raises:
            ArtifactError: it is missing, cut or changed.
        """
        path = folder / self.path
        remedy = "make it again with ldlm export or ldlm build"
        if not path.is_file():
            raise ArtifactError("a file is missing", expected=path, got="no file", remedy=remedy)
        size = path.stat().st_size
        if size != self.bytes:
            raise ArtifactError(
                f"{path} is not the file that was made",
                expected=f"{self.bytes:,} bytes",
                got=f"{size:,} bytes",
                remedy=remedy,
            )
        found = files.sha256(path)
        if found != self.sha256:
            raise ArtifactError(
                f"{path} has changed since it was made",
                expected=f"sha256 {self.sha256}",
                got=f"sha256 {found}",
                remedy=remedy,
            )
        return path


@dataclass(frozen=True)
class GraphEntry:
    """An exported ONNX graph and its external data."""

    stage: str
    precision: str
    graph: FileEntry
    data: FileEntry
    seconds: float
    evidence: dict[str, Any]

    def verified(self, folder: Path) -> Path:
        """The graph's path, if it and the data it reads are there and unchanged.

        Raises:
            ArtifactError: one of them is missing, cut or changed.
        """
        self.data.verified(folder)
        return self.graph.verified(folder)


@dataclass(frozen=True)
class EngineEntry:
    """A compiled engine: what it was made from, for which devices and shapes.

    Attributes:
        made_from: sha256 of the graph and of its data.
        sms: compute capabilities it runs on, such as "sm89".
        refused: compute capabilities that were asked for and cannot be, with the reason.
        profile: allowed sizes per dynamic axis.
    """

    stage: str
    precision: str
    target: str
    engine: FileEntry
    made_from: tuple[str, str]
    sms: tuple[str, ...]
    refused: dict[str, str]
    profile: dict[str, AxisRange]
    builder: dict[str, str]
    seconds: float


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

    def precisions(self) -> list[str]:
        """What was exported, in order; experiments must be asked for by name.

        Raises:
            ArtifactError: nothing else was.
        """
        names = list(dict.fromkeys(entry.precision for entry in self.graphs))
        found = [name for name in names if not is_experiment(name)]
        if not found:
            raise ArtifactError(
                "no precision was exported",
                expected="fp32, fp16 or bf16",
                got=", ".join(names) or "nothing",
                remedy="ldlm export; an experiment is asked for by --precision",
            )
        return found

    def graph(self, precision: str, stage: str) -> GraphEntry:
        """The entry of a graph.

        Raises:
            ArtifactError: it was not exported.
        """
        for entry in self.graphs:
            if (entry.precision, entry.stage) == (precision, stage):
                return entry
        raise ArtifactError(
            "this graph was not exported",
            stage=stage,
            expected=", ".join(sorted({e.precision for e in self.graphs})) or "nothing exported",
            got=precision,
            remedy="name one that was exported, or run ldlm export with it",
        )

    def put_graph(self, entry: GraphEntry) -> None:
        """Add or replace a graph's entry; engines of another version of it are dropped."""
        key = (entry.precision, entry.stage)
        self.graphs = [e for e in self.graphs if (e.precision, e.stage) != key] + [entry]
        source = (entry.graph.sha256, entry.data.sha256)
        self.engines = [
            e for e in self.engines if (e.precision, e.stage) != key or e.made_from == source
        ]

    def put_engine(self, entry: EngineEntry) -> None:
        """Add or replace an engine's entry.

        Raises:
            ArtifactError: its graph is no longer the one that it was made from.
        """
        graph = self.graph(entry.precision, entry.stage)
        if entry.made_from != (graph.graph.sha256, graph.data.sha256):
            raise ArtifactError(
                "the graph was exported anew while its engine was built",
                stage=entry.stage,
                remedy="run ldlm build again",
            )
        key = (entry.precision, entry.stage, entry.target)
        self.engines = [e for e in self.engines if (e.precision, e.stage, e.target) != key] + [
            entry
        ]

    def save(self, folder: Path) -> None:
        """Write manifest.json, whole or not at all."""
        text = json.dumps(dataclasses.asdict(self), indent=2) + "\n"
        files.write_whole(folder / MANIFEST, text.encode())


def exists(folder: Path) -> bool:
    """Whether the folder has a manifest."""
    return (folder / MANIFEST).is_file()


@contextlib.contextmanager
def updated(folder: Path) -> Iterator[Manifest]:
    """Read the manifest, let it be changed, and write it, while no other process does the same."""
    with files.locked(folder):
        manifest = load(folder)
        yield manifest
        manifest.save(folder)


def load(folder: Path) -> Manifest:
    """Read a folder's manifest.

    Raises:
        ArtifactError: there is none, or it is damaged or of another schema.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ArtifactError(
            f"no artifacts at {folder}",
            expected=str(path),
            got="no such file",
            remedy="ldlm export CHECKPOINT makes them",
        )
    try:
        document = json.loads(files.read_text(path, ArtifactError, "manifest"))
        schema = document["schema"]
        if schema != SCHEMA:
            raise ArtifactError(
                f"{path} has another schema version",
                expected=SCHEMA,
                got=schema,
                remedy="export again with this version",
            )
        return _parse(document)
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{path} is damaged", got=repr(error), remedy="export again") from error


def _parse(document: dict[str, Any]) -> Manifest:
    fields = dict(document)
    fields["config"] = LDLMConfig.from_dict(fields["config"], source=MANIFEST)
    if fields["tokenizer"] is not None:
        fields["tokenizer"] = FileEntry(**fields["tokenizer"])
    fields["graphs"] = [
        GraphEntry(**{**e, "graph": FileEntry(**e["graph"]), "data": FileEntry(**e["data"])})
        for e in fields["graphs"]
    ]
    fields["engines"] = [
        EngineEntry(
            **{
                **e,
                "engine": FileEntry(**e["engine"]),
                "made_from": tuple(e["made_from"]),
                "sms": tuple(e["sms"]),
                "profile": {axis: AxisRange(**r) for axis, r in e["profile"].items()},
            }
        )
        for e in fields["engines"]
    ]
    return Manifest(**fields)
