"""One step of DDP on two CPUs with Gloo, and calls after it, as torch 2.13 recorded them.

Each rank: a batch from a data loader with one worker; forward, backward and SGD of a model of two
linear layers (9610 parameters, one bucket); an asynchronous all-reduce of 1000 floats awaited
after a product; an all-gather, a barrier, and a send of rank 0 to rank 1 with tag 7.
"""

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from notes import codes, has_note, note_of
from small_traces import Trace

from onerank.analysis.step_time import replay
from onerank.analysis.summary import summarise
from onerank.annotate import compute_mask, recost
from onerank.cli import onerank
from onerank.converters.sources.kineto import Conversion, Sources, convert, convert_directory
from onerank.ir import Collective, Graph, Kind, Reason

DATA = Path(__file__).parent / "data/gloo-ddp"


def converted(rank: int) -> tuple[Graph, Conversion]:
    return convert(Sources(DATA / f"k{rank}.json.gz", DATA / f"et{rank}.json.gz"))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return converted(0)[0]


def calls(graph: Graph) -> list[int]:
    return np.flatnonzero(graph.communication).tolist()


def test_calls_have_bytes_group_and_peer(graph):
    figures = [
        (node.name, node.collective, node.value("comm_bytes"), node.text("group"))
        for node in map(graph.node, calls(graph))
    ]
    assert figures == [
        ("gloo:all_reduce", Collective.ALL_REDUCE, 9610 * 4, "default_pg"),
        ("gloo:all_reduce", Collective.ALL_REDUCE, 1000 * 4, "default_pg"),
        ("gloo:all_gather", Collective.ALL_GATHER, 1000 * 4, "default_pg"),
        ("gloo:barrier", Collective.BARRIER, 0, "default_pg"),
        ("gloo:send", Collective.NONE, 1000 * 4, "default_pg"),
    ]
    group = graph.job.group("default_pg")
    assert group is not None
    assert group.ranks == (0, 1)
    send = graph.node(calls(graph)[-1])
    assert (send.kind, send.value("comm_dst"), send.value("comm_tag")) == (Kind.SEND, 1, 7)
    received = converted(1)[0]
    recv = received.node(calls(received)[-1])
    assert (recv.kind, recv.value("comm_src"), recv.value("comm_tag")) == (Kind.RECV, 0, 7)


def test_roots_come_from_the_issuing_operators():
    """Rank 0 of two CPU ranks makes four calls rooted at rank 1, recorded by torch 2.13."""
    data = DATA.parent / "gloo-rooted"
    graph, _ = convert(Sources(data / "k0.json.gz", data / "et0.json.gz"))
    figures = {
        node.collective: (node.value("comm_src"), node.value("comm_dst"))
        for node in map(graph.node, calls(graph))
    }
    assert figures == {
        Collective.BROADCAST: (1, -1),
        Collective.REDUCE: (-1, 1),
        Collective.GATHER: (-1, 1),
        Collective.SCATTER: (1, -1),
    }
    scatter = np.flatnonzero(graph.nodes.collective == Collective.SCATTER)
    assert graph.nodes.comm_bytes[scatter].tolist() == [2 * 1000 * 4]  # rank 0 contributes no input


REAL = DATA.parent / "gloo-real"
"""A step of DDP as each of two real ranks captured it under `--record-real-job`: two buckets, an
all-reduce of 3 floats, an all-gather of 5 that overlaps it, a broadcast of 3."""


def on_other_threads(directory: Path, move: dict[int, int]) -> None:
    """Move the calls of the profiled window to other Gloo threads."""
    path = directory / "profile.json.gz"
    trace = json.loads(gzip.decompress(path.read_bytes()))
    events = [event for event in trace["traceEvents"] if "dur" in event]
    threads = {event["tid"] for event in events if event["name"].startswith("gloo:")}
    order = dict(enumerate(sorted(threads)))
    new = {order[before]: order[after] for before, after in move.items()}
    for event in events:
        event["tid"] = new.get(event["tid"], event["tid"])
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))


