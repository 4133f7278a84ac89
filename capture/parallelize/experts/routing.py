"""Static routing: the experts of each token, fixed before the step.

The tokens that a rank receives under expert parallelism depend on the routing of its absent peers.
With static routing every rank follows one table of tokens per expert. The router still computes
scores, weights and top-k; only the chosen indices are replaced.

Every peer sends as many tokens to each expert as this rank does, but for the balanced tokens that
are left over when all experts have equally many. Each rank sends those to other experts: if eight
ranks decode a sequence each with 8 of 128 experts, each of them computes eight tokens, of eight
experts.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from onerank.ir.errors import CaptureError, FormatError, SliceError
from onerank.ir.input_files import load_csv, load_json

if TYPE_CHECKING:
    from torch import Tensor

BALANCED = "balanced"
BY_MODEL = "model"  # the model's own router decides
_SEED = 0
# Times that a slot of a token changes places with another's. The mean number of ranks that a token
# visits is then within 0.6% of that of independent experts, and 51% above it without exchanges (256
# experts on 8 ranks, 8 experts a token).
_EXCHANGES = 4


class GroupRank(NamedTuple):
    """A rank of an expert-parallel group, each of which has consecutive experts.

    Attributes:
        rank: its number in the group.
        ranks: number of ranks.
    """

    rank: int = 0
    ranks: int = 1


_ALONE = GroupRank()


@dataclass(frozen=True)
class Routing:
    """Static distribution of tokens over experts.

    Attributes:
        name: as the user wrote it.
        exponent: exponent of Zipf's law: expert i has weight 1 / (i + 1) ** exponent; 0 is uniform.
        table: tokens per expert, one line per mixture-of-experts layer or one for all; counts or
            shares, because only proportions matter. Empty selects Zipf's law.
    """

    name: str
    exponent: float = 0.0
    table: tuple[tuple[float, ...], ...] = ()

    def check(self, layers: int, experts: int) -> None:
        """Check the table against a model's numbers of expert layers and experts.

        Raises:
            SliceError: the numbers differ.
        """
        if not self.table:
            return
        if len(self.table) not in (1, layers):
            raise SliceError(
                f"--moe-routing {self.name}: {len(self.table)} lines, but the model has {layers} "
                f"layers with experts: expected {layers} lines, or 1 for all",
                code="routing-layer-count",
            )
        for number, line in enumerate(self.table, start=1):
            if len(line) != experts:
                raise SliceError(
                    f"--moe-routing {self.name}: line {number} names tokens for {len(line)} "
                    f"experts, but the model has {experts}",
                    code="routing-expert-count",
                )

    def tokens_per_expert(
        self, layer: int, experts: int, tokens: int, top_k: int, sender: GroupRank = _ALONE
    ) -> list[int]:
        """Return how many of `tokens` go to each expert; the sum is tokens * top_k.

        A token goes to an expert at most once, so an expert gets at most `tokens`. Tokens of
        Zipf's law above that limit go to the other experts in proportion to their shares; a table
        above the limit is an error.

        Args:
            layer: index among the layers with experts.
            experts: experts of the layer.
            tokens: tokens that one rank routes.
            top_k: experts per token.
            sender: the rank whose tokens these are.

        Raises:
            SliceError: the table exceeds one visit per token and expert.
        """
        if not self.table and not self.exponent and top_k <= experts:
            each, left_over = divmod(tokens * top_k, experts)
            # In turn to an expert of each rank, after those to which the ranks before send theirs.
            local, first = experts // sender.ranks, sender.rank * left_over
            turns = (turn % experts for turn in range(first, first + left_over))
            extra = {turn % sender.ranks * local + turn // sender.ranks for turn in turns}
            return [each + (expert in extra) for expert in range(experts)]
        shares = self.shares(layer, experts)
        if self.table:
            self._refuse_overfull(layer, shares, top_k)
        return _apportion_tokens(shares, tokens, top_k)

    def shares(self, layer: int, experts: int) -> list[Fraction]:
        """Return each expert's share of the routed tokens; arguments as for `tokens_per_expert`."""
        if self.table:
            weights = [Fraction(w) for w in self.table[layer if len(self.table) > 1 else 0]]
        else:
            # Fractions, so that shares of equal ranks compare equal and counts do not depend on
            # rounding.
            weights = [Fraction((i + 1) ** -self.exponent) for i in range(experts)]
        total = sum(weights)
        return [weight / total for weight in weights]

    def _refuse_overfull(self, layer: int, shares: list[Fraction], top_k: int) -> None:
        busiest = max(range(len(shares)), key=shares.__getitem__)
        share = shares[busiest]
        if share * top_k > 1:
            raise SliceError(
                f"--moe-routing {self.name}: layer {layer} gives expert {busiest} "
                f"{float(share):.1%} of the routed tokens; a token goes to {top_k} different "
                f"experts, so an expert gets at most 1 / {top_k} = {1 / top_k:.1%}",
                code="routing-share-too-large",
            )


