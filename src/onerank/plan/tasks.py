"""Units of work of a plan, which run in any order and on any machine."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Task:
    """A function call whose result is stored.

    Attributes:
        key: content of the call: equal keys have equal results, also in later runs.
        label: what it does, for the progress bar.
        function: "module:callable", importable by name.
        arguments: its arguments, which pickle.
    """

    key: str
    label: str
    function: str
    arguments: tuple[Any, ...]
