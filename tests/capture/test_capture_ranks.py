"""Several ranks captured in turn: classes of equivalent ranks, outputs, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from job_options import axes
from notes import has_note
from own_process import call, run_command
from raised import raises_code

import onerank
from onerank.annotate import recost
from onerank.capture import Options, WindowPlan, capture, capture_ranks
from onerank.capture.parallelize.experts.expert_parallel import expert_loads
from onerank.capture.parallelize.experts.routing import Routing
from onerank.capture.parallelize.pipeline.stage import PipelineStage
from onerank.capture.parallelize.shard_model import classes_along, rank_classes
from onerank.converters.expand.pipeline import PipelineSchedule, expand
from onerank.converters.expand.ranks import expand_ranks
from onerank.converters.targets.astra_sim.check import check
from onerank.converters.targets.astra_sim.exporter import export_astra_sim_ranks
from onerank.ir import Collective, Graph, Pipeline, World
from onerank.ir.errors import CaptureError

SHORT = ["--warm-up", "1", "--timed-steps", "1"]


def run_onerank(*command: Any, status: int = 0) -> Any:
    done = run_command(*command)
    assert done.returncode == status, done.stderr
    return done


# Classes -----------------------------------------------------------------------------------------


def experts(layers: int) -> Any:
    with torch.device("meta"):
        return transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                hidden_size=32, intermediate_size=32, num_hidden_layers=layers,
                num_attention_heads=4, num_key_value_heads=2, vocab_size=32, num_local_experts=4,
            )
        )  # fmt: skip


def classes(world: World, routing: Routing, stages: int = 1) -> list[Any]:
    loads = expert_loads(experts(4), routing, world.ep)
    layers_per_stage = (4 // stages,) * stages
    work_keys = tuple((at == 0, at == stages - 1) for at in range(stages))
    stage = (
        PipelineStage(Pipeline(0, layers_per_stage), work_keys, "model.layers", 0, 0)
        if stages > 1
        else None
    )
    derived = rank_classes(world, stage, loads)
    members = [rank_class.members(world) for rank_class in derived]
    assert sorted(rank for ranks in members for rank in ranks) == [*range(world.size)]
    assert [rank_class.representative for rank_class in derived] == [ranks[0] for ranks in members]
    return [(rank_class.where, ranks) for rank_class, ranks in zip(derived, members, strict=True)]


def test_ranks_whose_experts_have_equal_loads_are_equivalent():
    world = World.of(tp=2, dp=4, ep=2)
    assert classes(world, Routing("balanced")) == [({}, (0, 1, 2, 3, 4, 5, 6, 7))]
    assert classes(world, Routing("zipf:1", 1.0)) == [
        ({"ep": (0,)}, (0, 1, 4, 5)),
        ({"ep": (1,)}, (2, 3, 6, 7)),
    ]
    # experts 0 and 1 get 3/8 and 1/8 of the tokens, experts 2 and 3 get 1/8 and 3/8
    assert classes(world, Routing("f", table=((3, 1, 1, 3),))) == [({}, (0, 1, 2, 3, 4, 5, 6, 7))]


def test_stages_with_other_routing_are_not_equivalent():
    world = World.of(dp=2, pp=4, ep=2)
    even, uneven = (1.0,) * 4, (3.0, 3.0, 1.0, 1.0)
    assert classes(world, Routing("balanced"), 4) == [
        ({"pp": (0,)}, (0, 1)),
        ({"pp": (1, 2)}, (2, 3, 4, 5)),
        ({"pp": (3,)}, (6, 7)),
    ]
    assert classes(world, Routing("f", table=(even, even, uneven, even)), 4) == [
        ({"pp": (0,)}, (0, 1)),
        ({"pp": (1,)}, (2, 3)),
        ({"pp": (2,), "ep": (0,)}, (4,)),
        ({"pp": (2,), "ep": (1,)}, (5,)),
        ({"pp": (3,)}, (6, 7)),
    ]


def test_named_ranks_represent_ranks_with_their_coordinates():
    world = World.of(tp=2, dp=2, pp=3)
    derived = classes_along(world, [0, 4, 8])
    assert [rank_class.members(world) for rank_class in derived] == [
        (0, 1, 2, 3),
        (4, 5, 6, 7),
        (8, 9, 10, 11),
    ]
    derived = classes_along(world, [0, 1])
    assert [rank_class.members(world) for rank_class in derived] == [
        (0, 2, 4, 6, 8, 10),
        (1, 3, 5, 7, 9, 11),
    ]
    assert classes_along(world, [5])[0].members(world) == tuple(range(12))


# From the command to the simulator ---------------------------------------------------------------

LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=96)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters())
while True:
    optimizer.zero_grad()
    for _ in range(3):
        tokens = torch.randint(0, 96, (2, 16))
        (model(input_ids=tokens, labels=tokens, use_cache=False).loss / 3).backward()
    optimizer.step()
"""


