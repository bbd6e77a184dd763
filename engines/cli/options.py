"""Every argument and option of the commands, declared once, and how lists in them are read.

A command says which of these it takes, and with which default. The flag is the parameter's name
where none is given here.
"""

from pathlib import Path
from typing import Annotated, TypeVar

from typer import Argument, Option

from engines.tensorrt.profiles import PROFILES
from ldlm.errors import ConfigError

Number = TypeVar("Number", int, float)

# Files and folders.
Folder = Annotated[Path, Argument(help="Artifacts folder.")]
Out = Annotated[Path | None, Option("--out", help="Artifacts folder; default artifacts/<name>.")]
AnyFolder = Annotated[Path, Argument(help="Where artifacts would be written.")]
AnyArtifact = Annotated[Path | None, Argument(help="Artifacts folder, .onnx or .engine file.")]
Checkpoint = Annotated[Path, Argument(help="Checkpoint folder.")]
CheckpointIfAny = Annotated[Path | None, Argument(help="Checkpoint folder; default: the preset.")]
NewCheckpoint = Annotated[Path, Argument(help="Checkpoint folder to write.")]
Origin = Annotated[Path, Option(help="Checkpoint folder the artifacts come from.")]
OriginIfAny = Annotated[Path | None, Option(help="Checkpoint folder the artifacts come from.")]
Weights = Annotated[Path, Argument(help="A .safetensors file, or a folder of them.")]
Keymap = Annotated[Path, Option("--map", help="Mapping file, TOML; see docs/model.md.")]
Tokenizer = Annotated[
    Path | None, Option(help="tokenizer.json to put in; default: made for the vocabulary.")
]
Judge = Annotated[Path, Option(help="Python file with accepts(text) and seen(); it is executed.")]
JsonFile = Annotated[Path | None, Option("--out", help="Also write the JSON here.")]
Force = Annotated[bool, Option("--force", help="Replace an older checkpoint.")]
Delete = Annotated[bool, Option("--delete", help="Delete it; without this it is only listed.")]

# What a command prints.
Json = Annotated[bool, Option("--json", help="Print JSON.")]
Schema = Annotated[bool, Option("--schema", help="Print the JSON schema of manifest.json.")]
Explain = Annotated[bool, Option("--explain", help="Say of each file whether it was made and why.")]

# The model.
Preset = Annotated[str, Option("--preset", help="base or small.")]
WeightsSeed = Annotated[int, Option(help="Seed of the weights.")]

# Precisions.
Precisions = Annotated[str, Option(help="Precisions, comma-separated.")]
ExportedPrecisions = Annotated[
    str | None, Option(help="Precisions, comma-separated; default: all exported (build: not int8).")
]
ExportedPrecision = Annotated[
    str | None, Option(help="An exported precision; default fp32, or the first there.")
]
OldPrecision = Annotated[
    str | None, Option(help="In place of leftovers: the graphs and engines of this one.")
]
WithoutIsland = Annotated[
    list[str] | None, Option(help="Experiment: leave this island in half; again for another one.")
]

# Engines.
Target = Annotated[
    str, Option(help="rtx: TensorRT-RTX, on any machine; trt: TensorRT, for the GPU at hand.")
]
Sm = Annotated[
    str,
    Option(
        help="Compute capabilities, such as 80,8.9,sm120. 'all' builds every one that a stage can "
        "have and says why it cannot have another; a list must be met in full."
    ),
]
Profiles = Annotated[
    str | None, Option(help=f"Batch profiles, of {' and '.join(PROFILES)}; default all of them.")
]
BatchRange = Annotated[str | None, Option(help="One batch range MIN,OPT,MAX in place of profiles.")]
LengthRange = Annotated[str | None, Option(help="Length range MIN,OPT,MAX; default every length.")]
Unfused = Annotated[
    bool,
    Option(
        "--unfused-attention",
        help="Attention from single float32 operators, where a fused kernel is wrong.",
    ),
]
Workers = Annotated[int | None, Option(min=1, help="Processes; default as cores and memory allow.")]

