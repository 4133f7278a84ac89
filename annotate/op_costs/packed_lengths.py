"""The lengths of packed sequences, as a capture without a device records them.

The boundaries of packed sequences (`cu_seqlens`) are numbers on the device, which no trace holds. A
capture without a device often knows them, and appends their text to the operator's values.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

PACKED = "sequences "
"""What the text begins with."""

_TEXT = re.compile(PACKED + r"([\d,]+)(?: keys ([\d,]+))?")


@dataclass(frozen=True, slots=True)
class PackedLengths:
    """Lengths of the sequences of a call of attention.

    Attributes:
        queries: of each sequence.
        keys: of each sequence, as many.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]

    @classmethod
    def of_values(cls, values: Sequence[Any]) -> Self | None:
        """Return the lengths that a call's last value has; None if it has no such text."""
        last = values[-1] if values else None
        match = _TEXT.fullmatch(last) if isinstance(last, str) else None
        if match is None:
            return None
        queries, keys = (
            tuple(map(int, text.split(","))) for text in (match[1], match[2] or match[1])
        )
        return cls(queries, keys) if len(queries) == len(keys) else None

    def __str__(self) -> str:
        """Return the text that `of_values` reads."""
        text = f"{PACKED}{','.join(map(str, self.queries))}"
        if self.keys != self.queries:
            text += f" keys {','.join(map(str, self.keys))}"
        return text

    def counts(self) -> Counter[tuple[int, int]]:
        """Return how many sequences have each pair of lengths, without empty ones."""
        pairs = Counter(zip(self.queries, self.keys, strict=True))
        return Counter({lengths: n for lengths, n in pairs.items() if all(lengths)})

    def equal_sequences(self) -> tuple[int, int, int]:
        """Return (sequences, queries, keys) of equal sequences with as many tokens and scores.

        Rounded to integers, each at least 1.
        """
        queries, keys = sum(self.queries), sum(self.keys)
        scores = sum(q * k for q, k in zip(self.queries, self.keys, strict=True))
        if not scores:
            return max(1, len(self.queries)), 1, 1
        sequences = queries * keys / scores
        sizes = sequences, queries / sequences, keys / sequences
        whole = [max(1, round(size)) for size in sizes]
        return whole[0], whole[1], whole[2]
