"""`onerank diff`: how two traces differ, by class, module and kernel name."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from onerank.cli.common import TRACE, as_json, reports_errors
from onerank.cli.terminal import (
    MODULE_ROWS,
    counted,
    lines,
    print_json,
    ratio,
    short_kernel,
    table,
    time_or_dash,
)

if TYPE_CHECKING:
    from onerank.analysis.trace_diff import NameDiff, TraceDiff


@click.command()
@click.argument("before", type=TRACE)
@click.argument("after", type=TRACE)
@as_json
@reports_errors
def diff(before: Path, after: Path, as_json: bool) -> None:
    """Compare two traces by class, module and kernel name."""
    import onerank as package

    difference = package.diff(before, after)
    if as_json:
        print_json(difference)
    else:
        render_difference(difference, str(before), str(after))


def render_difference(difference: "TraceDiff", before: str, after: str) -> None:
    """Print how two traces differ."""
    total = difference.total
    verdict = {True: "the same", False: "DIFFERENT"}
    lines(
        [
            ("compute", _pair(total)),
            ("kernels", f"names and counts {verdict[difference.same_kernels]}"),
            ("communication", verdict[difference.same_collectives]),
        ],
        f"{before} -> {after}",
    )
    for title, changes in (
        ("By class", difference.by_class),
        ("By module", difference.by_module[:MODULE_ROWS]),
        ("By kernel, largest change first", difference.by_kernel[:MODULE_ROWS]),
    ):
        rows = [
            (
                short_kernel(change.name) or "(none)",
                change.count_before,
                change.count_after,
                time_or_dash(change.time_before_ns),
                time_or_dash(change.time_after_ns),
                _ratio(change),
            )
            for change in changes
        ]
        table(title, ("", "nodes", "after", "time", "after", "ratio"), rows)
    for what, changes in (("modules", difference.by_module), ("kernels", difference.by_kernel)):
        if len(changes) > MODULE_ROWS:
            lines([("", f"and {len(changes) - MODULE_ROWS} more {what} (--json has all)")])


def _pair(change: "NameDiff") -> str:
    return (
        f"{time_or_dash(change.time_before_ns)} in {counted(change.count_before, 'node')} -> "
        f"{time_or_dash(change.time_after_ns)} in {change.count_after} ({_ratio(change)})"
    )


def _ratio(change: "NameDiff") -> str:
    if change.count_after and not change.count_before:
        return "new"
    return ratio(change.time_after_ns, change.time_before_ns)
