"""Run one batch through a whole model and all its slices, and compare against rounding noise.

The slicing itself shows which elements of the whole model a slice holds: a copy of the model whose
parameters hold their own indices is sliced too. So any slicing that only moves elements can be
verified, and one that loses or changes elements is detected.
"""

import contextlib
import copy
import importlib
import math
import os
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from onerank.capture.options import Options
from onerank.capture.parallelize.experts.expert_parallel import apply_static_routing, expert_layers
from onerank.capture.parallelize.experts.routing import MODEL, parse_routing
from onerank.capture.parallelize.tensor.replicated_grads import partial_gradients, reduce_deferred
from onerank.capture.parallelize.tensor.shard_parameters import fill_with_positions, origin_of
from onerank.capture.profiling.window_plan import Progress
from onerank.capture.run_as_rank import slicing
from onerank.capture.verify.comparison import (
    ABSOLUTE,
    ROUNDINGS,
    SLICES_FLOOR,
    SLICES_RELATIVE,
    Comparison,
    Difference,
    reordered,
    summed_up,
)
from onerank.capture.verify.threaded_world import ExactPeers, ThreadedWorld
from onerank.ir import World


@dataclass
class Result:
    """What a model, or its slice, made of a batch: detached, on the model's device."""

    loss: Tensor
    logits: Tensor | None
    gradients: dict[str, Tensor]


def run_step(model: nn.Module, batch: Any, named: Any, *, what: str = "logits") -> Result:
    """Run one step up to the optimizer's; a stage that gives nothing has a loss of 0."""
    partials = partial_gradients(model)
    for _, partial in partials:
        partial.deferred = True
    with torch.autocast(next(model.parameters()).device.type, enabled=False):
        output = model(*batch, **named)
        loss, logits = _loss_and_logits(output) if what == "logits" else (output.loss, None)
        if loss is None and logits is None:
            logits = output.logits
        if loss is None:
            loss = _projected(logits)
        loss.backward()
    reduce_deferred(partials)
    _before_optimizer_step(model)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return Result(loss.detach(), None if logits is None else logits.detach(), gradients)


def _loss_and_logits(output: Any) -> tuple[Any, Any]:
    """Return what a model made of a batch: by name, or by shape where it returns a tuple."""
    if hasattr(output, "loss") or hasattr(output, "logits"):
        return getattr(output, "loss", None), getattr(output, "logits", None)
    values = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    floating = [value for value in values if value.is_floating_point()]
    loss = next((value for value in floating if value.dim() == 0), None)
    return loss, next((value for value in floating if value.dim() > 0), None)


def _before_optimizer_step(model: nn.Module) -> None:
    """Let slices finish what they leave to that moment: the sum of a tied weight's gradients."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
    registered: Any = importlib.import_module("torch.optim.optimizer")
    for hook in list(registered._global_optimizer_pre_hooks.values()):
        hook(optimizer, (), {})


def _projected(output: Any) -> Tensor:
    """Return a loss for a model that a script gives no labels: a fixed mean of the outputs."""
    generator = torch.Generator(output.device).manual_seed(0)
    weights = torch.randn(output.shape, generator=generator, device=output.device)
    return (output * weights).mean()


def as_fp32(value: Any) -> Any:
    def cast(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().clone()
            return leaf.float() if leaf.is_floating_point() else leaf
        return leaf

    return tree_map(cast, value)


@contextlib.contextmanager
def computed_in_fp32() -> Generator[None]:
    """Let fp32 products be computed in fp32, not in TF32."""
    precision = torch.get_float32_matmul_precision()
    cudnn = torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = cudnn


def rounding_of(model: nn.Module, batch: Any, named: Any, expected: Result) -> Result:
    """Run a step with each weight moved to the fp32 number beside it, up or down at random.

    Args:
        model: in fp32; it is left as it is.
        batch: positional arguments of its call.
        named: keyword arguments of its call.
        expected: what it makes of them as it is.

    Returns:
        The largest changes, a scalar each: of the loss, the logits and each gradient.
    """
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in moved.parameters():
            up = torch.rand(weight.shape, generator=generator).to(weight.device) < 0.5
            far = torch.where(up, torch.inf, -torch.inf).to(weight.dtype)
            weight.copy_(torch.nextafter(weight, far))
    found = run_step(moved, batch, named)
    logits = None
    if found.logits is not None and expected.logits is not None:
        logits = _change(found.logits, expected.logits)
    gradients = {
        name: _change(found.gradients[name], gradient)
        for name, gradient in expected.gradients.items()
        if name in found.gradients
    }
    return Result(_change(found.loss, expected.loss), logits, gradients)


def _change(found: Tensor, expected: Tensor) -> Tensor:
    if not expected.numel():
        return torch.zeros(())
    change = (found.double() - expected.double()).abs().max()
    return change.nan_to_num(0.0, 0.0, 0.0)  # it excuses nothing


_TOLERANCE = (
    f"{ABSOLUTE:g} x max(1, largest), and {SLICES_RELATIVE:g} x largest + "
    f"{SLICES_FLOOR:g} x largest gradient"
)

_ROUNDED = (
    f"in place of the first, {ROUNDINGS} x what another rounding of the weights changes, which was "
    "tried as some differed by more"
)


@dataclass
class _Slice:
    """A rank's slice: its result, weights before the step, and where its elements stem from."""

    rank: int
    shares_sequence: tuple[int, ...]
    result: Result
    weights: dict[str, Tensor]
    positions: dict[str, Tensor]


