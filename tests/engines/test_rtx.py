"""TensorRT-RTX engines, really built, without a GPU."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import tensorrt_rtx as trt
from fake_tensorrt import FakeDevice
from files_of import graph_path as graph

from engines import build_engine
from engines.artifacts import folder as folders
from engines.compile.network import BuiltEngine
from engines.compile.target import Target
from engines.tensorrt.profiles import fitting, profiles
from engines.tensorrt.targets import RTX_SMS, parse_sms
from export.stages import AxisRange, compiled, stage
from ldlm import PRESETS
from ldlm.errors import ConfigError, EngineBuildError

CONFIG = PRESETS["small"]
AMPERE_ON = ("sm80", "sm86", "sm89", "sm120")


def test_targets_are_those_of_the_installed_builder() -> None:
    found = {name.lower() for name in dir(trt.ComputeCapability) if name.startswith("SM")}
    assert found == set(RTX_SMS)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", compiled())
def test_artifacts_hold_engines_for_every_target(
    small_artifacts: Path, precision: str, name: str
) -> None:
    manifest = folders.load(small_artifacts)
    (entry,) = [e for e in manifest.engines if (e.precision, e.stage) == (precision, name)]
    entry.engine.verified(small_artifacts)
    assert set(AMPERE_ON) <= set(entry.sms)
    on_turing = precision == "fp16" and name != "conditioning"  # Turing has no bf16
    assert ("sm75" in entry.sms) == on_turing
    assert ("sm75" in entry.refused) == (not on_turing)
    source = manifest.graph(precision, name)
    assert entry.is_of(source)
    if name == "conditioning":
        assert entry.profiles == {}
        return
    assert entry.profiles["latency"]["batch"] == AxisRange(1, 1, 1)
    assert entry.profiles["throughput"]["batch"] == AxisRange(1, 8, 8)
    assert entry.profiles["latency"]["length"].max == CONFIG.n_positions


def test_turing_is_refused_with_the_layer_that_stops_it(small_artifacts: Path) -> None:
    """Fact: FP32 GEMM is not supported there, and the time embedding is float32."""
    with pytest.raises(EngineBuildError, match="sm75: no float32 matrix product") as caught:
        build_engine(
            graph(small_artifacts, "fp16", "denoiser"),
            stage("denoiser"),
            CONFIG,
            sms=["sm75", "sm89"],
            profiles=profiles(CONFIG),
        )
    assert "the graph has 2" in str(caught.value)  # the two of the time embedding


def test_tensorrt_agrees_that_turing_has_no_float32_product(
    small_artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our own refusal is not stricter than the builder's."""
    monkeypatch.setattr("engines.compile.rtx.NO_FLOAT32_MATMUL", ())
    with pytest.raises(EngineBuildError, match="FP32 GEMM is not supported"):
        build_engine(
            graph(small_artifacts, "fp16", "denoiser"),
            stage("denoiser"),
            CONFIG,
            sms=["sm75"],
            profiles=profiles(CONFIG),
        )


