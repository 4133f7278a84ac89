"""Loops that wait for a number that no device computes, such as a solver's error below a tolerance.

A placeholder never changes, so such a loop never ends. Only the number of its reads distinguishes
it from a loop that ends.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

from onerank.capture.no_device.package_files import is_package_file

# Reads of one place. An episode of an environment has up to 1,000 steps, and reads an action in
# each of them.
_MOST_READS = 1_024

# Most reads of a loop that counts its iterations, or in which another loop reads the placeholders:
# such as a generation of as many tokens.
_MOST_COUNTED_READS = 100_000

# Iterators that never end: those of itertools.
_ENDLESS = ("count", "cycle", "repeat")

_FINITE = (ast.For, ast.AsyncFor, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True)
class EndlessLoop:
    """A loop that read too many placeholders.

    Attributes:
        file: its file.
        line: its first line.
        reads: how often it read a placeholder in one place.
    """

    file: str
    line: int
    reads: int


@dataclass(frozen=True)
class _Loop:
    """A loop of a file.

    Attributes:
        first: its first line.
        last: its last line.
        is_endless: whether it ends by a condition alone.
        names: names of variables, and of attributes of variables, in the conditions that end it.
    """

    first: int
    last: int
    is_endless: bool
    names: frozenset[str]


@dataclass
class _Reads:
    """The placeholders that the iterations of one run of a loop have read.

    Attributes:
        counts: reads by place: the calls between the loop and the read.
        numbers: of the variables in the conditions that end the loop, at half of the reads.
    """

    counts: Counter[tuple[tuple[CodeType, int], ...]] = field(
        default_factory=Counter[tuple[tuple[CodeType, int], ...]]
    )
    numbers: dict[str, int | float] = field(default_factory=dict[str, int | float])


class _FrameReads(dict[int, _Reads]):
    """The reads of each loop of a running function, by the loop's first line.

    It is the frame's trace function: the only attribute of a frame that can be set. It ends with
    the function, as a table by the frame's id would not, and keeps none of the function's tensors
    alive, as a reference to the frame would. Python ignores it unless a debugger runs.
    """

    def __call__(self, *_: object) -> None:
        """Trace nothing."""


def endless_loop() -> EndlessLoop | None:
    """Count the read of a placeholder for the loops that run; return one that does not end."""
    path: list[tuple[CodeType, int]] = []
    nested = False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        # torch and this package read on behalf of a script, and their loops end.
        if not is_package_file(code.co_filename):
            for loop in _loops_around(code, frame.f_lineno):
                if loop.is_endless:
                    reads = _reads_of_endless(frame, loop, (*path,), nested)
                    if reads:
                        return EndlessLoop(code.co_filename, loop.first, reads)
                nested = True
        path.append((code, frame.f_lasti))
        frame = frame.f_back
    return None


def _reads_of_endless(
    frame: FrameType, loop: _Loop, path: tuple[tuple[CodeType, int], ...], nested: bool
) -> int:
    """Count a read of a loop; return the number of its reads if these are too many, else 0.

    Args:
        frame: runs the loop.
        loop: the loop.
        path: the calls between the loop and the read.
        nested: whether a loop within this one reads.
    """
    if frame.f_trace is None:
        frame.f_trace = _FrameReads()
    if not isinstance(frame.f_trace, _FrameReads):
        return 0  # a debugger runs
    reads = frame.f_trace.setdefault(loop.first, _Reads())
    place = *path, (frame.f_code, frame.f_lasti)
    reads.counts[place] += 1
    count = reads.counts[place]
    if count == _MOST_READS // 2:
        reads.numbers = _numbers(frame, loop.names)
    if count == _MOST_READS and not nested and reads.numbers == _numbers(frame, loop.names):
        return count
    return count if count >= _MOST_COUNTED_READS else 0


def _numbers(frame: FrameType, names: frozenset[str]) -> dict[str, int | float]:
    """Return the numbers among variables of a function, and among attributes of its variables."""
    # Reading the local variables of a frame keeps them until it is read again or ends, so this
    # happens in loops that read many placeholders alone.
    variables = {**frame.f_globals, **frame.f_locals}
    numbers: dict[str, int | float] = {}
    for name in names:
        variable, _, attribute = name.partition(".")
        value = variables.get(variable)
        if attribute:
            value = getattr(value, "__dict__", {}).get(attribute)
        if isinstance(value, int | float):
            numbers[name] = value
    return numbers


@cache
def _loops_around(code: CodeType, line: int) -> tuple[_Loop, ...]:
    """Return the loops of a function around one of its lines, the innermost first."""
    return tuple(
        loop
        for loop in _loops(code.co_filename)
        if max(loop.first, code.co_firstlineno) <= line <= loop.last
        and loop.first >= code.co_firstlineno
    )


@cache
def _loops(file: str) -> list[_Loop]:
    """Return the loops of a file, a nested one before the one around it."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    loops: list[_Loop] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.While):
            ends = [node.test, *_conditions_of_breaks(node)]
            names = frozenset(name for test in ends for name in _names_in(test))
            loops.append(_Loop(node.lineno, node.end_lineno or node.lineno, True, names))
        elif isinstance(node, _FINITE):
            endless = isinstance(node, ast.For) and _is_endless(node.iter)
            loops.append(_Loop(node.lineno, node.end_lineno or node.lineno, endless, frozenset()))
    return sorted(loops, key=lambda loop: (-loop.first, loop.last))


def _is_endless(iterator: ast.expr) -> bool:
    if not isinstance(iterator, ast.Call):
        return False
    function = iterator.func
    name = function.attr if isinstance(function, ast.Attribute) else ""
    return (function.id if isinstance(function, ast.Name) else name) in _ENDLESS


def _conditions_of_breaks(loop: ast.While) -> Iterator[ast.expr]:
    """Yield the conditions of statements that may leave a loop."""
    for node in ast.walk(loop):
        if isinstance(node, ast.If) and any(
            isinstance(inner, ast.Break | ast.Return) for inner in ast.walk(node)
        ):
            yield node.test


def _names_in(test: ast.expr) -> Iterator[str]:
    for node in ast.walk(test):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"