def test_distinct_ranks_of_a_pipeline_become_a_workload_of_all(tmp_path):
    script, stages = tmp_path / "train.py", tmp_path / "stages"
    script.write_text(LLAMA)
    stages.mkdir()
    done = run_onerank(
        "capture",
        "run",
        script,
        "--pp",
        2,
        "--tp",
        2,
        "--ranks",
        "distinct",
        *SHORT,
        "--raw-dir",
        tmp_path / "raw",
        "-o",
        stages / "t.et",
    )
    assert "· one rank of each class of equivalent ranks: 0, 2" in done.stderr
    assert "· rank 2: linking the traces" in done.stderr
    graphs = {rank: onerank.read(stages / f"t.{rank}.et") for rank in (0, 2)}
    assert sorted(path.name for path in stages.iterdir()) == ["t.0.et", "t.2.et"]
    assert sorted(path.name for path in (tmp_path / "raw").iterdir()) == [
        "rank-0", "rank-2"]  # fmt: skip
    rows = [line.split() for line in done.stdout.splitlines() if line.rstrip().endswith(".et")]
    assert [row[:3] for row in rows] == [
        [str(rank), f"{rank}-{rank + 1}", str(len(graph))] for rank, graph in graphs.items()
    ]
    for graph in graphs.values():
        assert [rank_class.where for rank_class in graph.job.classes] == [
            {"pp": (at,)} for at in range(2)
        ]
    shown = run_onerank("show", stages / "t.2.et").stdout
    assert "rank classes    2; one rank of each: 0, 2\n" in shown
    for rank, graph in graphs.items():
        recost(graph, "H100").write(stages / f"t.{rank}.et")
    run_onerank(
        "export",
        "astra-sim",
        stages,
        "--schedule",
        "1f1b",
        "--micro-batches",
        4,
        "-o",
        tmp_path / "out",
    )
    assert {path.name for path in (tmp_path / "out").glob("workload.*.et")} == {
        f"workload.{rank}.et" for rank in range(4)
    }
    assert check(tmp_path / "out") == []
    refused = run_onerank("export", "astra-sim", stages, "-o", tmp_path / "other", status=2)
    assert "error[ranks-need-schedule]" in refused.stderr
    assert "stage 0" in refused.stderr


def test_stages_extrapolated_to_their_own_depths_become_a_workload_of_all(tmp_path):
    script, stages = tmp_path / "train.py", tmp_path / "stages"
    script.write_text(LLAMA.replace("num_hidden_layers=3", "num_hidden_layers=9"))
    stages.mkdir()
    run_onerank(
        "capture",
        "run",
        script,
        "--pp",
        2,
        "--capture-layers",
        "2,3",
        "--ranks",
        "distinct",
        *SHORT,
        "-o",
        stages / "t.et",
    )
    graphs = {rank: onerank.read(stages / f"t.{rank}.et") for rank in (0, 1)}
    lists: list[Any] = []
    for rank, graph in graphs.items():
        assert graph.job.pipeline == Pipeline(rank, (5, 4))
        depths = graph.job.measurement.depths
        assert depths is not None
        assert (depths.layers, depths.depth, depths.copied) == ((2, 3), 5 - rank, 2 - rank)
        lists.append(sorted({m.path for m in graph.job.modules if m.role == "layer"}))
        recost(graph, "H100").write(stages / f"t.{rank}.et")
    assert lists == [
        [f"model.layers.{number}" for number in numbers] for numbers in (range(5), range(5, 9))
    ]
    run_onerank(
        "export",
        "astra-sim",
        stages,
        "--schedule",
        "1f1b",
        "--micro-batches",
        4,
        "-o",
        tmp_path / "out",
    )
    assert check(tmp_path / "out") == []


