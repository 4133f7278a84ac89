"""Data parallelism that the script knows nothing of.

Held against the joint batch, against scripts that distribute themselves, and against arithmetic.
"""

import gc
import importlib
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import onerank
from onerank.capture import Options, Plan, buckets, capture, deferred, fully_sharded
from onerank.capture.data_groups import Groups
from onerank.capture.data_parallel import DataParallelism, form_of
from onerank.ir import Collective, Graph, Phase, World
from onerank.ir.errors import CaptureError, SliceError

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")

play = importlib.import_module("onerank.capture.play")  # the package has a function of that name
FORMS = ("ddp", "zero1", "zero2", "fsdp")
PLAN = Plan(warm_up=2, pure=1)

# Two real ranks against one process with both batches --------------------------------------------

SIZE, STEPS = 2, 3


class Tower(nn.Module):
    """A repeated block, a tied weight, an odd number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(x * self.scale.sum())


OPTIMIZERS = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}


def batch(step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randint(0, 11, (4, 5), generator=generator)


def train(kind: str, micro_batches: int, clips: bool, ranks: list[int]) -> dict[str, torch.Tensor]:
    """Take some steps on the batches of these ranks, as a script that knows nothing of others."""
    torch.manual_seed(ranks[0] if len(ranks) == 1 else 0)  # the first rank's weights are to win
    model = Tower()
    optimizer = OPTIMIZERS[kind](model)
    parameters = list(model.parameters())
    for step in range(STEPS):
        for micro in range(micro_batches):
            tokens = torch.cat([batch(step, micro, rank) for rank in ranks])
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())
            (loss / micro_batches).backward()
        if clips:
            nn.utils.clip_grad_norm_(parameters, 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(p.detach()) for name, p in model.named_parameters()}


def whole(parameter: Any) -> torch.Tensor:
    full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return full.clone()


class Expert(nn.Module):
    """A dense layer that all ranks hold and an expert of this rank alone."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.expert = nn.Linear(4, 4), nn.Linear(4, 4)
        for parameter in self.expert.parameters():
            parameter._onerank_axis = "edp"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expert(self.dense(x))


def expert_step(rank: int, *, alone: bool) -> dict[str, torch.Tensor]:
    """Return the parameters after a step, or the gradients of this rank alone."""
    torch.manual_seed(5)
    model = Expert()
    with torch.no_grad():
        model.expert.weight.add_(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    model(x).square().mean().backward()
    if alone:
        return {name: p.grad.clone() for name, p in model.named_parameters()}
    before = {name: whole(p.detach()) for name, p in model.named_parameters()}
    optimizer.step()
    return {name: before[name] - whole(p.detach()) for name, p in model.named_parameters()}


JOBS = [
    (kind, micro, clips)
    for kind in OPTIMIZERS
    for micro, clips in ((1, False), (3, False), (2, True))
]


def one_rank(rank: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=SIZE
    )

    def new_group(_: str, ranks: Any) -> Any:
        return dist.new_group(list(ranks), use_local_synchronization=True)

    buckets.BUCKET_ELEMENTS = 70  # several, the last of them whole only in a rank's padding
    for form in FORMS:
        for job in JOBS:
            groups = Groups(new_group, World.of(dp=SIZE), rank)
            with DataParallelism(form, groups).installed():
                # FSDP shards what each rank has, so there they must begin alike
                trained = train_alike(job, rank) if form == "fsdp" else train(*job, [rank])
            results[form, job, rank] = trained
        groups = Groups(new_group, World.of(dp=SIZE, ep=SIZE), rank)
        with DataParallelism(form, groups).installed():
            results[form, "expert", rank] = expert_step(rank, alone=False)
    dist.barrier()  # none leaves while another is at work
    dist.destroy_process_group()


def train_alike(job: tuple[str, int, bool], rank: int) -> dict[str, torch.Tensor]:
    seed = torch.manual_seed
    torch.manual_seed = lambda _: seed(0)
    try:
        return train(*job, [rank])
    finally:
        torch.manual_seed = seed


@pytest.fixture(scope="module")
def trained() -> Any:
    """Parameters after the steps, of every form, job and rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with multiprocessing.get_context("spawn").Manager() as manager:
        results = manager.dict()
        multiprocessing.spawn(one_rank, args=(port, results), nprocs=SIZE, join=True)
        return dict(results)


@pytest.mark.parametrize("job", JOBS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_two_ranks_learn_what_one_does_from_both_batches(trained, form, job):
    expected = train(*job, [0, 1])
    for rank in range(SIZE):
        for name, parameter in expected.items():
            found = trained[form, job, rank][name]
            torch.testing.assert_close(found, parameter, atol=2e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("form", FORMS)
def test_an_expert_averages_over_all_tokens_and_is_sent_to_nobody(trained, form):
    own = [expert_step(rank, alone=True) for rank in range(SIZE)]
    for rank in range(SIZE):
        change = trained[form, "expert", rank]
        for part in ("weight", "bias"):
            dense = (own[0][f"dense.{part}"] + own[1][f"dense.{part}"]) / SIZE
            torch.testing.assert_close(change[f"dense.{part}"], dense, atol=1e-6, rtol=1e-5)
            expert = own[rank][f"expert.{part}"] / SIZE
            torch.testing.assert_close(change[f"expert.{part}"], expert, atol=1e-6, rtol=1e-5)


# A captured rank ---------------------------------------------------------------------------------

LLAMA = """
    import torch
    {imports}
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=256))
    {wrap}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(12):
        for micro in range({micro}):
            tokens = torch.randint(0, 256, (2, 16))
            {sync}
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        {clip}
        optimizer.step()
        optimizer.zero_grad()
