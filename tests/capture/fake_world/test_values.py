"""Integer tensors of other ranks: shapes and token ids, against the values of their senders."""

import textwrap
from pathlib import Path
from typing import Any

import pytest
from job_options import axes
from own_process import run_command
from raised import warns_code

from onerank import read
from onerank.capture import Options, WindowPlan, capture
from onerank.ir import Graph, World
from onerank.ir.errors import CaptureWarning


def run(directory: Path, text: str, world: World, said: list[str], **options: Any) -> Graph:
    path = directory / "train.py"
    path.write_text(textwrap.dedent(text))
    options = {"windows": WindowPlan(warm_up=1, timed_steps=1), **options}
    return capture(path, [], Options(**axes(world), **options), progress=said.append).graph


def run_alone(directory: Path, text: str, *options: object) -> tuple[Graph, str]:
    """Capture in a new process: a fork fails after a backward has started autograd's threads."""
    path, trace = directory / "train.py", directory / "trace.et"
    path.write_text(textwrap.dedent(text))
    brief = ("--warm-up", 1, "--timed-steps", 1)
    ended = run_command("capture", "run", path, *options, *brief, "-o", trace)
    assert ended.returncode == 0, ended.stderr
    return read(trace), ended.stderr


def communicated(graph: Graph) -> list[tuple[str, int]]:
    return [(n.name, n.value("comm_bytes")) for n in graph if n.kind.is_communication]


def test_token_ids_of_a_broadcast_are_the_first_ranks(tmp_path):
    starts = tmp_path / "starts"
    graph, said = run_alone(
        tmp_path,
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        first = rank // 2 * 2
        with open("STARTS", "a") as starts:
            print(rank, file=starts)
        words = torch.nn.Embedding(100, 8)
        optimizer = torch.optim.SGD(words.parameters(), lr=0.1)
        own = words.weight.detach().clone()
        dist.broadcast(words.weight.data, src=first, group=pair)  # a parameter: no run finds it
        assert torch.equal(words.weight.data, own)
        for step in range(40):
            for batch in range(4):
                shape = torch.tensor([3, 5 + first]) if rank == first else torch.zeros(2).long()
                dist.broadcast(shape, src=first, group=pair)
                ids = torch.full(shape.tolist(), -1)
                mask = torch.zeros(3, dtype=torch.bool)
                if rank == first:
                    ids = torch.arange(ids.numel()).view(ids.shape) + 10 * batch + min(step, 1)
                    mask[batch % 3] = True
                dist.broadcast(ids, src=first, group=pair)
                dist.broadcast(mask, src=first, group=pair, async_op=True).wait()
                assert ids.flatten()[:2].tolist() == [10 * batch + min(step, 1) + n for n in (0, 1)]
                assert mask.nonzero().tolist() == [[batch % 3]]
                weights = torch.full((3,), 0.5 * batch * (rank == first), dtype=torch.bfloat16)
                dist.broadcast(weights, src=first, group=pair)  # with the ids, which are known
                assert weights.tolist() == [0.5 * batch * (rank == first or step > 0)] * 3
                words(ids).sum().backward()
            dist.broadcast(torch.zeros(2**18 + 1), src=first, group=pair)  # too large: a warning
            optimizer.step()
        """.replace("STARTS", str(starts)),
        *("--tp", 2, "--dp", 2, "--rank", 3),
    )
    # 2 sizes, 3 x 7 ids, 3 flags, 3 weights in each of four micro-batches
    assert communicated(graph) == [("broadcast", bytes_) for bytes_ in (16, 168, 3, 6)] * 4 + [
        ("broadcast", 2**20 + 4)
    ]
    too_large = "keeps its own values (values are learned for calls of up to 1048576 bytes)"
    assert said.count(f"rank 3 {too_large}") == 1
    looked_up = [
        n.text("input_shapes") for n in graph if n.name == "aten::embedding_dense_backward"
    ]
    assert looked_up == ["[[3,7,8],[3,7],[],[],[]]"] * 4
    assert said.count("running as rank 2, to learn what it sends") == 1
    # one run finds the 28 messages of two steps
    assert sorted(starts.read_text().split()) == ["2", "3"]


def test_shapes_sent_and_scattered_are_the_senders(tmp_path):
    graph, _ = run_alone(
        tmp_path,
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(40):
            rows, share = torch.zeros(1, dtype=torch.int32), torch.zeros(1).long()
            if rank == 1:
                dist.recv(rows, src=0)
                dist.send(2 * rows, dst=2)  # the next rank's follow from these
            if rank == 2:
                [one.wait() for one in dist.batch_isend_irecv([dist.P2POp(dist.irecv, rows, 1)])]
            if rank == 0:
                dist.send(rows + 6, dst=1)
            parts = [torch.tensor([n + 3]) for n in range(4)] if rank == 0 else None
            dist.scatter(share, parts, src=0)
            if rank == 2:
                assert (rows.item(), share.item()) == (12, 5)
            model(torch.randn(rows.item(), 8)).sum().backward()
            optimizer.step()
        """,
        *("--pp", 4, "--rank", 2),
    )
    assert communicated(graph) == [("recv", 4), ("scatter", 4 * 8)]
    assert [n.text("input_shapes") for n in graph if n.name == "aten::addmm"] == [
        "[[8],[12,8],[8,8],[],[]]"
    ]


