"""What engines can be built for, as data. Imports no TensorRT."""

import re

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


def target_of(library: str, sm: str) -> str:
    """The manifest's name of a build target: one file for all GPUs, or one per GPU."""
    return RTX if library == "rtx" else f"{library}-{sm}"