# What is proved.
Stress = Annotated[
    bool, Option("--stress", help="Also prove a copy with outliers and large scores.")
]
SelfTest = Annotated[
    bool, Option("--self-test", help="Damage the graphs in every known way; see who notices.")
]
Taps = Annotated[bool, Option("--taps", help="Also compare every equation of every block.")]
Ablate = Annotated[bool, Option("--ablate", help="Also measure the stages without their islands.")]
SamplerSteps = Annotated[
    int, Option(help="Also sample with this many steps on every runtime; 0 leaves it out.")
]
Stages = Annotated[
    list[str] | None,
    Option(help="Only this stage's component; again for another one. Default: all."),
]
EngineRuntime = Annotated[str, Option(help="rtx or trt: also compare engines, on the GPU at hand.")]
Again = Annotated[bool, Option("--again", help="Also verify what has not changed since it passed.")]

# What is sampled, and where.
Samples = Annotated[int, Option("--samples", "-n", help="Number of texts.")]
Length = Annotated[
    int | None, Option(help="Tokens per text; default 64 (evaluate: the model's most).")
]
BatchSize = Annotated[int, Option(help="Texts that run together; int8 takes each by itself.")]
Steps = Annotated[int | None, Option(help="Denoiser calls; default the model's own.")]
Grid = Annotated[str | None, Option(help="Decreasing times in (0, 1], with commas; not --steps.")]
Solver = Annotated[str, Option(help="euler, ddpm or ddim.")]
Seed = Annotated[int, Option(help="Seed; text k depends on it and on k alone.")]
Runtime = Annotated[str, Option(help="ort, torch (reference), evaluator, rtx or trt (engines).")]
Runtimes = Annotated[
    str, Option(help="Runtimes beside PyTorch, comma-separated; rtx and trt on a GPU.")
]
Provider = Annotated[str | None, Option(help="cpu or cuda, for ort; default cpu.")]
Plain = Annotated[bool, Option("--plain", help="The plain graphs, step by step; ort alone.")]
Raw = Annotated[bool, Option("--raw", help="Show all tokens, past the end too.")]

# What is timed.
Peers = Annotated[
    str | None,
    Option(
        help="torch, torch-bf16, torch-compile, ort-plain, ort, rtx, trt; all but torch's also as "
        "name:precision. The first is what the others are compared with. Default: those up to ort "
        "and, at batch 1 where it was exported, ort:int8."
    ),
]
Parts = Annotated[str, Option(help="step, latent_decoder: one, or both with a comma.")]
Lengths = Annotated[str | None, Option(help="Default 64,256,1024 as far as the model goes.")]
Batches = Annotated[str, Option(help="Batches.")]
Rounds = Annotated[int, Option(help="How often the turn goes round.")]
Seconds = Annotated[float, Option(help="A peer's share of one turn, about.")]


def names(text: str) -> list[str]:
    """A comma-separated list."""
    return [item for item in (part.strip() for part in text.split(",")) if item]


def precisions(text: str) -> list[str]:
    """A comma-separated list of precisions, at least one.

    Raises:
        ConfigError: it is empty.
    """
    found = list(dict.fromkeys(names(text)))
    if not found:
        raise ConfigError("no precision given", expected="such as fp32,fp16", got=repr(text))
    return found


def numbers(text: str, kind: type[Number], what: str, expected: str) -> list[Number]:
    """A comma-separated list of numbers.

    Raises:
        ConfigError: it is something else; says what is not usable, and what is expected.
    """
    try:
        return [kind(item) for item in names(text)]
    except ValueError:
        raise ConfigError(f"{what} is not usable", expected=expected, got=text) from None


def limits(text: str | None, option: str) -> list[int] | None:
    """MIN,OPT,MAX of an option, or None where it is not given.

    Raises:
        ConfigError: it is something else.
    """
    if text is None:
        return None
    expected = "MIN,OPT,MAX"
    values = numbers(text, int, option, expected)
    if len(values) != 3:
        raise ConfigError(f"{option} is not usable", expected=expected, got=text)
    return values
