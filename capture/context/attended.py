"""How a layer attends, and what comes of it."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Manner:
    """How a layer attends.

    Attributes:
        scale: of the scores.
        window: how many keys a query sees at most, its own the last; None for all, or causal.
        dropout: probability that a weight is dropped.
    """

    scale: float
    window: int | None = None
    dropout: float = 0.0


@dataclass(frozen=True)
class Attended:
    """What attention gave: the output [batch, heads, queries, width] and what its backward needs.

    `log_sums` are logarithms of the sums over the scores' exponentials, [batch, heads, queries];
    `random` is what the dropout was drawn from, or which weights it kept.
    """

    output: Tensor
    log_sums: Tensor
    random: tuple[Tensor, ...] = ()