"""
LAYER = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64
REST = 2 * 256 * 64 + 64  # embedding, head and last norm
PARAMETERS = 2 * LAYER + REST
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


def filled(**parts: Any) -> str:
    known = {"imports": "", "wrap": "", "micro": 1, "sync": "", "clip": "", **parts}
    return textwrap.dedent(LLAMA).format(**known)


def run(directory: Path, form: Any, world: World, *, rank: int = 1, **parts: Any) -> Graph:
    path = directory / "train.py"
    path.write_text(filled(**parts))
    gc.collect()
    return capture(path, [], Options(world=world, rank=rank, plan=PLAN, data_parallel=form)).graph


def risen(graph: Graph) -> int:
    """Return how far a step's peak is above its start; captures before may have left tensors."""
    measured = graph.job.measurement
    return measured.peak_memory_bytes - measured.start_memory_bytes


def calls(graph: Graph) -> list[tuple[str, int, tuple[int, ...]]]:
    """Type, bytes and ranks of each collective, in order."""
    found = []
    for index in np.flatnonzero(graph.communication):
        node = graph.node(int(index))
        group = graph.job.group(node.text("group"))
        assert group is not None
        found.append((node.collective.name.lower(), node.value("comm_bytes"), group.ranks))
    return found


def operators(graph: Graph) -> list[str]:
    names = zip(graph.text("name"), graph.communication, strict=True)
    return [name for name, communicates in names if not communicates]


OWN = {
    "ddp": {
        "imports": "import torch.distributed as dist\n"
        "from torch.nn.parallel import DistributedDataParallel",
        "wrap": "dist.init_process_group('gloo'); model = DistributedDataParallel(model)",
    },
    "fsdp": {
        "imports": "import torch.distributed as dist\n"
        "from torch.distributed.fsdp import fully_shard",
        "wrap": "dist.init_process_group('gloo'); [fully_shard(x) for x in model.model.layers]; "
        "fully_shard(model)",
    },
}


@pytest.mark.parametrize("form", OWN)
@pytest.mark.parametrize("changes", [{}, {"clip": CLIP, "micro": 3}], ids=["plain", "micro, clip"])
def test_the_same_as_a_script_that_distributes_itself(tmp_path, form, changes):
    own = dict(OWN[form])
    if "micro" in changes:
        own["sync"] = {
            "ddp": "model.require_backward_grad_sync = micro == 2",
            "fsdp": "model.set_requires_gradient_sync(micro == 2)",
        }[form]
    asked = run(tmp_path, form, World.of(dp=4), **changes)
    itself = run(tmp_path, None, World.of(dp=4), **changes, **own)
    assert calls(asked) == calls(itself)
    assert len(calls(asked)) > 0
    assert operators(asked) == operators(itself)
    assert len(operators(asked)) > 400
    assert risen(asked) == pytest.approx(risen(itself), rel=1e-3)