def parse_routing(text: str) -> Routing | None:
    """Parse `--moe-routing`: balanced, zipf:S, the path of a file, or `model`.

    A file is JSON, a list of numbers for all layers or a list of such lists, or CSV, one line for
    all layers or one per layer.

    Returns:
        The routing; None if the model's own router decides.

    Raises:
        CaptureError: the text is no known routing and no file.
        FormatError: the file is malformed.
    """
    if text == BY_MODEL:
        return None
    if text == BALANCED:
        return Routing(text)
    word, _, value = text.partition(":")
    if word == "zipf":
        return Routing(text, exponent=_parse_exponent(text, value))
    path = Path(text)
    if not path.is_file():
        raise CaptureError(
            f"--moe-routing {text}: no such file; expected a file, {BALANCED}, zipf:S (S = 1 is "
            f"Zipf's law, 0 is balanced) or {BY_MODEL} (the model's router)",
            code="routing-unknown",
        )
    return Routing(text, table=_load_table(path))


def chosen_experts(counts: list[int], top_k: int) -> "Tensor":
    """Return expert indices [tokens, top_k], int64, in which expert e occurs counts[e] times.

    The experts of a token differ, and are otherwise independent of each other, as those of many
    tokens are in a job: dispatchers that send a token once to each rank (DeepEP) move as many rows.
    A fixed seed draws them; torch's global generators keep their state.
    """
    # Imported here, because the command line parses --moe-routing without torch.
    import torch

    tokens = sum(counts) // top_k
    experts = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    # Token t takes the entries t, t + tokens, ...: an expert fills at most `tokens` consecutive
    # entries, so no token gets it twice.
    index = experts.view(top_k, tokens).T
    generator = torch.Generator().manual_seed(_SEED)
    index = index[torch.randperm(tokens, generator=generator)]
    slot_order = torch.rand(tokens, top_k, generator=generator).argsort(dim=1)
    index = index.gather(1, slot_order).contiguous()
    # The experts of a token are evenly spaced so far. A slot of each token in one half changes
    # places with a slot of a token in the other half, unless a token would get an expert twice.
    half = tokens // 2
    for _ in range(_EXCHANGES * top_k if top_k > 1 and half else 0):
        shift, slot, its = (
            int(torch.randint(limit, (), generator=generator)) for limit in (half, top_k, top_k)
        )
        one, other = index[:half], index[half : 2 * half].roll(shift, 0)
        first, second = one[:, slot].clone(), other[:, its].clone()
        twice = (one == second[:, None]).any(dim=1) | (other == first[:, None]).any(dim=1)
        one[:, slot] = torch.where(twice, first, second)
        other[:, its] = torch.where(twice, second, first)
        index[half : 2 * half] = other.roll(-shift, 0)
    return index


