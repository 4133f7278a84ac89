"""torch.distributed.pipelining as any rank: the neighbours, run up to there, tell shapes."""

import json
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest
import torch
from own_process import run_code, run_command
from torch.distributed.pipelining import stage

import onerank
from onerank.ir import Kind, Phase

SCRIPT = """
    import sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, schedules

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.up = nn.Embedding(50, 16), nn.Linear(16, 24)
        def forward(self, tokens):
            return self.up(self.words(tokens)).relu()

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    schedule, micro_batches = getattr(schedules, sys.argv[1]), 8
    several = issubclass(schedule, schedules.PipelineScheduleMulti)
    count = 2 * size if several else size
    folded = "V" in sys.argv[1]  # the last stage is on the first rank
    other = [count - 1 - rank if folded else rank + size] if several else []
    torch.manual_seed(0)
    modules = {
        index: First() if index == 0
        else nn.Linear(24, 50) if index == count - 1
        else nn.Sequential(nn.Linear(24, 24), nn.GELU())
        for index in [rank, *other]
    }
    device = torch.device("cpu")
    stages = [PipelineStage(m, i, count, device) for i, m in modules.items()]
    def loss(output, target):
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
    runner = schedule(stages if several else stages[0], micro_batches, loss_fn=loss)
    parameters = [p for module in modules.values() for p in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for step in range(STEPS):
        tokens, losses = torch.randint(0, 50, (16, 12)), []
        first = (tokens,) if 0 in modules else ()
        last = {"target": tokens, "losses": losses} if count - 1 in modules else {}
        runner.step(*first, **last)
        assert all(p.grad.isfinite().all() and p.grad.any() for p in parameters)
        assert bool(losses) == bool(last) and all(one.isfinite() for one in losses)
        optimizer.step()
        optimizer.zero_grad()
"""

# Runs the script under each schedule as each rank of three; prints what its second step
# communicates, and which other ranks ran. A fourth rank would add another pair of neighbours.
ALL_RANKS = """
    import collections, json, sys
    from pathlib import Path
    import torch
    import torch.distributed.pipelining  # here, not in every process that stands for a sender
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from onerank.capture import Options
    from onerank.capture.fake_world.recorder import Recorder
    from onerank.capture.fake_world.sender_processes import SenderProcesses
    from onerank.capture.emulate_torchrun import sender_runner, torchrun_variables
    from onerank.capture.script.runner import Script, environment, play_script
    from onerank.ir import World

    torch.set_num_threads(1)
    script, schedules = Path(sys.argv[1]), sys.argv[2:]
    for schedule in schedules:
        for rank in range(3):
            options = Options(pp=3, rank=rank)
            run = sender_runner(Script(script, [schedule]), options)
            runs = script.parent / "runs"
            runs.write_text("")
            def noted(sender, messages):
                with runs.open("a") as file:
                    print(sender, file=file)
                run(sender, messages)
            messages = SenderProcesses(rank, noted, lambda _: None)
            with messages.ready():
                recorder = Recorder(rank, 3, messages)
                recorder.start()
                steps = []
                hook = register_optimizer_step_post_hook(
                    lambda *_: steps.append(len(recorder.calls))
                )
                with environment(torchrun_variables(rank, 3, 3)):
                    play_script(Script(script, [schedule]))
                hook.remove()
                recorder.stop()
            calls = recorder.calls[steps[0]:]
            counts = collections.Counter((call.collective, call.peer, call.bytes) for call in calls)
            senders = sorted(map(int, runs.read_text().split()))
            print(json.dumps([schedule, rank, sorted(map(list, counts.items())), senders]))
"""

STATES = 2 * 12 * 24 * 4  # bytes of one micro-batch's hidden states
BATCHES = 8


def between(*peers: int) -> list[object]:
    """What one step exchanges with each neighbour, once for each stage border shared with it."""
    counts = {peer: BATCHES * peers.count(peer) for peer in peers}
    return sorted(
        [[way, peer, STATES], count] for way in ("recv", "send") for peer, count in counts.items()
    )


LINE = {0: between(1), 1: between(0, 2), 2: between(1)}
# two stages a rank: 0 to 2 and on to 0 again, or to 2 and back
LOOP = {0: between(1, 1, 2), 1: between(0, 0, 2, 2), 2: between(1, 1, 0)}
FOLD = {0: between(1, 1), 1: between(0, 0, 2, 2), 2: between(1, 1)}
SCHEDULES = {
    "ScheduleGPipe": LINE,
    "Schedule1F1B": LINE,
    "ScheduleInterleaved1F1B": LOOP,
    "ScheduleZBVZeroBubble": FOLD,
    "ScheduleDualPipeV": FOLD,
}


