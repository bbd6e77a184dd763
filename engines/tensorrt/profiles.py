"""The sizes that an engine takes, as data. Imports no TensorRT."""

from collections.abc import Collection, Mapping, Sequence

from export.stages import BATCH, LENGTH, AxisRange, graph_ranges
from ldlm.config import LDLMConfig
from ldlm.errors import ConfigError

# Batches (min, opt, max) of the profiles that every engine has unless asked otherwise. The first
# one that holds a shape is used: a batch of 1 runs on what is tuned for it.
PROFILES: dict[str, tuple[int, int, int]] = {"latency": (1, 1, 1), "throughput": (1, 8, 8)}

# Allowed sizes per dynamic axis, by the profile's name, in the engine's order.
Profiles = Mapping[str, Mapping[str, AxisRange]]


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
    named = {n: b for n, b in PROFILES.items() if n in (names or PROFILES)}
    batches: Mapping[str, Sequence[int]] = {"custom": batch} if batch else named
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


def fitting(profiles: Profiles, sizes: Mapping[str, int]) -> tuple[int, str] | None:
    """Index and name of the first profile that holds these sizes, or None."""
    for index, (name, ranges) in enumerate(profiles.items()):
        if all(ranges[axis].min <= size <= ranges[axis].max for axis, size in sizes.items()):
            return index, name
    return None
