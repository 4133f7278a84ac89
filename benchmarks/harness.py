"""Input folder of a benchmark, and the conditions that it prints."""

import argparse
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import polars as pl


def given_folder(document: str | None, *names: str) -> Path:
    """Return the folder of the command line; print date, versions and what the benchmark does.

    Ends the program where a file of the folder that it needs is missing.

    Args:
        document: docstring of the benchmark, whose third paragraph tells what it does.
        names: files that it needs.
    """
    title, _, text = (document or "").split("\n\n", 2)
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("data", type=Path, help="directory with the measurements")
    folder = parser.parse_args().data
    for name in names:
        if not (folder / name).is_file():
            sys.exit(f"{folder / name}: no such file; give the directory that holds it")
    print(f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, {os.cpu_count()} cores", end="; ")
    print(f"Python {platform.python_version()}, numpy {np.__version__}, polars {pl.__version__}")
    print(text)
    return folder