# Weights made as they are sharded ----------------------------------------------------------------


@pytest.mark.parametrize("placed", [False, True], ids=["called", "built in place"])
def test_weights_made_block_by_block_give_the_same_step(tmp_path, monkeypatch, placed):
    """As on a GPU, where the model may be too large; `placed` takes this CPU for one."""
    whole: list[int] = []
    shard = fully_sharded.fully_shard

    def counted(part: nn.Module, **kwargs: Any) -> Any:
        parameters = {p for p in part.parameters() if not isinstance(p, DTensor)}
        assert not any(p.is_meta for p in parameters)
        whole.append(sum(p.numel() for p in parameters))
        return shard(part, **kwargs)

    monkeypatch.setattr(fully_sharded, "fully_shard", counted)
    monkeypatch.setattr(play, "has_accelerator", lambda: True)
    if placed:
        monkeypatch.setattr(deferred, "device_of", lambda _: torch.device("cuda"))
    asked = run(tmp_path, "fsdp", World.of(dp=4), clip=CLIP)
    assert whole == [LAYER, LAYER, REST]
    itself = run(tmp_path, None, World.of(dp=4), clip=CLIP, **OWN["fsdp"])
    assert calls(asked) == calls(itself)
    assert operators(asked) == operators(itself)
    assert risen(asked) == pytest.approx(risen(itself), rel=1e-3)


