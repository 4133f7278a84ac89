"""`capture verify SCRIPT`: hold a capture's numerics against plain runs and the whole model."""

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onerank.cli.commands.capture import capture
from onerank.cli.common import (
    as_json,
    ends_beside_threads,
    print_json,
    progress,
    reports_errors,
    stdout_to_stderr,
)
from onerank.cli.help_groups import SectionedCommand
from onerank.cli.options import headings
from onerank.cli.parallelism_options import ParallelismOptions, job_options, loading_capture

if TYPE_CHECKING:
    from onerank.capture.verify.numerics import Verification

_TITLES = {
    "plain": "Steps without a profiler (warm-up, pure, timed), against those of a plain run",
    "profiled": "Steps under a profiler, against those of a plain run",
    "slices": "Slices that communicate, against the whole model",
}


@capture.command(
    cls=SectionedCommand,
    sections=headings(ParallelismOptions),
    epilog="The script's own arguments come after --: capture verify train.py --tp 4 -- --lr 1",
)
@job_options
@as_json
@ends_beside_threads
@reports_errors
def verify(script: Path, args: tuple[str, ...], job: ParallelismOptions, as_json: bool) -> None:
    """Check that the instruments and the slicing leave SCRIPT's numbers as they are.

    The script runs under the instruments of `run` and once more without them: losses, outputs
    and gradients of each step must agree. Then its first batch goes through the whole Hugging
    Face model and through all slices of it, in fp32 and with real communication in one process:
    loss, logits and every gradient must agree. Deterministic kernels are asked for throughout.

    Exit code 1: something differs by more than the tolerance.
    """
    with loading_capture():
        from onerank.capture import WindowPlan
        from onerank.capture.verify.numerics import verify as verify_script
    script, module = job.located(script)
    options = job.options(WindowPlan(warm_up=1, pure=1, repeat=1), module=module)
    with stdout_to_stderr() if as_json else contextlib.nullcontext():
        found = verify_script(script, args, options, progress)
    if as_json:
        print_json(found)
    else:
        _render(found, f"{script}: {options.world}")
    sys.exit(1 if found.breaches else 0)


def _render(found: "Verification", title: str) -> None:
    from onerank.cli.render.tables import counted, lines, table

    pairs = [("not checked", text) for text in found.not_checked]
    pairs += [("note", text) for text in found.notes]
    lines(pairs, title)
    columns = ("", "tensors", "equal", "largest error", "relative", "too much", "worst")
    for check, heading in _TITLES.items():
        rows = [
            (
                f"{one.what} {one.module}".strip() + f" ({one.dtype})",
                one.tensors,
                one.equal,
                f"{one.max_abs:.2e}",
                f"{one.max_rel:.2e}",
                one.breaches,
                one.worst if one.max_rel else "",
            )
            for one in found.comparisons
            if one.check == check
        ]
        if rows:
            table(heading, columns, rows, texts=(0, 6))
    if found.breaches:
        told = counted(found.breaches, "tensor")
        click.echo(f"error: {told} differ by more than the tolerance", err=True)
    else:
        lines([("verified", "no tensor differs by more than the tolerance")])
