"""Train the grammar's LDLM: `python examples/grammar/train.py runs/grammar`.

A run is one folder: the checkpoint with the averaged weights, the state to resume from, and a log
with a line per 100 steps. The same command continues a run that was cut. Everything random comes
from the seed and the step, so a run that was cut ends as one that was not.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from data import CONFIG, frozen_language_model, make_tokenizer, token_ids, training_sentences
from recipe import AdaptiveTimes, Recipe, decoder_loss, diffusion_loss, encode
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from torch import Tensor

from ldlm import LDLM, files
from ldlm.errors import CheckpointError, ConfigError, LDLMError
from ldlm.initialise import initialise
from ldlm.schedule import TangentSchedule

STATE, LOG = "state.safetensors", "log.jsonl"
EVERY = 100  # steps between lines of the log
SAVE_EVERY = 1000  # steps between states to resume from


@dataclass
class Run:
    """A training run between two steps.

    Attributes:
        average: the exponential average of every parameter, by name.
        step: how many are done.
        seconds: wall time so far, over all sessions of the run.
    """

    model: LDLM
    recipe: Recipe
    optimiser: torch.optim.AdamW
    times: AdaptiveTimes
    average: dict[str, Tensor]
    step: int = 0
    seconds: float = 0.0


@dataclass
class Data:
    """The training set.

    Attributes:
        ids: [sentences, T] tokens.
        table: [vocab, d], the frozen language model.
        latents: [sentences, T, d] once the encoder is kept; empty before.
    """

    ids: Tensor
    table: Tensor
    latents: Tensor = field(default_factory=lambda: torch.empty(0))


def new_run(recipe: Recipe) -> Run:
    """A model with the paper's start: gains 1, scales 0, zero modulations."""
    torch.manual_seed(recipe.seed)
    config = CONFIG
    model = LDLM(config)
    drawn = initialise(LDLM(config), recipe.seed)
    with torch.no_grad():
        for name in ("latent_decoder.positions", "latent_encoder.positions"):
            positions = drawn.get_parameter(name) / drawn.get_parameter(name).std()
            model.get_parameter(name).copy_(positions / config.p_scale)
        model.latent_decoder.mask_vector.copy_(drawn.latent_decoder.mask_vector)
        align(model)
    # Latents of unit root mean square: otherwise they could outgrow the noise.
    model.latent_encoder.output_norm.gain.requires_grad_(False)
    model.tokenizer_json = make_tokenizer(config).to_str()
    parameters = dict(model.named_parameters())
    decay = [p for p in parameters.values() if p.ndim >= 2]
    other = [p for p in parameters.values() if p.ndim < 2]
    optimiser = torch.optim.AdamW(
        [
            {"params": decay, "weight_decay": recipe.weight_decay},
            {"params": other, "weight_decay": 0.0},
        ],
        lr=recipe.learning_rate, betas=(0.9, 0.98), fused=True,
    )  # fmt: skip # the items of a row belong together
    times = AdaptiveTimes(recipe, TangentSchedule(config.tangent_d, config.t_min))
    average = {name: p.detach().clone() for name, p in parameters.items()}
    return Run(model, recipe, optimiser, times, average)


def align(model: LDLM) -> None:
    """Let every latent begin by reading its own position, and every position its own latent.

    Nothing in the two Perceivers says that latent i belongs to word i. From random weights they
    find some code that mixes positions, which decodes well and is hard to denoise.
    """
    encoder = model.latent_encoder
    encoder.latents.copy_(encoder.positions)
    encoder.latents_norm.gain.fill_(0.1)  # what is the same for every text takes little room
    encoder.positions.mul_(0.5)
    for block in (*encoder.blocks, *model.latent_decoder.blocks):
        attention = block.attention
        d = attention.kv.weight.shape[1]
        attention.kv.weight[:d] = attention.qkv.weight[:d]  # keys of the context as the queries
        attention.query_norm.gain.fill_(2.0)
        attention.key_norm.gain.fill_(2.0)


def save(run: Run, folder: Path) -> None:
    """Write the state to resume from, whole or not at all."""
    tensors = {f"model.{n}": t.detach() for n, t in run.model.state_dict().items()}
    tensors |= {f"average.{n}": t for n, t in run.average.items()}
    for index, state in run.optimiser.state_dict()["state"].items():
        tensors |= {f"adam.{index}.{key}": torch.as_tensor(value) for key, value in state.items()}
    tensors["times"] = torch.from_numpy(run.times.loss)
    about = {"step": run.step, "seconds": run.seconds, "recipe": asdict(run.recipe)}
    with files.staging_folder(folder) as staging:
        save_file(tensors, staging / STATE, metadata={"run": json.dumps(about)})
        files.publish(staging / STATE, folder / STATE)


def resume(run: Run, folder: Path) -> None:
    """Fill a new run with a saved state.

    Raises:
        CheckpointError: it was started with another recipe.
    """
    from safetensors import safe_open

    with safe_open(folder / STATE, "pt") as opened:
        about = json.loads(opened.metadata()["run"])
    if about["recipe"] != asdict(run.recipe):
        raise CheckpointError(
            f"{folder} is a run with another recipe",
            expected=asdict(run.recipe),
            got=about["recipe"],
            remedy="choose another folder, or the same options",
        )
    tensors = load_file(folder / STATE)

    def under(prefix: str) -> dict[str, Tensor]:
        return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

    run.model.load_state_dict(under("model."))
    run.average = under("average.")
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in under("adam.").items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = tensor
    whole = run.optimiser.state_dict()
    run.optimiser.load_state_dict({"state": state, "param_groups": whole["param_groups"]})
    run.times.loss = tensors["times"].numpy()
    run.step, run.seconds = about["step"], about["seconds"]


