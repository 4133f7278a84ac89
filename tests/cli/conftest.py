"""The captures of the repository as traces."""

from pathlib import Path

import pytest
from invoke_cli import TRACES

from onerank.converters.sources.kineto import convert_directory


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of gpu.et and cpu.et."""
    directory = tmp_path_factory.mktemp("traces")
    convert_directory(TRACES / "h200-llama-8b-4l-tp4")[0].write(directory / "gpu.et")
    convert_directory(TRACES / "cpu-llama-2l-tp4")[0].write(directory / "cpu.et")
    return directory
