"""ldlm bench: the peers side by side in one run."""

import json

from engines.artifacts import folder as folders
from engines.cli import options as opt
from engines.cli._shared import out, progress


def command(
    folder: opt.Folder,
    checkpoint: opt.Origin,
    peers: opt.Peers = None,
    what: opt.Parts = "step",
    length: opt.Lengths = None,
    batch: opt.Batches = "1",
    rounds: opt.Rounds = 3,
    seconds: opt.Seconds = 2.0,
    to: opt.JsonFile = None,
) -> None:
    """Time each peer on the same steps, in turn; the last line is JSON."""
    from engines.bench.measure import bench
    from engines.bench.peers import Case, default_peers
    from engines.show.findings import bench_table
    from ldlm import files

    manifest = folders.load(folder)
    most = manifest.config.n_positions
    if length is None:
        lengths = [n for n in (64, 256, 1024) if n <= most] or [most]
    else:
        lengths = opt.numbers(length, int, "--length", "such as 64,256")
    batches = opt.numbers(batch, int, "--batch", "such as 1,8")
    cases = [Case(part, b, n) for part in opt.names(what) for b in batches for n in lengths]
    chosen = default_peers(manifest, batches) if peers is None else opt.names(peers)
    with progress() as tell:
        document = bench(
            folder, checkpoint, chosen, cases, rounds=rounds, seconds=seconds, progress=tell
        )
    text = json.dumps(document) + "\n"
    out.print(bench_table(document))
    if to is not None:
        files.write_whole(to, text.encode())
    out.file.write(text)