EXPERTS = """
import torch
from transformers import MixtralConfig, MixtralForCausalLM

config = MixtralConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=96, num_local_experts=4, num_experts_per_tok=1)
model = MixtralForCausalLM(config)
optimizer = torch.optim.SGD(model.parameters())
while True:
    tokens = torch.randint(0, 96, (2, 25))
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def captured(script: Path, world: World, ranks: list[int]) -> dict[int, Graph]:
    graphs: dict[int, Graph] = {}
    for rank in ranks:
        routed = Options(
            **axes(world), rank=rank, windows=WindowPlan(1, 1), moe_routing="zipf:1", zero=1
        )  # replicas broadcast what is no parameter, which ASTRA-sim cannot
        graph = capture(script, [], routed).graph
        assert [rank_class.representative for rank_class in graph.job.classes] == ranks
        graphs[rank] = graph
    return graphs


def exchanged(graph: Graph) -> list[int]:
    return [n.value("comm_bytes") for n in graph if n.collective is Collective.ALL_TO_ALL]


def test_uneven_experts_meet_in_one_workload(tmp_path):
    """50 tokens go 24, 12, 8, 6: two ranks' experts get 36 and 14 from each, 128 bytes each."""
    script = tmp_path / "train.py"
    script.write_text(EXPERTS)
    graphs = captured(script, World.of(dp=4, ep=2), [0, 1])
    busy, idle = 2 * 36 * 128, 2 * 14 * 128
    assert exchanged(graphs[0]) == [50 * 128, busy] * 4
    assert exchanged(graphs[1]) == [50 * 128, idle] * 4
    rank_graphs = expand_ranks([recost(graph, "H100") for graph in graphs.values()])
    assert [entry.ranks for entry in rank_graphs] == [(0, 2), (1, 3)]
    done = export_astra_sim_ranks(rank_graphs, tmp_path / "out")
    assert done.ranks == 4
    assert has_note(done.notes, "all-to-all-unequal-parts")
    for rank in range(4):
        graph = onerank.read(done.directory / f"workload.{rank}.et")
        assert exchanged(graph) == [busy] * 8


