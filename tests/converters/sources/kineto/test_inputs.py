"""Inputs of a conversion: steps, several ranks, Kineto traces only, large files."""

import gzip
import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from notes import has_note, note_of
from raised import raises_code
from small_traces import Trace, edges

from onerank import read
from onerank.analysis.step_time import replay
from onerank.annotate.op_costs.node_costs import characterise
from onerank.cli import onerank
from onerank.converters.sources.kineto import Sources, convert, convert_directory
from onerank.converters.sources.kineto.rank_directory import convert_ranks, ranks_in
from onerank.converters.sources.kineto.read import json_stream as stream
from onerank.ir import Collective, Kind, Reason
from onerank.ir.errors import TraceError

TRACES = Path(__file__).parents[4] / "traces"
CPU = TRACES / "cpu-llama-2l-tp4"
H200 = TRACES / "h200-llama-8b-4l-tp4"
MILLISECONDS = {4: 0.01, 5: 0.03, 6: 0.02}


def stepped() -> Trace:
    """Three steps of 10, 30 and 20 us, each with a kernel that runs after its step's end."""
    trace = Trace()
    at = 100.0
    for number, milliseconds in MILLISECONDS.items():
        trace.annotation(f"ProfilerStep#{number}", at, milliseconds * 1000)
        op = trace.op("aten::mm", at + 1, 5)
        trace.launch(number, at + 2, external=op)
        trace.kernel(number, at + 1000, 7, name=f"of step {number}")
        at += milliseconds * 1000
    return trace


def test_callers_that_are_missing_are_counted(tmp_path):
    et = json.loads(gzip.decompress((CPU / "et.json.gz").read_bytes()))
    for node in et["nodes"][-2:]:
        node["ctrl_deps"] = 10**9
    path = tmp_path / "et.json"
    path.write_text(json.dumps(et))
    for profiles in ((), (CPU / "profile.json.gz",)):
        _, report = convert(Sources(CPU / "structure.json.gz", path, profiles))
        note_of(report.notes, "et-caller-missing", "et.json", 2)


@pytest.mark.parametrize(("step", "number"), [("4", 4), ("5", 5), ("median", 6)])
def test_one_step_has_what_it_launched(tmp_path, step, number):
    graph, report = stepped().convert(tmp_path, step=step)
    assert graph.text("name") == ["aten::mm", f"of step {number}"]
    assert report.gpu_ops == 1
    naming = f"step {number}", MILLISECONDS[number], "2 GPU operations"
    note_of(report.notes, "other-steps-dropped", *naming)


@pytest.mark.parametrize(("step", "busy"), [("4", 0), ("5", 0.007), ("6", 0.014)])
def test_a_step_tells_what_was_queued_before_it(tmp_path, step, busy):
    """Each step before it left a kernel of 7 us that ran later."""
    graph, report = stepped().convert(tmp_path, step=step)
    assert has_note(report.notes, "step-waits-for-earlier") == bool(busy)
    assert not busy or has_note(report.notes, "step-waits-for-earlier", busy)
    assert replay(graph).step_time_ns == replay(graph).measured_ns


def test_all_steps_are_the_whole_trace(tmp_path):
    graph, _ = stepped().convert(tmp_path)
    assert graph.gpu_compute.sum() == 3


def test_a_step_that_is_not_there(tmp_path):
    with raises_code("step-unknown"):
        stepped().convert(tmp_path, step="7")


def test_a_trace_without_steps(tmp_path):
    trace = Trace()
    trace.op("aten::mm", 0, 5)
    with raises_code("step-none-in-trace", TraceError):
        trace.convert(tmp_path, step="median")


def test_kineto_alone_gives_gpu_operations_in_stream_order():
    graph, report = convert(Sources(H200 / "profile.json.gz"))
    events = json.loads(gzip.decompress((H200 / "profile.json.gz").read_bytes()))["traceEvents"]
    gpu = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    assert len(graph) == len(gpu) == report.gpu_ops
    assert graph.nodes.duration_ns.sum() == sum(round(e["dur"] * 1000) for e in gpu)
    assert graph.text("op").count("aten::mm") > 0  # Kineto records which operator launched it
    in_order = (graph.edges.reason == Reason.STREAM_ORDER).sum()
    assert in_order == len(graph) - len(set(graph.nodes.stream.tolist()))
    assert has_note(report.notes, "gpu-operations-only")