def compare_slices(
    model: nn.Module,
    inputs: Sequence[Any],
    keywords: Mapping[str, Any],
    options: Options,
    progress: Progress,
) -> tuple[list[Comparison], str, list[str]]:
    """Run `model` whole and as slices on one batch, in fp32 and without dropout.

    Args:
        model: a whole model; it is left as it is.
        inputs: positional arguments of its call.
        keywords: keyword arguments of its call.
        options: world and tp_style of the slices.
        progress: told in a few words what goes on.

    Returns:
        The comparisons; why there are none, or ""; and notes.

    Raises:
        SliceError: the model cannot be sliced as asked.
    """
    world = without_copies(options.world)
    routed = _routed_alike(options)
    parameters = sum(p.numel() for p in model.parameters())
    needed = 4 * parameters * _COPIES
    free = _free_bytes(_device(model))
    does_not_fit = (
        f"whole model and {world.size} slices do not fit: {parameters:,} parameters x 4 bytes x "
        f"{_COPIES} = {needed / 1e9:.1f} GB and activations, and {free / 1e9:.1f} GB are free on "
        f"{_device(model)}; verify fewer layers"
    )
    if needed > free:
        return [], does_not_fit, []
    try:
        with computed_in_fp32():
            given = tuple(inputs), dict(keywords)
            rows, why_none, notes = _compare(model, given, world, routed, progress)
    except torch.OutOfMemoryError:
        return [], does_not_fit, []
    if routed.moe_routing != options.moe_routing and expert_layers(model):
        notes.append(
            f"experts went by the model's own routers, not by --moe-routing {options.moe_routing}: "
            "static routes are those of a rank, and each rank here has a part of the sequence"
        )
    return rows, why_none, notes


def _routed_alike(options: Options) -> Options:
    """Let routers decide where ranks route a part of the sequence each: tables are per rank."""
    if options.sequence_parallel or "cp" in options.world.sizes:
        return replace(options, moe_routing=MODEL)
    return options


# weights and gradients of the whole model and of the slices, and a copy that holds positions
_COPIES = 8


