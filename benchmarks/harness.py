"""Command line of a benchmark, and the conditions that it prints."""

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import polars as pl


def parser_of(document: str | None) -> argparse.ArgumentParser:
    """Return a parser of a benchmark's command line whose help is the benchmark's docstring."""
    title, _, text = (document or "").partition("\n\n")
    return argparse.ArgumentParser(
        description=title, epilog=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def print_conditions(*more: str) -> None:
    """Print date, machine and versions of this run.

    Args:
        more: what else the figures depend on, such as `torch 2.13.0`.
    """
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    versions = f"Python {platform.python_version()}, numpy {np.__version__}"
    parts = [versions, f"polars {pl.__version__}", *more]
    print(f"{datetime.now(UTC):%Y-%m-%d}, {machine}; {', '.join(parts)}")


def given_folder(document: str | None, *names: str) -> Path:
    """Return the folder of the command line; print date, versions and what the benchmark does.

    Exits if a required file is missing in the folder.

    Args:
        document: docstring of the benchmark; its third paragraph on says what it does.
        names: required files.
    """
    _, _, text = (document or "").split("\n\n", 2)
    parser = parser_of(document)
    parser.add_argument("data", type=Path, help="directory with the measurements")
    folder = parser.parse_args().data
    for name in names:
        if not (folder / name).is_file():
            sys.exit(f"{folder / name}: no such file; give the directory that holds it")
    print_conditions()
    print(text)
    return folder


def order_agreement(times: Sequence[tuple[float, float]]) -> str:
    """Return how well the order of predicted times agrees with that of measured ones, as text.

    Args:
        times: predicted and measured time of each layout.
    """
    from scipy.stats import kendalltau  # not every benchmark needs SciPy

    tau = float(kendalltau(*zip(*times, strict=True)).statistic)
    chosen = min(times)[1] / min(measured for _, measured in times) - 1
    return f"tau {tau:.2f}, the best predicted takes {chosen:.1%} longer than the best measured"
