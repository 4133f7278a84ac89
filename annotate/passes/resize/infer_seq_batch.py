"""Infer sequence length and micro-batch of a captured step from its token ids."""

from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from onerank.annotate.passes.resize.size_change import NO_SEQUENCE, Change, Sizing
from onerank.annotate.passes.resize.tensor_locations import tells_tensors
from onerank.annotate.token_count import token_ids
from onerank.ir import Graph, Phase
from onerank.ir.errors import AnnotateError

_NAME_BOTH = "name both captured sizes: --seq 4096=8192 --micro-batch 1=1"
_GROUPED = frozenset({"aten::_grouped_mm", "aten::_scaled_grouped_mm"})
_FINDS = frozenset(
    f"aten::{name}"
    for name in (
        "nonzero nonzero_static masked_select masked_scatter sort argsort bincount histc _unique2 "
        "unique_consecutive unique_dim repeat_interleave _local_scalar_dense"
    ).split()
)
"""Operators whose results, or their number, decide which tokens an expert gets."""


def sizing_of(graph: Graph, seq: Change | None, batch: Change | None) -> Sizing:
    """Return captured and new sizes; sizes that are not requested stay as captured.

    The token ids of a language model are integers, [micro-batch, sequence], and the first in the
    step. Ranks of a cp axis hold a part of the sequence each. A step without token ids has no
    sequence if only a micro-batch of two or more is requested: an image model, for example.

    Raises:
        AnnotateError: the graph does not show the sizes or distinguish its tensors, routes unequal
            shares of tokens to experts, is of a compiled step, or nothing would change.
    """
    _check(graph)
    length, count = seq.before if seq else 0, batch.before if batch else 0
    if not length or not count:
        found = token_ids(graph)
        if not found and batch and seq is None and count > 1:
            if count == batch.after:
                raise AnnotateError(
                    f"nothing changes: a micro-batch of {count} would stay one",
                    code="resize-same-batch",
                )
            _check_leads(graph, count)
            return Sizing.of(NO_SEQUENCE, batch, graph.job)
        fits = {
            (b, s) for b, s in found if (not length or s == length) and (not count or b == count)
        }
        if len(fits) != 1:
            raise AnnotateError(_untold(found, length, count), code="resize-sizes-unknown")
        count, length = fits.pop()
        if count == length:
            raise AnnotateError(
                f"the captured sequence length and micro-batch are both {count}, so that no shape "
                f"tells which is which; {_NAME_BOTH}",
                code="resize-sizes-equal",
            )
    made = Sizing.of(
        Change(length, seq.after if seq else length),
        Change(count, batch.after if batch else count),
        graph.job,
    )
    if made.seq.before == made.seq.after and made.batch.before == made.batch.after:
        raise AnnotateError(
            f"nothing changes: the step was captured with a sequence length of {length} and a "
            f"micro-batch of {count}",
            code="resize-nothing-changes",
        )
    return replace(made, routes=_routes(graph, made))


def _check_leads(graph: Graph, count: int) -> None:
    """Refuse a micro-batch that no result of forward has as its first dimension."""
    nodes, strings = graph.nodes, graph.strings
    found = Counter[int]()
    for code in nodes.output_shapes[nodes.phase == Phase.FORWARD].tolist():
        shapes: list[Any] = msgspec.json.decode(strings[code] or "[]")
        found.update({one[0] for one in shapes if len(one) > 1 and isinstance(one[0], int)})
    if count not in found:
        told = ", ".join(str(size) for size, _ in found.most_common(3))
        raise AnnotateError(
            f"forward has no result of {count} samples, its first dimension; those of most are "
            f"{told}: which of them was captured?",
            code="resize-batch-ambiguous",
        )


def _routes(graph: Graph, sizing: Sizing) -> tuple[int, ...]:
    """Return how many experts a token goes to, by the rows that products of experts have.

    Raises:
        AnnotateError: a router chooses, and what its experts get is no multiple of the tokens.
    """
    nodes, strings = graph.nodes, graph.strings
    named = {strings[int(code)]: int(code) for code in np.unique(nodes.op)}
    products = [code for op, code in named.items() if op in _GROUPED]
    if not products:
        if "aten::topk" in named and _parts_tokens(graph):
            raise AnnotateError(
                "the step routes tokens to experts (aten::topk) that work one after another, and "
                "how many tokens each gets is no multiple of the sequence: let all work in one "
                "call (aten::_grouped_mm; transformers: experts_implementation='grouped_mm')",
                code="resize-expert-tokens",
            )
        return ()
    rows = np.isin(nodes.op, products) & (nodes.phase == Phase.FORWARD)
    found: set[int] = set()
    tokens = {length * sizing.batch.before for length in sizing.lengths}
    for code in np.unique(nodes.input_shapes[rows]).tolist():
        count = int(msgspec.json.decode(strings[code])[0][0])
        times = {count // one for one in tokens if count and count % one == 0}
        if not times:
            raise AnnotateError(
                f"the experts of this rank got {count} rows of tokens, no multiple of the "
                f"{max(tokens)} tokens of a micro-batch, so that their share at another size is "
                "not known; capture with `--moe-routing balanced`, or at the other size",
                code="resize-expert-rows",
            )
        found |= times
    return tuple(sorted(found))


def _parts_tokens(graph: Graph) -> bool:
    """Return whether forward finds which tokens go where; else each expert works on all of them."""
    forward = np.unique(graph.nodes.op[graph.nodes.phase == Phase.FORWARD])
    return any(graph.strings[int(code)] in _FINDS for code in forward)


def _check(graph: Graph) -> None:
    if graph.job.measurement.depths is not None:
        raise AnnotateError(
            "the trace was extrapolated from fewer layers, so its tensors cannot be followed; "
            "capture all layers",
            code="resize-extrapolated-trace",
        )
    if graph.job.compilation is not None:
        raise AnnotateError(
            "the step was compiled, and generated kernels do not tell their operands; use the "
            "eager capture beside it (--compile writes trace.eager.et)",
            code="resize-compiled-trace",
        )
    if any(module.type == "OptimizedModule" for module in graph.job.modules):
        raise AnnotateError(
            "the script compiled its model, and generated kernels do not tell their operands; "
            "capture it without torch.compile",
            code="resize-compiled-script",
        )
    values = np.unique(graph.nodes.input_values).tolist()
    if not any(tells_tensors(graph.strings[code]) for code in values):
        raise AnnotateError(
            "the trace does not tell which tensors are the same (its operands have no ids), so "
            "sequence and micro-batch cannot be followed; capture it with `capture run`, or "
            "convert a recording with an execution trace",
            code="resize-no-tensor-ids",
        )


def _untold(found: list[tuple[int, int]], length: int, count: int) -> str:
    if not found:
        return (
            "the trace does not tell its sequence length and micro-batch: forward reads no token "
            f"ids (a later stage of a pipeline, or no language model); {_NAME_BOTH}; of a model "
            "without sequences, captured with two samples or more, --micro-batch 8=64 is enough"
        )
    told = " or ".join(f"{b} x {s}" for b, s in found)
    named = [f"sequence {length}"] * bool(length) + [f"micro-batch {count}"] * bool(count)
    if named:
        return (
            f"forward reads token ids of {told} (micro-batch x sequence), not of {', '.join(named)}"
        )
    return (
        f"forward reads integers of {told}, and which are the token ids cannot be told; "
        f"{_NAME_BOTH}"
    )
