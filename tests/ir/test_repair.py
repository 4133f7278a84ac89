"""Broken traces: dangling edges, nodes that wait for themselves, cycles; and feeders' JSON."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from notes import codes
from raised import raises_code

from onerank.ir import Collective, Kind, chakra
from onerank.ir.chakra.et_def_pb2 import COMP_NODE, GlobalMetadata, Node
from onerank.ir.chakra.framing import frame
from onerank.ir.errors import ChakraError, GraphError


def write(path: Path, waits: dict[int, list[int]], starts: dict[int, int] | None = None) -> Path:
    """Write a trace of another tool whose nodes wait as given."""
    messages = [GlobalMetadata(version="0.0.4").SerializeToString()]
    for number, ids in waits.items():
        node = Node(id=number, name=f"op {number}", type=COMP_NODE, data_deps=ids)
        node.start_time_micros = (starts or {}).get(number, number)
        node.duration_micros = 1
        messages.append(node.SerializeToString())
    path.write_bytes(frame(messages))
    return path


def waits_of(graph: Any) -> dict[int, list[int]]:
    ids = graph.nodes.id.tolist()
    return {ids[n]: [ids[s] for s, _ in graph.edges.of(n)] for n in range(len(graph))}


def test_an_intact_trace_stays_as_it_is(tmp_path):
    path = write(tmp_path / "t.et", {1: [], 2: [1], 3: [2, 1]})
    graph, repairs = chakra.read_repaired(path)
    assert repairs.total == 0
    assert graph.job.measurement.notes == ()
    graph.write(tmp_path / "out.et")
    assert (tmp_path / "out.et").read_bytes() == path.read_bytes()


def test_each_kind_is_counted_and_dropped(tmp_path):
    broken = {1: [99], 2: [1, 2], 3: [2, 4], 4: [3, 98, 97], 5: [5, 4]}
    path = write(tmp_path / "t.et", broken)
    with raises_code("graph-dangling-edge", GraphError):
        chakra.read(path)
    graph, repairs = chakra.read_repaired(path)
    assert (repairs.dangling, repairs.self_dependencies, repairs.cyclic) == (3, 2, 1)
    # of the cycle 3 -> 4 -> 3 the earlier node no longer waits for the later one
    assert waits_of(graph) == {1: [], 2: [1], 3: [2], 4: [3], 5: [4]}
    assert graph.topological_order().tolist() == [0, 1, 2, 3, 4]
    assert codes(graph.job.measurement.notes) == ["dependencies-dropped"]
    graph.write(tmp_path / "out.et")
    again, repairs = chakra.read_repaired(tmp_path / "out.et")
    assert repairs.total == 0
    assert waits_of(again) == waits_of(graph)
    assert again.job.measurement.notes == graph.job.measurement.notes


def test_the_edge_against_time_closes_a_cycle(tmp_path):
    """Node 1 starts last, so that it may wait for node 3, and not the other way round."""
    path = write(tmp_path / "t.et", {1: [3], 2: [1], 3: [2]}, starts={2: 10, 3: 20, 1: 30})
    graph, repairs = chakra.read_repaired(path)
    assert repairs.cyclic == 1
    assert waits_of(graph) == {1: [3], 2: [], 3: [2]}


def test_two_nodes_of_one_id_cannot_be_repaired(tmp_path):
    path = tmp_path / "t.et"
    node = Node(id=1, name="a", type=COMP_NODE).SerializeToString()
    path.write_bytes(frame([GlobalMetadata().SerializeToString(), node, node]))
    with raises_code("graph-repeated-id", GraphError):
        chakra.read_repaired(path)


@settings(max_examples=60)
@given(
    st.integers(1, 12).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, n + 1), max_size=5), min_size=n, max_size=n)
    )
)
def test_any_graph_becomes_acyclic_and_loses_only_what_is_broken(tmp_path_factory, waits):
    path = write(tmp_path_factory.mktemp("any") / "t.et", dict(enumerate(waits)))
    graph, repairs = chakra.read_repaired(path)
    graph.topological_order()
    n = len(waits)
    assert repairs.dangling == sum(awaited >= n for ids in waits for awaited in ids)
    assert repairs.self_dependencies == sum(
        awaited == k for k, ids in enumerate(waits) for awaited in ids
    )
    assert len(graph.edges) == sum(map(len, waits)) - repairs.total
    forward = all(awaited < k or awaited >= n for k, ids in enumerate(waits) for awaited in ids)
    assert not (forward and repairs.cyclic)


def test_a_long_cycle_needs_no_recursion(tmp_path):
    count = 20_000
    waits = {node: [(node - 1) % count] for node in range(count)}
    graph, repairs = chakra.read_repaired(write(tmp_path / "t.et", waits))
    assert repairs.cyclic == 1
    assert np.array_equal(graph.topological_order(), np.arange(count))


FEEDER: dict[str, Any] = {
    "workload_name": "two nodes",
    "ngpus": 8,
    "soc": {"name": "x"},
    "workload_graph": [
        {"Id": 5, "Name": "aten::mm", "NodeType": 4, "ctrlDeps": [3], "data_deps": [],
         "runtime": 318, "is_cpu_op": True, "unknown": 1.5},
        {"Id": 6, "Name": "gemm", "NodeType": 4, "data_deps": [5], "is_cpu_op": False},
        {"Id": 7, "Name": "all_reduce", "NodeType": 7, "ctrlDeps": [5], "data_deps": [6],
         "runtime": 28, "is_cpu_op": False, "comm_type": 0, "comm_size": 4096, "comm_tag": 2,
         "tensor_size": 2**63},
    ],
}  # fmt: skip


def test_a_feeders_json_becomes_a_trace(tmp_path):
    source, target = tmp_path / "chakra.0.json", tmp_path / "t.et"
    source.write_text(json.dumps(FEEDER, indent=1))
    assert chakra.from_json(source, target) == 3
    records = chakra.read_records(target)
    metadata = {name: given.value for name, given in records.metadata.items()}
    assert metadata == {"workload_name": "two nodes", "ngpus": 8, "soc": '{"name": "x"}'}
    first, _, last = records.nodes
    assert (first.id, first.duration_micros, first.ctrl_deps) == (5, 318, (3,))
    assert first.attributes["unknown"].value == 1.5
    assert last.attributes["tensor_size"].value == 2**63
    graph, repairs = chakra.read_repaired(target)
    assert (repairs.dangling, repairs.total) == (1, 1)
    kinds = [node.kind for node in graph]
    assert kinds == [Kind.HOST_OP, Kind.KERNEL, Kind.COLLECTIVE]
    last_node = graph.node(2)
    assert last_node.collective is Collective.ALL_REDUCE
    assert (last_node.value("comm_bytes"), last_node.value("comm_tag")) == (4096, 2)
    assert last_node.duration_ns == 28_000


@pytest.mark.parametrize(
    "graph",
    [{}, 3, [3], [{"Id": 1}], [{"Id": -1, "NodeType": 4}], [{"Id": 1, "NodeType": "no"}],
     [{"Id": 1, "NodeType": 4, "data_deps": [[1]]}], [{"Id": 1, "NodeType": 4, "x": 2**70}],
     [{"Id": 1, "NodeType": 4, "comm_src": 2**40}], [{"Id": 1, "NodeType": 4, "Name": 3}]],
)  # fmt: skip
def test_a_bad_feeders_json_is_refused(graph, tmp_path):
    source = tmp_path / "t.json"
    source.write_text(json.dumps({"workload_graph": graph}))
    with raises_code("chakra-json-schema", ChakraError):
        chakra.from_json(source, tmp_path / "t.et")
    assert not (tmp_path / "t.et").exists()