def test_kineto_alone_with_operators_replays_as_long_as_the_step():
    graph, report = convert(Sources(H200 / "structure.json.gz", operators=True))
    whole, _ = convert(Sources(H200 / "structure.json.gz", H200 / "et.json.gz"))
    assert graph.mask(Kind.HOST_OP).sum() == whole.mask(Kind.HOST_OP).sum() > 0
    work = [characterise(one).nodes.flops for one in (graph, whole)]
    products = [flops[flops > 1e9].sum() for flops in work]
    assert products[0] == products[1] > 1e12
    assert not has_note(report.notes, "gpu-operations-only")
    replayed = replay(graph)
    assert replayed.step_time_ns == pytest.approx(replayed.measured_ns, rel=0.02)


def test_kineto_alone_keeps_what_the_host_waited_for(tmp_path):
    """Operations launched after a synchronisation wait for it, on any stream."""
    trace = Trace()
    op = trace.op("aten::mm", 0, 100)
    trace.launch(1, 5, external=op)
    trace.kernel(1, 20, 30, name="before")
    trace.runtime("cudaStreamSynchronize", 2, 10, 45)
    trace.sync("Stream Sync", 10, correlation=2, stream=7)
    trace.launch(3, 60, external=op)
    trace.kernel(3, 70, 5, name="after", stream=9)
    kineto, _ = trace.write(tmp_path)
    graph, _ = convert(Sources(kineto))
    assert graph.text("name") == ["before", "after"]
    assert edges(graph, Reason.SYNC) == {("before", "after")}


def test_kineto_alone_on_a_cpu_gives_operators_without_shapes():
    graph, report = convert(Sources(CPU / "profile.json.gz"))
    assert graph.text("name").count("aten::mm") > 0
    assert set(graph.text("input_shapes")) == {""}
    assert report.host_ops_without_record == len(graph)


@pytest.mark.parametrize("piece", [300, 5000])
def test_pieces_of_any_size_give_the_same_graph(piece, monkeypatch):
    sources = Sources(CPU / "structure.json.gz", CPU / "et.json.gz")
    expected, _ = convert(sources)
    monkeypatch.setattr(stream, "PIECE_BYTES", piece)
    graph, _ = convert(sources)
    assert graph.nodes_frame().equals(expected.nodes_frame())
    assert graph.edges_frame().equals(expected.edges_frame())


def test_pieces_do_not_end_within_an_event(tmp_path, monkeypatch):
    """Arrays of objects, brackets in names and keys in another order look like an event's end."""
    trace = Trace()
    for position in range(20):
        name = 'a "}, {" b' if position % 2 else "aten::mm"
        trace.op(name, 10 * position, 5, parts=[{"ph": 1}, {"ph": 2}], more={"traceEvents": [{}]})
    for event in trace.events[::3]:
        event["ph"] = event.pop("ph")  # now the last key
    monkeypatch.setattr(stream, "PIECE_BYTES", 64)
    kineto, et = trace.write(tmp_path, before=[{"traceEvents": [1]}], note='"traceEvents": [')
    graph, report = convert(Sources(kineto, et))
    assert report.host_ops == 20
    assert graph.text("name").count("aten::mm") == 10


def rank_files(directory: Path, ranks: range, *, with_et: bool = True) -> None:
    for rank in ranks:
        trace = Trace()
        for position in range(rank + 1):
            trace.op("aten::mm", 10 * position, 5)
        kineto, et = trace.write(directory, distributedInfo={"backend": "nccl", "rank": rank})
        kineto.rename(directory / f"host{7 - rank}.pt.trace.json")
        et.rename(directory / f"et_rank{rank}.json") if with_et else et.unlink()


