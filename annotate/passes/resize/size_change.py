"""A change of sequence length and micro-batch: captured sizes, and the dimensions they explain.

A size alone is ambiguous: 4096 may be a sequence or a hidden size, 1 a batch or a broadcast
dimension. Each reading of a tensor's dimensions therefore has a cost for its implausible parts. A
caller that knows more about the tensor (how its number of elements grows, what it is multiplied
with) takes the cheapest reading that agrees.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import msgspec
import numpy as np

from onerank.annotate.op_costs.op_classes import is_generated
from onerank.annotate.op_costs.packed_lengths import PACKED
from onerank.annotate.passes.tensor_locations import has_tensor_ids
from onerank.annotate.token_count import token_ids
from onerank.ir import Graph, Job, Phase
from onerank.ir.arrays import Mask, deduplicate
from onerank.ir.errors import AnnotateError
from onerank.ir.notes import Note

Power = tuple[int, int]
"""Growth of a size: its powers of sequence length and of micro-batch."""

CONSTANT: Power = (0, 0)

SEQ: Power = (1, 0)

BATCH: Power = (0, 1)

TOKENS: Power = (1, 1)

# A size within 1/8 of the sequence length is the sequence with a shift, such as of labels.
_SHIFT_FRACTION = 8


@dataclass(frozen=True, slots=True)
class Change:
    """A captured size, 0 if it is to be inferred from the trace, and the new size."""

    before: int
    after: int


NO_SEQUENCE = Change(2**40, 2**40)
"""The change for a step without sequences; no size is as large, so none matches."""


_MOST_DIGITS = 12  # of a size in an option


def parse_change(option: str, text: str) -> Change:
    """Parse `8192`, or `4096=8192` with the captured size.

    Raises:
        AnnotateError: it is neither, or a size is below 1 or too large.
    """
    before, equals, after = text.partition("=")
    sizes = [before, after] if equals else [text]
    # The length first: Python refuses to convert thousands of digits.
    if not all(
        size.isascii() and size.isdecimal() and len(size) <= _MOST_DIGITS and int(size) > 0
        for size in sizes
    ):
        raise AnnotateError(
            f"{option} {text}: expected a size, {option} 8192, or the captured and the new one, "
            f"{option} 4096=8192; both 1 or more, of at most {_MOST_DIGITS} digits",
            code="resize-option-malformed",
        )
    return Change(*map(int, sizes)) if equals else Change(0, int(text))


# Without slots: `cached_property` needs the instance's dict.
@dataclass(frozen=True)
class Sizing:
    """Sequence length and micro-batch, captured and new.

    Attributes:
        seq: length of the sequences that the script passes to its model.
        batch: number of sequences in a micro-batch.
        parts: divisors of a sequence from the parallel axes, including 1.
        routes: experts per token, for each kind of routing layer; empty without routing.
    """

    seq: Change
    batch: Change
    parts: tuple[int, ...] = (1,)
    routes: tuple[int, ...] = ()

    @classmethod
    def of(cls, seq: Change, batch: Change, job: Job) -> "Sizing":
        """Return the sizing of a job, whose tp and cp axes may cut sequences."""
        tp, cp = (job.world.sizes.get(axis, 1) for axis in ("tp", "cp"))
        # Each cp rank has two chunks of the sequence, which balances a causal mask.
        chunks = {2 * cp} if cp > 1 else set[int]()
        cuts = sorted({1, tp, cp, tp * cp} | chunks)
        return cls(seq, batch, tuple(cut for cut in cuts if seq.before % cut == 0))

    @cached_property
    def lengths(self) -> frozenset[int]:
        """Sizes that a sequence dimension may have."""
        return frozenset(self.seq.before // part for part in self.parts)

    @cached_property
    def unit(self) -> int:
        """The smallest size of a sequence dimension."""
        return min(self.lengths)

    def is_shifted_sequence(self, size: int) -> bool:
        """Return whether a size is the sequence length with a shift, such as of labels."""
        return 0 < abs(size - self.seq.before) * _SHIFT_FRACTION < self.seq.before

    def _keeps_shift(self, size: int) -> bool:
        """Return whether a size that grows with the sequence keeps its distance from it.

        Labels padded by one token are 6 long for a sequence of 5. `is_shifted_sequence` guesses
        what a size is, so it does not accept that distance; here the growth is known.
        """
        by_one = abs(size - self.seq.before) == 1 and size % self.unit != 0
        return by_one or self.is_shifted_sequence(size)

    def is_token_count(self, size: int) -> bool:
        """Return whether a size counts the tokens of a micro-batch, of whole or split sequences.

        With routing, each token counts once per expert that receives it.
        """
        length, rest = divmod(size, self.batch.before)
        if not rest and (length in self.lengths or self.is_shifted_sequence(length)):
            return True
        routed = (divmod(size, self.batch.before * route) for route in self.routes)
        return any(not rest and length in self.lengths for length, rest in routed)

    def resized(self, size: int, power: Power) -> int:
        """Return the new size of a dimension.

        Raises:
            AnnotateError: the new size is not a whole number.
        """
        seq, batch = power
        if power == CONSTANT:
            return size
        per = self.batch.before**batch
        if seq == 1 and size % per == 0 and self._keeps_shift(size // per):
            return (size // per + self.seq.after - self.seq.before) * self.batch.after**batch
        # Multiplied before divided: integers stay exact.
        product = size * self.seq.after**seq * self.batch.after**batch
        divisor = self.seq.before**seq * per
        if product % divisor:
            raise AnnotateError(
                f"a size of {size} cannot be resized: {size} x "
                f"{_terms(self.seq, self.batch, power)} = {product / divisor:.2f} is no whole "
                "number\n  choose a sequence length and a micro-batch that divide as the captured "
                "ones do",
                code="resize-not-whole",
            )
        return product // divisor

    def shape(self, shape: tuple[int, ...], powers: tuple[Power, ...]) -> tuple[int, ...]:
        """Return the new shape of a tensor.

        Raises:
            AnnotateError: a new size is not a whole number, or the tensor is too large to count.
        """
        resized = tuple(self.resized(*pair) for pair in zip(shape, powers, strict=True))
        if prod(resized) > _MOST_ELEMENTS:
            raise AnnotateError(
                f"a tensor {[*shape]} would be {[*resized]}, more than {_MOST_ELEMENTS:.3g} "
                f"elements, at a sequence length of {self.seq.after} and a micro-batch of "
                f"{self.batch.after}\n  choose smaller ones",
                code="resize-too-large",
            )
        return resized


# Of 16 bytes each they are 2**61 bytes, the limit of a node's costs.
_MOST_ELEMENTS = 1 << 57


def total(powers: tuple[Power, ...]) -> Power:
    """Return how the number of elements grows."""
    return sum(seq for seq, _ in powers), sum(batch for _, batch in powers)


def numel(shape: tuple[int, ...]) -> int:
    """Return the number of elements; 1 for a 0-d tensor."""
    return prod(shape)


def _terms(seq: Change, batch: Change, power: Power) -> str:
    terms = [f"{seq.after} / {seq.before}"] * power[0] + [
        f"{batch.after} / {batch.before}"
    ] * power[1]
    return " x ".join(terms)


_LIST = msgspec.json.Decoder(list[Any])

# Operator of one product -> index of its first factor; the second factor follows it.
_FACTOR_INDEX = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}

# Binary operators that broadcast their operands.
_BINARY = frozenset(
    f"aten::{name}{place}" for name in ("add", "sub", "mul", "div") for place in ("", "_")
)


def check_products(before: Graph, after: Graph, changed: Mask) -> None:
    """Raise for products whose factors do not match, because a size was not followed.

    Mamba-2, for example, pads its sequences to whole chunks. Its resized products would have no
    FLOPs and be faster than at the captured size.

    Args:
        before: the step as captured.
        after: the same at another size.
        changed: nodes whose operands have other shapes, bool[n].

    Raises:
        AnnotateError: the inner sizes of a product differ.
    """
    nodes, strings = after.nodes, after.strings
    factor_indices = {
        code: _FACTOR_INDEX.get(strings[code]) for code in np.unique(nodes.op[changed]).tolist()
    }
    products = [code for code, factor_index in factor_indices.items() if factor_index is not None]
    rows = np.flatnonzero(changed & np.isin(nodes.op, products))
    first, _ = deduplicate([nodes.op[rows], nodes.input_shapes[rows]])
    for row in rows[first].tolist():
        factor_index = factor_indices[int(nodes.op[row])] or 0
        left, right = _LIST.decode(strings[int(nodes.input_shapes[row])])[
            factor_index : factor_index + 2
        ]
        if min(len(left), len(right)) > 1 and left[-1] != right[-2]:
            captured = _LIST.decode(before.strings[int(before.nodes.input_shapes[row])])
            raise AnnotateError(
                f"{strings[int(nodes.op[row])]} would multiply {left} x {right}, captured as "
                f"{captured[factor_index]} x {captured[factor_index + 1]}: a size was not "
                "followed, as in steps that pad, chunk or loop over their sequences\n"
                "  capture the step at the requested size",
                code="resize-operands-disagree",
            )


def mismatch_notes(after: Graph, changed: Mask) -> tuple[Note, ...]:
    """Return a note if binary operators have operands that no longer broadcast.

    Args:
        after: the step at another size.
        changed: nodes whose operands have other shapes, bool[n].
    """
    nodes, strings = after.nodes, after.strings
    codes = [code for code in np.unique(nodes.op[changed]).tolist() if strings[code] in _BINARY]
    rows = np.flatnonzero(changed & np.isin(nodes.op, codes))
    first, which = deduplicate([nodes.op[rows], nodes.input_shapes[rows]])
    mismatched = [
        not _can_broadcast(strings[int(nodes.input_shapes[row])]) for row in rows[first].tolist()
    ]
    is_mismatched = np.array(mismatched, dtype=bool)[which]
    if not is_mismatched.any():
        return ()
    names = sorted({strings[code] for code in nodes.op[rows[is_mismatched]].tolist()})
    return (
        Note(
            f"{int(is_mismatched.sum())} calls of {', '.join(names)} have operands that no longer "
            "broadcast: a size was not followed, and their shapes and bytes are unreliable.",
            code="resize-no-broadcast",
        ),
    )


def _can_broadcast(shapes: str) -> bool:
    pair = _LIST.decode(shapes)[:2]
    if not all(isinstance(size, int) for shape in pair for size in shape):
        return True  # a list of tensors
    ends = zip(*(reversed(shape) for shape in pair), strict=False)
    return all(a == b or 1 in (a, b) for a, b in ends)


Powers = tuple[Power, ...]
Shape = tuple[int, ...]

_MAX_READINGS = 48  # readings considered per tensor
_NO_COST = 0.0
_HIDDEN_AS_SEQUENCE = 1.0  # a constant size that equals the sequence length by chance
_HIDDEN_AS_TOKENS = 1.5  # a constant size that equals the number of tokens by chance
_MULTIPLE = 2.0  # a multiple of the size: heads x batch, or a flattened tensor
_REPEATED = 1.2  # a second sequence dimension, as in attention scores


@lru_cache(maxsize=1 << 16)
def readings(
    shape: Shape, sizing: Sizing, growth: Power | None
) -> tuple[tuple[float, Powers], ...]:
    """Return (cost, powers of each dimension), the cheapest first, then batch and sequence first.

    Args:
        shape: sizes of the tensor.
        sizing: captured and new sizes.
        growth: growth of its number of elements; None if unknown.
    """
    candidates: list[tuple[float, Powers]] = [(0.0, ())]
    for position, size in enumerate(shape):
        options = _options(size, position, len(shape), sizing)
        candidates = [
            (cost + cost_of_size + _order(powers, power), (*powers, power))
            for cost, powers in candidates
            for cost_of_size, power in options
            if growth is None or _within((*powers, power), growth)
        ]
        # Sort only if there are too many: in the unsorted order, equal costs keep the first of two
        # multiples of the micro-batch, which is the one that grows.
        if len(candidates) > 16 * _MAX_READINGS:
            candidates = sorted(candidates, key=lambda candidate: candidate[0])[
                : 16 * _MAX_READINGS
            ]
    if growth is not None:
        candidates = [candidate for candidate in candidates if total(candidate[1]) == growth]
    return tuple(sorted(candidates, key=lambda candidate: candidate[0])[:_MAX_READINGS])


def _options(size: int, position: int, rank: int, sizing: Sizing) -> list[tuple[float, Power]]:
    seq, batch = sizing.lengths, sizing.batch.before
    length = size in seq or sizing.is_shifted_sequence(size)
    tokens = sizing.is_token_count(size)
    options: list[tuple[float, Power]] = []
    if size == batch:
        options.append((_NO_COST, BATCH))
    elif size % batch == 0 and size:
        options.append((_MULTIPLE + 0.5 * (batch == 1) + _MULTIPLE * length, BATCH))
    if length:
        options.append((_NO_COST, SEQ))
    elif size and size % sizing.unit == 0:
        options.append((_MULTIPLE + 1, SEQ))
    merged = 0.3 if position == 0 or rank == 2 else 3.3
    if tokens:
        options.append((merged, TOKENS))
    elif size and size % (batch * sizing.unit) == 0:
        options.append((merged + _MULTIPLE + 1, TOKENS))
    if size and size % (batch * sizing.unit**2) == 0:
        options.append((merged + 2 * _MULTIPLE + 1, (2, 1)))
    # Pairs of positions, for relative position embeddings.
    if size and size % sizing.unit**2 == 0:
        options.append((merged + 2 * _MULTIPLE + 2, (2, 0)))
    # Size 1 is often a broadcast dimension, and a small batch may equal the experts per token.
    by_chance = batch == 1 or size in sizing.routes
    constant = (0.02 if by_chance else 0.5) * (size == batch)
    if length or tokens:
        constant = _HIDDEN_AS_SEQUENCE if length else _HIDDEN_AS_TOKENS
    options.append((constant, CONSTANT))
    return options


def _order(powers: Powers, power: Power) -> float:
    """Return the cost of a dimension after others: a second sequence, or batch after sequence."""
    seq, batch = total(powers)
    cost = 0.0
    if power[0] and seq:
        cost += _REPEATED
    if power[1] and batch:
        cost += 2 * _REPEATED
    if power == BATCH and seq:
        cost += 0.75
    return cost


def _within(powers: Powers, growth: Power) -> bool:
    seq, batch = total(powers)
    return seq <= growth[0] and batch <= growth[1]


_NAME_BOTH = "name both captured sizes: --seq 4096=8192 --micro-batch 1=1"
_GROUPED = frozenset({"aten::_grouped_mm", "aten::_scaled_grouped_mm"})
# Operators that select the tokens of an expert by value.
_SELECTS_TOKENS = frozenset(
    f"aten::{name}"
    for name in (
        "nonzero nonzero_static masked_select masked_scatter sort argsort bincount histc _unique2 "
        "unique_consecutive unique_dim repeat_interleave _local_scalar_dense"
    ).split()
)


def infer_sizing(graph: Graph, seq: Change | None, batch: Change | None) -> Sizing:
    """Return captured and new sizes; sizes that are not requested stay as captured.

    The token ids of a language model are the first integers [micro-batch, sequence] in the step.
    Each rank of a cp axis has a part of the sequence. A step without token ids has no
    sequence if only a micro-batch of two or more is requested: an image model, for example.

    Raises:
        AnnotateError: the graph does not show the sizes or distinguish its tensors, routes unequal
            shares of tokens to experts, is of a compiled step, or nothing would change.
    """
    _check(graph)
    length, count = seq.before if seq else 0, batch.before if batch else 0
    if not length or not count:
        candidates = token_ids(graph)
        if not candidates and batch and seq is None and count > 1:
            if count == batch.after:
                raise AnnotateError(
                    f"nothing changes: the micro-batch is {count} before and after",
                    code="resize-same-batch",
                )
            # Only the user names the micro-batch, and a wrong one would grow sizes that equal it.
            _check_leads(graph, count)
            return Sizing.of(NO_SEQUENCE, batch, graph.job)
        fits = {
            (b, s)
            for b, s in candidates
            if (not length or s == length) and (not count or b == count)
        }
        # A guess between two readings would scale other dimensions without notice.
        if len(fits) != 1:
            raise AnnotateError(
                _message_unknown(candidates, length, count), code="resize-sizes-unknown"
            )
        count, length = fits.pop()
        if count == length:
            raise AnnotateError(
                f"the captured sequence length and micro-batch are both {count}, so shapes "
                f"cannot distinguish them; {_NAME_BOTH}",
                code="resize-sizes-equal",
            )
    sizing = Sizing.of(
        Change(length, seq.after if seq else length),
        Change(count, batch.after if batch else count),
        graph.job,
    )
    if sizing.seq.before == sizing.seq.after and sizing.batch.before == sizing.batch.after:
        raise AnnotateError(
            f"nothing changes: the step was captured with a sequence length of {length} and a "
            f"micro-batch of {count}",
            code="resize-nothing-changes",
        )
    return replace(sizing, routes=_routes(graph, sizing))


def _check_leads(graph: Graph, count: int) -> None:
    """Raise if no result of forward has the micro-batch as its first dimension.

    Raises:
        AnnotateError: none has.
    """
    nodes, strings = graph.nodes, graph.strings
    leading_sizes = Counter[int]()
    for code in nodes.output_shapes[nodes.phase == Phase.FORWARD].tolist():
        shapes: list[Any] = msgspec.json.decode(strings[code] or "[]")
        leading_sizes.update(
            {shape[0] for shape in shapes if len(shape) > 1 and isinstance(shape[0], int)}
        )
    if count not in leading_sizes:
        common = ", ".join(str(size) for size, _ in leading_sizes.most_common(3))
        raise AnnotateError(
            f"no result of forward has a first dimension of {count}; most have {common}\n"
            "  name the captured micro-batch: --micro-batch CAPTURED=NEW",
            code="resize-batch-ambiguous",
        )


def _routes(graph: Graph, sizing: Sizing) -> tuple[int, ...]:
    """Return the numbers of experts per token, from the rows of the experts' products.

    Raises:
        AnnotateError: a router gives experts a number of rows that is no multiple of the tokens.
    """
    nodes, strings = graph.nodes, graph.strings
    codes = {strings[int(code)]: int(code) for code in np.unique(nodes.op)}
    products = [code for op, code in codes.items() if op in _GROUPED]
    if not products:
        # Experts that compute every token grow with the tokens and need no routes.
        if "aten::topk" in codes and _selects_tokens(graph):
            raise AnnotateError(
                "the step routes tokens to experts (aten::topk) one expert at a time, and the "
                "tokens per expert are no multiple of the sequence\n  run all experts in one call "
                "(aten::_grouped_mm; transformers: experts_implementation='grouped_mm')",
                code="resize-expert-tokens",
            )
        return ()
    rows = np.isin(nodes.op, products) & (nodes.phase == Phase.FORWARD)
    routes: set[int] = set()
    tokens = {length * sizing.batch.before for length in sizing.lengths}
    for code in np.unique(nodes.input_shapes[rows]).tolist():
        # The rows are tokens times experts per token.
        count = int(msgspec.json.decode(strings[code])[0][0])
        multiples = {
            count // token_count for token_count in tokens if count and count % token_count == 0
        }
        if not multiples:
            raise AnnotateError(
                f"the experts of this rank got {count} rows of tokens, no multiple of the "
                f"{max(tokens)} tokens of a micro-batch, so their share at another size is "
                "unknown\n  capture with `--moe-routing balanced`, or at the other size",
                code="resize-expert-rows",
            )
        routes |= multiples
    return tuple(sorted(routes))


def _selects_tokens(graph: Graph) -> bool:
    """Return whether forward selects tokens per expert; otherwise experts compute all tokens."""
    forward = np.unique(graph.nodes.op[graph.nodes.phase == Phase.FORWARD])
    return any(graph.strings[int(code)] in _SELECTS_TOKENS for code in forward)


def _check(graph: Graph) -> None:
    if graph.job.measurement.depths is not None:
        raise AnnotateError(
            "the trace was extrapolated from fewer layers, so its tensors cannot be followed\n"
            "  capture all layers",
            code="resize-extrapolated-trace",
        )
    if graph.job.compilation is not None:
        raise AnnotateError(
            "the step was compiled, and tensors cannot be followed through generated kernels\n"
            "  use the eager capture next to it (--compile writes trace.eager.et)",
            code="resize-compiled-trace",
        )
    # The job records a compilation only for `--compile`. After torch.compile in a script the module
    # shows it, but in captures without a device, or of `model.compile()`, only the kernels do.
    wrapped = any(module.type == "OptimizedModule" for module in graph.job.modules)
    operators = np.unique(graph.nodes.op).tolist()
    if wrapped or any(is_generated(graph.strings[code]) for code in operators):
        raise AnnotateError(
            "the script compiled its model, and tensors cannot be followed through generated "
            "kernels\n"
            "  capture it without torch.compile",
            code="resize-compiled-script",
        )
    values = np.unique(graph.nodes.input_values).tolist()
    if not any(has_tensor_ids(graph.strings[code]) for code in values):
        raise AnnotateError(
            "the operands of the trace have no tensor ids, so sequence and micro-batch cannot be "
            "followed\n  capture it with `capture run`, or convert with an execution trace",
            code="resize-no-tensor-ids",
        )
    if any(PACKED in graph.strings[code] for code in values):
        raise AnnotateError(
            "attention computes packed sequences whose lengths are recorded, and no other size has "
            "these lengths\n  capture it at the other size",
            code="resize-packed-sequences",
        )


def _message_unknown(candidates: list[tuple[int, int]], length: int, count: int) -> str:
    if not candidates:
        return (
            "sequence length and micro-batch are unknown: forward reads no token ids (a later "
            f"pipeline stage, or no language model)\n  {_NAME_BOTH}; for a model without "
            "sequences, captured with two samples or more, --micro-batch 8=64 is enough"
        )
    shapes = " or ".join(f"{b} x {s}" for b, s in candidates)
    requested = [f"sequence {length}"] * bool(length) + [f"micro-batch {count}"] * bool(count)
    if requested:
        return (
            f"forward reads token ids of {shapes} (micro-batch x sequence), not of "
            f"{', '.join(requested)}"
        )
    return (
        f"forward reads integers of {shapes}, and the token ids among them are ambiguous; "
        f"{_NAME_BOTH}"
    )