FAILS = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    assert dist.get_rank() == 1, "only here"
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(40):
        count = torch.tensor([7])
        {call}
        assert count.item() == {value}
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("call", "value", "function"),
    [("dist.broadcast(count, src=0)", 7, "broadcast"), ("dist.recv(count, src=0)", 0, "recv")],
)
def test_unknown_values_of_a_failed_sender_give_a_warning(tmp_path, call, value, function):
    with warns_code("tensors-unknown", naming=(f"{function}:", "rank 0", "rank 1")) as warned:
        run(tmp_path, FAILS.format(call=call, value=value), World.of(dp=2), [], rank=1)
    unknown = [w for w in warned if isinstance(w.message, CaptureWarning)]
    assert all("only here" in str(warning.message) for warning in unknown[:1])
    assert {Path(warning.filename).name for warning in unknown} == {"train.py"}


def test_torchs_own_messages_take_no_run(tmp_path):
    said: list[str] = []
    text = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        assert dist.get_rank() == 1, "never as another"
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        model = torch.nn.parallel.DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        huge = torch.full([2**17 + 1], 7)  # 8 bytes more than are carried
        for step in range(40):
            dist.broadcast(huge, src=0)
            dist.broadcast(torch.randn(4), src=0)
            model(torch.randn(8, 4)).sum().backward()
            optimizer.step()
        """
    with warns_code("tensors-unknown", naming="1048576 bytes"):
        graph = run(tmp_path, text, World.of(dp=2), said, rank=1)
    assert ("broadcast", 8 * (2**17 + 1)) in communicated(graph)
    assert not [one for one in said if "running as" in one]


def test_the_roots_of_calls_are_in_the_graph(tmp_path):
    graph = run(
        tmp_path,
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        half = dist.new_group([1, 3])
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(40):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            value = torch.ones(6)
            dist.broadcast(value, src=2)
            if rank in (1, 3):
                dist.reduce(value, dst=3, group=half)
                dist.scatter(value, src=1, scatter_list=[value, value] if rank == 1 else None,
                             group=half)
            dist.gather(value, dst=0)
            dist.all_reduce(value)
        """,
        World.of(dp=4),
        [],
        rank=3,
    )
    found = [(n.name, n.root) for n in graph if n.kind.is_communication]
    assert found == [
        ("broadcast", 2),
        ("reduce", 3),
        ("scatter", 1),
        ("gather", 0),
        ("all_reduce", -1),
    ]
