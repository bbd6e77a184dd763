"""The configuration: bounds on every field, in Python and in files, and no tracebacks."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import msgspec.inspect as kinds
import pytest
from msgspec.structs import asdict, replace

from ldlm import PRESETS, LDLMConfig
from ldlm.config import preset
from ldlm.errors import ConfigError
from ldlm.model import skeleton

BASE, SMALL = PRESETS["base"], PRESETS["small"]
KINDS = {
    field.name: kinds.type_info(field.type)  # type: ignore[arg-type]
    for field in msgspec.structs.fields(LDLMConfig)
}
# Not a size of a tensor: a checkpoint's shapes say nothing of it.
NO_SIZE = {"sampler_steps"}


def plain(kind: kinds.Type) -> kinds.Type:
    """Without its "or null"."""
    if isinstance(kind, kinds.UnionType):
        (kind,) = (one for one in kind.types if not isinstance(one, kinds.NoneType))
    return kind


def limits(kind: Any) -> tuple[float | None, float | None]:
    """The lowest and the highest bound of a number, exclusive or not."""
    return (
        kind.ge if kind.ge is not None else kind.gt,
        kind.le if kind.le is not None else kind.lt,
    )


def outside(kind: Any) -> Iterator[object]:
    """Values just beyond what a field takes, and values of other types."""
    if isinstance(kind, kinds.IntType | kinds.FloatType):
        low, high = limits(kind)
        step = 1 if isinstance(kind, kinds.IntType) else 1e-13
        if low is not None:
            yield from (low if kind.gt is not None else low - step, 0, -1)
        if high is not None:
            above = high + 1 if step == 1 else high * 1.001
            yield from (high if kind.lt is not None else above, 10**400)
        yield from (float("nan"), float("inf"), -float("inf"), True, "1")
    if isinstance(kind, kinds.IntType):
        yield 2.0
    if isinstance(kind, kinds.StrType):
        yield from ("", "x" * ((kind.max_length or 0) + 1), 7, ["x"])
    if isinstance(kind, kinds.VarTupleType):
        yield from (["x"] * ((kind.max_length or 0) + 1), "x", 5, [5], [["x"]])
        yield from ([item] for item in outside(kind.item_type))
    if isinstance(kind, kinds.BoolType):
        yield from (0, 1, "false", "no")
    yield from ([[]], {"a": 1})


CASES = [(name, value) for name, kind in KINDS.items() for value in outside(plain(kind))]


@pytest.mark.parametrize("name", KINDS)
def test_every_field_is_bounded(name: str) -> None:
    """A field that is added without bounds fails here."""
    kind: Any = plain(KINDS[name])
    if isinstance(kind, kinds.IntType | kinds.FloatType):
        assert None not in limits(kind)
    elif isinstance(kind, kinds.VarTupleType):
        assert kind.max_length is not None
        kind = kind.item_type
    if isinstance(kind, kinds.StrType):
        assert kind.min_length
        assert kind.max_length is not None


@pytest.mark.parametrize(("name", "value"), CASES, ids=lambda v: str(v)[:20])
def test_what_a_field_does_not_take(name: str, value: object) -> None:
    """The same values are refused in Python, by replace and in a file, with the field's range."""

    def refused(message: str) -> bool:
        kind: Any = plain(KINDS[name])
        numbers = limits(kind) if isinstance(kind, kinds.IntType | kinds.FloatType) else ()
        words = [f"the configuration's {name} is not usable", "expected:", "got:"]
        return all(word in message for word in (*words, *map(str, numbers)))

    with pytest.raises(ConfigError) as caught:
        LDLMConfig(**{name: value})  # type: ignore[arg-type]
    assert refused(str(caught.value))
    with pytest.raises(ConfigError) as caught:
        replace(SMALL, **{name: value})
    assert refused(str(caught.value))
    if value != value or value in (float("inf"), -float("inf")):  # no JSON
        return
    with pytest.raises(ConfigError) as caught:
        LDLMConfig.from_json(json.dumps({name: value}), source="/their/config.json")
    assert refused(str(caught.value))
    assert str(caught.value).startswith("/their/config.json")


@pytest.mark.parametrize("name", [n for n, k in KINDS.items() if hasattr(plain(k), "ge")])
def test_the_bounds_themselves_are_taken(name: str) -> None:
    kind: Any = plain(KINDS[name])
    for value in (kind.ge, kind.le):
        if value is not None:
            heads = {} if name == "n_heads" else {"n_heads": 1}
            width = {"d_model": 2 * value} if name == "n_heads" else {}
            config = LDLMConfig(**{name: value, **heads, **width})
            assert LDLMConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize("change", [{"n_heads": 5}, {"d_model": 100}, {"n_heads": 256}])
