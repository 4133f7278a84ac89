"""Overlap as far as data allow, on steps whose times can be added up by hand."""

import json
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from notes import note_of
from raised import raises_code

from onerank.analysis.step_time import replay
from onerank.annotate import PassOptions, recost
from onerank.annotate.passes.overlap import CHOICES, MaximizeOverlap, SerializeOverlap
from onerank.cli.commands.annotate import AnnotateOptions
from onerank.cli.dataclass_to_click import choices
from onerank.ir import (
    Collective,
    Device,
    Edges,
    Evidence,
    GraphBuilder,
    Job,
    Kind,
    LayerExtrapolation,
    Line,
    Measurement,
    ProcessGroup,
    Reason,
    World,
)
from onerank.ir.replay import schedule

COMPUTE = 7
ELEMENTS, ITEM = 100, 4


def tensor(place):
    """Return a tensor's text: its storage, or (storage, first element)."""
    storage, offset = place if isinstance(place, tuple) else (place, 0)
    return [storage, storage, offset, ELEMENTS, ITEM, "cuda:0"]


def operands(side, places):
    return {
        f"{side}_shapes": json.dumps([[ELEMENTS] for _ in places]),
        f"{side}_types": json.dumps(["Tensor(float)" for _ in places]),
        f"{side}_values": json.dumps([tensor(place) for place in places]),
    }


def kernel(ns, reads=(), writes=(), *, op="aten::mm"):
    """Return a kernel that reads and writes tensors in these storages."""
    columns = {"op": op, "kind": Kind.KERNEL, "duration_ns": ns}
    return columns | operands("input", reads) | operands("output", writes)


def call(ns, *places, collective=Collective.ALL_REDUCE, **more):
    """Return a blocking call on tensors in these storages."""
    columns = {
        "kind": Kind.COLLECTIVE, "name": "call", "collective": collective, "duration_ns": ns,
        "comm_bytes": ELEMENTS * ITEM, "group": "dp", **more,
    }  # fmt: skip
    if columns["kind"] is not Kind.COLLECTIVE:
        columns["collective"] = Collective.NONE
    return columns | operands("input", places)


def allocation(storage):
    """Return an operator that allocates memory and launches nothing."""
    return {"op": "aten::empty", "kind": Kind.HOST_OP} | operands("output", [storage])


def step(*work, launch_interval_ns=10, job=None):
    """Return a graph of host operators that launch this work on one stream, in this order."""
    builder = GraphBuilder()
    before, host = list[int](), None
    for place, columns in enumerate(work):
        op = columns.get("op", "c10d::call")
        on_host = {k: v for k, v in columns.items() if k.startswith(("input_", "output_"))}
        launcher = builder.add(
            **({"kind": Kind.HOST_OP, "name": op, "op": op, "thread": 1} | on_host),
            start_ns=launch_interval_ns * place,
        )
        if host is not None:
            builder.edge(host, launcher, Reason.PROGRAM_ORDER)
        host = launcher
        if columns["kind"] is Kind.HOST_OP:
            continue
        start = launch_interval_ns * place + 5
        node = builder.add(
            **({"name": op, "stream": COMPUTE, "evidence": Evidence.MEASURED} | columns),
            start_ns=start,
        )
        builder.edge(launcher, node, Reason.LAUNCH)
        if before:
            builder.edge(before[-1], node, Reason.STREAM_ORDER)
        before.append(node)
    groups = (ProcessGroup("dp", (0, 1)), ProcessGroup("pp", (0, 1)))
    measurement = Measurement(step_ns=(5,))
    job = job or Job(groups=groups)
    return builder.build(replace_job(job, groups, measurement))


def replace_job(job, groups, measurement):
    columns = {"groups": groups, "measurement": measurement, "device": Device("cuda", "H200")}
    return msgspec.structs.replace(job, **columns)


def overlapped(*work, **more):
    return MaximizeOverlap().apply(step(*work, **more))


def start_times_us(graph, kind=Kind.COLLECTIVE):
    """Return the replayed start time of each node of a kind, in us."""
    starts = schedule(graph).start_ns
    return [round(int(starts[node.index]) / 1000, 1) for node in graph if node.kind is kind]


