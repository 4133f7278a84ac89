"""Scripts and options that data parallelism refuses."""

import sys
import textwrap

import pytest
from data_parallel_job import ADAM, MODEL, SGD, TRAIN, run_text

from onerank.capture.parallelize.data.data_groups import strategy_of
from onerank.ir import World
from onerank.ir.errors import CaptureError, SliceError

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
CHANGED = "(?s)weights of SGD changed between a backward and its step.*--ddp or --fsdp"
REFUSED = {
    "sparse": (
        "ddp",
        f"    model.words = nn.Embedding(10, 16, sparse=True)\n{SGD}{TRAIN}",
        r"words has sparse gradients.*create it with sparse=False",
    ),
    "a scalar, as CLIP's scale of the logits": (
        "fsdp",
        f"    model.scale = nn.Parameter(torch.tensor(1.0))\n{SGD}{TRAIN}",
        r"scale of Model is a scalar.*make it a tensor of one element, or use --ddp, --zero 1",
    ),
    "unused": (
        "ddp",
        f"    model.idle = nn.Linear(3, 3)\n{SGD}{TRAIN}",
        r"(?s)idle\.weight, idle\.bias got no gradient.*requires_grad_\(False\)",
    ),
    "nested optimizers": (
        "zero2",
        f"{SGD}\n    outer = torch.optim.SGD(model.parameters(), momentum=0.9)"
        "\n    outer.param_groups = optimizer.param_groups" + TRAIN,
        "(?s)SGD and SGD hold the same parameters .sharpness-aware minimisation.*--ddp or --fsdp",
    ),
    "perturbs its weights": ("zero1", PERTURBS.replace("CLIMB", "p.add_(0.05 * p.grad)"), CHANGED),
    "perturbs its weights, by data": (
        "zero2",  # which has freed this rank's gradients
        PERTURBS.replace("CLIMB", "p.data.add_(0.05)"),
        CHANGED,
    ),
    "replaces its weights": (
        "zero1",
        PERTURBS.replace("CLIMB", "p.data = p.data.clone()"),
        CHANGED,
    ),
    "not elementwise": (
        "zero2",
        f"    optimizer = torch.optim.Adafactor(model.parameters()){TRAIN}",
        "Adafactor does not update element by element",
    ),
    "not elementwise, of a library": (
        "zero1",
        f"    class Adafactor(torch.optim.SGD): pass\n"
        f"    optimizer = Adafactor(model.parameters()){TRAIN}",
        "Adafactor does not update element by element",
    ),
    "states of a checkpoint": (
        "zero1",
        f"{ADAM}\n    optimizer.state[model.head.bias] = {{'step': torch.ones(())}}{TRAIN}",
        "AdamW holds non-uniform states of whole parameters before the first step",
    ),
    "clips a part": (
        "zero2",
        ADAM
        + TRAIN.replace(
            "optimizer.step",
            "nn.utils.clip_grad_norm_(model.head.parameters(), 1.0)\n        optimizer.step",
        ),
        "clipping got 2 of the 10 parameters that AdamW steps",
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
        "Model contains a model that was trained separately before",
    ),
    "differentiates a gradient": (
        "fsdp",
        SGD
        + """
    x = data().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.square().sum().backward()
""",
        "(?s)FSDP frees its weights after the first backward.* --zero 1",
    ),
    "differentiates a function": (
        "ddp",
        SGD
        + """
    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).sum()
    torch.func.grad(loss)(dict(model.named_parameters()), data())
""",
        "(?s)Model is called under torch.func.*use --zero 1",
    ),
    "a parameter of no module": (
        "ddp",
        "    weight = nn.Parameter(torch.ones(16, 16))\n"
        "    optimizer = torch.optim.SGD([*model.parameters(), weight])"
        + TRAIN.replace("model(data())", "(model(data()) @ weight)"),
        r"SGD steps 1 parameters \(the first of shape \(16, 16\)\) outside every module",
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
        r"(?s)creates process groups itself.*--no-torchrun",
    ),
    "wraps itself elsewhere": (
        "ddp",
        f"    from wraps import wrapped\n    model = wrapped(model)\n{SGD}{TRAIN}",
        r"(?s)is already wrapped in DistributedDataParallel by the script.*--torchrun",
    ),
    "shards itself elsewhere": (
        "fsdp",
        f"    from wraps import sharded\n    model = sharded(model)\n{SGD}{TRAIN}",
        r"(?s)is a DTensor, so the script or a library.*--torchrun",
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
    form, text, complaint = REFUSED[case]
    (tmp_path / "wraps.py").write_text(textwrap.dedent(WRAPS))
    sys.modules.pop("wraps", None)
    with pytest.raises((CaptureError, SliceError), match=complaint):
        run_text(tmp_path, MODEL + text, form)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ddp": True, "fsdp": True}, "--ddp and --fsdp: each selects how"),
        ({"fsdp": True, "zero": 3}, "--fsdp and --zero 3: each selects how"),
        ({"zero": 4}, "--zero 4: expected 1 .*, 2 .* or 3"),
    ],
)
def test_strategies_that_exclude_each_other_are_refused(options, message):
    with pytest.raises(CaptureError, match=message):
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
    with pytest.raises(CaptureError, match=r"--zero 2 needs more.* the world has tp 4 = 4"):
        strategy_of(World.of(tp=4), **{**none, "zero": 2})
    assert strategy_of(World.of(cp=2), **{**none, "fsdp": True}) == "fsdp"
