"""ldlm bench: the peers side by side in one run."""

from __future__ import annotations

import json

from engines.artifacts import folder as folders
from engines.cli import options as opt
from engines.cli._shared import names, numbers, out, progress


def command(
    folder: opt.ArtifactsFolder,
    checkpoint: opt.MadeFrom,
    peers: opt.Peers = None,
    what: opt.What = "step",
    length: opt.Lengths = None,
    batch: opt.Batches = "1",
    rounds: opt.Rounds = 3,
    seconds: opt.Seconds = 2.0,
    to: opt.JsonOut = None,
) -> None:
    """Time each peer on the same steps, in turn; the last line is JSON."""
    from engines.bench.measure import bench
    from engines.bench.peers import default_peers
    from engines.bench.worker import Case
    from engines.show.bench import bench_table
    from ldlm import files

    manifest = folders.load(folder)
    most = manifest.config.n_positions
    lengths = numbers(length, "--length")
    if lengths is None:
        lengths = [n for n in (64, 256, 1024) if n <= most] or [most]
    batches = numbers(batch, "--batch") or []
    cases = [Case(part, b, n) for part in names(what) or () for b in batches for n in lengths]
    chosen = default_peers(manifest, batches) if peers is None else names(peers) or []
    with progress() as told:
        document = bench(
            folder, checkpoint, chosen, cases, rounds=rounds, seconds=seconds, progress=told
        )
    text = json.dumps(document)
    out.print(bench_table(document))
    if to is not None:
        files.write_whole(to, (text + "\n").encode())
    out.file.write(text + "\n")
