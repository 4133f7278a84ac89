"""Building blocks of all tables."""

import math
import re
from collections.abc import Sequence
from typing import Any

from onerank.cli.terminal import console, visible, visible_line

MODULE_ROWS = 14
RANKS = 12
"""Ranks listed on one line; --json has all."""
KERNEL_NAME = 120
"""Characters of a kernel name in a table; --json has all."""
_NAMESPACES = re.compile(r"^void |at::native::|\(anonymous namespace\)::|binary_internal::|c10::")


def amount(value: float) -> str:
    """Format a sum of money, or what it is reckoned from: four digits that count, cents of more."""
    if abs(value) >= 100:
        return f"{value:.2f}"
    if value == 0 or abs(value) < 1e-6:
        return f"{value:.3e}" if value else "0"
    return f"{value:.{3 - math.floor(math.log10(abs(value)))}f}"


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    texts: Sequence[int] = (0,),
) -> None:
    """Print a table: the columns `texts` left-aligned and folded, figures right and whole."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if not rows:
        lines([], f"{title}: none")
        return
    printed = Table(
        title=visible_line(title),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for position, column in enumerate(map(visible_line, columns)):
        if position in texts:
            printed.add_column(column, justify="left", overflow="fold")
        else:
            printed.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        printed.add_row(*(Text(visible_line(str(cell))) for cell in row))
    console().print(printed)


def counted(count: int, noun: str) -> str:
    """Return `1 node`, `2 nodes`."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def short_kernel(name: str) -> str:
    """Return a kernel's name without the namespaces all of PyTorch's have, and its start only."""
    short = _NAMESPACES.sub("", name)
    return short if len(short) <= KERNEL_NAME else f"{short[: KERNEL_NAME - 1]}…"


def lines(pairs: Sequence[tuple[str, str]], title: str = "") -> None:
    """Print labelled values, one per line."""
    out = console()
    if title:
        out.print(visible_line(title), style="bold", soft_wrap=True)
    width = max((len(label) for label, _ in pairs), default=0)
    for label, value in pairs:
        out.print(visible(f"  {label.ljust(width)}  {value}"), soft_wrap=True)


def counts_of_evidence(counts: dict[str, int], times_ns: dict[str, int] | None = None) -> str:
    """Say how many nodes' times have which evidence, and what part of all time that is."""
    kinds = [f"{n} {evidence(name)}" for name, n in counts.items()]
    if times_ns is not None and len(counts) > 1:
        shares = parts(times_ns)
        kinds = [
            f"{kind} ({shares[name]} of the time)" for name, kind in zip(counts, kinds, strict=True)
        ]
    return ", ".join(kinds) or "none"


def evidence(name: str) -> str:
    """Return the words for a kind of evidence."""
    return {"none": "of unknown origin"}.get(name, name.replace("_", " "))


def parts(amounts: dict[str, int]) -> dict[str, str]:
    """Return each amount's part of their sum in percent."""
    whole = sum(amounts.values()) or 1
    return {name: _percent(amount / whole * 100) for name, amount in amounts.items()}


def _percent(share: float) -> str:
    if 0 < share < 0.05:
        return "<0.1%"
    return ">99.9%" if 99.95 <= share < 100 else f"{share:.1f}%"


def rank_list(ranks: tuple[int, ...]) -> str:
    """Name ranks as short as can be."""
    if not ranks:
        return "?"
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks)) if len(ranks) <= 8 else f"{len(ranks)} ranks"
