"""Buckets of gradients that follow from their sizes."""

import json
from typing import Any

import pytest

from onerank.converters.expand.layers.ddp_buckets import (
    find_bucket_calls,
    find_buckets,
    insert_bucket_calls,
)
from onerank.ir import Collective, Graph, GraphBuilder, Job, Kind, Phase, Reason

MIB = 1 << 20
FILL, EMPTY = "aten::mul", "torch.distributed.ddp.reducer::copy_bucket_to_grad"


def backward(megabytes: list[int], calls: list[tuple[int, int]]) -> Graph:
    """Return a CPU's backward of gradients in bf16, and calls (after which gradient, MiB)."""
    builder = GraphBuilder()
    before, now, chained = -1, 0, -1
    launchers: list[int] = []

    def host(name: str, phase: Phase, shapes: Any, types: Any) -> int:
        nonlocal before, now
        node = builder.add(
            name=name, op=name, kind=Kind.HOST_OP, thread=0, start_ns=now, duration_ns=10,
            phase=phase, input_shapes=json.dumps(shapes, separators=(",", ":")),
            input_types=json.dumps(types),
        )  # fmt: skip
        if before >= 0:
            builder.edge(before, node, Reason.PROGRAM_ORDER)
        before, now = node, now + 100
        return node

    tensor = "Tensor(c10::BFloat16)"
    shapes = [[size * MIB // 2] for size in megabytes]
    for number, shape in enumerate(shapes):
        host("aten::mm", Phase.BACKWARD, [shape, shape], [tensor, tensor])
        filled = host(FILL, Phase.BACKWARD, [shape, [], shape], [tensor, "Tensor(double)", tensor])
        for at, size in calls:
            if at == number:
                call = builder.add(
                    name="all_reduce", kind=Kind.COLLECTIVE, collective=Collective.ALL_REDUCE,
                    comm_bytes=size * MIB, group="dp", start_ns=now - 90, phase=Phase.BACKWARD,
                    input_shapes=f"[[{size * MIB // 2}]]",
                )  # fmt: skip
                builder.edge(filled, call, Reason.PROGRAM_ORDER)
                if chained >= 0:
                    builder.edge(chained, call, Reason.STREAM_ORDER)
                chained = call
                launchers.append(call)
    emptied = [host(EMPTY, Phase.NONE, [shape], [tensor]) for shape in shapes]
    for call in launchers:
        builder.edge(call, emptied[0], Reason.SYNC)
    return builder.build(Job())


SIZES = [2, 10, 10, 10, 1, 40, 3]
CALLS = [(0, 2), (3, 30), (5, 41), (6, 3)]  # 1 MiB fills the first, 25 MiB the others


def calls(graph: Graph) -> list[tuple[int, str]]:
    """Return each call's MiB and the operand shapes of the nodes before it, in order."""
    order = [i for i in graph.topological_order().tolist() if graph.communication[i]]
    after = [next(s for s, why in graph.edges.of(i) if why == Reason.PROGRAM_ORDER) for i in order]
    return [
        (int(graph.nodes.comm_bytes[i]) // MIB, graph.node(source).text("input_shapes"))
        for i, source in zip(order, after, strict=True)
    ]


def test_buckets_follow_from_the_sizes():
    buckets = find_buckets(backward(SIZES, CALLS))
    assert buckets is not None
    assert buckets.ends == [1, 4, 6, 7]
    assert [size // MIB for size in buckets.bytes] == [2, 30, 41, 3]


def test_calls_are_taken_out_and_put_back_as_they_were():
    graph = backward(SIZES, CALLS)
    bucket_calls = find_bucket_calls(graph)
    assert bucket_calls is not None
    without = bucket_calls.without()
    assert not without.communication.any()
    assert len(without) == len(graph) - 4
    restored = insert_bucket_calls(without, bucket_calls)
    assert calls(restored) == calls(graph)
    assert len(restored.edges) == len(graph.edges)
    assert find_bucket_calls(restored) is not None


def test_a_longer_backward_has_the_calls_of_its_own_sizes():
    bucket_calls = find_bucket_calls(backward(SIZES, CALLS))
    assert bucket_calls is not None
    longer = [2, 10, 10, 10, 1, 10, 10, 10, 1, 40, 3]
    longer_step = insert_bucket_calls(backward(longer, []), bucket_calls)
    assert calls(longer_step) == calls(
        backward(longer, [(0, 2), (3, 30), (7, 31), (9, 41), (10, 3)])
    )


@pytest.mark.parametrize(
    "others",
    [[(0, 2), (3, 30), (5, 41)], [(0, 2), (2, 20), (5, 51), (6, 3)], [(0, 2), (3, 31), (5, 41)]],
    ids=["one missing", "a smaller cap", "other bytes"],
)
def test_calls_that_do_not_follow_so_are_left_alone(others):
    assert find_bucket_calls(backward(SIZES, others)) is None
