"""The options of the commands, each declared once: its type, its name and what it means."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from engines.tensorrt.profiles import PROFILES

# Folders and files.
ArtifactsFolder = Annotated[Path, Argument(help="Artifacts folder.")]
CheckpointFolder = Annotated[Path, Argument(help="Checkpoint folder.")]
NewCheckpoint = Annotated[Path, Argument(help="Checkpoint folder to write.")]
PresetOrCheckpoint = Annotated[
    Path | None, Argument(help="Checkpoint folder; default: the preset.")
]
ToInspect = Annotated[Path | None, Argument(help="Artifacts folder, .onnx or .engine file.")]
ToConvert = Annotated[Path, Argument(help="A .safetensors file, or a folder of them.")]
Where = Annotated[Path, Argument(help="Where artifacts would be written.")]
Out = Annotated[Path | None, Option("--out", help="Artifacts folder; default artifacts/<name>.")]
JsonOut = Annotated[Path | None, Option("--out", help="Also write the JSON here.")]
MadeFrom = Annotated[Path, Option("--checkpoint", help="Checkpoint folder they were made from.")]
Reference = Annotated[
    Path | None,
    Option("--checkpoint", help="Checkpoint folder: the artifacts must have been made from it."),
]
Map = Annotated[Path, Option("--map", help="Mapping file, TOML; see docs/model.md.")]
Tokenizer = Annotated[
    Path | None, Option(help="tokenizer.json to put in; default: made for the vocabulary.")
]
Judge = Annotated[Path, Option(help="Python file with accepts(text) and seen(); it is executed.")]

# Checkpoints.
Preset = Annotated[str, Option("--preset", help="base or small.")]
Force = Annotated[bool, Option("--force", help="Replace an older checkpoint.")]
WeightsSeed = Annotated[int, Option(help="Seed of the weights.")]

# What is made, and for what.
Made = Annotated[str, Option(help="Precisions, comma-separated.")]
Precisions = Annotated[
    str | None, Option(help="Precisions, comma-separated; default: every exported one.")
]
Compiled = Annotated[
    str | None, Option(help="Precisions, comma-separated; default: every exported one but int8.")
]
WithoutIsland = Annotated[
    list[str] | None,
    Option(help="Experiment: leave this island in half; again for another one."),
]
Target = Annotated[
    str, Option(help="rtx: TensorRT-RTX, on any machine; trt: TensorRT, for the GPU at hand.")
]
Sm = Annotated[
    str,
    Option(
        help="Compute capabilities, such as 80,8.9,sm120. 'all' builds every one that a stage "
        "can have and says why it cannot have another; a list must be met in full."
    ),
]
Profile = Annotated[
    str | None, Option(help=f"Batch profiles, of {' and '.join(PROFILES)}; default all of them.")
]
BatchRange = Annotated[
    str | None, Option("--batch", help="One batch range MIN,OPT,MAX in place of the profiles.")
]
LengthRange = Annotated[
    str | None, Option("--length", help="Length range MIN,OPT,MAX; default every length.")
]
Unfused = Annotated[
    bool,
    Option(
        "--unfused-attention",
        help="Attention from single float32 operators, where a fused kernel is wrong.",
    ),
]
Workers = Annotated[
    int | None, Option(min=1, help="Processes; default: as cores and memory allow.")
]
Explain = Annotated[
    bool, Option("--explain", help="Say of every file whether it was made, and why.")
]

# Sampling.
Runtime = Annotated[
    str, Option(help="ort, torch (the reference), evaluator, rtx or trt (the engines).")
]
Runtimes = Annotated[
    str,
    Option("--runtime", help="Runtimes beside PyTorch, comma-separated; rtx and trt on a GPU."),
]
OnePrecision = Annotated[
    str | None, Option(help="An exported precision; default fp32, or the first there.")
]
Provider = Annotated[str | None, Option(help="cpu or cuda, for ort; default cpu.")]
Samples = Annotated[int, Option("--samples", "-n", help="Number of texts.")]
Length = Annotated[int | None, Option(help="Tokens per text; default 64, or the model's most.")]
MostLength = Annotated[
    int | None, Option("--length", help="Tokens per text; default the model's most.")
]
Steps = Annotated[int | None, Option("--steps", help="Denoiser calls; default the model's own.")]
Grid = Annotated[
    str | None, Option(help="Decreasing times in (0, 1], comma-separated, not --steps.")
]
Solver = Annotated[str, Option(help="euler, ddpm or ddim.")]
Seed = Annotated[int, Option(help="Seed; text k depends on it and on k alone.")]
BatchSize = Annotated[int, Option(help="Texts that run together; int8 takes each by itself.")]
Plain = Annotated[bool, Option("--plain", help="The plain graphs, step by step; ort alone.")]
Raw = Annotated[bool, Option("--raw", help="Show all tokens, past the end too.")]

# The proof.
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
    Option("--stage", help="Only this stage's component; again for another one. Default: all."),
]
EngineRuntime = Annotated[
    str, Option("--runtime", help="rtx or trt: also compare the engines, on the GPU at hand.")
]
Again = Annotated[bool, Option("--again", help="Also verify what has not changed since it passed.")]

# The benchmark.
Peers = Annotated[
    str | None,
    Option(
        help="torch, torch-bf16, torch-compile, ort-plain, ort, rtx, trt; all but torch's also as "
        "name:precision. The first is what the others are compared with. Default: those up to "
        "ort and, at batch 1 where it was exported, ort:int8."
    ),
]
What = Annotated[str, Option(help="step, latent_decoder: one, or both with a comma.")]
Lengths = Annotated[
    str | None, Option("--length", help="Lengths; default 64,256,1024 as far as the model goes.")
]
Batches = Annotated[str, Option("--batch", help="Batches.")]
Rounds = Annotated[int, Option(help="How often the turn goes round.")]
Seconds = Annotated[float, Option(help="A peer's share of one turn, about.")]

# What is shown or deleted.
Json = Annotated[bool, Option("--json", help="Print JSON.")]
Schema = Annotated[bool, Option("--schema", help="Print the JSON schema of manifest.json.")]
DropPrecision = Annotated[
    str | None,
    Option("--precision", help="In place of leftovers: the graphs and engines of this one."),
]
Delete = Annotated[bool, Option("--delete", help="Delete it; without this it is only listed.")]
