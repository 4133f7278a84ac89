"""`show`, `convert --repair` and `annotate` of traces with broken dependencies."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from invoke_cli import invoke

import onerank as package
from onerank.cli import annotate, onerank
from onerank.ir.chakra import read_records, write_records
from onerank.ir.chakra.records import ChakraRecords
from onerank.ir.edges import Edges


def with_dependencies(
    records: ChakraRecords, changes: dict[int, tuple[int, ...]], path: Path
) -> None:

    nodes = [
        replace(node, ctrl_deps=(*node.ctrl_deps, *changes.get(node.position, ())))
        for node in records.nodes
    ]
    write_records(replace(records, path=path, nodes=nodes))


@pytest.fixture
def broken(traces, tmp_path):
    """Return a trace with 2 dangling edges, 1 node that waits for itself, and 1 cycle."""
    records = read_records(traces / "gpu.et")
    first, second = records.nodes[0], records.nodes[1]
    waiter = next(node for node in records.nodes if first.id in (*node.ctrl_deps, *node.data_deps))
    changes = {0: (10**9, waiter.id), second.position: (10**9 + 1, second.id)}
    path = tmp_path / "broken.et"
    with_dependencies(records, changes, path)
    return path


def test_a_broken_trace_is_shown(broken, traces):
    intact = json.loads(invoke(onerank, "show", traces / "gpu.et", "--json").stdout)
    result = invoke(onerank, "show", broken, "--json")
    shown = json.loads(result.stdout)
    assert shown["gpu_time_ns"] == intact["gpu_time_ns"]
    assert shown["edges"] == intact["edges"]
    assert len(shown["notes"]) == len(intact["notes"]) + 1
    assert "--repair" in result.stderr
    invoke(onerank, "show", broken)
    invoke(onerank, "show", broken, "--granularity", "kernel")


def test_repair_reports_what_it_drops(broken, tmp_path):
    out = tmp_path / "out.et"
    invoke(onerank, "convert", broken, "-o", out, code=2)
    assert not out.exists()
    done = invoke(onerank, "convert", broken, "--repair", "-o", out, "--json")
    dropped = json.loads(done.stdout)["dropped"]
    assert dropped == {"dangling": 2, "self_dependencies": 1, "cyclic": 1}
    package.read(out).topological_order()
    assert json.loads(invoke(onerank, "check", out, "--json").stdout) == []
    invoke(onerank, "replay", out)
    invoke(onerank, "convert", "--repair", tmp_path, "-o", out, code=2)


def test_a_graph_with_a_self_edge_is_refused_before_anything_is_written(traces, tmp_path):
    graph = package.read(traces / "gpu.et")
    edges, at = graph.edges, graph.edges.offsets[1]
    offsets = edges.offsets + (np.arange(len(edges.offsets)) > 0)
    looped = Edges(offsets, np.insert(edges.source, at, 0), np.insert(edges.reason, at, 0))

    path, out = tmp_path / "loop.et", tmp_path / "out.et"
    replace(graph, edges=looped).write(path)
    result = invoke(annotate, path, "--target", "A100", "-o", out, code=2)
    assert result.stderr.startswith("error[graph-cycle]: ")
    assert not out.exists()
