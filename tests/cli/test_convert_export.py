"""`convert`, `export` and `check`, of captures and of other tools' traces."""

import json
from pathlib import Path

import pytest
from invoke_cli import GPU_NS, TRACES, empty, invoke, refused
from notes import has_note, note_of

from onerank.cli import annotate, onerank
from onerank.ir import Collective, Device, GraphBuilder, Job, Kind, ProcessGroup, World
from onerank.ir.chakra.et_def_pb2 import (
    COMM_COLL_NODE,
    COMP_NODE,
    AttributeProto,
    GlobalMetadata,
    Node,
)
from onerank.ir.chakra.framing import frame


def test_a_measured_bus_bandwidth_goes_without_the_link_s(traces, tmp_path):
    export = ("export", "astra-sim", traces / "gpu.et", "-o", tmp_path / "out", "--busbw-gb-s", 300)
    result = invoke(onerank, *export)
    assert "one switch, 300.0 GB/s" in " ".join(result.stdout.split())
    assert json.loads((tmp_path / "out" / "system.json").read_text())["local-mem-bw"] == 1e9
    refused(
        onerank,
        *export,
        "--bandwidth-gb-s",
        450,
        error="export-two-bandwidths",
        naming="--busbw-gb-s",
    )


def test_the_network_has_the_links_of_the_traces_gpu(traces, tmp_path):
    """Its datasheet: an A100's NVLinks carry 300 GB/s each way, its memory 2039 GB/s."""
    trace, out = tmp_path / "trace.A100.et", tmp_path / "out"
    invoke(annotate, "--target", "A100", traces / "gpu.et", "-o", trace)
    output = " ".join(invoke(onerank, "export", "astra-sim", trace, "-o", out).stdout.split())
    assert "one switch, 300.0 GB/s and 500.0 ns between any two ranks, 2039.0 GB/s of" in output
    assert json.loads((out / "system.json").read_text())["local-mem-bw"] == 2039


def all_reduce_of_16(path: Path, device: str) -> Path:
    """Write a step that sums 1 MiB over 16 ranks, two nodes of eight."""
    group = ProcessGroup("tp", tuple(range(16)), "tp")
    builder = GraphBuilder()
    builder.add(kind=Kind.KERNEL, stream=7, duration_ns=1000, name="before")
    builder.add(
        kind=Kind.COLLECTIVE, collective=Collective.ALL_REDUCE, group="tp", comm_bytes=1 << 20,
        stream=20,
    )  # fmt: skip
    device_of_job = Device(type="cuda", name=device)
    builder.build(Job(world=World.of(tp=16), groups=(group,), device=device_of_job)).write(path)
    return path


@pytest.mark.parametrize(
    ("device", "options", "algorithm"),
    [
        ("NVIDIA A100-SXM4-80GB", (), "tree"),
        ("NVIDIA A10", (), "ring"),  # PCIe alone, though Ampere's like an A100
        ("NVIDIA GeForce RTX 3090", (), "ring"),
        ("NVIDIA A100 80GB PCIe", (), "ring"),
        ("NVIDIA A100 80GB PCIe", ("--compute-capability", "9.0"), "tree"),  # another GPU then
        ("Tesla V100-SXM2-32GB", (), "tree"),
        ("NVIDIA PG506-232 PCIe", ("--compute-capability", "8.0"), "ring"),  # of no description
        ("NVIDIA PG506-230", ("--compute-capability", "8.0"), "tree"),
        ("NVIDIA B200", (), "tree"),
        ("NVIDIA B200", ("--compute-capability", "12.0"), "ring"),
        ("NVIDIA GeForce RTX 5090", (), "ring"),
        ("A10 (memory_bandwidth_gb_per_s=900)", (), "ring"),  # as `annotate --override` calls it
    ],
)
def test_goal_goes_by_the_compute_capability(device, options, algorithm, tmp_path):
    trace = all_reduce_of_16(tmp_path / "trace.et", device)
    export = ("export", "goal", trace, "-o", tmp_path / "job.goal", "--json", *options)
    report = json.loads(invoke(onerank, *export).stdout)
    assert report["algorithms"] == {f"all_reduce by {algorithm}": 1}
    assert not has_note(report["notes"], "compute-capability-assumed")