def write(directory: Path, steps: int) -> Path:
    path = directory / "train.py"
    path.write_text(textwrap.dedent(SCRIPT).replace("STEPS", str(steps)))
    return path


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory):
    """What a step communicates, and the ranks that ran as senders, by schedule and rank."""
    script = write(tmp_path_factory.mktemp("pipelining"), steps=2)
    done = run_code(textwrap.dedent(ALL_RANKS), script, *SCHEDULES)
    assert done.returncode == 0, done.stderr
    lines = map(json.loads, done.stdout.splitlines())
    return {(schedule, rank): (counts, senders) for schedule, rank, counts, senders in lines}


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_first_middle_and_last_rank(exchanged, schedule, rank):
    counts, senders = exchanged[schedule, rank]
    assert counts == SCHEDULES[schedule][rank]
    assert senders == sorted({0, 1, 2} - {rank})  # each ran once


def test_a_middle_rank_is_captured(tmp_path):
    script, trace = write(tmp_path, steps=50), tmp_path / "t.et"
    arguments = ("capture", "run", script, "--pp", "4", "--rank", "2", "-o", trace)
    done = run_command(*arguments, "--json", "--", "Schedule1F1B")
    assert done.returncode == 0, done.stderr
    assert "running as rank 1, to learn what it sends" in done.stderr
    summary = json.loads(done.stdout)
    calls = Counter[tuple[str, int]]()  # of all phases
    for use in summary["collectives"]:
        calls[use["type"], use["bytes"]] += use["count"]
    assert calls == {("recv", STATES): 16, ("send", STATES): 16}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.et", "train.py"]
    graph = onerank.read(tmp_path / "t.et")
    for name in ("aten::gelu", "aten::gelu_backward"):
        numbers = [node.value("micro_batch") for node in graph if node.name == name]
        assert numbers == [*range(BATCHES)]
    ways = {
        ("recv", 1): Phase.FORWARD,
        ("send", 3): Phase.FORWARD,
        ("recv", 3): Phase.BACKWARD,
        ("send", 1): Phase.BACKWARD,
    }
    exchanged = {way: [] for way in ways}
    for node in graph:
        if node.kind in (Kind.SEND, Kind.RECV):
            peer = node.value("comm_src" if node.kind == Kind.RECV else "comm_dst")
            exchanged[node.name, peer].append((node.phase, node.value("micro_batch")))
    assert exchanged == {way: [(phase, n) for n in range(BATCHES)] for way, phase in ways.items()}
    # GELU keeps its input, which Linear made; its output is sent, and kept before torch 2.15
    kept = 1 if hasattr(stage, "_ForwardChunkState") else 2
    assert graph.job.measurement.activation_bytes == (kept * STATES,) * BATCHES


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_neighbours_run_on_the_gpu(tmp_path):
    """Neighbours are forks: nothing may initialise CUDA before they are prepared."""
    on_gpu = SCRIPT.replace('torch.device("cpu")', 'torch.device("cuda", 0)')
    on_gpu = on_gpu.replace("import sys", "import sys, torch; torch.set_default_device('cuda')", 1)
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(on_gpu).replace("STEPS", "30"))
    windows = ("--warm-up", "3", "--timed-steps", "2")
    command = (
        sys.executable,
        "-m",
        "onerank",
        "capture",
        "run",
        script,
        "--pp",
        "4",
        "--rank",
        "2",
    )
    trace = ("-o", tmp_path / "trace.et", "--", "Schedule1F1B")
    done = subprocess.run([*command, *windows, *trace], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    graph = onerank.read(tmp_path / "trace.et")
    assert graph.job.device.type == "cuda"
    assert (graph.nodes.kind == Kind.SEND).sum() == 16


def test_a_neighbour_that_fails_is_quoted(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch.distributed as dist\n"
        "dist.init_process_group()\n"
        "if dist.get_rank() == 0: raise RuntimeError('no data for the first rank')\n"
        "dist.recv_object_list([None], src=0)\n"
    )
    arguments = ("capture", "run", script, "--pp", "2", "--rank", "1", "-o", tmp_path / "t.et")
    done = run_command(*arguments)
    assert done.returncode == 2
    assert "error[sender-failed]" in done.stderr
    assert "rank 1 waits for objects from rank 0" in done.stderr
    assert "RuntimeError: no data for the first rank" in done.stderr
    assert not (tmp_path / "t.et").exists()