def one_step(run: Run, data: Data) -> dict[str, float]:
    """One step of the optimiser; the losses."""
    recipe, model, step = run.recipe, run.model, run.step
    generator = torch.Generator().manual_seed((recipe.seed << 32) + step)
    random = np.random.default_rng([recipe.seed, step])
    rows = torch.from_numpy(random.integers(len(data.ids), size=recipe.batch_size))
    tokens = data.ids[rows]
    t, bins = run.times.draw(recipe.batch_size, random)
    moving = step < recipe.autoencoder_steps
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=recipe.autocast == "bf16"):
        if moving:
            h = data.table[tokens]
            z = encode(model, h)
            share = recipe.share(step)
            target = share * z + (1 - share) * z.detach()
            square, entropy = decoder_loss(model, z, h, tokens, recipe, generator)
        else:
            target = data.latents[rows]
            square = entropy = torch.zeros(())
        if moving and recipe.share(step) < 0.01:  # until then the diffusion has nothing to learn
            each = torch.zeros(recipe.batch_size)
        else:
            each = diffusion_loss(model, target, t, recipe, generator)
        loss = each.mean() + square + entropy
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
    for group in run.optimiser.param_groups:
        group["lr"] = recipe.rate(step)
    run.optimiser.step()
    run.optimiser.zero_grad(set_to_none=True)
    if each.any():
        run.times.update(bins, each.detach().numpy())
    decay = min(recipe.ema, (1 + step) / (10 + step))
    live = dict(model.named_parameters())
    torch._foreach_lerp_(
        list(run.average.values()), [live[n].detach() for n in run.average], 1 - decay
    )
    return {
        "diffusion": each.mean().item(), "decoder": square.item(), "tokens": entropy.item(),
        "gradient": float(norm),
    }  # fmt: skip # rows, as a table


def keep_autoencoder(run: Run, data: Data) -> None:
    """From here on the encoder and the decoders stay, and every sentence's latents are known."""
    model = run.model
    first = run.step == run.recipe.autoencoder_steps
    for name, parameter in model.named_parameters():
        if not name.startswith("denoiser."):
            parameter.data.copy_(run.average[name])
            parameter.requires_grad_(False)
            parameter.grad = None
    with torch.no_grad():
        if first:
            z = model.latent_encoder(data.table[data.ids[:4096]]).flatten(0, 1)
            model.latent_mean.copy_(z.mean(0))
            model.latent_std.copy_(z.std(0))
        parts = [encode(model, data.table[part]) for part in torch.split(data.ids, 1024)]
    data.latents = torch.cat(parts)


def averaged(run: Run) -> LDLM:
    """A copy of the model with the averaged weights."""
    model = LDLM(run.model.config).eval()
    model.load_state_dict({**run.model.state_dict(), **run.average})
    model.tokenizer_json = run.model.tokenizer_json
    return model


def cut_log(path: Path, step: int) -> None:
    """Take out what was logged after the saved state: those steps are done again."""
    lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if json.loads(line)["step"] <= step]
    files.write_whole(path, "".join(kept).encode())


def train(folder: Path, recipe: Recipe) -> LDLM:
    """Run, or continue, a training; the averaged model at its end."""
    if recipe.steps <= recipe.autoencoder_steps:
        raise ConfigError(
            "the denoiser would learn nothing",
            expected=f"more than {recipe.autoencoder_steps} steps",
            got=recipe.steps,
        )
    folder.mkdir(parents=True, exist_ok=True)
    run = new_run(recipe)
    config = run.model.config
    ids = token_ids(training_sentences(recipe.sentences, recipe.seed, config), config)
    data = Data(ids, frozen_language_model(ids, config, recipe.seed))
    if (folder / STATE).exists():
        resume(run, folder)
        cut_log(folder / LOG, run.step)
        if run.step > recipe.autoencoder_steps:
            keep_autoencoder(run, data)
    started = time.perf_counter() - run.seconds
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn()) as bar, (folder / LOG).open("a") as log:
        task = bar.add_task("training", total=recipe.steps, completed=run.step)
        while run.step < recipe.steps:
            if run.step == recipe.autoencoder_steps:
                keep_autoencoder(run, data)
            losses = one_step(run, data)
            run.step += 1
            run.seconds = time.perf_counter() - started
            bar.update(task, completed=run.step)
            if run.step % EVERY == 0 or run.step == recipe.steps:
                line = {"step": run.step, "seconds": round(run.seconds, 1), **losses}
                log.write(json.dumps({k: round(v, 5) for k, v in line.items()}) + "\n")
                log.flush()
                bar.update(task, description=f"diffusion {losses['diffusion']:.4f}")
            if run.step % SAVE_EVERY == 0 or run.step == recipe.steps:
                save(run, folder)
    return averaged(run)


def main(
    folder: Annotated[Path, typer.Argument(help="The run; continued if it is there.")],
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = Recipe.steps,
    seed: Annotated[int, typer.Option(help="Of weights, sentences and noise.")] = Recipe.seed,
) -> None:
    """Train, and write the checkpoint into FOLDER/checkpoint."""
    try:
        model = train(folder, replace(Recipe(), steps=steps, seed=seed))
    except LDLMError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    model.save_checkpoint(folder / "checkpoint")
    typer.echo(f"{folder / 'checkpoint'}")


if __name__ == "__main__":
    typer.run(main)