# two gradients, summed after the backward in the order of the parameters, and an optimizer step
GRADIENTS = (
    kernel(1000_000, [1], [11]),
    kernel(2000_000, [2], [12]),
    call(500_000, 12),
    call(3000_000, 11),
    kernel(700_000, [11, 12], [13], op="aten::_foreach_add"),
)


def test_sums_after_the_backward_start_when_their_gradients_are_ready():
    captured, rewired = step(*GRADIENTS), overlapped(*GRADIENTS)
    assert replay(captured).step_time_ns == pytest.approx(7200_000, abs=100)
    # 1000, then 3000 of the first gradient's sum overlapping 2000; 500 of the second's sum; 700
    assert start_times_us(rewired) == [4000, 1000]  # the sum that is ready first runs first
    assert start_times_us(rewired, Kind.KERNEL) == [0, 1000, 4500]
    assert replay(rewired).step_time_ns == pytest.approx(5200_000, abs=100)
    assert replay(rewired).exposed_communication_ns == pytest.approx(1500_000, abs=100)
    note_of(rewired.job.measurement.notes, "overlap-on", "2 calls", "1 overlap", "1 are exposed")
    assert rewired.job.measurement.step_ns == ()


def test_calls_get_a_separate_stream_and_are_launched_after_their_data():
    rewired = overlapped(*GRADIENTS)
    calls = [node for node in rewired if node.kind is Kind.COLLECTIVE]
    assert {call.value("stream") for call in calls} == {COMPUTE + 1}
    launched = [
        rewired.node(source).value("start_ns")
        for collective in calls
        for source, reason in rewired.edges.of(collective.index)
        if reason is Reason.LAUNCH
    ]
    assert launched == [10, 0]  # by the operators of the products, not at 20 and 30
    kernels = [node.index for node in rewired if node.kind is Kind.KERNEL]
    for before, after in pairwise(kernels):
        assert (before, Reason.STREAM_ORDER) in rewired.edges.of(after)


def test_a_late_issue_by_the_host_does_not_delay_a_call():
    """The launch of a call does not delay it if the host issues it 5 ms later."""
    rewired = overlapped(*GRADIENTS, launch_interval_ns=5000_000)
    captured = step(*GRADIENTS, launch_interval_ns=5000_000)
    assert start_times_us(captured) == [10_000, 15_000]
    assert start_times_us(rewired) == [7000, 1000]


def test_a_call_whose_data_are_needed_at_once_stays_exposed():
    with raises_code("overlap-data-dependent"):
        overlapped(kernel(1000, [1], [2]), call(500, 2), kernel(300, [2], [3], op="aten::add"))


def test_kernels_wait_only_if_they_use_the_data():
    rewired = overlapped(
        kernel(1000_000, [1], [2]),
        call(500_000, 2),
        kernel(300_000, [1], [3]),
        kernel(100_000, [2], [4], op="aten::add"),
    )
    assert start_times_us(rewired, Kind.KERNEL) == [0, 1000, 1500]


@pytest.mark.parametrize(
    ("last", "begins"),
    [
        (kernel(100_000, [5], [2], op="aten::add_"), 1300),  # other data in newly allocated memory
        (kernel(100_000, [5, 2], [2], op="aten::add_"), 1500),  # written in place
        (kernel(100_000, [5, 2], op="mine::scale"), 1500),  # may write its operands
        (kernel(100_000, [(2, ELEMENTS)], [6]), 1300),  # the bytes behind it
        (kernel(100_000, [(2, ELEMENTS - 1)], [6]), 1500),
        ({"op": "mine::untold", "kind": Kind.KERNEL, "duration_ns": 100_000}, 1500),
    ],
)
def test_nodes_that_wait_for_a_call(last, begins):
    summed, reader = call(500_000, 2, 8), kernel(10, [8], [9])
    work = [kernel(1000_000, [1], [2]), summed, kernel(300_000, [1], [3]), last, reader]
    assert start_times_us(overlapped(*work), Kind.KERNEL)[-2] == begins