def test_a_directory_of_ranks(tmp_path):
    """The rank is in the Kineto trace; for an execution trace it is in the file's name."""
    rank_files(tmp_path, range(3))
    output = tmp_path / "out"
    done = convert_ranks(ranks_in(tmp_path), output)
    assert [one.path for one in done] == [output / f"trace.{rank}.et" for rank in range(3)]
    assert [one.nodes for one in done] == [1, 2, 3]
    assert sorted(path.name for path in output.iterdir()) == [one.path.name for one in done]


def test_a_directory_of_captures(tmp_path):
    names = [rank.name for rank in ranks_in(TRACES)]
    assert names == [
        "cpu-llama-2l-tp4",
        "h200-llama-8b-4l-tp4",
        "h200-llama-8b-4l-tp4-standin",
        "h200-megatron-core-pp2",
    ]


RAW_FOLDERS = sorted(
    path.name
    for path in TRACES.iterdir()
    if path.is_dir() and (any(path.glob("structure*.json.gz")) or any(path.glob("kineto*.json.gz")))
)


@pytest.mark.parametrize("name", RAW_FOLDERS)
def test_every_folder_of_raw_traces_converts(tmp_path, name):
    """Uses the command of traces/README.md: -o is a file, for several ranks a directory."""
    several = not (TRACES / name / "structure.json.gz").exists()
    output = tmp_path / ("out" if several else "trace.et")
    result = CliRunner().invoke(onerank, ["convert", str(TRACES / name), "-o", str(output)])
    assert result.exit_code == 0, result.output
    paths = sorted(output.iterdir()) if several else [output]
    assert len(paths) == (2 if several else 1)
    for path in paths:
        graph = read(path)
        assert graph.communication.any()
        assert replay(graph).step_time_ns > 0


def test_a_capture_without_its_job_takes_the_world_from_the_trace():
    graph, report = convert_directory(TRACES / "h200-megatron-core-pp2")
    assert (graph.job.rank, graph.job.world.size) == (1, 2)
    assert graph.job.device.name == "NVIDIA H200"
    note_of(report.notes, "job-file-missing", "job.json")


def test_raw_folders_are_found():
    """All other folders contain only graphs, except those of three other kinds of recordings."""
    recordings = ("h100-cuda-graphs", "cpu-vllm-2l", "h100-allocator")
    others = {path for path in TRACES.iterdir() if path.is_dir()} - {
        TRACES / name for name in (*RAW_FOLDERS, *recordings)
    }
    assert len(RAW_FOLDERS) == 5
    assert all(path.name.endswith(".et.gz") for folder in others for path in folder.iterdir())


@pytest.mark.parametrize(
    ("directories", "names"),
    [
        (["rank-0", "rank-8"], ["trace.0", "trace.8"]),
        (["rank-8", "shallow"], ["trace.8", "shallow"]),
        (["rank-1", "rank_1"], ["rank-1", "rank_1"]),
    ],
)
def test_captures_are_called_by_their_ranks(tmp_path, directories, names):
    for name in directories:
        (tmp_path / name).mkdir()
        shutil.copy(CPU / "job.json", tmp_path / name)
    assert [rank.name for rank in ranks_in(tmp_path)] == names


def test_ranks_without_execution_traces(tmp_path):
    rank_files(tmp_path, range(2), with_et=False)
    assert [rank.sources.et for rank in ranks_in(tmp_path)] == [None, None]


def test_one_bad_rank_leaves_nothing(tmp_path):
    rank_files(tmp_path, range(2))
    bad = tmp_path / "host7.pt.trace.json"
    bad.write_text(bad.read_text()[:-40])
    with raises_code("trace-malformed", naming=bad.name):
        convert_ranks(ranks_in(tmp_path), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".onerank-*"))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda d: (d / "et_rank1.json").unlink(), "traces-unpaired"),
        (lambda d: (d / "host6.pt.trace.json").unlink(), "traces-unpaired"),
        (lambda d: (d / "et_rank1.json").rename(d / "x_rank0.json"), "traces-same-rank"),
        (lambda d: [path.unlink() for path in d.iterdir()], "traces-not-found"),
        (lambda d: (d / "et_rank1.json").rename(d / "et.json"), "trace-rank-unknown"),
    ],
)
def test_directories_that_do_not_add_up(tmp_path, change, code):
    rank_files(tmp_path, range(2))
    change(tmp_path)
    with raises_code(code, TraceError):
        ranks_in(tmp_path)