def test_goal_of_a_board_without_description_goes_by_its_name(tmp_path):
    trace = all_reduce_of_16(tmp_path / "trace.et", "NVIDIA PG506-232 PCIe")
    done = invoke(onerank, "export", "goal", trace, "-o", tmp_path / "job.goal", "--json")
    report = json.loads(done.stdout)
    assert report["algorithms"] == {"all_reduce by ring": 1}
    naming = "NVIDIA PG506-232 PCIe", "H100 on PCIe"
    note_of(report["notes"], "compute-capability-assumed", *naming)


def test_goal_notes_an_assumed_compute_capability(tmp_path):
    trace = all_reduce_of_16(tmp_path / "trace.et", "AMD Instinct MI300X")
    export = ("export", "goal", trace, "-o", tmp_path / "job.goal")
    output = " ".join(invoke(onerank, *export).stdout.split())
    assert "compute capability of AMD Instinct MI300X is not known" in output
    output = invoke(onerank, *export, "--compute-capability", "9.0").stdout
    assert "no compute capability" not in " ".join(output.split())


@pytest.mark.parametrize("given", ["86", "sm_86", "8.6a", "0.9"])
def test_a_compute_capability_that_is_none_is_refused(given, traces, tmp_path):
    export = ("export", "goal", traces / "gpu.et", "-o", tmp_path / "job.goal")
    arguments = (*export, "--compute-capability", given)
    refused(onerank, *arguments, error="compute-capability-malformed", naming=f"{given}:")
    assert not (tmp_path / "job.goal").exists()


def test_export_check_and_their_exit_codes(traces, tmp_path):
    out = tmp_path / "workload"
    report = json.loads(
        invoke(onerank, "export", "astra-sim", traces / "gpu.et", "-o", out, "--json").stdout
    )
    assert report["ranks"] == 4
    assert report["gpu_time_ns"] == GPU_NS
    assert invoke(onerank, "check", out).stdout.splitlines()[-1].endswith("no findings")
    assert json.loads(invoke(onerank, "check", out, "--json").stdout) == []
    damaged = out / "workload.2.et"
    damaged.write_bytes(damaged.read_bytes()[:-3])
    findings = json.loads(invoke(onerank, "check", out, "--json", code=1).stdout)
    assert {(f["rule"], f["file"]) for f in findings} == {("truncated-file", "workload.2.et")}
    assert set(findings[0]) == {"rule", "file", "node", "message", "is_note"}


def test_a_cpu_capture_must_be_annotated_before_it_is_exported(traces, tmp_path):
    out = tmp_path / "workload"
    export = ("export", "astra-sim", traces / "cpu.et", "-o", out)
    refused(onerank, *export, error="graph-no-gpu-time", naming="annotate --target")
    assert not out.exists()


def test_convert_files_from_elsewhere(tmp_path):
    raw = TRACES / "h200-llama-8b-4l-tp4"
    args = ("--kineto", raw / "structure.json.gz", "--et", raw / "et.json.gz")
    result = invoke(onerank, "convert", *args, "-o", tmp_path / "t.et")
    assert "GPU operations  850: 850 by external id" in result.stdout
    assert (tmp_path / "t.et").exists()


@pytest.fixture
def elsewhere(tmp_path) -> Path:
    """Return a trace as Chakra's generator writes them: no shapes, no device, no world."""

    def node(number: int, name: str, kind: int, duration_us: int, **attributes: int) -> bytes:
        chakra_node = Node(id=number, name=name, type=kind, duration_micros=duration_us)
        chakra_node.data_deps.extend([number - 1] if number else [])
        chakra_node.attr.append(AttributeProto(name="is_cpu_op", bool_val=False))
        for attribute, value in attributes.items():
            chakra_node.attr.append(AttributeProto(name=attribute, int64_val=value))
        return chakra_node.SerializeToString()

    messages = [
        GlobalMetadata(version="0.0.4").SerializeToString(),
        node(0, "COMP_NODE", COMP_NODE, 100),
        node(1, "COMP_NODE", COMP_NODE, 0, num_ops=10**9, tensor_size=10**6),
        node(2, "COMM_COLL_NODE_ALL_REDUCE", COMM_COLL_NODE, 0, comm_type=0, comm_size=65536),
    ]
    path = tmp_path / "chakra.et"
    path.write_bytes(frame(messages))
    return path