@pytest.mark.parametrize(
    ("between", "begins"),
    [
        (kernel(300_000, [1], [3]), 1000),
        (kernel(300_000, [2], [3]), 1300),  # reads what the sum overwrites
        ({"op": "mine::untold", "kind": Kind.KERNEL, "duration_ns": 300_000}, 1300),
    ],
)
def test_a_call_waits_for_users_of_the_memory_that_it_writes(between, begins):
    rest = kernel(900_000, [1], [5]), kernel(10, [2], [6])
    rewired = overlapped(kernel(1000_000, [1], [2]), between, call(500_000, 2), *rest)
    assert start_times_us(rewired) == [begins]


def test_memory_that_a_call_fills():
    """A shard is summed into memory that a kernel read before a new allocation."""
    scatter = call(500_000, 2, 9, collective=Collective.REDUCE_SCATTER)
    work = [kernel(1000_000, [1], [2]), kernel(300_000, [9], [3])]
    rest = [scatter, kernel(100_000, [1], [5]), kernel(10, [9], [6])]
    assert start_times_us(overlapped(*work, allocation(9), *rest)) == [1000]
    assert start_times_us(overlapped(*work, *rest)) == [1300]


@pytest.mark.parametrize(("allocations", "begins"), [([], 1500), ([allocation(2)], 1300)])
def test_memory_that_a_kernel_fills(allocations, begins):
    """Zeros in the memory of a call's data: in place, or after a new allocation."""
    zeros = kernel(100_000, [2], [2], op="aten::fill_")
    work = [kernel(1000_000, [1], [2]), call(500_000, 2, 8), kernel(300_000, [1], [3])]
    rewired = overlapped(*work, *allocations, zeros, kernel(10, [8], [9]))
    assert start_times_us(rewired, Kind.KERNEL)[2] == begins


def test_an_unread_result_is_awaited_as_captured():
    """In a slice, the emulated sum over absent peers may lie in other memory."""
    work = [kernel(1000_000, [1], [2]), call(500_000, 2), kernel(300_000, [1], [3])]
    with raises_code("overlap-data-dependent"):
        overlapped(*work)
    rewired = overlapped(*work, kernel(10, [2], [4]))
    assert start_times_us(rewired, Kind.KERNEL) == [0, 1000, 1500]
    rewired = overlapped(*work, *work, kernel(10, [2], [4]))
    assert start_times_us(rewired, Kind.KERNEL) == [0, 1500, 1800, 2800, 3300]
    note_of(rewired.job.measurement.notes, "overlap-on", "1 are awaited")


def test_a_call_that_depends_on_a_call():
    scatter = call(500_000, 2, 9, collective=Collective.REDUCE_SCATTER)
    rewired = overlapped(
        kernel(1000_000, [1], [2]),
        kernel(800_000, [1], [3]),
        scatter,
        call(200_000, 9, group="pp"),
        kernel(100_000, [9], [5]),
    )
    assert start_times_us(rewired) == [1000, 1500]
    assert start_times_us(rewired, Kind.KERNEL) == [0, 1000, 1800]
    streams = [node.value("stream") for node in rewired if node.kind is Kind.COLLECTIVE]
    assert streams == [COMPUTE + 1, COMPUTE + 2]


def test_calls_without_recorded_tensors_stay():
    untold = {"input_shapes": "", "input_types": "", "input_values": ""}
    rewired = overlapped(
        *GRADIENTS[:2], call(3000_000, 11), call(500_000, 12) | untold, GRADIENTS[-1]
    )
    assert start_times_us(rewired) == [1000, 4000]  # behind the other of its group
    assert start_times_us(rewired, Kind.KERNEL) == [0, 1000, 4500]
    first, second = (node.value("stream") for node in rewired if node.kind is Kind.COLLECTIVE)
    assert (first, second) == (COMPUTE + 1, COMPUTE)
    note_of(rewired.job.measurement.notes, "overlap-on", "1 stay")
    with raises_code("overlap-no-operands"):
        overlapped(kernel(1000, [1], [2]), call(500, 2) | untold)


@pytest.mark.parametrize(
    ("columns", "world", "order"),
    [
        ({}, World.of(dp=2), [4000, 1000]),
        ({"group": "pp"}, World.of(pp=2), [3000, 3500]),
        ({"kind": Kind.SEND, "comm_dst": 1}, World.of(dp=2), [3000, 3500]),
    ],
)
def test_the_order_of_a_group(columns, world, order):
    """Ranks of other stages, and two ranks of a message, keep the captured order."""
    calls = call(500_000, 12, **columns), call(3000_000, 11, **columns)
    work = [*GRADIENTS[:2], *calls, kernel(9000_000, [1], [14]), kernel(10, [11, 12], [15])]
    rewired = overlapped(*work, job=Job(world=world))
    assert start_times_us(rewired, calls[0]["kind"]) == order


