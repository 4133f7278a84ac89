"""Command line of a benchmark, and the conditions and errors that it prints."""

import argparse
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import numpy as np

from onerank.ir.arrays import F64, Mask


def parser_of(document: str | None) -> argparse.ArgumentParser:
    """Return a parser of a benchmark's command line whose help is the benchmark's docstring."""
    title, _, text = (document or "").partition("\n\n")
    return argparse.ArgumentParser(
        description=title, epilog=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def print_conditions(*more: str) -> None:
    """Print date, machine, load and versions of this run.

    Args:
        more: what else the figures depend on, such as `version_of("transformers")`.
    """
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    libraries = [version_of(name) for name in ("onerank", "numpy", "polars")]
    parts = [f"Python {platform.python_version()}", *libraries, *more]
    print(f"{datetime.now(UTC):%Y-%m-%d}, {machine}; {', '.join(parts)}", flush=True)


def version_of(package: str) -> str:
    """Return the name and version of an installed package, for `print_conditions`."""
    return f"{package} {metadata.version(package)}"


def gpus_and_torch(count: int = 1) -> tuple[str, ...]:
    """Return the GPUs of this host, torch, and CUDA or NCCL, for `print_conditions`.

    Args:
        count: number of GPUs that the benchmark runs on; with several, NCCL's version counts.
    """
    import torch  # not every benchmark needs it

    gpus = f"{count} x {torch.cuda.get_device_name()}"
    nccl = [f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"] if count > 1 else []
    return (gpus, version_of("torch"), f"CUDA {torch.version.cuda}", *nccl)


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


def print_errors(error: F64, inside: Mask, groups: Mapping[str, Mask]) -> None:
    """Print the errors of each group of calls, and the share of them inside the interval.

    Args:
        error: of each call, in percent of the measured time, float64[n].
        inside: whether its measured time is inside the interval of the prediction, bool[n].
        groups: name -> calls, bool[n]; a group without calls is not printed.
    """
    print(f"\n{'percent':18}{'calls':>6}{'median':>8}{'mean':>8}{'signed':>8}{'inside':>8}")
    for group, chosen in groups.items():
        if (of := error[chosen]).size:
            print(f"{group:18}{len(of):6}{np.median(np.abs(of)):8.1f}{np.abs(of).mean():8.1f}"
                  f"{of.mean():+8.1f}{100 * inside[chosen].mean():7.0f}%")  # fmt: skip


def order_agreement(times: Sequence[tuple[float, float]]) -> str:
    """Return how well the order of predicted times agrees with that of measured ones, as text.

    Args:
        times: predicted and measured time of each layout.
    """
    from scipy.stats import kendalltau  # not every benchmark needs SciPy

    tau = float(kendalltau(*zip(*times, strict=True)).statistic)
    chosen = min(times)[1] / min(measured for _, measured in times) - 1
    return f"tau {tau:.2f}, the best predicted takes {chosen:.1%} longer than the best measured"