def test_memory_on_threads_without_operators_is_noted():
    _, report = convert_directory(REAL / "0")
    note_of(report.notes, "memory-without-operator", 80)


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    "move", [{}, {0: 1, 1: 0}, {0: 1}], ids=["as recorded", "swapped", "on one"]
)
def test_calls_keep_their_bytes_on_any_gloo_thread(tmp_path, rank, move):
    shutil.copytree(REAL / rank, tmp_path / "raw")
    on_other_threads(tmp_path / "raw", move)
    graph, report = convert_directory(tmp_path / "raw")
    figures = [
        (node.name, node.value("comm_bytes"), node.value("comm_src"))
        for node in map(graph.node, calls(graph))
    ]
    bucket = 2 * (64 * 64 + 64) * 4
    assert figures == [
        ("gloo:all_reduce", bucket, -1),
        ("gloo:all_reduce", bucket, -1),
        ("gloo:all_reduce", 3 * 4, -1),
        ("gloo:all_gather", 5 * 4, -1),
        ("gloo:broadcast", 3 * 4, 0),
    ]
    assert not has_note(report.notes, "profiled-times-dropped")
    assert not has_note(report.notes, "calls-without-arguments")


def test_each_call_follows_its_issuer_and_is_awaited(graph):
    names, edges = graph.text("name"), graph.edges
    issuers = {
        names[source] for call in calls(graph) for source, why in edges.of(call)
        if why is Reason.LAUNCH
    }  # fmt: skip
    assert issuers == {"c10d::allreduce_", "c10d::allgather_", "c10d::barrier", "c10d::send"}
    waits = {
        source: names[node]
        for node in range(len(graph))
        for source, why in edges.of(node)
        if why is Reason.SYNC
    }
    assert [waits[call] for call in calls(graph)] == [
        "torch.distributed.ddp.reducer::copy_bucket_to_grad",
        "aten::fill_",
        "c10d::barrier",
        "c10d::send",
        "aten::add_",
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_replay_is_the_measured_step(rank):
    graph, report = converted(rank)
    done = replay(graph)
    assert done.measured_ns is not None
    assert done.step_time_ns == pytest.approx(done.measured_ns, rel=1e-6)
    assert done.exposed_communication_ns > 0
    assert report.communication == 5
    assert not [code for code in codes(report.notes) if code.startswith("gloo")]


def test_what_copies_within_a_call_is_part_of_it(graph):
    """The all-gather copies its two outputs on Gloo's thread."""
    _, report = converted(0)
    assert report.host_ops_dropped["part of a call by Gloo"] >= 2
    threads = set(graph.nodes.thread[graph.mask(Kind.HOST_OP)].tolist())
    assert len(threads) == 1
    assert report.host_ops == report.host_ops_kept + sum(report.host_ops_dropped.values())


def test_the_wait_for_a_batch_is_named_and_counted(graph):
    loading = np.flatnonzero(graph.data_loading).tolist()
    assert [graph.node(node).name for node in loading] == [
        "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    ]
    waited_ns = int(graph.nodes.duration_ns[loading].sum())
    assert 81_000_000 < waited_ns < 81_200_000  # 81.1 ms by the file
    assert summarise(graph).data_loading_ns == waited_ns
    assert replay(graph).data_loading_ns == pytest.approx(waited_ns, rel=1e-3)
    assert not compute_mask(graph)[loading].any()


def test_for_a_gpu_the_host_s_own_time_is_taken_out(graph):
    on_gpu = recost(graph, "H100")
    assert calls(on_gpu)
    assert not on_gpu.mask(Kind.HOST_OP).any()
    dropped = on_gpu.job.annotations[-1].details["dropped"]
    assert dropped["c10d::allreduce_"] == 2


def test_without_execution_trace_bytes_are_not_known():
    graph, report = convert(Sources(DATA / "k0.json.gz"))
    assert report.communication == 5
    assert graph.nodes.comm_bytes[calls(graph)].tolist() == [-1] * 5


def test_calls_whose_issuer_the_trace_lacks_are_noted(tmp_path):
    trace = json.loads(gzip.decompress((DATA / "k0.json.gz").read_bytes()))
    trace["traceEvents"] = [
        event for event in trace["traceEvents"] if not event.get("name", "").startswith("c10d::")
    ]
    (tmp_path / "k0.json").write_text(json.dumps(trace))
    _, report = convert(Sources(tmp_path / "k0.json"))
    note_of(report.notes, "gloo-without-issuer", 5)


def test_calls_of_one_of_several_groups_are_reported(tmp_path):
    """torch.profiler records Gloo's calls without their group."""
    trace = json.loads(gzip.decompress((DATA / "k0.json.gz").read_bytes()))
    world = trace["distributedInfo"]["pg_config"][0]
    trace["distributedInfo"]["pg_config"].append({**world, "pg_name": "1", "pg_desc": "tp"})
    (tmp_path / "k0.json").write_text(json.dumps(trace))
    graph, done = convert(Sources(tmp_path / "k0.json"))
    note_of(done.notes, "gloo-unknown-group", 5, "2 groups")
    assert {graph.node(index).text("group") for index in calls(graph)} == {""}
    graph.write(tmp_path / "t.et")
    shown = CliRunner().invoke(onerank, ["show", str(tmp_path / "t.et")]).stdout
    assert "-1 B" not in shown
    assert "(none)      ?  all_reduce" in shown


def test_a_record_of_another_name_is_reported(tmp_path):
    kineto = gzip.decompress((DATA / "k0.json.gz").read_bytes())
    path = tmp_path / "k.json"
    path.write_bytes(kineto.replace(b"gloo:barrier", b"gloo:tea_time"))
    graph, report = convert(Sources(path, DATA / "et0.json.gz"))
    assert len(calls(graph)) == 4
    note_of(report.notes, "gloo-unknown-collective", "1 'gloo:tea_time'")


def test_commands_tell_of_data_loading(tmp_path):
    run = CliRunner().invoke
    out = str(tmp_path / "o.et")
    files = ["--kineto", str(DATA / "k0.json.gz"), "--et", str(DATA / "et0.json.gz")]
    assert run(onerank, ["convert", *files, "-o", out]).exit_code == 0
    assert "data loading" in run(onerank, ["show", out]).output
    assert "data loading" in run(onerank, ["replay", out]).output
    assert json.loads(run(onerank, ["replay", out, "--json"]).output)["data_loading_ns"] > 0


def test_a_gpu_idles_while_its_script_waits_for_a_batch(tmp_path):
    """Times in microseconds: the loader from 30 to 530, an operator of 20 within it."""
    trace = Trace()
    trace.op("aten::mm", 0, 20)
    trace.launch(1, 5, external=1)
    trace.kernel(1, 10, 100, **{"External id": 1})
    trace.op("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 30, 500)
    trace.events[-1]["cat"] = "user_annotation"
    trace.op("aten::stack", 100, 20)
    trace.op("aten::mm", 540, 20)
    trace.launch(2, 545, external=4)
    trace.kernel(2, 550, 100, **{"External id": 4})
    graph, report = trace.convert(tmp_path)
    loading = np.flatnonzero(graph.data_loading)
    assert graph.nodes.duration_ns[loading].tolist() == [480_000]
    assert report.host_ops_kept == report.host_ops == 3
    done = replay(graph)
    assert done.step_time_ns == done.measured_ns == 650_000
    assert done.idle_ns == 650_000 - 200_000
    assert done.data_loading_ns == 510_000 - 110_000  # what the first kernel does not cover
