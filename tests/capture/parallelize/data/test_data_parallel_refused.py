"""Scripts and options that data parallelism refuses."""

import sys
import textwrap

import pytest
from data_parallel_job import ADAM, MODEL, SGD, TRAIN, run_text
from raised import raises_code

from onerank.capture.parallelize.data.data_groups import strategy_of
from onerank.ir import World

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")

# two backward passes per step, the second with perturbed weights (sharpness-aware minimisation)
PERTURBS = f"""{SGD}
    while True:
        for climbs in (True, False):
            model(data()).square().mean().backward()
            if climbs:
                with torch.no_grad():
                    for p in model.parameters():
                        CLIMB
                model.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
"""
CHANGED = ("zero-weights-changed", ("SGD", "--ddp or --fsdp"))
REFUSED = {
    "sparse": (
        "ddp",
        f"    model.words = nn.Embedding(10, 16, sparse=True)\n{SGD}{TRAIN}",
        "dp-sparse-gradient",
        ("words", "sparse=False"),
    ),
    "a scalar, as CLIP's scale of the logits": (
        "fsdp",
        f"    model.scale = nn.Parameter(torch.tensor(1.0))\n{SGD}{TRAIN}",
        "fsdp-scalar-parameter",
        ("scale of Model", "--ddp, --zero 1"),
    ),
    "unused": (
        "ddp",
        f"    model.idle = nn.Linear(3, 3)\n{SGD}{TRAIN}",
        "ddp-unused-parameter",
        ("Model: idle.weight, idle.bias", "requires_grad_(False)"),
    ),
    "nested optimizers": (
        "zero2",
        f"{SGD}\n    outer = torch.optim.SGD(model.parameters(), momentum=0.9)"
        "\n    outer.param_groups = optimizer.param_groups" + TRAIN,
        "zero-shared-parameters",
        ("SGD and SGD", "--ddp or --fsdp"),
    ),
    "perturbs its weights": ("zero1", PERTURBS.replace("CLIMB", "p.add_(0.05 * p.grad)"), *CHANGED),
    "perturbs its weights, by data": (
        "zero2",  # which has freed this rank's gradients
        PERTURBS.replace("CLIMB", "p.data.add_(0.05)"),
        *CHANGED,
    ),
    "replaces its weights": (
        "zero1",
        PERTURBS.replace("CLIMB", "p.data = p.data.clone()"),
        *CHANGED,
    ),
    "not elementwise": (
        "zero2",
        f"    optimizer = torch.optim.Adafactor(model.parameters()){TRAIN}",
        "zero-not-elementwise",
        ("Adafactor",),
    ),
    "not elementwise, of a library": (
        "zero1",
        f"    class Adafactor(torch.optim.SGD): pass\n"
        f"    optimizer = Adafactor(model.parameters()){TRAIN}",
        "zero-not-elementwise",
        ("Adafactor",),
    ),
    "states of a checkpoint": (
        "zero1",
        f"{ADAM}\n    optimizer.state[model.head.bias] = {{'step': torch.ones(())}}{TRAIN}",
        "optimizer-early-states",
        ("AdamW",),
    ),
    "clips a part": (
        "zero2",
        ADAM
        + TRAIN.replace(
            "optimizer.step",
            "nn.utils.clip_grad_norm_(model.head.parameters(), 1.0)\n        optimizer.step",
        ),
        "zero-partial-clipping",
        ("2 of the 10", "AdamW"),
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
        "dp-varying-micro-batches",
        ("step of 1", "steps of 2"),
    ),
    "a part before the whole": (
        "fsdp",
        SGD + TRAIN.replace("model(data())", "(model.head(data()) + model(data()))"),
        "dp-part-used-first",
        ("Model",),
    ),
    "differentiates a gradient": (
        "fsdp",
        SGD
        + """
    x = data().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.square().sum().backward()
""",
        "fsdp-double-backward",
        ("--zero 1",),
    ),
    "differentiates a function": (
        "ddp",
        SGD
        + """
    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).sum()
    torch.func.grad(loss)(dict(model.named_parameters()), data())
""",
        "dp-functional-grad",
        ("Model", "torch.func", "--zero 1"),
    ),
    "a parameter of no module": (
        "ddp",
        "    weight = nn.Parameter(torch.ones(16, 16))\n"
        "    optimizer = torch.optim.SGD([*model.parameters(), weight])"
        + TRAIN.replace("model(data())", "(model(data()) @ weight)"),
        "dp-foreign-parameters",
        ("SGD", "1 parameters", "(16, 16)"),
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
        "dp-sparse-gradient",
        ("words",),
    ),
    "distributes itself": (
        "ddp",
        "    torch.distributed.init_process_group('gloo')\n" + SGD + TRAIN,
        "dp-strategy-unused",
        ("train.py", "--no-torchrun"),
    ),
    "wraps itself elsewhere": (
        "ddp",
        f"    from wraps import wrapped\n    model = wrapped(model)\n{SGD}{TRAIN}",
        "dp-already-ddp",
        ("DistributedDataParallel", "--torchrun"),
    ),
    "shards itself elsewhere": (
        "fsdp",
        f"    from wraps import sharded\n    model = sharded(model)\n{SGD}{TRAIN}",
        "dp-already-dtensor",
        ("blocks.0.0.weight", "--torchrun"),
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
def test_scripts_are_refused_with_the_reason(case, tmp_path):
    form, text, code, names = REFUSED[case]
    (tmp_path / "wraps.py").write_text(textwrap.dedent(WRAPS))
    sys.modules.pop("wraps", None)
    with raises_code(code, naming=names):
        run_text(tmp_path, MODEL + text, form)


@pytest.mark.parametrize(
    ("options", "code", "name"),
    [
        ({"ddp": True, "fsdp": True}, "dp-strategy-twice", "--ddp and --fsdp:"),
        ({"fsdp": True, "zero": 3}, "dp-strategy-twice", "--fsdp and --zero 3:"),
        ({"zero": 4}, "dp-zero-stage", "--zero 4:"),
    ],
)
def test_strategies_that_exclude_each_other_are_refused(options, code, name):
    with raises_code(code, naming=name):
        strategy_of(World.of(dp=4), **{"ddp": False, "fsdp": False, "zero": None, **options})


def test_options_select_the_strategy():
    world, none = World.of(dp=4), {"ddp": False, "fsdp": False, "zero": None}
    assert strategy_of(world, **none) is None
    assert strategy_of(world, **{**none, "ddp": True}) == "ddp"
    assert [strategy_of(world, **{**none, "zero": n}) for n in (1, 2, 3)] == [
        "zero1",
        "zero2",
        "fsdp",
    ]
    with raises_code("dp-size-missing", naming=("--zero 2", "tp 4 = 4")):
        strategy_of(World.of(tp=4), **{**none, "zero": 2})
    assert strategy_of(World.of(cp=2), **{**none, "fsdp": True}) == "fsdp"
