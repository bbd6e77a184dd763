"""Every command and every Python block of the documentation is run, on the small preset.

Each fenced block is one test: its lines run one after the other in a folder of its own, as a reader
would type them. What takes minutes is only parsed here; `make test-long` runs it.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pages import PAGES, ROOT, Block, blocks, parse, require_extras, require_targets

from engines import Artifacts
from engines.cli import main
from ldlm import PRESETS
from ldlm.checkpoint import WEIGHTS
from ldlm.errors import LDLMError
from ldlm.keymap import read_map

GPU = Path("/dev/nvidiactl").exists()

# What is run in place of what is written, always: (pattern, replacement, why).
SMALL = (
    (r"--preset base", "--preset small", "the published size takes minutes"),
    (r"1,256,1024", "1,64,128", "positions of the small preset"),
    (r"--length 256,1024", "--length 128", "positions of the small preset"),
    (r"\[2,16,768\]", f"[2,16,{PRESETS['small'].d_model}]", "width of the small preset"),
    (r"-n 1000 --batch-size 64", "-n 20 --batch-size 20", "1000 texts take minutes"),
    (r"(--judge judge.py)$", r"\1 -n 4 --steps 4", "the default is 1000 texts of 1024 steps"),
    (r"(--grid \S+)", r"\1 --length 16", "a text shows all that its grid does"),
    (
        r"artifacts/grammar --checkpoint examples/grammar/checkpoint(.*) -n 100 --steps 64",
        r"artifacts/base --checkpoint checkpoints/base\1 -n 4 --steps 4",
        "make demo makes those artifacts",
    ),
)
# The same, where the test is not a long one.
FAST = (
    (r"(ldlm engines .*)$", r"\1 --precision fp32", "one precision of two"),
    (r"(ldlm verify .*checkpoints/base)$", r"\1 --precision fp32", "one precision of four"),
    (r"(ldlm build \S+ .*(?:--sm|--unfused).*)", r"\1 --precision fp32", "one precision of three"),
    (r"-n 200 --steps 64", "-n 4 --steps 4", "800 texts"),
    (r"(ldlm evaluate .*)$", r"\1 --precision fp32 --runtime ort", "one row of nine"),
)
# Lines that take minutes even then, and why.
LONG = (
    (r"--(stress|self-test|taps|ablate)\b", "exports copies of the checkpoint"),
    (r"ldlm verify .*int8", "int8 has the slowest reference"),
    (r"ldlm bench", "a process for every peer"),
    (r"examples/grammar/checkpoint", "exports another model"),
    (r"artifacts/(small|grammar|experiment)", "exports another precision, and uses it"),
)
# Lines whose gates fail, as the page says.
FAILING = ("--precision fp16-without-rms_norm",)
# Lines that need an NVIDIA GPU, and what they say where there is none.
ON_GPU = (
    (r"--runtime rtx\b", "cuda|driver|GPU"),
    (r"--(runtime|target) trt\b", "tensorrt is not usable here|cuda|driver|GPU"),
)


def replaced(line: str, table: tuple[tuple[str, str, str], ...]) -> str:
    for pattern, replacement, _ in table:
        line = re.sub(pattern, replacement, line)
    return line


def is_long(line: str) -> bool:
    return any(re.search(pattern, line) for pattern, _ in LONG)


# The block that runs a line; another one that repeats the line only parses it.
RUN_BY = {line: block for block in reversed(blocks("bash")) for line in block.lines()}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a reader; the working directory."""
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def furnish(here: Path, int8_artifacts: Path, small_checkpoint: Path) -> Callable[[str], None]:
    """Puts there what the commands of a text assume to be there."""

    def put(text: str) -> None:
        for name in set(re.findall(r"checkpoints/(base|mine|small)", text)):
            shutil.copytree(small_checkpoint, here / "checkpoints" / name)
        for name in set(re.findall(r"artifacts/(base|mine)", text)):
            shutil.copytree(int8_artifacts, here / "artifacts" / name)
        shutil.copy2(small_checkpoint / WEIGHTS, here / "theirs.safetensors")
        shutil.copy2(small_checkpoint / "tokenizer.json", here / "tokenizer.json")
        (here / "map.toml").write_text(
            'preset = "small"\n[[tensor]]\ntheirs = "{name*}"\nours = "{name*}"\n'
        )
        (here / "judge.py").write_text(
            "def accepts(text):\n    return len(text) > 20\ndef seen():\n    return []\n"
        )
        shutil.copytree(ROOT / "examples", here / "examples")

    return put


