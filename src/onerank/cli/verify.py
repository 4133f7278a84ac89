"""`capture verify SCRIPT`: hold a capture's numerics against plain runs and the whole model."""

import contextlib
import inspect
import os
import sys
from pathlib import Path
from typing import Any

import click

from onerank.cli.capture import INSTEAD, SECTIONS, capture, run, stdout_to_stderr
from onerank.cli.frame import print_json, progress, reports_errors
from onerank.cli.sections import SectionedCommand

# options of `run` that say what is measured, and how they stand here
_FIXED: dict[str, Any] = {
    "output": Path(os.devnull),
    "keep_raw": None,
    "real": False,
    "warm_up": 1,
    "pure_steps": 1,
    "repeat": 1,
    "layers": None,
    "ranks": None,
    "compile_mode": None,
}


def _verify(**given: Any) -> None:
    """Check that the instruments and the slicing leave SCRIPT's numbers as they are.

    The script runs under the instruments of `run` and once more without them: losses, outputs
    and gradients of each step must agree. Then its first batch goes through the whole Hugging
    Face model and through all slices of it, in fp32 and with real communication in one process:
    loss, logits and every gradient must agree. Deterministic kernels are asked for throughout.

    Exit code 1: something differs by more than the tolerance.
    """
    context = click.get_current_context()
    context.meta[INSTEAD] = _report
    fixed = {p.name: _FIXED[p.name] for p in run.params if p.name in _FIXED}
    assert run.callback is not None
    run.callback(**given, **fixed)


def _report(script: Path, args: tuple[str, ...], options: Any, as_json: bool) -> None:
    from onerank.capture.verify import verify as verify_script
    from onerank.cli.render import counted, lines, table

    with stdout_to_stderr() if as_json else contextlib.nullcontext():
        found = verify_script(script, args, options, progress)
    if as_json:
        print_json(found)
        sys.exit(1 if found.breaches else 0)
    pairs = [("not checked", text) for text in found.not_checked]
    pairs += [("note", text) for text in found.notes]
    lines(pairs, f"{script}: {options.world}")
    columns = ("", "tensors", "equal", "largest error", "relative", "too much", "worst")
    for check, title in _TITLES.items():
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
            table(title, columns, rows, texts=(0, 6))
    if found.breaches:
        told = counted(found.breaches, "tensor")
        click.echo(f"error: {told} differ by more than the tolerance", err=True)
        sys.exit(1)
    lines([("verified", "no tensor differs by more than the tolerance")])


_TITLES = {
    "plain": "Steps without a profiler (warm-up, pure, timed), against those of a plain run",
    "profiled": "Steps under a profiler, against those of a plain run",
    "slices": "Slices that communicate, against the whole model",
}

verify = SectionedCommand(
    "verify",
    sections=SECTIONS,
    params=[parameter for parameter in run.params if parameter.name not in _FIXED],
    callback=reports_errors(_verify),
    help=inspect.getdoc(_verify),
    epilog="The script's own arguments come after --: capture verify train.py --tp 4 -- --lr 1",
)
capture.add_command(verify)