def test_uneven_experts_of_a_pipeline_s_stages(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(EXPERTS)
    graphs = captured(script, World.of(dp=2, pp=2, ep=2), [0, 1, 2, 3])
    on_h100 = [recost(graph, "H100") for graph in graphs.values()]
    rank_graphs = expand(on_h100, PipelineSchedule("1f1b"), 4)
    assert [(entry.ranks, entry.stages) for entry in rank_graphs] == [
        ((0,), (0,)), ((1,), (0,)), ((2,), (1,)), ((3,), (1,))]  # fmt: skip
    done = export_astra_sim_ranks(rank_graphs, tmp_path / "out")
    assert {(0, 1), (2, 3)} <= {*done.groups.values()}


# Scripts that distribute themselves --------------------------------------------------------------

ITSELF = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
model = torch.nn.Linear(8, 8 * (1 + rank // 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
stage = dist.new_subgroups(2)[0]
while True:
    assert rank != 2, "not this one"
    model(torch.randn(4, 8)).sum().backward()
    if rank < 2:
        dist.send(torch.ones(16), dst=rank + size // 2)
    else:
        dist.recv(torch.empty(16), src=rank - size // 2)
    dist.all_reduce(model.bias.grad, group=stage)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_named_ranks_of_a_script_that_distributes_itself(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(ITSELF.replace("rank != 2", "True"))
    options = Options(dp=2, pp=2, windows=WindowPlan(1, 1))
    done = call(capture_ranks, script, [], options, [2, 0])
    assert done.represents == {0: (0, 1), 2: (2, 3)}
    assert done.missing == ()
    on_h100 = [recost(captured_rank.graph, "H100") for captured_rank in done.captures.values()]
    exported = export_astra_sim_ranks(
        expand_ranks(on_h100), tmp_path / "out"
    )  # checks that they meet
    assert {*exported.groups.values()} == {(0, 1, 2, 3), (0, 1), (2, 3)}


def test_a_rank_that_fails_is_named_and_nothing_is_written(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(ITSELF)
    done = run_onerank(
        "capture",
        "run",
        script,
        "--pp",
        2,
        "--dp",
        2,
        "--ranks",
        "0,2",
        *SHORT,
        "--raw-dir",
        tmp_path / "raw",
        "-o",
        tmp_path / "t.et",
        status=2,
    )
    assert "error[script-raised]: rank 2: " in done.stderr
    assert "AssertionError after 0 optimizer steps: not this one" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_ranks_in_turn_on_a_gpu_leave_each_other_no_memory(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        LLAMA.replace("(config)\n", "(config).to('cuda', torch.bfloat16)\n").replace(
            "(2, 16))", "(2, 16), device='cuda')"
        )
    )
    options = Options(tp=2, pp=2, windows=WindowPlan(1, 1))
    both = capture_ranks(script, [], options, None)
    assert both.represents == {0: (0, 1), 2: (2, 3)}
    only_rank = capture_ranks(script, [], options, [2]).captures[2].graph
    second = both.captures[2].graph
    assert second.gpu_compute.sum() == only_rank.gpu_compute.sum() > 0
    measured, expected = second.job.measurement, only_rank.job.measurement
    assert measured.start_memory_bytes == expected.start_memory_bytes
    assert measured.peak_memory_bytes == expected.peak_memory_bytes
    graphs = [captured_rank.graph for captured_rank in both.captures.values()]
    assert (
        export_astra_sim_ranks(expand(graphs, PipelineSchedule("1f1b"), 4), tmp_path / "out").ranks
        == 4
    )


REFUSED: dict[str, tuple[str, World, dict[str, Any], Any, str]] = {
    "the classes are the script's": (
        ITSELF, World.of(dp=8, pp=2), {}, None,
        "ranks-classes-unknown"),
    "the classes are the script's, no pipeline": (
        ITSELF, World.of(dp=8), {}, None, "ranks-classes-unknown"),
    "the classes are the router's": (
        EXPERTS, World.of(dp=2, ep=2), {"moe_routing": "model"}, None,
        "ranks-model-routing"),
    "one rank": (LLAMA, World(), {}, None, "ranks-of-one"),
    "a rank that is not there": (LLAMA, World.of(tp=4), {}, [0, 4, 7], "ranks-out-of-range"),
    "a rank twice": (LLAMA, World.of(tp=4), {}, [1, 1], "ranks-repeated"),
    "real ranks": (LLAMA, World.of(tp=4), {"record_real_job": True}, [0], "ranks-with-real-job"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_captured_in_turn_is_refused_before_it_runs(tmp_path, case):
    text, world, options, ranks, code = REFUSED[case]
    script = tmp_path / "train.py"
    script.write_text(f"raise AssertionError('the script ran')\n{text}")
    with raises_code(code, CaptureError):
        capture_ranks(
            script, [], Options(**axes(world), windows=WindowPlan(1, 1), **options), ranks
        )


@pytest.mark.parametrize(
    ("more", "code"),
    [
        (["--rank", "1"], "ranks-with-rank"),
        (["--compile"], "ranks-with-compile"),
        (["--record-real-job"], "ranks-with-real-job"),
    ],
)
def test_options_that_go_without_ranks(tmp_path, more, code):
    script = tmp_path / "train.py"
    script.write_text(LLAMA)
    done = run_onerank(
        "capture",
        "run",
        script,
        "--tp",
        2,
        "--ranks",
        "0,1",
        *more,
        "-o",
        tmp_path / "t.et",
        status=2,
    )
    assert f"error[{code}]" in done.stderr
    assert more[0] in done.stderr


def test_ranks_are_numbers_with_commas_between(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(LLAMA)
    done = run_onerank(
        "capture", "run", script, "--ranks", "0;1", "-o", tmp_path / "t.et", status=2
    )
    assert "error[option-not-integers]" in done.stderr
    assert "'0;1'" in done.stderr


def test_json_tells_each_rank_and_extrapolates_each(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(LLAMA.replace("range(3)", "range(1)"))
    done = run_onerank(
        "capture",
        "run",
        script,
        "--tp",
        2,
        "--ranks",
        "distinct",
        "--capture-layers",
        "1,3",
        *SHORT,
        "--json",
        "-o",
        tmp_path / "absent" / "t.et",
    )
    output = json.loads(done.stdout)
    assert output["missing"] == []
    (entry,) = output["ranks"]
    assert (entry["rank"], entry["represents"], entry["trace"]) == (
        0,
        [0, 1],
        str(tmp_path / "absent" / "t.0.et"),
    )
    assert entry["step_ns"] > 0
    depths = onerank.read(tmp_path / "absent" / "t.0.et").job.measurement.depths
    assert depths is not None
    assert depths.layers == (1, 3)


# Each in a process of its own --------------------------------------------------------------------

CHANGES_ALL = """
import atexit
import json
import os
import signal
import sys

import numpy
import torch

seeds = [numpy.random.random(), torch.initial_seed()]
found = [os.getcwd(), "MINE" in os.environ, hasattr(json, "mine"), sys.argv[1:], __name__,
         signal.getsignal(signal.SIGINT).__name__]
atexit.register(print, "ends as", os.getpid())
print("seen", os.getppid(), json.dumps([found, seeds]))
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
numpy.random.seed(1), torch.manual_seed(1), signal.signal(signal.SIGINT, signal.SIG_IGN)
json.mine = os.environ["MINE"] = "1"
os.chdir("/")
while True:
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_no_rank_inherits_what_the_one_before_changed(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(CHANGES_ALL)
    done = run_onerank(
        "capture",
        "run",
        script,
        "--dp",
        2,
        "--ranks",
        "0,1",
        *SHORT,
        "-o",
        tmp_path / "t.et",
        "--",
        "-x",
    )
    lines = [line.split(" ", 2) for line in done.stdout.splitlines()]
    (parent, first), (same, second) = [fields[1:] for fields in lines if fields[0] == "seen"]
    assert parent == same  # both are forks of the command, which imported torch for both
    assert len({fields[2] for fields in lines if fields[:2] == ["ends", "as"]}) == 2
    (first_state, seeds), (second_state, others) = json.loads(first), json.loads(second)
    expected = [str(Path.cwd()), False, False, ["-x"], "__main__", "default_int_handler"]
    assert first_state == second_state == expected
    assert not {*seeds} & {*others}


ENDS = """
import atexit
import os
import pathlib
import signal
import time

import torch

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(4, 8)).sum().backward()
optimizer.step()
command = os.getppid()
"""

KILLED = "os.kill(os.getpid(), signal.SIGKILL)\n"

INTERRUPTS = """
atexit.register(pathlib.Path(__file__).with_name("ended").touch)
os.kill(command, signal.SIGINT)
time.sleep(600)
"""

TERMINATES = INTERRUPTS.replace("SIGINT", "SIGTERM")  # as a scheduler does


@pytest.mark.parametrize(
    ("ending", "status", "complaint", "left"),
    [
        (KILLED, 2, "error[capture-process-died]: rank 0: ", []),
        (INTERRUPTS, 130, "interrupted", ["ended"]),
        (TERMINATES, 130, "interrupted", ["ended"]),
    ],
)
def test_a_rank_that_is_killed_or_interrupted(tmp_path, ending, status, complaint, left):
    script, temporary = tmp_path / "train.py", tmp_path / "tmp"
    script.write_text(ENDS + ending)
    temporary.mkdir()
    done = run_command(
        *("capture", "run", script, "--dp", 2, "--ranks", "0,1", *SHORT, "-o", tmp_path / "t.et"),
        environment={"TMPDIR": str(temporary)},
    )
    assert done.returncode == status, done.stderr
    assert complaint in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "tmp", *left}
    # what was killed could not remove its own
    assert status == 2 or list(temporary.glob("onerank-*")) == []