def test_received_data_are_awaited_where_they_are_read():
    receive = call(500_000, 21, kind=Kind.RECV, comm_src=1)
    rewired = overlapped(
        kernel(1000_000, [1], [2]), receive, kernel(300_000, [1], [3]), kernel(100, [21], [4])
    )
    (begins,) = start_times_us(rewired, Kind.RECV)
    assert begins < 1  # as soon as the script asks for it
    assert start_times_us(rewired, Kind.KERNEL) == [0, 1000, 1300]


def test_serialize_and_maximize_again():
    rewired = overlapped(*GRADIENTS)
    serialized = SerializeOverlap().apply(rewired)
    assert replay(serialized).step_time_ns == pytest.approx(7200_000, abs=100)
    maximized = MaximizeOverlap().apply(serialized)
    assert replay(maximized).step_time_ns == pytest.approx(5200_000, abs=100)
    assert start_times_us(maximized) == start_times_us(rewired)
    with raises_code("overlap-data-dependent"):
        MaximizeOverlap().apply(rewired)


def test_an_operator_that_launches_after_its_inner_operators():
    """The call is issued when the operator ends: after the inner operators, which began later."""
    graph = step(
        kernel(10_000, [1], [2]),  # launched by the operator at 0, behind the kernel of that at 10
        kernel(30_000, [1], [3]),
        call(50_000, 2),
        kernel(40_000, [1], [4]),
        kernel(10, [2], [5]),
    )
    first, second, *_ = (node.index for node in graph if node.kind is Kind.KERNEL)
    edges, start = graph.edges, graph.nodes.start_ns.copy()
    swapped = {first: second, second: first}
    ordered = edges.reason == Reason.STREAM_ORDER
    source, target = edges.source.copy(), edges.target
    both = ordered & np.isin(source, [first, second])
    source[both] = [swapped[collective] for collective in source[both]]
    target[ordered & (target == second)] = first
    start[first] = start[second] + 1
    behind = Edges.from_pairs(len(graph), source, target, edges.reason)
    rewired = MaximizeOverlap().apply(replace(graph, edges=behind).with_columns(start_ns=start))
    (collective,) = (node for node in rewired if node.kind is Kind.COLLECTIVE)
    launched = [s for s, reason in rewired.edges.of(collective.index) if reason is Reason.LAUNCH]
    assert rewired.nodes.start_ns[launched].tolist() == [10]
    assert start_times_us(rewired) == [40]
    assert replay(SerializeOverlap().apply(rewired)).exposed_communication_ns == 50_000


def test_overlap_of_a_trace_recosted_for_another_gpu():
    rewired = recost(step(*GRADIENTS), "H100", passes=PassOptions(overlap="on"))
    plain = recost(step(*GRADIENTS), "H100")
    assert (rewired.nodes.duration_ns == plain.nodes.duration_ns).all()
    assert replay(rewired).step_time_ns < replay(plain).step_time_ns


def test_names():
    assert choices(AnnotateOptions, "overlap") == CHOICES
    with raises_code("recost-unknown-overlap"):
        recost(step(*GRADIENTS), "H100", passes=PassOptions(overlap="never"))


def test_graphs_without_communication_or_compute():
    for work, code in (
        (GRADIENTS[:2], "overlap-nothing-to-overlap"),
        (GRADIENTS[2:3], "overlap-nothing-to-overlap"),
    ):
        with raises_code(code):
            overlapped(*work)


def test_extrapolated_graphs():
    graph = step(*GRADIENTS)
    line = Line((1, 2), 0, 1, None, 4)
    depths = LayerExtrapolation((1, 2), 4, "layers", 0, 1, 2, line, line, line, line, 4, 0)
    measurement = msgspec.structs.replace(graph.job.measurement, depths=depths)
    with raises_code("overlap-extrapolated-trace"):
        MaximizeOverlap().apply(
            replace(graph, job=msgspec.structs.replace(graph.job, measurement=measurement))
        )
