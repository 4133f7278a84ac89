"""A generator's workload, as STAGE writes it: counts of work, no times, groups in PREFIX.json."""

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from notes import note_of
from raised import raises_code

import onerank
from onerank import annotate as annotate_package
from onerank.analysis.step_time import replay
from onerank.annotate.gpus.registry import load_gpu
from onerank.annotate.recost.from_datasheet import _in_bytes, recost_counts
from onerank.cli import annotate
from onerank.converters.targets.astra_sim.exporter import export_astra_sim
from onerank.ir import Evidence
from onerank.ir.chakra import attribute
from onerank.ir.chakra.et_def_pb2 import COMM_COLL_NODE, COMP_NODE, GlobalMetadata, Node
from onerank.ir.chakra.framing import frame

FLOPS, SIZE = 8 * 4096 * 1024 * 1024, 16_777_216


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Return rank 0 of two: a product, a kernel that moves memory, an all-reduce."""
    return written(tmp_path)


def written(directory: Path, schema: str = "") -> Path:
    counts = ((1, FLOPS, SIZE), (2, 1000, 64 * SIZE))
    nodes = []
    for number, flops, size in counts:
        node = Node(id=number, name=f"mb0.ffn.{number}@0_COMP", type=COMP_NODE)
        node.MergeFromString(attribute("num_ops", "int64_val", flops))
        node.MergeFromString(attribute("tensor_size", "uint64_val", size))
        node.MergeFromString(attribute("op_type", "string_val", "M" if flops == FLOPS else "E"))
        nodes.append(node)
    reduce = Node(id=3, name="mb0.ffn@0_X1COMM", type=COMM_COLL_NODE, data_deps=[1, 2])
    for name, value in (("comm_type", 0), ("comm_size", SIZE)):
        reduce.MergeFromString(attribute(name, "int64_val", value))
    reduce.MergeFromString(attribute("pg_name", "string_val", "1"))
    metadata = GlobalMetadata(version="0.0.4")
    metadata.attr.add(name="schema", string_val=schema)
    messages = [metadata, *nodes, reduce]
    for node in messages[1:]:
        node.MergeFromString(attribute("is_cpu_op", "bool_val", False))
    for rank in range(2):
        data = frame(message.SerializeToString() for message in messages)
        (directory / f"workload.{rank}.et").write_bytes(data)
    (directory / "workload.json").write_text(json.dumps({"1": [0, 1]}))
    return directory / "workload.0.et"


def test_counts_become_durations_by_the_roofline(trace: Path) -> None:
    graph = onerank.read(trace)
    assert graph.job.world.size == 2
    assert graph.nodes.flops.tolist()[:2] == [FLOPS, 1000]
    assert graph.nodes.bytes_read.tolist()[:2] == [SIZE, 64 * SIZE]
    made, gpu = onerank.recost(graph, "H100"), load_gpu("H100")
    rate = gpu.tensor_flops_per_s("bfloat16")
    assert rate is not None
    floor = gpu.launch_floor_ns
    product = floor + FLOPS / rate * 1e9
    memory = floor + 64 * SIZE / gpu.bandwidth_bytes_per_s * 1e9
    assert made.nodes.duration_ns.tolist()[:2] == [round(product), round(memory)]
    assert made.nodes.evidence.tolist()[:2] == [Evidence.DATASHEET] * 2
    note_of(made.job.measurement.notes, "recost-from-counts", 2, "H100-SXM")


def test_stage_counts_multiply_adds_and_elements(tmp_path: Path) -> None:
    graph = onerank.read(written(tmp_path, schema="symbolic_tensor_network"))
    assert graph.nodes.flops.tolist()[:2] == [2 * FLOPS, 1000]
    made, gpu = onerank.recost(graph, "H100"), load_gpu("H100")
    memory = gpu.launch_floor_ns + 2 * 64 * SIZE / gpu.bandwidth_bytes_per_s * 1e9
    assert made.nodes.duration_ns[1] == round(memory)
    assert made.nodes.comm_bytes.tolist() == [-1, -1, 2 * SIZE]
    made.write(tmp_path / "h100.et")
    assert onerank.read(tmp_path / "h100.et").nodes.comm_bytes[2] == 2 * SIZE


def test_kernels_without_a_stream_run_one_at_a_time(trace: Path) -> None:
    made = onerank.recost(onerank.read(trace), "H100")
    first, second = made.nodes.duration_ns.tolist()[:2]
    wire = round(SIZE / 100)  # of two ranks: 2 x 1/2
    assert replay(made, bandwidth_gb_per_s=100).step_time_ns == first + second + wire


def test_counts_alone_are_no_workload(trace: Path, tmp_path: Path) -> None:
    with raises_code("graph-counts-no-times"):
        export_astra_sim(onerank.read(trace), tmp_path / "workload")
    assert not (tmp_path / "workload").exists()


def test_a_count_beyond_all_reason_is_named(tmp_path: Path) -> None:
    node = Node(id=7, name="mm", type=COMP_NODE)
    node.MergeFromString(attribute("num_ops", "int64_val", 1))
    node.MergeFromString(attribute("tensor_size", "uint64_val", 2**64 - 1))
    node.MergeFromString(attribute("is_cpu_op", "bool_val", False))
    messages = [GlobalMetadata(version="0.0.4"), node]
    (tmp_path / "t.et").write_bytes(frame(message.SerializeToString() for message in messages))
    with raises_code("graph-counts-too-large", naming=("node 7", str(2**64 - 1), str(2**58))):
        onerank.read(tmp_path / "t.et")


def test_counts_survive_a_file(trace: Path, tmp_path: Path) -> None:
    made = onerank.recost(onerank.read(trace), "H100")
    made.write(tmp_path / "h100.et")
    again = onerank.read(tmp_path / "h100.et")
    assert again.nodes.duration_ns.tolist() == made.nodes.duration_ns.tolist()
    assert again.nodes.flops.tolist()[:2] == [FLOPS, 1000]


def test_options_that_need_shapes_or_a_source_are_refused(trace: Path) -> None:
    rows = str(Path(annotate_package.__file__).parent / "databases" / "H200.parquet")
    given = (["--source", "A100"], ["--dtype", "fp8"], ["--seq", "4096=2048"], ["--database", rows])
    for options in given:
        result = CliRunner().invoke(annotate, ["--target", "H100", str(trace), *options])
        assert result.exit_code == 2
        assert "error[recost-counts-no-target]" in result.stderr
    assert sorted(path.name for path in trace.parent.iterdir()) == [
        "workload.0.et",
        "workload.1.et",
        "workload.json",
    ]


def test_explaining_a_counted_node_says_how_all_are_made(trace: Path) -> None:
    result = CliRunner().invoke(annotate, ["--target", "H100", "--explain", "1", str(trace)])
    assert result.exit_code == 2
    assert "error[explain-counted-work]" in result.stderr


def test_sizes_beyond_int64_are_refused(trace: Path) -> None:
    graph = onerank.read(trace)
    columns = {"comm_bytes": graph.nodes.comm_bytes.copy()}
    columns["comm_bytes"][2] = 2**62
    with raises_code("recost-counts-too-large", naming=("node 3", "comm_bytes", str(2**62))):
        _in_bytes(graph.with_columns(**columns), 2)


def test_a_target_without_a_rate_is_refused(trace: Path) -> None:
    bare = load_gpu("H100")
    figures = {k: v for k, v in bare.figures.items() if "flops" not in k}
    with raises_code("recost-counts-no-rate"):
        recost_counts(onerank.read(trace), msgspec.structs.replace(bare, figures=figures))
