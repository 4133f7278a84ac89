"""Data parallelism of scripts of many styles, with and without distributed code."""

import numpy as np
import pytest
from data_parallel_job import (
    ADAM,
    BLOCK,
    HEAD,
    MODEL,
    SGD,
    TRAIN,
    calls,
    peak_above_start,
    run_text,
)

from onerank.capture.parallelize.data import zero as buckets
from onerank.ir import Phase, World

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")


def test_zero_2_never_holds_all_gradients(tmp_path, monkeypatch):
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
        peaks[form] = peak_above_start(run_text(tmp_path, layers + TRAIN, form))
    assert peaks["zero1"] == 16 * bucket + bucket  # all gradients, and one bucket of copies
    # the shard's, and a gradient, the bucket it fills and the one in flight
    assert 4 * bucket < peaks["zero2"] <= 4 * bucket + 3 * bucket


# two rounds of two micro-batches a step (sharpness-aware minimisation)
SHARPNESS = (
    SGD
    + """
    def gradients():
        for _ in range(2):
            model(data()).square().mean().backward()
    while True:
        gradients()
        with torch.no_grad():
            rises = [0.05 * p.grad for p in model.parameters()]
            for p, rise in zip(model.parameters(), rises): p.add_(rise)
        optimizer.zero_grad(set_to_none=False)
        gradients()
        with torch.no_grad():
            for p, rise in zip(model.parameters(), rises): p.sub_(rise)
        optimizer.step()
        optimizer.zero_grad()
"""
)
# evaluates between forward and backward, and after the last backward with gradients recorded
EVALUATED = (
    SGD
    + """
    while True:
        for micro in range(2):
            loss = model(data()).square().mean()
            with torch.no_grad():
                model(data())
            loss.backward()
        model.eval()(data())
        optimizer.step()
        optimizer.zero_grad()
"""
)
GATHERED = [("all_gather", size // 4) for size in (HEAD, BLOCK, BLOCK, BLOCK, BLOCK)]
REDUCED = [("reduce_scatter", size) for size in (BLOCK, HEAD, BLOCK)]

COMPLETE = {
    "perturbs its weights": ("ddp", SHARPNESS, [("all_reduce", 2 * BLOCK + HEAD)] * 2),
    "perturbs its weights, sharded": ("fsdp", SHARPNESS, (2 * GATHERED + REDUCED) * 2),
    "evaluates": (
        "fsdp",
        EVALUATED,  # which leaves the head gathered, for the step that follows
        [*(6 * GATHERED[1:2]), GATHERED[0], *(6 * GATHERED[1:2]), *REDUCED, *GATHERED[:3]],
    ),
    "compiles": (
        "fsdp",
        f"    model = torch.compile(model, backend='aot_eager')\n{ADAM}{TRAIN}",
        GATHERED + REDUCED,  # no gradient ends block 0
    ),
    "compiles while gradients wait for their step": (
        "zero1",
        f"""{ADAM}
    compiled = torch.compile(model, backend='aot_eager')
    for used in (model, *[compiled] * 40):
        model(data()).square().mean().backward()
        used(data()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
""",
        [("reduce_scatter", 2 * BLOCK + HEAD), ("all_gather", (2 * BLOCK + HEAD) // 4)],
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
    "computes its weights (spectral norm)": (
        "ddp",
        f"    nn.utils.parametrizations.spectral_norm(model.head)\n{SGD}{TRAIN}",
        [("broadcast", 2 * 16 * 4), ("all_reduce", 2 * BLOCK + HEAD)],
    ),
    "freezes its first block": (
        "fsdp",
        f"    model.blocks[0].requires_grad_(False)\n{ADAM}{TRAIN}",
        # FSDP prefetches the frozen block too, which has no backward
        [("all_gather", size // 4) for size in (HEAD, BLOCK, BLOCK, BLOCK, BLOCK)]
        + [("reduce_scatter", HEAD), ("reduce_scatter", BLOCK)],
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
            ("all_reduce", 4),  # the GradScaler's flag
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
def test_collectives_of_scripts(style, tmp_path):
    form, text, expected = COMPLETE[style]
    graph = run_text(tmp_path, MODEL + text, form)
    assert [(kind, size) for kind, size, _ in calls(graph)] == expected


# a frozen copy of the trained model with other weights (the reference of DPO)
REFERENCE = """
    reference = Model().requires_grad_(False)
    SHARDS
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        x = data()
        with torch.no_grad():
            aim = reference(x)
        (model(x) - aim).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
BOTH = """
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))  # as the script, GPU or none
    for whole in (model, reference):
        [fully_shard(block, mesh=mesh) for block in whole.blocks]
        fully_shard(whole, mesh=mesh)
"""


def test_a_reference_built_after_the_first_forward_is_sharded(tmp_path):
    begins = "    model(data()).sum().backward()\n    model.zero_grad()"
    graph = run_text(tmp_path, MODEL + begins + REFERENCE.replace("SHARDS", ""), "fsdp")
    assert [kind for kind, _, _ in calls(graph)] == ["all_gather"] * 7 + ["reduce_scatter"] * 3


def test_a_reference_matches_a_script_that_shards_both_models(tmp_path):
    requested = run_text(tmp_path, MODEL + REFERENCE.replace("SHARDS", ""), "fsdp")
    itself = run_text(tmp_path, MODEL + REFERENCE.replace("    SHARDS", BOTH), None)
    fetched = 2 * GATHERED[1:2]  # its head stays gathered, because it belongs to the root
    assert [(kind, size) for kind, size, _ in calls(requested)] == fetched + GATHERED + REDUCED
    assert calls(requested) == calls(itself)
    assert peak_above_start(requested) == peak_above_start(itself)


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
def test_experts_are_reduced_over_the_ranks_that_hold_them(tmp_path, form):
    text = MIXTRAL + ADAM + TRAIN.replace("(data())", "(data(), use_cache=False).logits")
    found = calls(run_text(tmp_path, text, form, World.of(dp=4, ep=2)))
    layer = 2 * 3 * 32 * 64 * 4  # two of four experts
    expected = {
        "ddp": [("all_reduce", 2 * layer)],
        "fsdp": [("all_gather", layer // 2)] * 4 + [("reduce_scatter", layer)] * 2,
    }[form]
    assert sorted((kind, size) for kind, size, ranks in found if ranks == (1, 3)) == expected
    assert {ranks for _, _, ranks in found} == {(0, 1), (1, 3), (0, 1, 2, 3)}


# Scripts with distributed code -------------------------------------------------------------------

ITSELF = {
    "FSDP1": (
        World.of(dp=4),
        "    from torch.distributed.fsdp import FullyShardedDataParallel\n"
        "    model = FullyShardedDataParallel(model, device_id=torch.device('cpu'))\n" + ADAM,
        {"dp": {("all_gather", Phase.FORWARD), ("reduce_scatter", Phase.BACKWARD)}},
    ),
    "HSDP": (
        World.of(cp=2, dp=2),  # inner and outer axis of the mesh
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
def test_process_groups_of_a_script_get_the_axes_of_the_world(kind, tmp_path):
    world, text, expected = ITSELF[kind]
    start = "    import torch.distributed as dist\n    dist.init_process_group('gloo')\n"
    graph = run_text(tmp_path, MODEL + start + text + TRAIN, None, world)
    uses_by_axis: dict[str, set[tuple[str, Phase]]] = {}
    for index in np.flatnonzero(graph.communication):
        node = graph.node(int(index))
        group = graph.job.group(node.text("group"))
        assert group is not None
        assert group.ranks == world.line(group.axis, 1)
        uses_by_axis.setdefault(group.axis, set()).add((node.collective.name.lower(), node.phase))
    known = {axis: {use for use in uses if use[1] in Phase} for axis, uses in uses_by_axis.items()}
    for axis, uses in expected.items():
        assert uses <= known[axis]
    assert known.keys() == expected.keys()


@pytest.mark.filterwarnings("ignore")  # FSDP's, of views
@pytest.mark.parametrize("form", ["ddp", "fsdp"])
def test_callbacks_at_the_end_of_autograd_are_backward(form, tmp_path):
    graph = run_text(tmp_path, MODEL + ADAM + TRAIN, form)
    phases = {node.phase for node in graph if node.name == "reduce_scatter"}
    assert phases == ({Phase.BACKWARD} if form == "fsdp" else set())
    outside = [node.name for node in graph if node.phase is Phase.NONE]
    # the batch, and the gradient of the loss; DDP's buckets are copied out in backward
    assert outside == ["aten::normal_", "aten::fill_"]