def test_amd_gives_streams_and_the_driver_grids_as_text(tmp_path):
    trace = Trace()
    op = trace.op("aten::mm", 0, 10)
    trace.runtime("hipExtModuleLaunchKernel", 100, 5)
    trace.events[-1]["args"]["External id"] = op
    trace.kernel(100, 20, 5, stream="0", grid="[4, 1, 1]", block=[256, 1, 1])
    graph, report = trace.convert(tmp_path)
    kernel = next(node for node in graph if node.kind is Kind.KERNEL)
    assert report.gpu_ops_linked == {"external id": 1}
    assert (kernel.value("stream"), kernel.text("grid")) == (0, "[4, 1, 1]")
    assert kernel.text("block") == "[256, 1, 1]"


GROUP = {"Process Group Name": "1", "dtype": "Half", "In msg nelems": 100}


@pytest.mark.parametrize(
    ("name", "peer", "kind", "expected"),
    [
        ("send", {"Dst Rank": 5}, Kind.SEND, (-1, 5)),
        ("recv", {"Src Rank": 3}, Kind.RECV, (3, -1)),
    ],
)
def test_sends_and_receives_know_their_peers(tmp_path, name, peer, kind, expected):
    trace = Trace()
    op = trace.op("record_param_comms", 0, 10)
    trace.launch(100, 5, external=op)
    args = {"Collective name": name, **GROUP, **peer}
    trace.kernel(100, 20, 5, name="ncclDevKernel_SendRecv", **args)
    node = next(node for node in trace.convert(tmp_path)[0] if node.kind is kind)
    assert (node.value("comm_src"), node.value("comm_dst")) == expected
    assert node.value("comm_bytes") == 200


@pytest.mark.parametrize(
    ("name", "collective"),
    [
        ("broadcast", Collective.BROADCAST),
        ("_reduce_oop", Collective.REDUCE),
        ("reduce_scatter_tensor_coalesced", Collective.REDUCE_SCATTER),
        ("ALLTOALL_BASE", Collective.ALL_TO_ALL),
    ],
)
def test_collectives_by_their_names(tmp_path, name, collective):
    trace = Trace()
    op = trace.op("record_param_comms", 0, 10)
    trace.launch(100, 5, external=op)
    trace.kernel(100, 20, 5, name="ncclKernel_x", **{"Collective name": name, **GROUP})
    graph, _ = trace.convert(tmp_path)
    assert next(node for node in graph if node.kind is Kind.COLLECTIVE).collective is collective