def ldlm(line: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the command in this process; its exit status."""
    monkeypatch.setattr(sys, "argv", shlex.split(line))
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


def run_ldlm(line: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Run a line; it works, or says why not: it needs a GPU, or shows a gate that fails."""
    words = [said for pattern, said in ON_GPU if re.search(pattern, line)]
    if words and GPU:
        return  # tests/gpu measures there what these lines do
    words += ["measurements fail" for part in FAILING if part in line]
    _, name, *arguments = shlex.split(line)
    if name in ("init", "convert"):  # a reader has no such checkpoint yet
        (target,) = [word for word in arguments if word.startswith("checkpoints/")]
        shutil.rmtree(target, ignore_errors=True)
    capfd.readouterr()
    status = ldlm(line, monkeypatch)
    out, err = capfd.readouterr()
    assert status == (1 if words else 0), f"{line}: {status}\n{out}\n{err}"
    assert not words or re.search(words[0], err), f"{line}: {err}"
    assert out or words, f"{line} prints nothing"


def run_make(line: str) -> None:
    """`make -n`: the targets exist, and every `ldlm` that they call parses."""
    require_targets(line)
    shown = subprocess.run(
        ["make", "-n", *shlex.split(line)[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, f"{line}: {shown.stderr}"
    for called in re.findall(r"\.venv/bin/(ldlm .*)", shown.stdout.replace("\\\n", " ")):
        parse(called)


def run_shell(line: str) -> None:
    """A line for the shell, with this environment's commands first."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        ["bash", "-c", line],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


def run_block(block: Block, monkeypatch: Any, capfd: Any, *, fast: bool) -> None:
    for written in block.lines():
        line = replaced(written, SMALL)
        kind = line.split()[0]
        if kind == "ldlm" and fast and (is_long(line) or RUN_BY[written] != block):
            parse(line)
        elif kind == "ldlm":
            run_ldlm(replaced(line, FAST) if fast else line, monkeypatch, capfd)
        elif kind == "make":
            run_make(line)
        elif kind == "pip":
            require_extras(line)
        elif kind == "polygraphy":
            run_shell(line)
        else:  # training takes half an hour: its program is there, and its tests are its own
            assert kind == "python", line
            assert (ROOT / line.split()[1]).is_file(), line


@pytest.mark.parametrize("block", blocks("bash"), ids=str)
def test_shell_block(
    block: Block,
    furnish: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    furnish(block.text)
    run_block(block, monkeypatch, capfd, fast=True)


@pytest.mark.long
@pytest.mark.parametrize(
    "block", [b for b in blocks("bash") if any(map(is_long, b.lines()))], ids=str
)
def test_shell_block_as_it_is_written(
    block: Block,
    furnish: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    furnish(block.text)
    run_block(block, monkeypatch, capfd, fast=False)


SERVICE = "serve_forever"


@pytest.mark.parametrize("block", [b for b in blocks("python") if SERVICE not in b.text], ids=str)
def test_python_block(block: Block, furnish: Callable[[str], None]) -> None:
    furnish(block.text)
    if "TrtRuntime" in block.text:
        if GPU:
            pytest.skip("tests/gpu runs engines there")
        with pytest.raises(LDLMError, match=ON_GPU[0][1]):
            execute(block.text)
    else:
        execute(block.text)


def execute(text: str, names: dict[str, Any] | None = None) -> None:
    names = {"__name__": "__main__"} if names is None else names
    exec(compile(text, "a page", "exec"), names)


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_mapping_file(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "map.toml"
    path.write_text(block.text)
    assert read_map(path).config == PRESETS["base"]


def test_every_block_is_run() -> None:
    """No block is in another language, which these tests would pass over."""
    run = sum(len(blocks(language)) for language in ("bash", "python", "toml"))
    fences = sum(len(re.findall(r"^```", page.read_text("utf-8"), re.MULTILINE)) for page in PAGES)
    assert run > 30
    assert 2 * run == fences


@pytest.fixture
def service(furnish: Callable[[str], None]) -> Iterator[int]:
    """The web service of docs/python.md, as it is written there but for its port; its port."""
    (block,) = [block for block in blocks("python") if SERVICE in block.text]
    furnish(block.text)
    assert block.text.count("8000") == 1
    names: dict[str, Any] = {"__name__": "__main__"}
    text = block.text.replace("8000", "0")
    thread = threading.Thread(target=execute, args=(text, names), daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while "server" not in names and time.monotonic() < deadline and thread.is_alive():
        time.sleep(0.01)
    yield names["server"].server_port
    names["server"].shutdown()
    names["server"].server_close()
    thread.join()


def post(port: int, body: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", "/", body)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_the_web_service_gives_every_client_the_text_that_it_gets_alone(service: int) -> None:
    asked = [
        {"samples": 1 + number % 2, "steps": 20 + 2 * number, "seed": number} for number in range(6)
    ]
    with ThreadPoolExecutor(4) as clients:
        found = list(clients.map(lambda body: post(service, json.dumps(body)), asked))
    assert [status for status, _ in found] == [200] * len(asked)
    artifacts = Artifacts("artifacts/base")
    alone = [artifacts.sample(**body).texts for body in asked]
    assert [answer["texts"] for _, answer in found] == alone
    assert len({text for texts in alone for text in texts}) == sum(
        body["samples"] for body in asked
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"samples": 0, "steps": 20, "seed": 0}', "samples is not usable"),
        ('{"samples": 1, "steps": 4, "seed": 0}', "euler"),
        ('{"samples": 1, "steps": 20}', "seed"),
        ("no JSON", "Expecting value"),
    ],
)
def test_the_web_service_says_what_is_wrong(service: int, body: str, message: str) -> None:
    status, answer = post(service, body)
    assert status == 400
    assert message in answer["error"]
