"""How a script is started: by its name as a module, by torchrun, by a launcher of its own."""

import gc
import textwrap
import weakref
from pathlib import Path

import pytest
import torch
from own_process import run_command
from raised import raises_code
from torch.distributed import fsdp

from onerank import read
from onerank.capture import Options, WindowPlan, capture
from onerank.capture.fake_world.device_remap import DeviceRemap, remap_devices, report_node_gpus
from onerank.capture.parallelize.tensor.plan_file import ShardingPlan

TRAINING = """
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        model(torch.randn(2, 8)).sum().backward()
        dist.all_reduce(model.weight.grad)
        optimizer.step()
"""


def test_a_module_runs_by_its_name_with_imports_from_here(tmp_path, monkeypatch):
    package = tmp_path / "jobs" / "llm"
    package.mkdir(parents=True)
    (tmp_path / "sibling.py").write_text("import torch.distributed as dist\n")
    (package / "parts.py").write_text("import torch\n")
    start = "from sibling import dist\nfrom .parts import torch\ndist.init_process_group('nccl')\n"
    (package / "train.py").write_text(start + textwrap.dedent(TRAINING))
    monkeypatch.chdir(tmp_path)
    short = ("--dp", 2, "--warm-up", 1, "--timed-steps", 1, "-o", "t.et")
    done = run_command("capture", "run", "-m", "jobs.llm.train", *short, "--", "--lr", "1")
    assert done.returncode == 0, done.stderr
    assert [node.name for node in read("t.et") if node.kind.is_communication] == ["all_reduce"]
    missed = run_command("capture", "run", "-m", "jobs.llm.trian", *short)
    assert missed.returncode == 2
    assert "error[script-no-module]: -m jobs.llm.trian" in missed.stderr


def test_a_script_that_torchrun_starts_need_not_name_torch_distributed(tmp_path):
    path = tmp_path / "train.py"
    start = """
        import importlib, os, torch
        dist = importlib.import_module("torch" + ".distributed")
        assert dist.is_torchelastic_launched()  # Lightning starts no ranks then
        assert os.environ["RANK"] == os.environ["ROLE_RANK"] == "2"
        getattr(dist, "init_process" + "_group")()
    """
    path.write_text(textwrap.dedent(start) + textwrap.dedent(TRAINING))
    plan = WindowPlan(warm_up=1, timed_steps=1)
    graph = capture(path, [], Options(dp=4, rank=2, windows=plan, torchrun=True)).graph
    assert [node.name for node in graph if node.kind.is_communication] == ["all_reduce"]
    with raises_code("torchrun-with-plan"):
        capture(
            path,
            [],
            Options(dp=4, torchrun=True, sharding_plan=ShardingPlan(("Net",), {})),
        )


OFF = """
import os, sys, torch
import torch.distributed as dist
ddp = "RANK" in os.environ  # as nanoGPT decides
if "--group" in sys.argv and ddp:
    dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.randn(2, 8)).sum().backward()
    if "--group" in sys.argv and ddp:
        dist.all_reduce(model.bias.grad)
    optimizer.step()
"""
"""Names torch.distributed; whether it uses it, its arguments say."""

QUICK = WindowPlan(warm_up=1, timed_steps=1)


def _collectives(path: Path, args: list[str], options: Options) -> list[tuple[str, int]]:
    graph = capture(path, args, options).graph
    return [(node.name, node.value("comm_bytes")) for node in graph if node.kind.is_communication]


