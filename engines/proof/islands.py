"""Is the island really there, and what does it buy?

The first is read from the final file, and from TensorRT's own network of it; for the second, every
island is switched on and off, on both checkpoints.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from engines.proof.records import Ablation, IslandRecord, Source
from engines.proof.stress import stressed
from engines.proof.subject import Subject, pooled_distance
from export.precision import Precision
from export.stages import StageSpec

# ONNX operators and the kind of computation whose rule decides their dtype.
ONNX_KINDS: dict[str, str] = {
    "LayerNormalization": "layer_norm",
    "ReduceL2": "rms_norm",
    "Tanh": "softcap_softmax",
    "Softmax": "softcap_softmax",
    "Cos": "time_embedding",
    "Sin": "time_embedding",
    "Attention": "fused_attention",
    "Add before LayerNormalization": "residual",
}

# TensorRT's layers for the same computations; ATTENTION_INPUT opens a fused attention.
TRT_KINDS: dict[str, str] = {
    "NORMALIZATION": "layer_norm",
    "REDUCE": "rms_norm",
    "ACTIVATION TANH": "softcap_softmax",
    "SOFTMAX": "softcap_softmax",
    "ATTENTION_INPUT": "fused_attention",
}

_TRT_NAMES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16"}

# (batch, length) of what is measured with islands switched off.
CASE = (2, 64)


def from_file(path: Path) -> Counter[tuple[str, str]]:
    """How often each (operator, dtype of its result) of interest stands in an ONNX file."""
    found: Counter[tuple[str, str]] = Counter()
    for node in ir.load(path).graph:
        if node.op_type in ONNX_KINDS:
            found[node.op_type, _dtype(node)] += 1
        if node.op_type == "LayerNormalization" and (total := _sum_before(node)) is not None:
            found["Add before LayerNormalization", _dtype(total)] += 1
    return found


def _dtype(node: ir.Node) -> str:
    dtype = node.outputs[0].dtype
    return dtype.numpy().name if dtype is not None else "none"


def _sum_before(norm: ir.Node) -> ir.Node | None:
    """The residual sum that a norm reads, through casts: a sum with no constant operand."""
    value = norm.inputs[0]
    producer = None if value is None else value.producer()
    while producer is not None and producer.op_type == "Cast" and producer.inputs[0] is not None:
        producer = producer.inputs[0].producer()
    if producer is None or producer.op_type != "Add":
        return None
    constant = any(v is not None and v.const_value is not None for v in producer.inputs)
    return None if constant else producer


def from_tensorrt(path: Path, spec: StageSpec) -> Counter[tuple[str, str]]:
    """The same from the network that TensorRT-RTX parses; empty where it is not installed."""
    try:
        from engines.compile.rtx import layer_dtypes
    except ImportError:
        return Counter()
    return Counter((kind, _TRT_NAMES.get(dtype, dtype)) for kind, dtype in layer_dtypes(path, spec))


def look(
    path: Path, spec: StageSpec, precision: Precision, *, tensorrt: bool = True
) -> list[IslandRecord]:
    """One record per (source, operator): the dtype that the policy asks for and those found.

    Args:
        path: the .onnx file.
        spec, precision: what it should be.
        tensorrt: whether to ask TensorRT too; it is left out where it is not installed, and for
            integer products, which it does not take.
    """
    where = (spec.name, str(precision))
    sources: list[tuple[Source, Counter[tuple[str, str]], dict[str, str]]]
    sources = [("onnx", from_file(path), ONNX_KINDS)]
    if tensorrt and precision.runs_on("rtx"):
        sources.append(("tensorrt", from_tensorrt(path, spec), TRT_KINDS))
    return [
        IslandRecord(*where, source, what, precision.dtype(spec.component, kind), counts)
        for source, found, kinds in sources
        for what, kind in kinds.items()
        if (counts := {dtype: n for (name, dtype), n in sorted(found.items()) if name == what})
    ]


def ablate(subject: Subject) -> Iterator[Ablation]:
    """Export a component with each of its islands in half, alone and all together.

    Args:
        subject: in a half precision; of any other there is nothing to say. See `Subject.exported`.
    """
    if not subject.precision.is_half:
        return
    islands = subject.precision.islands(subject.spec.component)
    for whole in (subject.at(CASE), subject.stressed(stressed(subject.model)).at(CASE)):
        for off in dict.fromkeys(((), *((island,) for island in islands), tuple(islands))):
            whole.tell(f"{whole.checkpoint} checkpoint, without {' '.join(off) or 'nothing'}")
            with replace(whole, precision=whole.precision.without(off)).exported() as experiment:
                outputs = whole.outputs(experiment.runner(whole.spec.name))
            yield Ablation(
                stage=whole.spec.name,
                precision=str(whole.precision),
                checkpoint=whole.checkpoint,
                off=off,
                error=pooled_distance(outputs, whole.expected).relative_l2,
                autocast=whole.baseline_error.relative_l2,
            )
