"""`onerank bench link`: measure the link between the GPUs of a job into a network file."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onerank.cli.common import OUTPUT, UsageError, as_json, reports_errors
from onerank.cli.dataclass_to_click import with_options
from onerank.cli.terminal import advancing, lines, print_json, table
from onerank.option_fields import option

if TYPE_CHECKING:
    from onerank.capture.bench.measure_link import MeasuredLink


@dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """The sizes to measure, and the network file to write."""

    output: Path = option("Network file to write (TOML).", "-o", "--output", type=OUTPUT)
    most_mib: int = option(
        "Largest input of a rank, MiB; sizes begin at 4 KiB, each four times the previous one.",
        default=256,
        type=click.IntRange(1, 4096),
        show_default=True,
    )


@click.command()
@with_options(LinkOptions)
@as_json
@reports_errors
def link(options: LinkOptions, as_json: bool) -> None:
    """Measure collectives and messages between all ranks, and write a network file.

    Start it with `torchrun --nproc-per-node GPUS -m onerank bench link -o FILE`. It measures
    all-reduce, all-gather, reduce-scatter, all-to-all and send/receive in groups of every size that
    divides the ranks, with NCCL, or with gloo where there is no GPU. `capture run --network FILE`
    reads the file.
    """
    # Before the import of torch, which takes seconds: without torchrun the command fails at once.
    rank, ranks = _rank_of_torchrun()
    from onerank.capture.bench.measure_link import link_requests, measure_link, to_network_file
    from onerank.ir.output_files import replace_file

    requests = link_requests(ranks, options.most_mib << 20)
    first = rank == 0
    bar = advancing(len(requests), "measuring") if first else contextlib.nullcontext(lambda: None)
    with bar as advance:
        measured = measure_link(requests, advance)
    # Each time is that of the slowest rank, so all ranks have the same, and one writes them.
    if not first:
        return
    replace_file(options.output, to_network_file(measured).encode())
    print_json(measured) if as_json else render_link(measured, str(options.output))


def _rank_of_torchrun() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, as torchrun's variables have them."""
    start = "start one process for each GPU: torchrun --nproc-per-node GPUS -m onerank bench link"
    texts = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not all(text.isdecimal() for text in texts):
        raise UsageError(
            f"RANK is '{texts[0]}' and WORLD_SIZE '{texts[1]}', which torchrun sets; {start}",
            code="link-no-torchrun",
        )
    rank, ranks = map(int, texts)
    if ranks < 2:
        raise UsageError(
            f"a link needs two ranks, and WORLD_SIZE is {ranks}; {start}", code="link-one-rank"
        )
    return rank, ranks


def render_link(measured: "MeasuredLink", output: str) -> None:
    """Print the bus bandwidth by call and size, a table for each group size."""
    from onerank.capture.bench.measure_link import CALLS

    for fit in measured.groups:
        curves = [measured.curve(call, fit.ranks) for call in CALLS]
        rows = [
            (_binary_size(times[0].input_bytes), *(f"{t.busbw_gb_per_s:.4g}" for t in times))
            for times in zip(*curves, strict=True)
        ]
        title = f"groups of {fit.ranks} ranks: bus bandwidth, GB/s"
        table(title, ("input", *(call.replace("_", "-") for call in CALLS)), rows)
    software = ", ".join(f"{name} {version}" for name, version in measured.versions.items())
    fits = [
        (f"{fit.ranks} ranks", f"{fit.busbw_gb_per_s:.4g} GB/s, {fit.latency_us:.4g} us")
        for fit in measured.groups
    ]
    lines([("link", f"{measured.ranks} x {measured.device}; {software}"), *fits], output)


def _binary_size(count: int) -> str:
    return f"{count / 2**20:.4g} MiB" if count >= 1 << 20 else f"{count / 2**10:.4g} KiB"
