"""Files that users write: limits on size, depth and numbers, and one kind of error."""

import json
import os
from pathlib import Path

import pytest
from raised import raises_code

from onerank.annotate.cost import load_prices
from onerank.annotate.gpus.registry import load_gpu
from onerank.ir import input_files
from onerank.ir.chakra.third_party_traces import read_groups
from onerank.ir.errors import CaptureError, FormatError, TargetError
from onerank.ir.input_files import load_csv, load_json, load_toml

TOML = {
    "nested arrays": (b"a = " + b"[" * 5_000 + b"]" * 5_000, "file-nested-too-deep"),
    "nested inline tables": (b"a = " + b"{a = " * 200 + b"1" + b"}" * 200, "file-nested-too-deep"),
    "arrays within Python's recursion limit": (
        b"a = " + b"[" * 40 + b"]" * 40,
        "file-nested-too-deep",
    ),
    "a dotted key": (b".".join([b"a"] * 200_000) + b" = 1", "file-nested-too-deep"),
    "a dotted key of quoted parts": (b" . ".join([b'"a b"'] * 90_000) + b" = 1",
                                     "file-nested-too-deep"),
    "a header of many parts": (b"[" + b".".join([b"a"] * 90_000) + b"]", "file-nested-too-deep"),
    "5,000 digits": (b"a = " + b"1" * 5_000, "file-number-too-large"),
    "400 digits": (b"a = " + b"1" * 400, "file-number-too-large"),
    "-400 digits in a table": (b"[a.b]\nc = [1, -" + b"1" * 400 + b"]", "file-number-too-large"),
    "not UTF-8": (b'a = "\xff"', "file-not-utf8"),
    "UTF-16": ('a = "b"'.encode("utf-16"), "file-not-utf8"),
    "no TOML": (b"a = = 1", "toml-malformed"),
    "NUL": (b"a = 1\0", "toml-malformed"),
}  # fmt: skip


@pytest.mark.parametrize("case", TOML)
def test_toml_beyond_the_limits(case, tmp_path):
    octets, code = TOML[case]
    path = tmp_path / "f.toml"
    path.write_bytes(octets)
    with raises_code(code, FormatError):
        load_toml(path)
    with raises_code(code, TargetError):
        load_gpu(path)
    with raises_code(code, FormatError):
        load_prices(path)


def test_toml_within_the_limits(tmp_path):
    path = tmp_path / "f.toml"
    path.write_bytes(
        b"\xef\xbb\xbf"
        + f"a = {2**63 - 1}\nb = {-(2**63)}\n"
        f"c = {'[' * 30}{']' * 30}\nd.e.f = 'x.{'y.' * 500}'\n".encode()
    )
    content = load_toml(path)
    assert (content["a"], content["b"]) == (2**63 - 1, -(2**63))
    assert content["d"]["e"]["f"].count("y") == 500


JSON = {
    "nested lists": (b"[" * 100_000, "file-nested-too-deep"),
    "another type": (b'{"0": "a"}', "json-malformed"),
    "5,000 digits": (b'{"0": [' + b"1" * 5_000 + b"]}", "json-malformed"),
    "not UTF-8": (b'{"\xff": [0]}', "file-not-utf8"),
    "cut": (b'{"0": [0', "json-malformed"),
}


@pytest.mark.parametrize("case", JSON)
def test_json_beyond_the_limits(case, tmp_path):
    octets, code = JSON[case]
    path = tmp_path / "f.json"
    path.write_bytes(octets)
    with raises_code(code, FormatError):
        load_json(path, list if "lists" in case else dict[str, list[int]], "lists")
    if "lists" not in case:
        with raises_code(code, FormatError):
            read_groups(path)


CSV = {
    "a field over csv's limit": "1" * 131_073,
    "text": "1,2\n3,b",
    "an open quote": '"1,2\n' + "1\n" * 70_000,
}


@pytest.mark.parametrize("case", CSV)
def test_csv_beyond_the_limits(case, tmp_path):
    path = tmp_path / "f.csv"
    path.write_text(CSV[case])
    with raises_code("csv-malformed", FormatError):
        load_csv(path)


def test_csv_of_numbers(tmp_path):
    path = tmp_path / "f.csv"
    path.write_bytes(b"\xef\xbb\xbf1,2.5\r\n\r\n3,4e2\r\n")
    assert load_csv(path) == [(1.0, 2.5), (3.0, 400.0)]


def test_a_file_over_the_limit_is_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(input_files, "MOST_BYTES", 1000)
    path = tmp_path / "f.json"
    for extra, refused in ((0, False), (1, True)):
        path.write_text(json.dumps("a" * (998 + extra)))
        if refused:
            with raises_code("file-too-large", FormatError):
                load_json(path, str, "text")
        else:
            assert len(load_json(path, str, "text")) == 998


def test_what_is_no_file_is_refused_without_opening_it(tmp_path):
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)  # opening it for reading would wait for a writer
    with raises_code("file-not-regular", CaptureError):
        load_toml(pipe, error=CaptureError)
    with raises_code("file-not-regular"):
        load_toml(tmp_path)
    with raises_code("file-unreadable"):
        load_toml(tmp_path / "absent.toml")
    with raises_code("file-unreadable"):
        load_toml(Path("a" * 300))
