"""Files that are not Chakra's messages as JSON: the error names the file and the place."""

from pathlib import Path

import pytest
from raised import raises_code

from onerank.ir import chakra


@pytest.mark.parametrize(
    ("content", "code", "name"),
    [
        (b"", "chakra-json-empty", "t.json"),
        (b"[1]", "chakra-json-malformed", "line 1"),
        (b'{\n"version": ', "chakra-json-malformed", "line "),
        (b'{"version": "\xff"}', "chakra-json-not-utf8", "byte 13"),
        (b'{"version": "0.0.4"}\n{"id": "one"}', "chakra-json-schema", "line 2"),
    ],
)
def test_what_is_not_json_of_chakra_is_refused(
    content: bytes, code: str, name: str, tmp_path: Path
):
    source = tmp_path / "t.json"
    source.write_bytes(content)
    with raises_code(code, naming=(str(source), name)):
        chakra.from_json(source, tmp_path / "t.et")
    assert not (tmp_path / "t.et").exists()