def test_the_script_decides_whether_it_distributes_itself(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(OFF)
    replicas = Options(dp=8, windows=QUICK)
    # 8 x 8 weights and 8 biases of 4 bytes, or the biases alone
    assert _collectives(path, [], replicas) == [("all_reduce", 288)]
    assert _collectives(path, ["--group"], replicas) == [("all_reduce", 32)]
    not_launched = Options(dp=8, windows=QUICK, torchrun=False)
    assert _collectives(path, ["--group"], not_launched) == [("all_reduce", 288)]
    with raises_code("script-missing", naming="absent.py"):
        capture(tmp_path / "absent.py", [], not_launched)
    with raises_code("nothing-parallel") as caught:
        capture(path, [], Options(dp=8, windows=QUICK, torchrun=True))
    assert "--no-torchrun" in str(caught.value)
    with raises_code("dp-strategy-unused") as caught:
        capture(path, ["--group"], Options(dp=8, windows=QUICK, ddp=True))
    assert "--no-torchrun" in str(caught.value)


def test_a_world_of_one_has_no_environment_of_torchrun(tmp_path):
    path = tmp_path / "train.py"
    start = "assert not dist.is_initialized()\nif ddp:\n    torch.cuda.set_device(7)\nif ddp and "
    path.write_text(OFF.replace("if ", start, 1))
    assert _collectives(path, [], Options(windows=QUICK)) == []


def test_a_hugging_face_script_whose_branch_of_several_gpus_is_off_is_sliced(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import argparse, torch, transformers\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--ddp', action='store_true')\n"
        "if parser.parse_args().ddp:\n"
        "    import torch.distributed as dist\n"
        "    dist.init_process_group('gloo')\n"
        "config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64,\n"
        "    num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4)\n"
        "model = transformers.LlamaForCausalLM(config)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "tokens = torch.randint(64, (2, 8))\n"
        "while True:\n"
        "    model(tokens, labels=tokens).loss.backward()\n"
        "    optimizer.step()\n"
    )
    size = ("--tp", 2, "--warm-up", 1, "--timed-steps", 1)
    done = run_command("capture", "run", path, *size, "-o", tmp_path / "t.et")
    assert done.returncode == 0, done.stderr
    reduced = [n.value("comm_bytes") for n in read(tmp_path / "t.et") if n.name == "all_reduce"]
    assert reduced.count(2 * 8 * 32 * 4) >= 4  # two of forward, two of backward


def test_arguments_of_the_script_come_after_two_dashes(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import sys\nassert sys.argv[1:] == ['--lr', '3']\nsys.exit(7)\n")
    refused = run_command("capture", "run", path, "-o", tmp_path / "t.et", "--lr", "3")
    assert refused.returncode == 2
    assert "error[script-arguments-unseparated]" in refused.stderr
    assert f"capture run {path} ... -- --lr ..." in refused.stderr
    ran = run_command("capture", "run", path, "-o", tmp_path / "t.et", "--", "--lr", "3")
    assert "error[script-exited]" in ran.stderr
    assert "sys.exit(7)" in ran.stderr


def test_the_trace_is_named_like_the_script_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        "import torch\n" + textwrap.dedent(TRAINING).replace("dist.all_reduce", "id")
    )
    done = run_command("capture", "run", "train.py", "--warm-up", 1, "--timed-steps", 1)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.et", "train.py"]
    assert len(read("train.et")) > 0


def test_an_output_that_cannot_be_written_is_refused_before_the_script_runs(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("print('the script ran')\n")
    done = run_command("capture", "run", path, "-o", "/proc/a.et")  # root may write, says access(2)
    assert done.returncode == 2
    assert "error[output-not-writable]" in done.stderr
    assert "/proc" in done.stderr
    assert "the script ran" not in done.stdout + done.stderr


def test_a_library_that_leaves_torchruns_ranks_alone_is_refused(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import torch\n" + textwrap.dedent(TRAINING).replace("dist.all_reduce", "id"))
    with raises_code("nothing-parallel"):
        capture(path, [], Options(dp=4, torchrun=True))


def test_ranks_that_a_script_starts_itself_are_refused(tmp_path: Path):
    path = tmp_path / "train.py"
    path.write_text(
        "import os, subprocess, sys\n"
        "subprocess.run(['true'], env={**os.environ, 'OTHER': '1'})\n"
        "subprocess.Popen([sys.executable, __file__], env={**os.environ, 'LOCAL_RANK': '1'})\n"
    )
    with raises_code("spawn-launcher") as caught:
        capture(path, [], Options(dp=4))
    assert "--torchrun" in str(caught.value)


def test_calls_of_functions_on_absent_ranks_are_refused(tmp_path: Path):
    path = tmp_path / "train.py"
    path.write_text(
        "import torch.distributed.rpc as rpc, torch.multiprocessing as mp\n"
        "def work(rank):\n"
        "    rpc.init_rpc(f'worker{rank}', rank=rank, world_size=3)\n"
        "mp.spawn(work, nprocs=3)\n"
    )
    with raises_code("script-rpc"):
        capture(path, [], Options(dp=3))


def test_a_node_has_as_many_ranks_as_torchrun_would_start_on_it(tmp_path):
    path = tmp_path / "train.py"
    start = """
        import os, torch, torch.distributed as dist
        from torch.distributed.fsdp import _init_utils as fsdp1
        dist.init_process_group("gloo")
        node, nodes = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["GROUP_WORLD_SIZE"])
        assert node * nodes == 16 and int(os.environ["GROUP_RANK"]) == 9 // node
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        counted = 1  # GPUs of this host, as FullyShardedDataParallel counts them
        groups = fsdp1._init_intra_and_inter_node_groups(dist.group.WORLD, counted)
        groups = (*groups, dist.new_subgroups()[0])
        while True:
            model(torch.randn(2, 8)).sum().backward()
            for group in groups:
                dist.all_reduce(model.weight.grad, group=group)
            optimizer.step()
    """
    path.write_text(textwrap.dedent(start))
    eight, four = (tuple(range(8, 16)), (1, 9)), ((8, 9, 10, 11), (1, 5, 9, 13))
    for gpus_per_node, (within, across) in ((None, eight), (4, four)):
        options = Options(
            dp=16,
            rank=9,
            windows=WindowPlan(warm_up=1, timed_steps=1),
            nproc_per_node=gpus_per_node,
        )
        graph = capture(path, [], options).graph
        groups = {group.name: group.ranks for group in graph.job.groups}
        called = [groups[name] for name in graph.text("group") if name]
        assert called == [within, across, within]
    for options, code in (
        (Options(dp=16, nproc_per_node=5), "nodes-indivisible"),
        (Options(dp=16, nproc_per_node=4, record_real_job=True), "nproc-unused"),
    ):
        with raises_code(code):
            capture(path, [], options)
    (tmp_path / "unaware.py").write_text("import torch\n")
    with raises_code("nproc-unused"):
        capture(tmp_path / "unaware.py", [], Options(dp=16, nproc_per_node=4))


def test_a_rank_finds_its_place_on_the_requested_node(tmp_path):
    path = tmp_path / "train.py"
    start = """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        assert int(os.environ["LOCAL_RANK"]) == dist.new_subgroups()[0].rank() == 5  # nanotron's
    """
    path.write_text(textwrap.dedent(start) + textwrap.dedent(TRAINING))
    options = Options(
        dp=16, rank=13, windows=WindowPlan(warm_up=1, timed_steps=1), true_local_rank=True
    )
    capture(path, [], options)
    (tmp_path / "unaware.py").write_text("import torch\n")
    with raises_code("local-rank-unused"):
        capture(tmp_path / "unaware.py", [], options)


def test_a_script_counts_the_gpus_of_its_jobs_node(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.accelerator.device_count", torch.cuda.device_count)
    path = tmp_path / "train.py"
    start = """
        import torch, torch.distributed as dist
        from torch.cuda import device_count
        dist.init_process_group("gloo")
        rank, gpus = dist.get_rank(), torch.cuda.device_count()
        assert gpus == device_count() == torch.accelerator.device_count() == 8 and rank == 13
        assert list(range(gpus)) == [*range(8)] and dist.get_world_size() // gpus == 2
        assert rank % gpus == 0 and divmod(rank, gpus) == (1, 0)  # LOCAL_RANK is 0
        assert torch.cuda.device(rank - gpus * (rank // gpus)).idx == torch.cuda.device(0).idx == 0
        assert torch.cuda.device(8).idx == 8  # no GPU of the node
        own = {"torch": torch, "__name__": "torch.random"}  # it asks each of those that are here
        assert eval("torch.cuda.device_count()", own) == 1
        lightning = {"__name__": "lightning.fabric.accelerators.cuda", "torch": torch}
        assert type(eval("torch.cuda.device_count()", lightning)) is int
    """
    path.write_text(textwrap.dedent(start) + textwrap.dedent(TRAINING))
    capture(path, [], Options(dp=16, rank=13, windows=WindowPlan(warm_up=1, timed_steps=1)))
    assert torch.cuda.device_count() == 1
    assert torch.cuda.device(5).idx == 5
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with report_node_gpus(8):
        assert torch.cuda.device_count() == 0  # the job would have none either


def test_counting_gpus_keeps_nothing_of_the_callers(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)

    def counting() -> weakref.ref[torch.Tensor]:
        held = torch.empty(1)
        assert torch.cuda.device_count() == 8
        return weakref.ref(held)

    gc.collect()
    gc.disable()
    try:
        with report_node_gpus(8):
            assert counting()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("requested", "found"),
    [
        *((1, 0), (7, 0), (8, 8), (0, 0), (None, None), (torch.float32, torch.float32)),
        *(("cuda:3", "cuda:0"), ("cuda:8", "cuda:8"), ("cuda", "cuda"), ("cpu", "cpu")),
        (torch.device("cuda", 3), torch.device("cuda", 0)),
        (torch.device("cuda"), torch.device("cuda")),
        (torch.device("cpu", 1), torch.device("cpu", 1)),
    ],
)
def test_a_gpu_of_the_node_is_the_one_that_is_here(requested, found):
    assert DeviceRemap(1, 8)(requested) == found
    assert DeviceRemap(0, 8)(requested) == requested  # a job without GPUs has none elsewhere


class OnCpu(DeviceRemap):
    """Has the CPU for the GPU that is here."""

    def __call__(self, requested):
        found = super().__call__(requested)
        return found if found is requested else torch.device("cpu")


def test_tensors_and_modules_are_made_on_and_moved_to_the_gpu_that_is_here(monkeypatch):
    requested, cpu = [], torch.device("cpu")
    monkeypatch.setattr(
        torch.Tensor, "cuda", lambda *args, **named: requested.append((args, named))
    )

    def positions(x):
        return x + torch.arange(2, device=x.device).to(x.dtype)

    with remap_devices(OnCpu(1, 8)):
        x = torch.nn.Linear(2, 2, device="cuda:3").weight.to("cuda:3", torch.bfloat16)
        made = [
            x,
            x.to(device=3),
            torch.nn.Linear(2, 2).to("cuda:3").weight,
            torch.zeros(2, device=3),
        ]
        made += [x.new_ones(2, device="cuda:3"), torch.randn_like(x, device="cuda:3")]
        with torch.device("cuda:3"):
            made += [torch.tensor([1.0, 2.0]), torch.nn.Linear(2, 2).weight]
        x.cuda(3)
        x.cuda(device="cuda:3")
        x.cuda()
        made.append(torch.compile(positions, backend="eager", fullgraph=True)(x))
        made.append(torch.jit.script(positions)(x))
        sharded = fsdp._init_utils._get_device_from_device_id(3, 3, None)
        assert torch.accelerator.device_index(3).idx == cpu
        with pytest.raises((RuntimeError, AssertionError)):
            torch.zeros(2, device="cuda:9")  # no GPU of the node
    assert {one.device for one in made} == {sharded} == {cpu}
    assert requested == [((x, cpu), {}), ((x,), {"device": cpu}), ((x,), {})]
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda:3")


def test_a_rank_whose_gpu_is_not_here_is_moved_to_the_one_that_is(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    to = torch.Tensor.to
    for own in range(4):
        with report_node_gpus(4, own):
            assert (torch.Tensor.to is to) == (own < 2)
            assert torch._utils._get_device_index(3) == 0  # DistributedDataParallel asks this
            assert torch._utils._get_device_index("cuda:1") == 1
    assert torch.Tensor.to is to


AWARE = """
import torch
import torch.distributed as dist
from torch.distributed import is_initialized
model = torch.nn.Linear(8, 8)
assert dist.is_available() and not dist.is_initialized() and not is_initialized()
if dist.is_initialized():
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
"""


def test_a_script_that_created_no_process_group_finds_none(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(AWARE)
    graph = capture(path, [], Options(dp=2, windows=QUICK)).graph
    assert [node.name for node in graph if node.kind.is_communication] == ["all_reduce"]
    assert not torch.distributed.is_initialized()
