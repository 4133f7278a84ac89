"""Table of the differences between two traces."""

from onerank.analysis.trace_diff import Change, Difference
from onerank.cli.render.tables import MODULE_ROWS, counted, lines, short_kernel, table, time


def render_difference(difference: Difference, before: str, after: str) -> None:
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
                time(change.time_before_ns),
                time(change.time_after_ns),
                _ratio(change),
            )
            for change in changes
        ]
        table(title, ("", "nodes", "after", "time", "after", "ratio"), rows)
    for what, changes in (("modules", difference.by_module), ("kernels", difference.by_kernel)):
        if len(changes) > MODULE_ROWS:
            lines([("", f"and {len(changes) - MODULE_ROWS} more {what} (--json has all)")])


def _pair(change: Change) -> str:
    return (
        f"{time(change.time_before_ns)} in {counted(change.count_before, 'node')} -> "
        f"{time(change.time_after_ns)} in {change.count_after} ({_ratio(change)})"
    )


def _ratio(change: Change) -> str:
    if not change.time_before_ns:
        return "new" if change.time_after_ns else "-"
    return f"x{change.time_after_ns / change.time_before_ns:.3f}"