class StaticRouting:
    """Static expert indices of a model's layers, created at the first forward."""

    def __init__(self, routing: Routing) -> None:
        self._routing = routing
        self._indices: dict[Any, Tensor] = {}

    def indices(
        self, layer: int, experts: int, chosen: "Tensor", sender: GroupRank = _ALONE
    ) -> "Tensor":
        """Return indices in place of those `chosen` by a router; both are [tokens, top_k].

        Layers with the same distribution share one tensor.

        Args:
            layer: index among the layers with experts.
            experts: experts of the layer.
            chosen: indices of the router.
            sender: this rank.
        """
        line = layer if len(self._routing.table) > 1 else 0
        key = line, experts, chosen.shape, chosen.dtype, chosen.device, sender
        if key not in self._indices:
            tokens, top_k = chosen.shape
            counts = self._routing.tokens_per_expert(layer, experts, tokens, top_k, sender)
            index = chosen_experts(counts, top_k)
            # Copied once, so that later steps have no copy that the job lacks.
            self._indices[key] = index.to(chosen.device, chosen.dtype)
        return self._indices[key]

    def counts(self, layer: int, experts: int, ranks: int, chosen: "Tensor") -> "Tensor":
        """Return how many tokens each rank of a group sends to each expert, int64[ranks, experts].

        Arguments as for `indices`; every rank routes as many tokens as are `chosen`.
        """
        import torch

        line = layer if len(self._routing.table) > 1 else 0
        key = line, experts, chosen.shape, chosen.device, "counts", ranks
        if key not in self._indices:
            tokens, top_k = chosen.shape
            senders = (GroupRank(rank, ranks) for rank in range(ranks))
            of_senders = [
                self._routing.tokens_per_expert(layer, experts, tokens, top_k, sender)
                for sender in senders
            ]
            self._indices[key] = torch.tensor(of_senders).to(chosen.device)
        return self._indices[key]


def _apportion_tokens(weights: list[Fraction], tokens: int, top_k: int) -> list[int]:
    """Split tokens * top_k by weight with the largest-remainder method, at most `tokens` each."""
    if sum(1 for weight in weights if weight) < top_k:
        raise SliceError(
            f"each token goes to {top_k} experts, but only "
            f"{sum(1 for weight in weights if weight)} of {len(weights)} get any tokens",
            code="routing-too-few-experts",
        )
    saturated: set[int] = set()
    while True:
        remaining = tokens * (top_k - len(saturated))
        total = sum(weight for expert, weight in enumerate(weights) if expert not in saturated) or 1
        exact = {
            expert: weight * remaining / total
            for expert, weight in enumerate(weights)
            if expert not in saturated
        }
        overfull = {expert for expert, value in exact.items() if value > tokens}
        if not overfull:
            break
        # Their excess raises the others' counts, which may fill further experts: hence the loop.
        saturated |= overfull
    counts = [
        tokens if expert in saturated else math.floor(exact[expert])
        for expert in range(len(weights))
    ]
    by_remainder = sorted(
        exact, key=lambda expert: (math.floor(exact[expert]) - exact[expert], expert)
    )
    for expert in by_remainder[: tokens * top_k - sum(counts)]:
        counts[expert] += 1
    return counts


def _parse_exponent(text: str, value: str) -> float:
    try:
        exponent = float(value)
    except ValueError:
        exponent = math.nan
    if not 0 <= exponent < math.inf:
        raise CaptureError(
            f"--moe-routing {text}: the exponent {value or 'is missing'}; expected a number of 0 "
            "(balanced) or more, as in zipf:1",
            code="routing-bad-exponent",
        )
    return exponent


def _load_table(path: Path) -> tuple[tuple[float, ...], ...]:
    lines = _load_json_lines(path) if path.suffix == ".json" else tuple(load_csv(path))
    for number, line in enumerate(lines, start=1):
        if not all(0 <= value < math.inf for value in line) or not 0 < sum(line) < math.inf:
            raise FormatError(
                f"{path}: line {number} is {list(line)}; expected tokens per expert, each 0 or "
                "more and not all 0",
                code="routing-bad-line",
            )
    if not lines:
        raise FormatError(f"{path}: no line of tokens per expert", code="routing-file-empty")
    return lines


def _load_json_lines(path: Path) -> tuple[tuple[float, ...], ...]:
    expected = "a list of tokens per expert, or a list of such lists"
    items = load_json(path, list[float | list[float]], expected)
    lists = [tuple(item) for item in items if isinstance(item, list)]
    numbers = tuple(item for item in items if not isinstance(item, list))
    if lists and numbers:
        raise FormatError(
            f"{path}: both numbers and lists; expected one of them",
            code="routing-file-malformed",
        )
    return (numbers,) if numbers else tuple(lists)
