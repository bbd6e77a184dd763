"""What engines can be built for, as data. Imports no TensorRT."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from export.precision import is_integer, policy, require_floats
from export.stages import BATCH, LENGTH, AxisRange, graph_ranges
from ldlm.config import LDLMConfig
from ldlm.errors import ConfigError

RTX = "rtx"

# The compute capabilities of TensorRT-RTX 1.7 and what they are.
RTX_SMS: dict[str, str] = {
    "sm75": "Turing",
    "sm80": "Ampere, data centre",
    "sm86": "Ampere, RTX 30",
    "sm89": "Ada, RTX 40",
    "sm120": "Blackwell, RTX 50",
    "sm121": "Blackwell, GB10",
}

# Known absences, so that the message says more than "unknown".
NO_RTX: dict[str, str] = {
    "sm90": "Hopper has no TensorRT-RTX; it needs plain TensorRT, built on that GPU",
    "sm100": "Blackwell B200 has no TensorRT-RTX; it needs plain TensorRT, built on that GPU",
}

# What TensorRT-RTX cannot compile for Turing: "FP32 GEMM is not supported", and bfloat16 at all.
NO_FLOAT32_MATMUL = ("sm75",)
NO_BFLOAT16 = ("sm75",)

# Batches (min, opt, max) of the profiles that every engine has unless asked otherwise. The first
# one that holds a shape is used: a batch of 1 runs on what is tuned for it.
PROFILES: dict[str, tuple[int, int, int]] = {"latency": (1, 1, 1), "throughput": (1, 8, 8)}
CUSTOM = "custom"


def compilable(precision: str) -> bool:
    """Whether TensorRT takes a precision's graphs: it has no products of dynamic integers."""
    return not is_integer(policy(precision))


def require_compilable(precisions: Sequence[str]) -> None:
    """Refuse what TensorRT does not take.

    Raises:
        ConfigError: naming the first precision.
    """
    require_floats(
        precisions,
        "no engines are built of this precision: its products are for CPUs",
        "ldlm export and ldlm verify; ldlm sample runs it on ONNX Runtime",
    )


def parse_sms(text: str) -> tuple[str, ...]:
    """`all`, or a list such as `80,8.9,sm120`, as names of RTX_SMS in ascending order.

    Raises:
        ConfigError: one of them is no TensorRT-RTX target.
    """
    if text.strip().lower() == "all":
        return tuple(RTX_SMS)
    wanted = set()
    for item in filter(None, re.split(r"[,\s]+", text.strip().lower())):
        name = "sm" + item.removeprefix("sm").replace(".", "")
        if name not in RTX_SMS:
            raise ConfigError(
                "no such TensorRT-RTX target",
                expected=", ".join(RTX_SMS),
                got=item,
                remedy=NO_RTX.get(name),
            )
        wanted.add(name)
    if not wanted:
        raise ConfigError("no target given", expected=f"all, or of {', '.join(RTX_SMS)}", got=text)
    return tuple(name for name in RTX_SMS if name in wanted)


def profiles(
    config: LDLMConfig,
    names: Collection[str] | None = None,
    batch: Sequence[int] | None = None,
    length: Sequence[int] | None = None,
) -> dict[str, dict[str, AxisRange]]:
    """An engine's profiles by name, each with the range (min, opt, max) per dynamic axis.

    Args:
        config: of the model.
        names: of PROFILES; None is all of them.
        batch: a range of one's own: one profile, named "custom", in place of the named ones.
        length: a range for all profiles; None is every length.

    Raises:
        ConfigError: no such profile, or a range is out of order or larger than the graph's.
    """
    unknown = [name for name in names or () if name not in PROFILES]
    if unknown:
        raise ConfigError("no such profile", expected=" or ".join(PROFILES), got=unknown[0])
    if batch and names:
        raise ConfigError("a batch range is a profile of its own", got="--batch and --profile")
    allowed = graph_ranges(config)
    batches: Mapping[str, Sequence[int]] = (
        {CUSTOM: batch}
        if batch
        else {n: b for n, b in PROFILES.items() if n in (names or PROFILES)}
    )
    lengths = AxisRange(*length) if length else allowed[LENGTH]
    found = {n: {BATCH: AxisRange(*b), LENGTH: lengths} for n, b in batches.items()}
    for name, ranges in found.items():
        for axis, chosen in ranges.items():
            if chosen.max > allowed[axis].max:
                raise ConfigError(
                    f"the {axis} of profile '{name}' is larger than the graph's",
                    expected=f"at most {allowed[axis].max}",
                    got=chosen.max,
                )
    return found


def fitting(
    profiles: Mapping[str, Mapping[str, AxisRange]], sizes: Mapping[str, int]
) -> tuple[int, str] | None:
    """Index and name of the first profile that holds these sizes, or None."""
    for index, (name, ranges) in enumerate(profiles.items()):
        if all(ranges[axis].min <= size <= ranges[axis].max for axis, size in sizes.items()):
            return index, name
    return None
