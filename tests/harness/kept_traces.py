"""The traces of `traces/`, which are kept compressed."""

import gzip
from pathlib import Path

import onerank
from onerank.ir import Graph

TRACES = Path(__file__).parents[2] / "traces"


def unpack(name: str, directory: Path) -> Path:
    """Unpack a kept trace, such as `h100-llama-8b-prefill/8192`, into a directory."""
    path = directory / f"{Path(name).name}.et"
    path.write_bytes(gzip.decompress((TRACES / f"{name}.et.gz").read_bytes()))
    return path


def kept_graph(name: str, directory: Path) -> Graph:
    """Unpack a kept trace into a directory, and read it."""
    return onerank.read(unpack(name, directory))