@pytest.mark.parametrize(
    ("sent", "received", "elements", "exchanged"),
    [
        # Elements of 2 bytes, 20 a row. Rank 1 sends 4 rows to others and receives 9.
        ("[3, 1, 1]", "[4, 2, 5]", 220, 9 * 40),
        ("[]", "[0, 1, 1]", 40, 2 * 100 * 2 // 3),
        ("[]", "[]", 100, -1),
        ("[3, 1, ..., 1]", "[4, 2, 5]", 220, -1),
        ("[3, 1]", "[4, 2, 5]", 220, -1),
    ],
)
def test_parts_of_an_all_to_all_of_a_real_rank(tmp_path, sent, received, elements, exchanged):
    trace = Trace()
    op = trace.op("record_param_comms", 0, 10)
    trace.launch(100, 5, external=op)
    args = {"Collective name": "all_to_allv", "Group size": 3, "Rank": 1, **GROUP}
    args |= {"In split size": sent, "Out split size": received, "Out msg nelems": elements}
    trace.kernel(100, 20, 5, name="ncclDevKernel_SendRecv", **args)
    node = next(node for node in trace.convert(tmp_path)[0] if node.kind is Kind.COLLECTIVE)
    assert (node.value("comm_bytes"), node.value("exchanged_bytes")) == (200, exchanged)


@pytest.mark.parametrize(
    ("name", "before", "ends"),
    [
        ("broadcast", ["<Object>"], (6, -1)),
        ("scatter", [[[[2, 3, 0, 100, 2, "cuda:0"]]], "<Object>"], (6, -1)),
        ("reduce", ["<Object>", "<Object>"], (-1, 6)),
        ("gather", [[[2, 3, 0, 100, 2, "cuda:0"]], "<Object>"], (-1, 6)),
        ("allreduce", ["<Object>", "<Object>"], (-1, -1)),
    ],
)
def test_roots_follow_from_the_operator(tmp_path, name, before, ends):
    """The root is the third of ranks 2, 4, 6: NCCL's arguments do not contain it."""
    trace = Trace()
    trace.op(f"c10d::{name}_", 0, 20)
    values = [[[2, 3, 0, 100, 2, "cuda:0"]], *before, 2, 0, True, -1]
    trace.nodes[-1]["inputs"] = {"values": values, "shapes": [], "types": []}
    op = trace.op("record_param_comms", 1, 10)
    trace.launch(100, 5, external=op)
    args = {"Collective name": name, **GROUP, "Process Group Ranks": "[2, 4, 6]"}
    trace.kernel(100, 20, 5, name="ncclDevKernel_x", **args)
    node = next(node for node in trace.convert(tmp_path)[0] if node.kind is Kind.COLLECTIVE)
    assert (node.value("comm_src"), node.value("comm_dst")) == ends


def test_a_long_list_of_ranks_is_shown_by_its_stride(tmp_path):
    trace = Trace()
    op = trace.op("record_param_comms", 0, 10)
    trace.launch(100, 5, external=op)
    cut = {"Process Group Ranks": "[2, 6, 10, ...]", "Group size": 40}
    cut |= {"Global rank start": 2, "Global rank stride": 4}
    trace.kernel(100, 20, 5, **{"Collective name": "allreduce", **GROUP, **cut})
    graph, _ = trace.convert(tmp_path)
    assert graph.job.group("1").ranks == tuple(range(2, 162, 4))


def coalesced(*calls: dict) -> Trace:
    """Calls that launch nothing, then one kernel for all."""
    trace = Trace()
    outer = trace.op("c10d::_coalesced", 0, 100)
    for position, call in enumerate(calls):
        trace.op("record_param_comms", 10 + 10 * position, 5, **GROUP | call)
    trace.launch(100, 90, external=outer)
    trace.kernel(100, 200, 50, name="ncclDevKernel_AllReduce_Sum_f16_RING_LL")
    return trace


def test_calls_coalesced_into_one_kernel_add_up(tmp_path):
    one = {"Collective name": "allreduce_coalesced"}
    graph, report = coalesced(one, one | {"In msg nelems": 28}).convert(tmp_path)
    node = next(node for node in graph if node.kind is Kind.COLLECTIVE)
    assert node.value("comm_bytes") == (100 + 28) * 2
    assert node.duration_ns == 50_000
    assert report.communication == 1


def test_sends_and_receives_batched_into_one_kernel_are_a_node_each(tmp_path):
    """50 us for 200, 100 and 200 bytes; sends come first, since they wait for no other rank."""
    recv = {"Collective name": "recv", "Src Rank": 1}
    send = {"Collective name": "send", "Dst Rank": 3, "In msg nelems": 50}
    other = {"Collective name": "recv", "Src Rank": 2}
    trace = coalesced(recv, send, other)
    last = trace.op("aten::mm", 110, 20)
    trace.launch(101, 115, external=last)
    trace.kernel(101, 260, 10, name="gemm")
    graph, report = trace.convert(tmp_path)
    nodes = [node for node in graph if node.kind in (Kind.SEND, Kind.RECV)]
    figures = [
        (node.kind, node.value("comm_src"), node.value("comm_dst"), node.value("comm_bytes"))
        for node in nodes
    ]
    expected = [(Kind.SEND, -1, 3, 100), (Kind.RECV, 1, -1, 200), (Kind.RECV, 2, -1, 200)]
    assert figures == expected
    assert [node.duration_ns for node in nodes] == [10_000, 20_000, 20_000]
    assert [node.value("start_ns") for node in nodes] == [200_000, 210_000, 230_000]
    order = [int(at) for at in np.flatnonzero(graph.nodes.stream == 7)]
    for before, after in pairwise(order):  # in sequence, then the product
        assert (before, Reason.STREAM_ORDER) in [*graph.edges.of(after)]
    assert (report.gpu_ops, report.communication) == (2, 3)
    assert has_note(report.notes, "nccl-kernel-of-several-calls", 1)


def test_a_send_without_a_peer_is_counted(tmp_path):
    _, report = coalesced({"Collective name": "send"}, {"Collective name": "recv"}).convert(
        tmp_path
    )
    assert has_note(report.notes, "p2p-without-peer", 2)


def test_an_nccl_kernel_without_arguments_is_counted(tmp_path):
    graph, report = coalesced().convert(tmp_path)
    assert graph.mask(Kind.KERNEL).sum() == 1
    assert has_note(report.notes, "communication-kept-as-kernels", 1)


def test_edges_on_which_the_trace_contradicts_itself_are_left_out_and_named(tmp_path):
    """The host waits until 12 us for a kernel that begins at 30 us, after one launched at 19."""
    trace = Trace()
    first = trace.op("aten::mm", 0, 13)
    trace.launch(1, 5, external=first)
    trace.kernel(1, 30, 5, name="late")
    trace.runtime("cudaStreamSynchronize", 2, 8, 4)
    trace.sync("Stream Sync", 8, correlation=2, stream=7)
    second = trace.op("aten::add", 15, 10)
    trace.launch(3, 19, external=second)
    trace.kernel(3, 20, 5, name="early")
    graph, report = trace.convert(tmp_path)
    assert len(graph.topological_order()) == 4
    assert edges(graph, Reason.SYNC) == set()
    assert edges(graph, Reason.STREAM_ORDER) == {("early", "late")}
    note_of(report.notes, "edges-of-cycle-dropped", "1 edges", "1 sync", "'late'")


def without_sync_events(call: str, returns: float) -> Trace:
    """Streams 7 and 9 are busy until 60 and 300 us; a call at 10 us blocks until `returns`."""
    trace = Trace()
    op = trace.op("aten::mm", 0, 9)
    for correlation, (stream_number, end) in enumerate({7: 60, 9: 300}.items(), start=1):
        trace.launch(correlation, 1 + correlation, external=op)
        name = f"on {stream_number}"
        trace.kernel(correlation, 20, end - 20, name=name, stream=stream_number)
    trace.runtime(call, 3, 10, returns - 10)
    trace.op("aten::add", returns + 1, 5)
    return trace


@pytest.mark.parametrize(
    ("call", "returns", "waited_for"),
    [
        ("cudaStreamSynchronize", 62, {"on 7"}),
        ("hipStreamSynchronize", 303, {"on 9"}),
        ("cudaDeviceSynchronize", 303, {"on 7", "on 9"}),
        ("cudaStreamSynchronize", 15, set()),
    ],
)
def test_a_blocking_call_waited_for_what_ended_during_it(tmp_path, call, returns, waited_for):
    graph, report = without_sync_events(call, returns).convert(tmp_path)
    assert edges(graph, Reason.SYNC) == {(name, "aten::add") for name in waited_for}
    assert has_note(report.notes, "waits-inferred") == bool(waited_for)
    if not waited_for:
        assert report.syncs_dropped == {"no operation ended during the call": 1}


def test_the_step_is_measured_from_the_first_start_to_the_last_end(tmp_path):
    trace = Trace()
    op = trace.op("aten::mm", 10, 10)
    trace.launch(100, 12, external=op)
    trace.kernel(100, 40, 5)
    graph, _ = trace.convert(tmp_path)
    assert graph.job.measurement.profiled_step_ns == 35_000
    assert np.all(graph.nodes.start_ns == [0, 30_000])


def test_a_directory_of_unzipped_traces_gives_the_same_graph(tmp_path):
    for file in CPU.iterdir():
        opener = gzip.open if file.suffix == ".gz" else Path.open
        with opener(file, "rb") as data:
            (tmp_path / file.name.removesuffix(".gz")).write_bytes(data.read())
    assert convert_directory(tmp_path)[0].job == convert_directory(CPU)[0].job
    assert len(convert_directory(tmp_path)[0]) == len(convert_directory(CPU)[0])
