"""Infer sequence length and micro-batch of a captured step from its token ids."""

from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from onerank.annotate.passes.resize.size_change import NO_SEQUENCE, Change, Sizing
from onerank.annotate.passes.resize.tensor_locations import has_tensor_ids
from onerank.annotate.token_count import token_ids
from onerank.ir import Graph, Phase
from onerank.ir.errors import AnnotateError

_NAME_BOTH = "name both captured sizes: --seq 4096=8192 --micro-batch 1=1"
_GROUPED = frozenset({"aten::_grouped_mm", "aten::_scaled_grouped_mm"})
_SELECTS_TOKENS = frozenset(
    f"aten::{name}"
    for name in (
        "nonzero nonzero_static masked_select masked_scatter sort argsort bincount histc _unique2 "
        "unique_consecutive unique_dim repeat_interleave _local_scalar_dense"
    ).split()
)
"""Operators that select the tokens of an expert by value."""


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
            "the step was compiled, and generated kernels do not record their operands\n"
            "  use the eager capture next to it (--compile writes trace.eager.et)",
            code="resize-compiled-trace",
        )
    # The job records a compilation only for `--compile`; torch.compile in a script leaves this.
    if any(module.type == "OptimizedModule" for module in graph.job.modules):
        raise AnnotateError(
            "the script compiled its model, and generated kernels do not record their operands\n"
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