def test_deferred_weights_are_initialised_as_the_model_does():
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=256, tie_word_embeddings=True, initializer_range=0.5,
    )  # fmt: skip
    with deferred.DeferredModels(lambda _: None).installed():
        model = LlamaForCausalLM(config)
        assert all(p.is_meta for p in model.parameters())
        assert not any(b.is_meta for b in model.buffers())
        model.to(torch.bfloat16)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert not any(p.is_meta for p in copied(LlamaForCausalLM, model).parameters())
    deferred.make_weights(model.model.layers[0], model)
    assert [p.is_meta for p in model.model.layers[1].parameters()] == [True] * 9
    deferred.make_weights(model, model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (model.model.norm.weight == 1).all()
    assert model.model.layers[0].mlp.up_proj.weight.float().std().item() == pytest.approx(
        0.5, rel=0.1
    )


def copied(kind: Any, model: Any) -> Any:
    """Load a model as `from_pretrained` does, from weights at hand."""
    weights = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    return kind.from_pretrained(None, config=model.config, state_dict=weights)


def expected_calls(form: str, world: World, rank: int) -> list[tuple[str, int, tuple[int, ...]]]:
    """Calls of the data-parallel group, from the sizes of the model alone, in fp32."""
    ranks, tp = world.line("dp", rank), world.sizes.get("tp", 1)
    norms = 2 * 2 * 64 + 64
    held = (PARAMETERS - norms) // tp + norms
    layer, rest = (LAYER - 128) // tp + 128, (REST - 64) // tp + 64
    n = len(ranks)
    if form == "ddp":  # under one bucket of 25 MiB; the rotary embedding's two buffers are sent
        return [("broadcast", 2 * 8 * 4, ranks), ("all_reduce", held * 4, ranks)]
    if form.startswith("zero"):
        padded = -(-held // (2 * n)) * 2 * n
        return [("reduce_scatter", padded * 4, ranks), ("all_gather", padded * 4 // n, ranks)]
    gathers = [rest // n, layer // n, layer // n, layer // n, layer // n]
    scatters = [layer, layer, rest]
    return [("all_gather", size * 4, ranks) for size in gathers] + [
        ("reduce_scatter", size * 4, ranks) for size in scatters
    ]


FLAGS = {"ddp": [], "zero1": ["--zero", "1"], "zero2": ["--zero", "2"], "fsdp": ["--zero", "3"]}


def run_alone(directory: Path, flags: list[str]) -> Graph:
    """Capture rank 5 in a process of its own, which holds no tensors but this capture's."""
    script, trace = directory / "train.py", directory / "t.et"
    script.write_text(filled())
    sizes = ["--tp", "2", "--dp", "4", "--rank", "5", "--warm-up", "2", "--pure-steps", "1"]
    command = [sys.executable, "-m", "onerank", "capture", "run", str(script), *sizes, *flags]
    done = subprocess.run([*command, "-o", str(trace)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return onerank.read(trace)


@pytest.mark.parametrize("form", FORMS)
def test_calls_and_states_follow_the_sizes(tmp_path, form):
    world = World.of(tp=2, dp=4)
    graph = run_alone(tmp_path, FLAGS[form])
    own = (1, 3, 5, 7)
    found = [call for call in calls(graph) if call[2] == own]
    assert found == expected_calls(form, world, rank=5)
    assert {(g.name, g.axis, g.ranks) for g in graph.job.groups if g.ranks == own} == {
        ("dp", "dp", own)
    }
    # kept between steps: parameters, two states, and what DDP and FSDP do not free by themselves
    norms = 2 * 2 * 64 + 64
    held = ((PARAMETERS - norms) // 2 + norms) * 4
    kept = {
        "ddp": held + 2 * held + held + held,  # gradients, and the buckets
        "zero1": held + 2 * held / 4,
        "zero2": held + 2 * held / 4,
        "fsdp": held / 4 + 2 * held / 4 + held / 4,  # gradients
    }[form]
    measured = graph.job.measurement.start_memory_bytes
    assert measured == pytest.approx(kept, abs=2048)  # tokens, step counters, rotary buffers


@pytest.mark.parametrize("form", ["zero1", "zero2"])
def test_gradients_of_stage_2_leave_in_each_backward(tmp_path, form):
    graph = run(tmp_path, form, World.of(dp=4), micro=2)
    scatters = np.flatnonzero(graph.nodes.collective == Collective.REDUCE_SCATTER)
    phases = [graph.node(int(index)).phase for index in scatters]
    assert phases == ([Phase.OPTIMIZER] if form == "zero1" else [Phase.BACKWARD] * 2)


# Scripts of many styles --------------------------------------------------------------------------

MODEL = """
    import torch
    from torch import nn
    torch.manual_seed(0)
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2))
            self.head = nn.Linear(16, 16)
        def forward(self, x):
            for block in self.blocks:
                x = x + block(x)
            return self.head(x)
    model = Model()
    data = lambda: torch.randn(4, 16)
"""
TRAIN = """
    while True:
        model(data()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
BLOCK, HEAD = (16 * 32 + 32 + 32 * 16 + 16) * 4, (16 * 16 + 16) * 4
SGD, ADAM = (f"    optimizer = torch.optim.{kind}(model.parameters())" for kind in ("SGD", "AdamW"))


def run_text(directory: Path, text: str, form: Any, world: World | None = None) -> Graph:
    path = directory / "train.py"
    path.write_text(textwrap.dedent(text))
    gc.collect()
    options = Options(world=world or World.of(dp=4), rank=1, plan=PLAN, data_parallel=form)
    return capture(path, [], options).graph


def test_stage_2_never_holds_all_gradients(tmp_path, monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_ELEMENTS", 64 * 64)
    layers = """
    import torch
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(16)))
    data = lambda: torch.randn(1, 64)
    optimizer = torch.optim.SGD(model.parameters())
"""
    bucket = 64 * 64 * 4
    peaks = {}
    for form in ("zero1", "zero2"):
        peaks[form] = risen(run_text(tmp_path, layers + TRAIN, form))
    assert peaks["zero1"] == 16 * bucket + bucket  # all gradients, and one bucket of copies
    # the shard's, and a gradient, the bucket it fills and the one in flight
    assert 4 * bucket < peaks["zero2"] <= 4 * bucket + 3 * bucket


COMPLETE = {
    "compiles": (
        "fsdp",
        f"    model = torch.compile(model, backend='aot_eager')\n{ADAM}{TRAIN}",
        [("all_gather", size // 4) for size in (HEAD, BLOCK, BLOCK, BLOCK, BLOCK)]
        + [("reduce_scatter", size) for size in (BLOCK, HEAD, BLOCK)],  # no gradient ends block 0
    ),
    "recomputes, reentrantly": (
        "zero2",
        """
    from torch.utils.checkpoint import checkpoint
    def forward(x):
        x.requires_grad_()
        for block in model.blocks:
            x = x + checkpoint(block, x, use_reentrant=True)
        return model.head(x)
    model.forward = forward
"""
        + ADAM
        + TRAIN,
        [("reduce_scatter", 2 * BLOCK + HEAD), ("all_gather", (2 * BLOCK + HEAD) // 4)],
    ),
    "scales its loss, and skips a step": (
        "zero1",
        ADAM
        + """
    scaler = torch.amp.GradScaler("cpu")
    step = 0
    while True:
        step += 1
        loss = model(data()).square().mean() * (float("inf") if step == 2 else 1)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
        [
            ("reduce_scatter", 2 * BLOCK + HEAD),
            ("all_reduce", 4),  # was any rank's gradient infinite?
            ("all_reduce", 4),  # the norm
            ("all_gather", (2 * BLOCK + HEAD) // 4),
        ],
    ),
    "makes its optimizer late": (
        "ddp",
        f"    model(data()).sum().backward()\n{SGD}\n    optimizer.zero_grad(){TRAIN}",
        [("all_reduce", 2 * BLOCK + HEAD)],
    ),
    "has a critic": (
        "ddp",
        """
    critic = nn.Linear(16, 1)
    optimizers = [torch.optim.SGD(m.parameters()) for m in (critic, model)]
    while True:
        (critic(model(data()).detach()).mean() - critic(data()).mean()).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        critic(model(data())).mean().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
""",
        [("all_reduce", 2 * BLOCK + HEAD), ("all_reduce", 17 * 4)],
    ),
    "has fewer parameters than ranks": (
        "fsdp",
        f"    model = nn.Linear(1, 1)\n    data = lambda: torch.randn(4, 1)\n{ADAM}{TRAIN}",
        [("all_gather", 2 * 4), ("reduce_scatter", 4 * 2 * 4)],  # padded to one element a rank
    ),
    "has fewer parameters than ranks, zero": (
        "zero2",
        f"    model = nn.Linear(1, 1)\n    data = lambda: torch.randn(4, 1)\n{ADAM}{TRAIN}",
        [("reduce_scatter", 8 * 4), ("all_gather", 2 * 4)],  # padded to two elements a rank
    ),
}


@pytest.mark.filterwarnings("ignore")  # torch.compile's and the skipped step's
@pytest.mark.parametrize("style", COMPLETE)
def test_a_script_that(style, tmp_path):
    form, text, expected = COMPLETE[style]
    graph = run_text(tmp_path, MODEL + text, form)
    assert [(kind, size) for kind, size, _ in calls(graph)] == expected


MIXTRAL = """
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, num_local_experts=4))
    tokens = torch.randint(0, 64, (2, 16))
    data = lambda: tokens
"""


@pytest.mark.parametrize("form", ["ddp", "fsdp"])
def test_experts_are_shared_among_those_that_hold_the_same(tmp_path, form):
    text = MIXTRAL + ADAM + TRAIN.replace("(data())", "(data(), use_cache=False).logits")
    found = calls(run_text(tmp_path, text, form, World.of(dp=4, ep=2)))
    layer = 2 * 3 * 32 * 64 * 4  # two of four experts
    expected = {
        "ddp": [("all_reduce", 2 * layer)],
        "fsdp": [("all_gather", layer // 2)] * 4 + [("reduce_scatter", layer)] * 2,
    }[form]
    assert sorted((kind, size) for kind, size, ranks in found if ranks == (1, 3)) == expected
    assert {ranks for _, _, ranks in found} == {(0, 1), (1, 3), (0, 1, 2, 3)}


REFUSED = {
    "sparse": (
        "ddp",
        f"    model.words = nn.Embedding(10, 16, sparse=True)\n{SGD}{TRAIN}",
        r"words has sparse gradients.*make it with sparse=False",
    ),
    "unused": (
        "ddp",
        f"    model.idle = nn.Linear(3, 3)\n{SGD}{TRAIN}",
        r"idle\.weight, idle\.bias got no gradient.*requires_grad_\(False\)",
    ),
    "closure": (
        "zero1",
        SGD
        + """
    def closure():
        optimizer.zero_grad()
        loss = model(data()).sum()
        loss.backward()
        return loss
    while True:
        optimizer.step(closure)
""",
        "SGD.step got a closure",
    ),
    "not elementwise": (
        "zero2",
        f"    optimizer = torch.optim.Adafactor(model.parameters()){TRAIN}",
        "Adafactor does not update element by element",
    ),
    "states of a checkpoint": (
        "zero1",
        f"{ADAM}\n    optimizer.state[model.head.bias] = {{'step': torch.ones(())}}{TRAIN}",
        "AdamW holds states of whole parameters before the first step",
    ),
    "clips a part": (
        "zero2",
        ADAM
        + TRAIN.replace(
            "optimizer.step",
            "nn.utils.clip_grad_norm_(model.head.parameters(), 1.0)\n        optimizer.step",
        ),
        "clip_grad_norm_ got 2 of the 10 parameters that AdamW steps",
    ),
    "uneven steps": (
        "fsdp",
        SGD
        + """
    for count in (2, 2, 1, 2, 2, 2, 2, 2):
        for _ in range(count):
            model(data()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
""",
        "a step of 1 micro-batches followed steps of 2",
    ),
    "a part before the whole": (
        "fsdp",
        SGD + TRAIN.replace("model(data())", "(model.head(data()) + model(data()))"),
        "Model holds a model that was trained by itself before",
    ),
    "a parameter of no module": (
        "ddp",
        "    weight = nn.Parameter(torch.ones(16, 16))\n"
        "    optimizer = torch.optim.SGD([*model.parameters(), weight])"
        + TRAIN.replace("model(data())", "(model(data()) @ weight)"),
        r"SGD steps 1 parameters \(the first of shape \(16, 16\)\) that belong to no module",
    ),
    "catches the refusal": (
        "ddp",
        f"    model.words = nn.Embedding(10, 16, sparse=True)\n{SGD}"
        + """
    while True:
        try:
            model(data()).sum().backward()
        except Exception:
            break
""",
        "words has sparse gradients",
    ),
    "distributes itself": (
        "ddp",
        "    torch.distributed.init_process_group('gloo')\n" + SGD + TRAIN,
        "names torch.distributed, so it is run as it is",
    ),
    "wraps itself elsewhere": (
        "ddp",
        f"    from wraps import wrapped\n    model = wrapped(model)\n{SGD}{TRAIN}",
        "is wrapped in DistributedDataParallel by the script",
    ),
    "shards itself elsewhere": (
        "fsdp",
        f"    from wraps import sharded\n    model = sharded(model)\n{SGD}{TRAIN}",
        "is a DTensor, so the script distributes its model itself",
    ),
}
WRAPS = """
    import torch
    def wrapped(model):
        return torch.nn.parallel.DistributedDataParallel(model)
    def sharded(model):
        return torch.distributed.fsdp.fully_shard(model)
"""


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_reason(case, tmp_path):
    form, text, complaint = REFUSED[case]
    (tmp_path / "wraps.py").write_text(textwrap.dedent(WRAPS))
    sys.modules.pop("wraps", None)
    with pytest.raises((CaptureError, SliceError), match=complaint):
        run_text(tmp_path, MODEL + text, form)


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"ddp": True, "fsdp": True}, "--ddp and --fsdp: each says how"),
        ({"fsdp": True, "zero": 3}, "--fsdp and --zero 3: each says how"),
        ({"zero": 4}, "--zero 4: expected 1 .*, 2 .* or 3"),
    ],
)
def test_forms_that_exclude_each_other(asked, complaint):
    with pytest.raises(CaptureError, match=complaint):
        form_of(World.of(dp=4), **{"ddp": False, "fsdp": False, "zero": None, **asked})


def test_forms_by_option():
    world, none = World.of(dp=4), {"ddp": False, "fsdp": False, "zero": None}
    assert form_of(world, **none) is None
    assert form_of(world, **{**none, "ddp": True}) == "ddp"
    assert [form_of(world, **{**none, "zero": n}) for n in (1, 2, 3)] == ["zero1", "zero2", "fsdp"]
    with pytest.raises(CaptureError, match=r"--zero 2 shares work.* the world has tp 4 = 4 ranks"):
        form_of(World.of(tp=4), **{**none, "zero": 2})
    assert form_of(World.of(cp=2), **{**none, "fsdp": True}) == "fsdp"


# Scripts that distribute themselves --------------------------------------------------------------

ITSELF = {
    "FSDP1": (
        World.of(dp=4),
        "    from torch.distributed.fsdp import FullyShardedDataParallel\n"
        "    model = FullyShardedDataParallel(model, device_id=torch.device('cpu'))\n" + ADAM,
        {"dp": {("all_gather", Phase.FORWARD), ("reduce_scatter", Phase.BACKWARD)}},
    ),
    "HSDP": (
        World.of(cp=2, dp=2),  # the inner axis of its mesh, and the outer
        "    from torch.distributed.fsdp import fully_shard\n"
        "    mesh = dist.init_device_mesh('cpu', (2, 2), mesh_dim_names=('copies', 'shards'))\n"
        "    for part in [*model.blocks, model]: fully_shard(part, mesh=mesh)\n" + ADAM,
        {
            "cp": {
                ("all_gather", Phase.FORWARD),
                ("all_gather", Phase.BACKWARD),
                ("reduce_scatter", Phase.BACKWARD),
            },
            "dp": {("all_reduce", Phase.BACKWARD)},
        },
    ),
    "ZeroRedundancyOptimizer": (
        World.of(dp=4),
        "    from torch.distributed.optim import ZeroRedundancyOptimizer\n"
        "    model = nn.parallel.DistributedDataParallel(model)\n"
        "    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)",
        {"dp": {("all_reduce", Phase.BACKWARD), ("broadcast", Phase.OPTIMIZER)}},
    ),
    "TP x FSDP": (
        World.of(tp=2, dp=4),
        "    from torch.distributed.fsdp import fully_shard\n"
        "    from torch.distributed.tensor.parallel import *\n"
        "    mesh = dist.init_device_mesh('cpu', (4, 2), mesh_dim_names=('data', 'tensor'))\n"
        "    styles = {'0': ColwiseParallel(), '2': RowwiseParallel()}\n"
        "    for block in model.blocks: parallelize_module(block, mesh['tensor'], styles)\n"
        "    for part in [*model.blocks, model]: fully_shard(part, mesh=mesh['data'])\n" + ADAM,
        {
            "tp": {("all_reduce", Phase.FORWARD), ("all_reduce", Phase.BACKWARD)},
            "dp": {
                ("all_gather", Phase.FORWARD),
                ("all_gather", Phase.BACKWARD),
                ("reduce_scatter", Phase.BACKWARD),
            },
        },
    ),
}


@pytest.mark.filterwarnings("ignore")  # FSDP's, of views and of its first version
@pytest.mark.parametrize("kind", ITSELF)
def test_groups_of_a_script_are_placed_on_the_axes_of_the_world(kind, tmp_path):
    world, text, expected = ITSELF[kind]
    start = "    import torch.distributed as dist\n    dist.init_process_group('gloo')\n"
    graph = run_text(tmp_path, MODEL + start + text + TRAIN, None, world)
    found: dict[str, set[tuple[str, Phase]]] = {}
    for index in np.flatnonzero(graph.communication):
        node = graph.node(int(index))
        group = graph.job.group(node.text("group"))
        assert group is not None
        assert group.ranks == world.line(group.axis, 1)
        found.setdefault(group.axis, set()).add((node.collective.name.lower(), node.phase))
    known = {axis: {use for use in uses if use[1] in Phase} for axis, uses in found.items()}
    for axis, uses in expected.items():
        assert uses <= known[axis]
    assert known.keys() == expected.keys()
