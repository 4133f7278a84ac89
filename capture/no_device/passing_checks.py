"""The value of an unknown bool with which a check in the running code passes.

Scripts and libraries check numbers: `assert boxes.min() >= 0`, `if not valid.all(): raise ...`. A
job that trains passes its checks, so a bool that no device computed has the value that does not
raise.
"""

import ast
from dis import opname
from functools import cache
from pathlib import Path
from types import FrameType

# Beginnings of the names of instructions that read a bool and jump.
_BRANCHES = ("POP_JUMP", "JUMP_IF", "TO_BOOL")

# Line and column where an expression begins and ends.
_Position = tuple[int, int, int, int]


def passing_value(frame: FrameType) -> bool | None:
    """Return the value of a bool with which a check passes; None if no check reads it.

    Args:
        frame: a frame that is reading the bool.
    """
    read = _read_position(frame)
    if read is None:
        return None
    for test, passes in _checks(frame.f_code.co_filename):
        if _contains(test, read):
            negations = sum(
                isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
                for node in ast.walk(test)
                if isinstance(node, ast.expr) and _contains(node, read)
            )
            return passes is (negations % 2 == 0)
    return None


def _read_position(frame: FrameType) -> _Position | None:
    """Return where the expression is whose bool a frame is reading."""
    positions = list(frame.f_code.co_positions())
    at = frame.f_lasti // 2
    if opname[frame.f_code.co_code[frame.f_lasti]].startswith(_BRANCHES):
        # A branch has the position of its statement; the value is of the instruction before it.
        at = next((n for n in range(at, 0, -1) if positions[n] != positions[at]), at)
    line, end_line, column, end_column = positions[at]
    if line is None or end_line is None or column is None or end_column is None:
        return None
    return line, column, end_line, end_column


@cache
def _checks(file: str) -> list[tuple[ast.expr, bool]]:
    """Return the condition of each check in a file, and its value if the check passes."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    checks: list[tuple[ast.expr, bool]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            checks.append((node.test, True))
        elif isinstance(node, ast.If):
            if _raises(node.body):
                checks.append((node.test, False))
            elif _raises(node.orelse):
                checks.append((node.test, True))
    return checks


def _raises(statements: list[ast.stmt]) -> bool:
    return bool(statements) and isinstance(statements[-1], ast.Raise)


def _contains(node: ast.expr, position: _Position) -> bool:
    line, column, end_line, end_column = position
    starts = (node.lineno, node.col_offset) <= (line, column)
    ends = (end_line, end_column) <= (node.end_lineno or 0, node.end_col_offset or 0)
    return starts and ends