def test_heads_divide_the_width(change: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="heads of an even size"):
        LDLMConfig(**{**asdict(BASE), **change})
    with pytest.raises(ConfigError, match="heads of an even size"):
        replace(BASE, **change)
    with pytest.raises(ConfigError, match=r"map\.toml: d_model does not split"):
        LDLMConfig.from_dict(change, source="map.toml")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        "null",
        '"base"',
        '{"softcap": NaN}',
        '{"softcap": 1e999}',
        '{"softcap": ' + "9" * 400 + "}",
        '{"d_model": ' + "9" * 400 + "}",
        '{"d_model": -' + "9" * 5000 + "}",
        '{"softcap": ' + "9" * 5000 + "}",
        '{"softcap": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"softcap": ' + "[" * 500 + "]" * 500 + "}",
        '{"x": ' * 100_000,
        "[" * 100_000,
        '{"end_of_text": "\\ud800"}',
        '{"end_of_text": "\ud800"}',
        '{"softcup": 50.0}',
        '{"softcap": 50.0} {}',
        '\ufeff{"softcap": 50.0}',
    ],
    ids=lambda text: ascii(text[:24]),
)
def test_bad_files_are_named(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LDLMConfig.from_json(text, source="/their/config.json")
    assert str(caught.value).startswith("/their/config.json")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("digits", [400, 5000])
def test_a_number_of_many_digits_is_a_fault_of_its_field(digits: int) -> None:
    with pytest.raises(ConfigError, match="d_model is not usable") as caught:
        LDLMConfig.from_json('{"d_model": ' + "9" * digits + "}")
    assert "<= 65536" in str(caught.value)
    assert "999..." in str(caught.value)
    for value in (10**digits, [10**digits]):
        with pytest.raises(ConfigError, match="d_model is not usable"):
            LDLMConfig(d_model=value)  # type: ignore[arg-type]


def test_an_unknown_field_is_not_passed_over() -> None:
    with pytest.raises(ConfigError, match="softcup"):
        LDLMConfig.from_dict({**asdict(SMALL), "softcup": 50.0})
    with pytest.raises(msgspec.ValidationError, match="softcup"):
        msgspec.convert({"softcup": 50.0}, LDLMConfig)


@pytest.mark.parametrize("name", KINDS)
def test_every_field_has_a_default(name: str) -> None:
    fields = asdict(BASE)
    del fields[name]
    assert LDLMConfig.from_dict(fields) == LDLMConfig.from_json(json.dumps(fields)) == BASE


@pytest.mark.parametrize("name", [n for n, k in KINDS.items() if isinstance(k, kinds.IntType)])
def test_every_size_shows_in_a_shape(name: str) -> None:
    """So a size that a file leaves out is not taken for another one: the weights would not fit."""
    other = replace(SMALL, **{name: 2 * getattr(SMALL, name)})
    assert (skeleton(other).shapes() == skeleton(SMALL).shapes()) == (name in NO_SIZE)


def test_equal_configs_have_one_text() -> None:
    as_written = LDLMConfig.from_json('{"softcap": 50, "added_tokens": ["<|pad|>", "<|mask|>"]}')
    in_python = LDLMConfig(softcap=50, added_tokens=["<|pad|>", "<|mask|>"])  # type: ignore[arg-type]
    assert as_written == in_python == BASE
    assert as_written.to_json() == in_python.to_json() == BASE.to_json()
    assert hash(as_written) == hash(in_python) == hash(BASE)


def test_the_text_is_as_it_was() -> None:
    """Keys of artifacts hash it: order, indentation and the form of numbers."""
    text = PRESETS["small"].to_json()
    assert text.startswith('{\n  "d_model": 128,\n  "n_heads": 2,\n')
    assert '"norm_eps": 1e-05,\n  "time_max_period": 10.0,\n' in text
    assert text.endswith('"added_tokens": [\n    "<|pad|>",\n    "<|mask|>"\n  ]\n}\n')
    assert list(json.loads(text)) == list(KINDS)


def test_a_config_is_a_value() -> None:
    with pytest.raises(AttributeError):
        SMALL.d_model = 64  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(SMALL)) == copy.deepcopy(SMALL) == SMALL


def test_presets_by_name() -> None:
    assert preset("base") is BASE
    with pytest.raises(ConfigError, match="no such preset"):
        preset("large")


def test_the_module_is_light() -> None:
    code = (
        "import sys, ldlm.config;"
        "print({'torch', 'onnx', 'numpy', 'safetensors'} & set(sys.modules) or 'light')"
    )
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert got.stdout.strip() == "light"


def test_a_denoiser_call_needs_six_vectors_per_block_and_two_at_the_end() -> None:
    assert [PRESETS[name].modulation_rows for name in ("base", "small")] == [74, 14]
