"""Fuzz a reader with coverage, by hand; needs atheris.

    python tests/bad/fuzz.py kineto|et|chakra|json|onnx -max_total_time=600

Inputs are changed from the small files of the tests; an error that is not onerank's own stops the
run, and libFuzzer leaves the input beside.
"""

import contextlib
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["onerank"]):
    import onerank
    from onerank.converters.sources.kineto import Sources, convert
    from onerank.converters.sources.onnx import convert_onnx
    from onerank.ir.chakra import from_json, to_json
    from onerank.ir.errors import OneRankError

from pair import pair
from seeds import chakra, model

DIRECTORY = Path(tempfile.mkdtemp())
KINETO, ET = (json.dumps(one).encode() for one in pair())


def traces(kineto: bytes, et: bytes) -> None:
    for name, content in (("k.json", kineto), ("et.json", et)):
        (DIRECTORY / name).write_bytes(content)
    convert(Sources(DIRECTORY / "k.json", DIRECTORY / "et.json"))


def read_chakra(data: bytes) -> None:
    (DIRECTORY / "x.et").write_bytes(data)
    onerank.read(DIRECTORY / "x.et").write(DIRECTORY / "again.et")


def read_json(data: bytes) -> None:
    (DIRECTORY / "x.json").write_bytes(data)
    from_json(DIRECTORY / "x.json", DIRECTORY / "out.et")


def read_onnx(data: bytes) -> None:
    (DIRECTORY / "x.onnx").write_bytes(data)
    convert_onnx(DIRECTORY / "x.onnx", sizes={}, batch=2, seq=None, train=True)


def chakra_text() -> bytes:
    (DIRECTORY / "seed.et").write_bytes(chakra())
    return to_json(DIRECTORY / "seed.et").encode()


READERS: dict[str, tuple[Callable[[bytes], None], Callable[[], bytes]]] = {
    "kineto": (lambda data: traces(data, ET), lambda: KINETO),
    "et": (lambda data: traces(KINETO, data), lambda: ET),
    "chakra": (read_chakra, chakra),
    "json": (read_json, chakra_text),
    "onnx": (read_onnx, model),
}


def main() -> None:
    """Fuzz the reader that the command line names."""
    read, seed = READERS[sys.argv[1]]
    corpus = DIRECTORY / "corpus"
    corpus.mkdir()
    (corpus / "seed").write_bytes(seed())
    warnings.simplefilter("ignore")

    def once(data: bytes) -> None:
        with contextlib.suppress(OneRankError):
            read(data)

    atheris.Setup([sys.argv[0], *sys.argv[2:], str(corpus)], once)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