def test_another_tools_trace(elsewhere, tmp_path):
    shown = invoke(onerank, "show", elsewhere).stdout
    assert "device       not known\n" in shown
    assert "step         not measured\n" in shown
    assert "100.000 us in 2 GPU operations" in shown
    assert "2 of unknown origin" in shown
    refused(annotate, "--target", "A100", elsewhere, error="recost-source-unknown")
    out = tmp_path / "a100.et"
    args = ("--target", "A100", "--source", "H100", elsewhere, "-o", out)
    output = invoke(annotate, *args).stdout
    assert "1 of unknown origin (0.0% of the time), 1 calibrated (100.0% of the time)" in output
    assert "1 node: FLOPs and bytes unknown: memory bandwidth" in output
    assert "1 node: kept: the trace has no duration to scale" in output
    assert "2 nodes without a class or formula" in output
    workload = tmp_path / "workload"
    export = ("export", "astra-sim", elsewhere, "-o", workload)
    refused(onerank, *export, error="export-one-rank")
    assert not workload.exists()
    assert "1: GPU nodes of 0 ns" in invoke(onerank, *export, "--ranks", 4).stdout
    invoke(onerank, "check", workload)


def test_an_unknown_collective_is_named_everywhere(tmp_path):
    strange = Node(id=1, name="WHAT", type=COMM_COLL_NODE)
    strange.attr.append(AttributeProto(name="comm_type", int64_val=42))
    strange.attr.append(AttributeProto(name="comm_size", int64_val=65536))
    invalid = Node(id=2, name="X", type=77)
    path = tmp_path / "t.et"
    messages = [GlobalMetadata(version="0.0.4"), strange, invalid]
    path.write_bytes(frame(message.SerializeToString() for message in messages))
    summary = json.loads(invoke(onerank, "show", path, "--json").stdout)
    assert summary["kinds"] == {"collective": 1, "invalid": 1}
    assert summary["collectives"][0]["type"] == "unknown"
    export = ("export", "astra-sim", path, "-o", tmp_path / "w", "--ranks", 2)
    refused(onerank, *export, error="export-unknown-collective")


def test_check_names_the_missing_rank(traces, tmp_path):
    out = tmp_path / "workload"
    invoke(onerank, "export", "astra-sim", traces / "gpu.et", "-o", out)
    (out / "workload.2.et").unlink()
    (finding,) = json.loads(invoke(onerank, "check", out, "--json", code=1).stdout)
    assert finding["rule"] == "rank-files"
    assert "1 of 4 ranks" in finding["message"]
    assert "1 of 4 ranks" in invoke(onerank, "check", out, code=1).stdout
    refused(onerank, "check", empty(tmp_path), error="check-no-traces")


def test_convert_a_directory_of_captures(tmp_path):
    result = invoke(onerank, "convert", TRACES, "-o", tmp_path / "out", "--json")
    nodes_of = {Path(rank["path"]).name: rank["nodes"] for rank in json.loads(result.stdout)}
    assert nodes_of == {
        "cpu-llama-2l-tp4.et": 480,
        "h200-llama-8b-4l-tp4.et": 4056,
        "h200-llama-8b-4l-tp4-standin.et": 4056,
        "h200-megatron-core-pp2.et": 3663,
    }
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(nodes_of)


def test_chakra_s_json_is_converted_and_has_no_steps(traces, tmp_path):
    spelled, out = tmp_path / "t r ä.json", tmp_path / "t.et"
    invoke(onerank, "export", "chakra-json", traces / "cpu.et", "-o", spelled)
    report = json.loads(invoke(onerank, "convert", spelled, "-o", out, "--json").stdout)
    assert report == {"output": str(out), "nodes": 480}
    assert out.read_bytes() == (traces / "cpu.et").read_bytes()
    refused(onerank, "convert", spelled, "-o", out, "--step", "2", error="convert-no-steps")
    refused(onerank, "convert", spelled, "-o", tmp_path, error="output-is-directory")


def test_convert_a_kineto_trace_alone(tmp_path):
    kineto = TRACES / "h200-llama-8b-4l-tp4" / "profile.json.gz"
    result = invoke(onerank, "convert", "--kineto", kineto, "-o", tmp_path / "t.et")
    assert f"{tmp_path / 't.et'}: 850 nodes" in result.stdout
    text = " ".join(result.stdout.split())
    assert "the graph holds only GPU operations" in text
