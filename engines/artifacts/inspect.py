"""What a folder of artifacts, an ONNX file or an engine is, as a document."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from engines.artifacts import folder as folders
from engines.artifacts.manifest import Manifest
from ldlm import files
from ldlm.errors import ArtifactError

# Computations whose dtype a precision policy decides.
DTYPE_OPERATORS = (
    "LayerNormalization", "RMSNormalization", "Softmax", "Tanh", "Attention", "MatMul", "Gemm",
    "DynamicQuantizeLinear", "MatMulInteger",
)  # fmt: skip # the items of a row belong together

Document = dict[str, Any]


def describe(path: Path) -> Document:
    """A folder of artifacts, an .onnx file or an .engine file.

    Raises:
        ArtifactError: it is none of them, or damaged.
    """
    if path.is_dir():
        return _folder(folders.load(path))
    if path.is_file() and path.suffix == ".onnx":
        try:
            found = _facts(path)
        except Exception as error:  # of protobuf, of onnx_ir, of what a damaged graph lacks
            problem = f"{path} is not a readable ONNX file"
            raise ArtifactError(problem, got=str(error)[:300]) from error
        return {"sha256": files.sha256(path), **found, "manifest": _home(path)}
    if path.is_file() and path.suffix == ".engine":
        size = path.stat().st_size
        return {"sha256": files.sha256(path), "bytes": size, "manifest": _home(path)}
    raise ArtifactError(
        "there is nothing to inspect",
        expected="an artifacts folder, an .onnx or an .engine file",
        got=path if path.exists() else f"no {path}",
    )


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, text) of every leaf of a document; numbers side by side are one leaf."""
    if isinstance(value, dict) and all(isinstance(item, int | float) for item in value.values()):
        yield prefix, ", ".join(f"{key} {item}" for key, item in value.items()) or "none"
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from flatten(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list | tuple):
        yield prefix, ", ".join(map(str, value)) or "none"
    else:
        yield prefix, str(value)


def _folder(manifest: Manifest) -> Document:
    """The manifest, with a line per rule, and its entries by name."""
    document: Document = msgspec.to_builtins(manifest)
    for name, rules in manifest.policies.items():
        document["policies"][name] = [" ".join(map(str, rule.values())) for rule in rules]
    for kind in ("graphs", "engines"):
        entries = ((e["precision"], e.get("target"), e["stage"], e) for e in document[kind])
        document[kind] = {"/".join(filter(None, names)): entry for *names, entry in entries}
    return document


def _facts(path: Path) -> Document:
    import onnx_ir as ir

    graph = ir.load(path).graph
    held = [value.const_value for value in graph.initializers.values() if value.const_value]
    external = {str(tensor.location) for tensor in held if isinstance(tensor, ir.ExternalTensor)}
    missing = sorted(name for name in external if not (path.parent / name).is_file())
    return {
        "opset": graph.opset_imports.get("", "none"),
        "inputs": {str(value.name): _type(value) for value in graph.inputs},
        "outputs": {str(value.name): _type(value) for value in graph.outputs},
        "nodes": dict(Counter(node.op_type for node in graph).most_common()),
        "dtypes": {
            name: dict(Counter(_types(node) for node in graph if node.op_type == name))
            for name in DTYPE_OPERATORS
            if any(node.op_type == name for node in graph)
        },
        "parameters": sum(tensor.size for tensor in held),
        "weights": dict(Counter(str(tensor.dtype.name) for tensor in held)),
        "external data": [f"{n} (missing)" if n in missing else n for n in sorted(external)],
    }


def _type(value: Any) -> str:
    shape = "?" if value.shape is None else ", ".join(str(size) for size in value.shape)
    return f"{value.dtype.name if value.dtype else '?'} [{shape}]"


def _types(node: Any) -> str:
    """Dtypes of the first input and the first output."""
    first, last = node.inputs[0], node.outputs[0]
    names = [v.dtype.name if v is not None and v.dtype else "?" for v in (first, last)]
    return " -> ".join(names)


def _home(path: Path) -> Document | str:
    """What the manifest above a file says of it; an engine's file says nothing of itself."""
    folder = next((p for p in path.resolve().parents if folders.exists(p)), None)
    if folder is None:
        return "none above this file"
    try:
        manifest = folders.load(folder)
    except ArtifactError as error:  # another program's, perhaps
        return f"not readable: {error.problem}"
    name = path.resolve().relative_to(folder).as_posix()
    for entry in manifest.entries():
        if entry.files[0].path == name:
            same = files.sha256(path) == entry.files[0].sha256
            found = "as it was made" if same else "CHANGED SINCE"
            return {"of": folder.name, "file": found, **msgspec.to_builtins(entry)}
    return f"{folder.name} does not speak of this file"
