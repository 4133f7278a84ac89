"""Serialized communication and compute, on steps whose times can be added up by hand."""

import pytest
from notes import note_of
from raised import raises_code

from onerank.analysis.step_time import replay
from onerank.annotate import recost
from onerank.annotate.passes.overlap import SerializeOverlap
from onerank.annotate.passes.pass_options import PassOptions
from onerank.ir import (
    Collective,
    Device,
    Evidence,
    GraphBuilder,
    Job,
    Kind,
    Measurement,
    ProcessGroup,
    Reason,
)

COMPUTE, NETWORK = 7, 20


def step(*work, waits=()):
    """Return a graph of host operators that launch compute and collectives, in this order.

    `work` holds (kind, duration_ns, uncontended_ns); `waits` pairs of indices: the second
    waits for the first.
    """
    builder = GraphBuilder()
    last, nodes = dict[int, int](), list[int]()
    for place, (kind, duration, uncontended_ns) in enumerate(work):
        host = builder.add(kind=Kind.HOST_OP, name="op", thread=1, start_ns=10 * place)
        stream = COMPUTE if kind is Kind.KERNEL else NETWORK
        about = (
            {"collective": Collective.ALL_REDUCE, "comm_bytes": 8, "group": "dp"}
            if kind is Kind.COLLECTIVE
            else {}
        )
        node = builder.add(
            kind=kind, name="work", stream=stream, start_ns=10 * place + 5, duration_ns=duration,
            uncontended_ns=uncontended_ns, evidence=Evidence.MEASURED, **about,
        )  # fmt: skip
        builder.edge(host, node, Reason.LAUNCH)
        if stream in last:
            builder.edge(last[stream], node, Reason.STREAM_ORDER)
        last[stream] = node
        nodes.append(node)
    for before, after in waits:
        builder.edge(nodes[before], nodes[after], Reason.SYNC)
    groups = (ProcessGroup("dp", (0, 1)),)
    return builder.build(Job(groups=groups, device=Device("cuda", "H200"),
                             measurement=Measurement(step_ns=(5,))))  # fmt: skip


K, C = Kind.KERNEL, Kind.COLLECTIVE
DDP = step((K, 1000, -1), (C, 3000, -1), (K, 5000, 4000), (C, 2000, -1), (K, 700, -1),
           waits=[(0, 1), (2, 3), (3, 4)])  # fmt: skip


def test_compute_and_communication_take_turns():
    serialized = SerializeOverlap().apply(DDP)
    # overlapped: 1000 + 5000 + 2000 + 700; serialized: the second kernel at its uncontended time
    assert replay(DDP).step_time_ns == pytest.approx(8700, abs=20)
    assert replay(serialized).step_time_ns == pytest.approx(1000 + 3000 + 4000 + 2000 + 700, abs=20)
    assert replay(serialized).exposed_communication_ns == 5000
    assert (
        len(serialized.edges) == len(DDP.edges) + 1
    )  # the first collective before the second kernel
    assert serialized.job.measurement.step_ns == ()
    note_of(serialized.job.measurement.notes, "overlap-off", "1 added edges", "1 kernels")


def test_it_is_the_source_whose_times_alone_count():
    serialized = recost(DDP, "H100", passes=PassOptions(overlap="off"))
    plain = recost(DDP, "H100")
    assert len(serialized.edges) == len(plain.edges) + 1
    kernels = serialized.gpu_compute
    assert (serialized.nodes.duration_ns[kernels] <= plain.nodes.duration_ns[kernels]).all()
    assert serialized.nodes.duration_ns[kernels][1] < plain.nodes.duration_ns[kernels][1]


def test_several_streams_wait_for_all_of_the_other_sort():
    serialized = SerializeOverlap().apply(step((C, 100, -1), (K, 50, -1), (K, 60, -1), (C, 10, -1)))
    assert replay(serialized).step_time_ns == pytest.approx(220, abs=20)


@pytest.mark.parametrize(
    ("graph", "code"),
    [
        (step((K, 100, -1), (C, 50, -1), waits=[(0, 1)]), "serialize-already-serial"),
        (step((K, 100, -1)), "serialize-nothing-overlaps"),
        (step((C, 100, -1)), "serialize-nothing-overlaps"),
        # The kernel waits for a collective that is issued after it.
        (step((K, 100, -1), (C, 50, -1), waits=[(1, 0)]), "serialize-order-conflict"),
    ],
)
def test_where_there_is_no_overlap(graph, code):
    with raises_code(code):
        SerializeOverlap().apply(graph)