def without_copies(world: World) -> World:
    """Return the ranks without those that hold the same slice of the model."""
    sizes = world.sizes
    tp, cp, pp = (sizes.get(axis, 1) for axis in ("tp", "cp", "pp"))
    return World.of(tp=tp, cp=cp, dp=world.ep // math.gcd(world.ep, cp), pp=pp, ep=world.ep)


def _compare(
    model: nn.Module,
    called_with: tuple[tuple[Any, ...], dict[str, Any]],
    world: World,
    options: Options,
    progress: Progress,
) -> tuple[list[Comparison], str, list[str]]:
    whole = copy.deepcopy(model).float().eval()
    for parameter in whole.parameters():
        parameter.grad = None
    batch, named = as_fp32(called_with)
    starts, total = dict[str, int](), 1
    for name, parameter in whole.named_parameters():
        starts[name], total = total, total + parameter.numel()

    def one_slice(peers: ExactPeers) -> _Slice:
        own = replace(options, world=world, rank=peers.rank, real_job=True)
        progress(f"slice {peers.rank + 1} of {world.size}")
        mine = copy.deepcopy(whole)
        slicing(peers, own).slice_one(mine)
        weights = {name: p.detach().clone() for name, p in mine.named_parameters()}
        result = run_step(mine, batch, named, what=_gives(world, peers.rank))
        positions = copy.deepcopy(whole)
        fill_with_positions(positions, starts)
        slicing(peers, own).slice_one(positions)
        places = {name: p.data.double() for name, p in positions.named_parameters()}
        return _Slice(peers.rank, world.line("cp", peers.rank), result, weights, places)

    slices = ThreadedWorld(world.size).run(one_slice)
    progress("the whole model")
    reference = copy.deepcopy(whole)
    routing = parse_routing(options.moe_routing)
    if routing is not None:
        apply_static_routing(reference, routing)
    expected = run_step(reference, batch, named)

    def compared(rounding: Result | None) -> list[Difference]:
        differences: list[Difference] = []
        for found in slices:
            if _gives(world, found.rank) != "nothing":
                differences += _of_outputs(found, expected, world, rounding)
            beside = [slices[rank] for rank in _fed_alike(world, found.rank)]
            differences += _of_parameters(found, beside, expected, whole, starts, rounding=rounding)
        return differences

    differences, allowed = compared(None), _TOLERANCE
    if any(difference.breach for difference in differences):
        progress("the whole model, its weights rounded otherwise")
        differences = compared(rounding_of(reference, batch, named, expected))
        allowed = f"{_TOLERANCE}; {_ROUNDED}"
    rows = summed_up("slices", allowed, differences)
    notes = [
        f"the slices of {world} ran as threads of one process that really communicate, in fp32 "
        f"without TF32, autocast and dropout, on the first batch of {type(model).__name__}; "
        f"allowed of a tensor: {allowed}"
    ]
    return rows, "", notes


def _of_outputs(
    found: _Slice, expected: Result, world: World, rounding: Result | None
) -> list[Difference]:
    label = f"rank {found.rank}"
    noise = float(rounding.loss) if rounding else 0.0
    differences = [reordered("loss", "", label, found.result.loss, expected.loss, rounding=noise)]
    logits, whole = found.result.logits, expected.logits
    if logits is not None and whole is not None:
        shards = world.sizes.get("tp", 1)
        if logits.shape[-1] * shards == whole.shape[-1]:  # some heads leave them sharded
            whole = whole.chunk(shards, dim=-1)[world.point(found.rank).get("tp", 0)]
        noise = float(rounding.logits) if rounding and rounding.logits is not None else 0.0
        differences.append(reordered("logits", "", label, logits, whole, rounding=noise))
    return differences


def _gives(world: World, rank: int) -> Literal["nothing", "loss", "logits"]:
    """Return what a rank has: the last pipeline stage the loss, and logits unless of a part."""
    if world.point(rank).get("pp", 0) < world.sizes.get("pp", 1) - 1:
        return "nothing"
    return "loss" if "cp" in world.sizes else "logits"


def _fed_alike(world: World, rank: int) -> list[int]:
    """Return the ranks that got a batch of their own, which was the same for each."""
    own = world.point(rank)
    return [
        other
        for other in range(world.size)
        if all(world.point(other)[axis] == own[axis] for axis in own if axis in ("tp", "pp"))
    ]


def _of_parameters(
    found: _Slice,
    beside: list[_Slice],
    expected: Result,
    whole: nn.Module,
    starts: dict[str, int],
    *,
    rounding: Result | None,
) -> list[Difference]:
    """Compare weights and gradients with the elements of the whole model's that they stem from.

    What one rank alone holds for several (an expert) gets the gradients of all their batches. Of
    ranks that share a sequence the mean counts, which data parallelism takes of them.
    """
    largest = max((float(g.abs().max()) for g in expected.gradients.values()), default=0.0)
    parameters = dict(whole.named_parameters())
    changes = rounding.gradients if rounding else {}
    differences: list[Difference] = []
    for name, positions in found.positions.items():
        origin, places = origin_of(name, positions, starts)
        known = places.flatten() >= 0  # the rest is padding
        index = places.flatten()[known]
        label = f"{origin}, rank {found.rank}"
        weight = found.weights[name].flatten()[known]
        wanted = parameters[origin].detach().flatten()[index]
        differences.append(reordered("weights", "", label, weight, wanted))
        holders = [
            other
            for other in beside
            if name in other.positions and torch.equal(other.positions[name], positions)
        ]
        batches = len(beside) // len(holders)
        gradient = _mean_gradient(name, [h for h in holders if h.rank in found.shares_sequence])
        whole_gradient = expected.gradients.get(origin)
        if gradient is None and whole_gradient is None:
            continue
        gradient = torch.zeros_like(found.weights[name]) if gradient is None else gradient
        if whole_gradient is None:
            whole_gradient = torch.zeros_like(parameters[origin])
        differences.append(
            reordered(
                "gradients",
                _module_class(whole, origin),
                label,
                gradient.flatten()[known],
                whole_gradient.flatten()[index] * batches,
                floor=SLICES_FLOOR * largest,
                rounding=float(changes.get(origin, 0.0)) * batches,
            )
        )
    return differences


def _mean_gradient(name: str, slices: list[_Slice]) -> Tensor | None:
    found = [one.result.gradients[name] for one in slices if name in one.result.gradients]
    return torch.stack(found).sum(0) / len(slices) if found else None


def _module_class(model: nn.Module, parameter: str) -> str:
    """Return "LlamaAttention.q_proj" for "model.layers.0.self_attn.q_proj.weight"."""
    module = parameter.rpartition(".")[0]
    parent, _, leaf = module.rpartition(".")
    if leaf.isdigit():
        return type(model.get_submodule(module)).__name__
    return f"{type(model.get_submodule(parent)).__name__}.{leaf}"


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError):  # free pages leave out what caches would give back
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