def test_a_failed_build_leaves_no_trace_in_the_next(
    small_artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT-RTX 1.7.1 gives another engine right after a build that failed for SM75."""

    def build() -> bytes:
        return build_engine(
            graph(small_artifacts, "fp16", "token_decoder"),
            stage("token_decoder"),
            CONFIG,
            sms=["sm89"],
            profiles=profiles(CONFIG),
        ).plan

    before = build()
    monkeypatch.setattr("engines.compile.rtx.NO_FLOAT32_MATMUL", ())
    with pytest.raises(EngineBuildError):
        build_engine(
            graph(small_artifacts, "fp16", "denoiser"),
            stage("denoiser"),
            CONFIG,
            sms=["sm75"],
            profiles=profiles(CONFIG),
        )
    assert build() == before


@pytest.mark.fault(17)
def test_builds_are_repeatable_and_report_progress(small_artifacts: Path) -> None:
    """Case 17: the same inputs give the same bytes."""
    seen: list[tuple[str, int, int]] = []
    plans = [
        build_engine(
            graph(small_artifacts, "fp16", "token_decoder"), stage("token_decoder"), CONFIG,
            sms=["sm89"], profiles=profiles(CONFIG), progress=lambda *step: seen.append(step),
        ).plan
        for _ in range(2)
    ]  # fmt: skip # rows, as a table
    assert hashlib.sha256(plans[0]).digest() == hashlib.sha256(plans[1]).digest()
    assert seen
    assert all(1 <= step <= steps for _, step, steps in seen)


@pytest.mark.parametrize("after", [0.05, 0.2, 0.35, 0.5, 0.65])
def test_ctrl_c_stops_a_build(small_artifacts: Path, after: float) -> None:
    """Whatever TensorRT is doing then: it discards exceptions raised inside its callbacks."""
    old = signal.getsignal(signal.SIGINT)
    timer = threading.Timer(after, lambda: os.kill(os.getpid(), signal.SIGINT))

    def build_for_long() -> None:
        for _ in range(20):
            build_engine(
                graph(small_artifacts, "fp16", "denoiser"),
                stage("denoiser"),
                CONFIG,
                sms=["sm89"],
                profiles=profiles(CONFIG),
            )

    timer.start()
    with pytest.raises(KeyboardInterrupt):
        build_for_long()
    timer.join()
    assert signal.getsignal(signal.SIGINT) is old


def test_ctrl_c_while_tensorrt_tells_something_is_not_lost(
    small_artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first message, which comes before the build: there, too, an exception is discarded."""
    from engines.compile import network

    told: list[str] = []
    made = network.make_logger

    def make_logger(trt: Any) -> Any:
        class Interrupted(type(made(trt))):  # type: ignore[misc]
            def log(self, severity: Any, message: str) -> None:
                told.append(message)
                if len(told) == 1:
                    os.kill(os.getpid(), signal.SIGINT)
                super().log(severity, message)

        return Interrupted()

    monkeypatch.setattr(network, "make_logger", make_logger)
    old = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        build_engine(
            graph(small_artifacts, "fp16", "token_decoder"),
            stage("token_decoder"),
            CONFIG,
            sms=["sm89"],
            profiles=profiles(CONFIG),
        )
    assert told
    assert signal.getsignal(signal.SIGINT) is old


def test_stopping_a_build_stops_it(small_artifacts: Path) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_engine(
            graph(small_artifacts, "fp16", "token_decoder"),
            stage("token_decoder"),
            CONFIG,
            sms=["sm89"],
            profiles=profiles(CONFIG),
            progress=stop,
        )


@pytest.mark.fault(7)
def test_attention_that_parses_and_does_not_build_in_float32(
    small_artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 7: the Attention op parses and then fails to build in float32 as it stands."""
    monkeypatch.setattr("engines.compile.network._allow_float32_attention", lambda *_: None)
    with pytest.raises(EngineBuildError, match="could not build"):
        build_engine(
            graph(small_artifacts, "fp32", "token_decoder"),
            stage("token_decoder"),
            CONFIG,
            sms=["sm89"],
            profiles=profiles(CONFIG),
        )


def test_a_file_that_is_no_graph(tmp_path: Path) -> None:
    (tmp_path / "x.onnx").write_bytes(b"\x00nothing")
    with pytest.raises(EngineBuildError, match="cannot read the graph"):
        build_engine(
            tmp_path / "x.onnx", stage("denoiser"), CONFIG, sms=["sm89"], profiles=profiles(CONFIG)
        )


def test_sm_lists() -> None:
    assert parse_sms("89, 8.0 sm120") == ("sm80", "sm89", "sm120")
    assert parse_sms("all") == tuple(RTX_SMS)
    for text, words in (("90", "Hopper"), ("42", "no such"), ("", "no target"), ("x", "no such")):
        with pytest.raises(ConfigError, match=words):
            parse_sms(text)


def test_profiles() -> None:
    """Case 18: out of order, or larger than the graph: refused before TensorRT is asked."""
    (name,), (ranges,) = zip(*profiles(CONFIG, None, (1, 2, 4), (1, 16, 64)).items(), strict=True)
    assert name == "custom"
    assert ranges["batch"] == AxisRange(1, 2, 4)
    assert ranges["length"] == AxisRange(1, 16, 64)
    assert list(profiles(CONFIG, ["latency"])) == ["latency"]
    for batch, length in (((1, 4, 2), None), ((1, 1, 65), None), (None, (1, 64, 129))):
        with pytest.raises(ConfigError):
            profiles(CONFIG, None, batch, length)
    with pytest.raises(ConfigError, match="no such profile"):
        profiles(CONFIG, ["fast"])
    with pytest.raises(ConfigError, match="a profile of its own"):
        profiles(CONFIG, ["latency"], (1, 2, 4))


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ({"batch": 1, "length": 5}, (0, "latency")),
        ({"batch": 2, "length": 128}, (1, "throughput")),
        ({"batch": 9, "length": 5}, None),
        ({"batch": 1, "length": 129}, None),
    ],
)
def test_a_shape_chooses_its_profile(sizes: dict[str, int], name: tuple[int, str] | None) -> None:
    assert fitting(profiles(CONFIG), sizes) == name


class OnThisGpu:
    """TensorRT-RTX in place of plain TensorRT on an sm89: the one difference is set here."""

    class Builder(trt.Builder):  # type: ignore[misc]
        def create_builder_config(self) -> Any:
            settings = super().create_builder_config()
            settings.num_compute_capabilities = 1
            settings.set_compute_capability(trt.ComputeCapability.SM89, 0)
            return settings

    def __getattr__(self, name: str) -> Any:
        return getattr(trt, name)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TensorRT-RTX has no timing cache
def test_plain_tensorrt_builds_the_same_way(
    small_artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a timing cache, and one that cannot be used."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("engines.compile.target.load_library", lambda _: OnThisGpu())
    path, spec = graph(small_artifacts, "fp16", "token_decoder"), stage("token_decoder")

    def build() -> BuiltEngine:
        target = Target(("sm89",), device=FakeDevice("sm89"))
        return target.build(path, spec, CONFIG, profiles(CONFIG), lambda *_: None)

    built = [build()]
    (cache,) = (tmp_path / "ldlm-engines").iterdir()
    for content in (cache.read_bytes(), b"torn"):
        cache.write_bytes(content)
        built.append(build())
        assert cache.read_bytes() != b"torn"
    assert {engine.sms for engine in built} == {("sm89",)}
    assert len({engine.plan for engine in built}) == 1


def test_sizes_that_tensorrt_refuses(small_artifacts: Path) -> None:
    """It takes sizes out of order without a word, and gives the profile no index."""
    ranges = {"batch": AxisRange(1, 1, 1), "length": AxisRange(1, 2, 3)}
    object.__setattr__(ranges["length"], "min", 9)
    with pytest.raises(EngineBuildError, match="refuses profile 'custom'"):
        build_engine(
            graph(small_artifacts, "fp16", "token_decoder"),
            stage("token_decoder"),
            CONFIG,
            sms=["sm89"],
            profiles={"custom": ranges},
        )
