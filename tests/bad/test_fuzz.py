"""Readers of damaged files: whatever the bytes, only errors of onerank's own come out."""

import contextlib
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pair import pair
from seeds import chakra, model

import onerank
from onerank.converters.sources.kineto import Sources, convert
from onerank.ir.chakra import from_json, to_json
from onerank.ir.errors import OneRankError

FUZZ = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
Draw = Any
NUMBERS = [0, -1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 0.5, -0.5, 1e18, 1e300]
ODD = [*NUMBERS, None, True, "", "\u0000", "é", "9" * 40, [], {}, [[]], [{}], {"a": 1}, [1, "a"]]


@st.composite
def damaged(draw: Draw, whole: bytes) -> bytes:
    """Return bytes with some cut out, put in, doubled or changed."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        to = min(len(data), at + draw(st.integers(0, 40)))
        kind = draw(st.sampled_from(["cut", "insert", "double", "flip", "truncate"]))
        if kind == "cut":
            del data[at:to]
        elif kind == "insert":
            data[at:at] = draw(st.binary(max_size=12))
        elif kind == "double":
            data[at:at] = data[at:to]
        elif kind == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "truncate":
            del data[at:]
    return bytes(data)


@st.composite
def odd(draw: Draw, whole: Any) -> Any:
    """Return a JSON value with some of its parts replaced, left out or doubled."""
    made = copy.deepcopy(whole)
    for _ in range(draw(st.integers(1, 4))):
        places = [*_places(made)]
        if not places:
            break
        parent, key = draw(st.sampled_from(places))
        kind = draw(st.sampled_from(["replace", "replace", "drop", "double", "swap"]))
        if kind == "replace":
            parent[key] = copy.deepcopy(draw(st.sampled_from(ODD)))
        elif kind == "drop":
            del parent[key]
        elif kind == "double" and isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
        else:
            other, there = draw(st.sampled_from(places))
            with contextlib.suppress(KeyError, IndexError):
                parent[key] = copy.deepcopy(other[there])
    return made


def _places(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        keys: list[Any] = [*value]
    elif isinstance(value, list):
        keys = [*range(len(value))]
    else:
        return []
    return [(value, key) for key in keys] + [one for key in keys for one in _places(value[key])]


def only_own_errors(read: Callable[[], object]) -> None:
    with contextlib.suppress(OneRankError):
        read()


def convert_pair(directory: Path, kineto: bytes, et: bytes) -> None:
    for name, content in (("k.json", kineto), ("et.json", et)):
        (directory / name).write_bytes(content)
    sources = Sources(directory / "k.json", directory / "et.json")

    def read() -> None:
        graph, _ = convert(sources)
        graph.write(directory / "out.et")
        onerank.read(directory / "out.et")

    only_own_errors(read)


KINETO, ET = (json.dumps(one).encode() for one in pair())


@FUZZ
@given(damaged(KINETO))
def test_damaged_kineto(tmp_path: Path, kineto: bytes) -> None:
    convert_pair(tmp_path, kineto, ET)


@FUZZ
@given(damaged(ET))
def test_damaged_execution_trace(tmp_path: Path, et: bytes) -> None:
    convert_pair(tmp_path, KINETO, et)


@FUZZ
@given(odd(pair()[0]))
def test_odd_kineto(tmp_path: Path, kineto: Any) -> None:
    convert_pair(tmp_path, json.dumps(kineto).encode(), ET)


@FUZZ
@given(odd(pair()[1]))
def test_odd_execution_trace(tmp_path: Path, et: Any) -> None:
    convert_pair(tmp_path, KINETO, json.dumps(et).encode())


@pytest.fixture(scope="module")
def small() -> bytes:
    return chakra()


@FUZZ
@given(st.data())
def test_damaged_chakra(tmp_path: Path, small: bytes, data: st.DataObject) -> None:
    path = tmp_path / "x.et"
    path.write_bytes(data.draw(damaged(small)))

    def read() -> None:
        graph = onerank.read(path)
        graph.nodes_frame()
        graph.write(tmp_path / "again.et")

    only_own_errors(read)
    only_own_errors(lambda: to_json(path))


@FUZZ
@given(st.data())
def test_damaged_chakra_json(tmp_path: Path, small: bytes, data: st.DataObject) -> None:
    (tmp_path / "small.et").write_bytes(small)
    text = to_json(tmp_path / "small.et").encode()
    (tmp_path / "x.json").write_bytes(data.draw(damaged(text)))
    only_own_errors(lambda: from_json(tmp_path / "x.json", tmp_path / "out.et"))


@pytest.fixture(scope="module")
def onnx_model() -> bytes:
    pytest.importorskip("onnx")
    return model()


@FUZZ
@given(st.data())
def test_damaged_onnx(tmp_path: Path, onnx_model: bytes, data: st.DataObject) -> None:
    from onerank.converters.sources.onnx import convert_onnx

    path = tmp_path / "x.onnx"
    path.write_bytes(data.draw(damaged(onnx_model)))
    only_own_errors(lambda: convert_onnx(path, sizes={}, batch=2, seq=None, train=True))
