"""Coarser graphs: rules on small graphs, and what must hold for any graph."""

from hypothesis import given, settings
from hypothesis import strategies as st
from notes import note_of
from raised import raises_code

from onerank.ir import Graph, GraphBuilder, Job, Kind, Module, Phase, Reason
from onerank.ir.coarsen import Scope, scopes_of

MODULES = (
    Module("model", "Model"),
    Module("layers.0", "Block", "layer", "layers.0"),
    Module("layers.0.attn", "Attention", "attention", "layers.0"),
    Module("layers.0.attn.q", "Linear", "attention", "layers.0", "layers.0.attn"),
    Module("layers.0.mlp", "MLP", "mlp", "layers.0"),
    Module("head", "Linear", "head"),
)
JOB = Job(modules=MODULES)


def chain(*rows: tuple[str, int], phase: Phase = Phase.FORWARD, kind: Kind = Kind.KERNEL) -> Graph:
    """Return kernels of (module, duration) on one stream, one after another."""
    builder = GraphBuilder()
    for position, (module, duration) in enumerate(rows):
        builder.add(name=f"k{position}", kind=kind, module=module, duration_ns=duration,
                    phase=phase, stream=7, start_ns=position, micro_batch=0)  # fmt: skip
        if position:
            builder.edge(position - 1, position, Reason.STREAM_ORDER)
    return builder.build(JOB)


def rows(graph: Graph) -> list[tuple[str, str, int]]:
    return [(node.name, node.text("module"), node.duration_ns) for node in graph]


STEP = (("layers.0.attn.q", 3), ("layers.0.attn", 4), ("layers.0", 5), ("layers.0.mlp", 6))


def test_submodules():
    coarse = chain(*STEP, ("head", 7), ("model", 8)).coarsen("submodule")
    assert rows(coarse) == [
        ("attention forward", "layers.0.attn", 7),
        ("layer forward", "layers.0", 5),
        ("mlp forward", "layers.0.mlp", 6),
        ("head forward", "head", 7),
        ("loss forward", "", 8),
    ]
    assert [coarse.edges.of(index) for index in range(5)] == [
        [],
        *([(index, Reason.STREAM_ORDER)] for index in range(4)),
    ]


def test_calls_of_python_add():
    graph = chain(*STEP)
    texts = ('{"dtensor":2}', "", '{"dtensor":1,"function":4}', '{"function":1}')
    counted = graph.with_columns(python_calls=graph.strings.encode(texts))
    assert counted.coarsen("submodule").text("python_calls") == [
        '{"dtensor":2}', '{"dtensor":1,"function":4}', '{"function":1}'
    ]  # fmt: skip
    assert counted.coarsen("layer").text("python_calls") == ['{"dtensor":3,"function":5}']


def test_layers():
    coarse = chain(*STEP, ("head", 7), ("model", 8)).coarsen("layer")
    assert rows(coarse)[0] == ("layer forward", "layers.0", 18)
    assert len(coarse) == 3


def test_before_the_head_and_without_one_there_is_no_loss():
    assert [n.name for n in chain(("model", 1), ("head", 1)).coarsen("layer")] == [
        "other forward",
        "head forward",
    ]
    assert [n.name for n in chain(("layers.0", 1), ("model", 1)).coarsen("layer")] == [
        "layer forward",
        "other forward",
    ]


def test_the_optimizer_is_its_phase_whatever_the_module():
    scoping = scopes_of(chain(("", 1), ("head", 1), phase=Phase.OPTIMIZER), "submodule")
    assert scoping.scopes == [Scope("", "optimizer")]


def test_communication_stays_and_divides():
    builder = GraphBuilder()
    for position, kind in enumerate((Kind.KERNEL, Kind.COLLECTIVE, Kind.KERNEL)):
        builder.add(name="x", kind=kind, module="layers.0.mlp", duration_ns=5, stream=7,
                    phase=Phase.FORWARD, comm_bytes=64 if position == 1 else -1)  # fmt: skip
        if position:
            builder.edge(position - 1, position, Reason.STREAM_ORDER)
    coarse = builder.build(JOB).coarsen("layer")
    assert [node.kind for node in coarse] == [Kind.KERNEL, Kind.COLLECTIVE, Kind.KERNEL]
    assert coarse.node(1).value("comm_bytes") == 64
    assert coarse.edges.of(2) == [(1, Reason.STREAM_ORDER)]


def test_a_wait_from_another_stream_divides_so_that_no_cycle_arises():
    """a1 -> b1 -> a2 -> b2, with a1 a2 on one stream and b1 b2 on another, all of one scope."""
    builder = GraphBuilder()
    for position, stream in enumerate((1, 2, 1, 2)):
        builder.add(name="k", kind=Kind.KERNEL, module="layers.0", duration_ns=1, stream=stream,
                    start_ns=position, phase=Phase.FORWARD)  # fmt: skip
        if position:
            builder.edge(position - 1, position, Reason.SYNC)
    coarse = builder.build(JOB).coarsen("layer")
    assert len(coarse) == 4
    assert len(coarse.topological_order()) == 4


def test_host_operators_are_contracted_and_their_bytes_kept():
    builder = GraphBuilder()
    builder.add(name="op", kind=Kind.HOST_OP, thread=0, duration_ns=9, bytes_allocated=100)
    builder.add(name="k", kind=Kind.KERNEL, stream=7, module="layers.0", duration_ns=2,
                phase=Phase.FORWARD)  # fmt: skip
    builder.edge(0, 1, Reason.LAUNCH)
    coarse = builder.build(JOB).coarsen("layer")
    assert rows(coarse) == [("layer forward", "layers.0", 2)]
    assert coarse.node(0).value("bytes_allocated") == 100
    note_of(coarse.job.measurement.notes, "graph-coarsened", "1 host operators (9 ns)")


def test_a_graph_without_modules_is_refused():
    with raises_code("graph-no-modules"):
        GraphBuilder().build(Job()).coarsen("layer")


NODES = st.lists(
    st.tuples(
        st.sampled_from([Kind.KERNEL, Kind.KERNEL, Kind.KERNEL, Kind.COLLECTIVE, Kind.HOST_OP]),
        st.sampled_from(["", "model", "layers.0.attn.q", "layers.0.mlp", "head"]),
        st.integers(0, 2),
        st.integers(0, 50),
        st.lists(st.integers(1, 6), max_size=3),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=80, deadline=None)
@given(NODES, st.sampled_from(["layer", "submodule"]))
def test_any_graph_stays_acyclic_and_keeps_its_time_and_bytes(node_specs, grain):
    builder = GraphBuilder()
    for position, (kind, module, lane, duration, back) in enumerate(node_specs):
        builder.add(name="x", kind=kind, module=module, stream=lane, thread=lane,
                    duration_ns=duration, bytes_allocated=duration, start_ns=position,
                    phase=Phase.BACKWARD)  # fmt: skip
        for source in {position - distance for distance in back if distance <= position}:
            builder.edge(source, position, Reason.DATA)
    graph = builder.build(JOB)
    coarse = graph.coarsen(grain)
    assert len(coarse.topological_order()) == len(coarse)
    if graph.gpu_compute.any():
        is_kept = graph.gpu_compute | graph.communication
        assert coarse.nodes.bytes_allocated.sum() == graph.nodes.bytes_allocated.sum()
        assert coarse.communication.sum() == graph.communication.sum()
        assert coarse.nodes.duration_ns.sum() == graph.nodes.duration_ns[is_kept].sum()
