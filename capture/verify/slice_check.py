"""Run one batch through a whole model and all its slices, and compare against rounding noise.

A copy of the model whose parameter values are their indices is sliced too, which shows the
elements of the whole model that a slice has. So any slicing that only moves elements can be
verified, and a slicing that loses or changes elements is detected.
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
from onerank.capture.parallelize.experts.routing import BY_MODEL, parse_routing
from onerank.capture.parallelize.tensor.replicated_grads import partial_gradients, reduce_deferred
from onerank.capture.parallelize.tensor.shard_parameters import fill_with_positions, origin_of
from onerank.capture.profiling.window_plan import Progress
from onerank.capture.run_as_rank import slicing_to_rank
from onerank.capture.verify.comparison import (
    ABSOLUTE,
    ROUNDINGS,
    SLICES_FLOOR,
    SLICES_RELATIVE,
    Comparison,
    TensorDifference,
    compare_reordered,
    summarize,
)
from onerank.capture.verify.threaded_world import ThreadedPeers, ThreadedWorld
from onerank.ir import World
from onerank.ir.notes import Note


@dataclass
class StepResult:
    """Loss, logits and gradients of a model or slice: detached, on the model's device."""

    loss: Tensor
    logits: Tensor | None
    gradients: dict[str, Tensor]


def run_step(model: nn.Module, batch: Any, named: Any, *, what: str = "logits") -> StepResult:
    """Run forward and backward, and the reductions before an optimizer's step.

    Args:
        model: a model or slice.
        batch: positional arguments of its call.
        named: keyword arguments of its call.
        what: "logits" also returns logits, and takes a loss from them if the output has none.
    """
    partials = partial_gradients(model)
    for _, partial in partials:
        # As in the last micro-batch of a step, whose sums are one flat all-reduce.
        partial.deferred = True
    with torch.autocast(next(model.parameters()).device.type, enabled=False):
        output = model(*batch, **named)
        loss, logits = _loss_and_logits(output) if what == "logits" else (output.loss, None)
        if loss is None and logits is None:
            logits = output.logits
        if loss is None:
            loss = _projection(logits)
        loss.backward()
    reduce_deferred(partials)
    _before_optimizer_step(model)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return StepResult(loss.detach(), None if logits is None else logits.detach(), gradients)


def _loss_and_logits(output: Any) -> tuple[Any, Any]:
    """Return loss and logits of an output: by name, or by shape if it is a tuple."""
    if hasattr(output, "loss") or hasattr(output, "logits"):
        return getattr(output, "loss", None), getattr(output, "logits", None)
    values = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    floating = [value for value in values if value.is_floating_point()]
    loss = next((value for value in floating if value.dim() == 0), None)
    return loss, next((value for value in floating if value.dim() > 0), None)


def _before_optimizer_step(model: nn.Module) -> None:
    """Run the optimizer hooks with which slices sum the gradients of a tied weight."""
    # The optimizer only passes the parameters to the hooks; it does not step.
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
    registered: Any = importlib.import_module("torch.optim.optimizer")
    for hook in list(registered._global_optimizer_pre_hooks.values()):
        hook(optimizer, (), {})


def _projection(output: Any) -> Tensor:
    """Return a loss for a batch without labels: the mean of outputs with fixed random weights."""
    generator = torch.Generator(output.device).manual_seed(0)
    weights = torch.randn(output.shape, generator=generator, device=output.device)
    return (output * weights).mean()


def as_fp32(value: Any) -> Any:
    """Return a copy of nested tensors, with floating-point tensors in fp32."""

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().clone()
            return leaf.float() if leaf.is_floating_point() else leaf
        return leaf

    return tree_map(cast, value)


@contextlib.contextmanager
def computed_in_fp32() -> Generator[None]:
    """Compute fp32 products in fp32, not in TF32."""
    precision = torch.get_float32_matmul_precision()
    cudnn = torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = cudnn


def rounding_noise(model: nn.Module, batch: Any, named: Any, expected: StepResult) -> StepResult:
    """Run a step with each weight moved to a neighbouring fp32 number, up or down at random.

    Args:
        model: fp32 model; it stays unchanged.
        batch: positional arguments of its call.
        named: keyword arguments of its call.
        expected: the result of the unchanged model.

    Returns:
        The largest absolute change of the loss, the logits and each gradient, as scalars.
    """
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in moved.parameters():
            up = torch.rand(weight.shape, generator=generator).to(weight.device) < 0.5
            direction = torch.where(up, torch.inf, -torch.inf).to(weight.dtype)
            weight.copy_(torch.nextafter(weight, direction))
    result = run_step(moved, batch, named)
    logits = None
    if result.logits is not None and expected.logits is not None:
        logits = _change(result.logits, expected.logits)
    gradients = {
        name: _change(result.gradients[name], gradient)
        for name, gradient in expected.gradients.items()
        if name in result.gradients
    }
    return StepResult(_change(result.loss, expected.loss), logits, gradients)


def _change(actual: Tensor, expected: Tensor) -> Tensor:
    if not expected.numel():
        return torch.zeros(())
    change = (actual.double() - expected.double()).abs().max()
    # NaN or infinite noise must not widen the tolerance.
    return change.nan_to_num(0.0, 0.0, 0.0)


_TOLERANCE = (
    f"{ABSOLUTE:g} x max(1, largest), and {SLICES_RELATIVE:g} x largest + "
    f"{SLICES_FLOOR:g} x largest gradient"
)

_ROUNDED = (
    f"in place of the first, {ROUNDINGS} x the change by another rounding of the weights, measured "
    "because some tensors differed by more"
)


@dataclass
class _Slice:
    """A rank's slice: its result, weights before the step, and its elements' origins.

    Attributes:
        rank: global rank.
        shares_sequence: ranks of its context-parallel group.
        result: result of its step.
        weights: parameters by name before the step.
        positions: parameters of the sliced copy whose values are positions in the whole model.
    """

    rank: int
    shares_sequence: tuple[int, ...]
    result: StepResult
    weights: dict[str, Tensor]
    positions: dict[str, Tensor]


def compare_slices(
    model: nn.Module,
    inputs: Sequence[Any],
    keywords: Mapping[str, Any],
    options: Options,
    progress: Progress,
) -> tuple[list[Comparison], str, list[Note]]:
    """Run `model` whole and as slices on one batch, in fp32 and without dropout.

    Args:
        model: a whole model; it stays unchanged.
        inputs: positional arguments of its call.
        keywords: keyword arguments of its call.
        options: world and tp_style of the slices.
        progress: receives one short line per slice.

    Returns:
        The comparisons; the reason if there are none, otherwise ""; and notes.

    Raises:
        SliceError: the model cannot be sliced with these options.
    """
    world = without_replicas(options.world)
    routed = _with_equal_routing(options)
    parameters = sum(p.numel() for p in model.parameters())
    needed = 4 * parameters * _COPIES
    free = _free_bytes(_device(model))
    does_not_fit = (
        f"whole model and {world.size} slices do not fit: {parameters:,} parameters x 4 bytes x "
        f"{_COPIES} = {needed / 1e9:.1f} GB and activations, but {free / 1e9:.1f} GB are free on "
        f"{_device(model)}; verify fewer layers"
    )
    if needed > free:
        return [], does_not_fit, []
    try:
        with computed_in_fp32():
            call = tuple(inputs), dict(keywords)
            rows, notes = _compare(model, call, world, routed, progress)
    except torch.OutOfMemoryError:
        return [], does_not_fit, []
    if routed.moe_routing != options.moe_routing and expert_layers(model):
        notes.append(
            Note(
                f"the model's routers chose the experts, not --moe-routing {options.moe_routing}: "
                "static routes are per rank, and each rank has only a part of the sequence",
                code="verify-model-routing",
            )
        )
    return rows, "", notes


def _with_equal_routing(options: Options) -> Options:
    """Use the model's routers if each rank routes a part of the sequence: tables are per rank."""
    if options.sp or "cp" in options.world.sizes:
        return replace(options, moe_routing=BY_MODEL)
    return options


# Times the parameters' fp32 bytes: weights and gradients of the whole model and of the slices, and
# the copy of positions.
_COPIES = 8


def without_replicas(world: World) -> World:
    """Return the world without ranks that only replicate a slice."""
    sizes = world.sizes
    tp, cp, pp = (sizes.get(axis, 1) for axis in ("tp", "cp", "pp"))
    return World.of(tp=tp, cp=cp, dp=world.ep // math.gcd(world.ep, cp), pp=pp, ep=world.ep)


def _compare(
    model: nn.Module,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    world: World,
    options: Options,
    progress: Progress,
) -> tuple[list[Comparison], list[Note]]:
    """Return how the slices differ from the whole model, and how they ran.

    Args:
        model: as for `compare_slices`.
        call: positional and keyword arguments of the model.
        world: the ranks that differ in their slice.
        options: how to slice.
        progress: receives the name of each run.
    """
    # `eval` turns dropout off, whose random numbers the slices would draw in another order.
    whole_model = copy.deepcopy(model).float().eval()
    for parameter in whole_model.parameters():
        parameter.grad = None
    batch, keywords = as_fp32(call)
    starts, total = dict[str, int](), 1
    for name, parameter in whole_model.named_parameters():
        starts[name], total = total, total + parameter.numel()
    call = (batch, keywords)
    slices = _run_slices(whole_model, starts, call, world=world, options=options, progress=progress)
    progress("the whole model")
    reference = copy.deepcopy(whole_model)
    routing = parse_routing(options.moe_routing)
    if routing is not None:
        apply_static_routing(reference, routing)
    expected = run_step(reference, batch, keywords)

    def compare_all(rounding: StepResult | None) -> list[TensorDifference]:
        differences: list[TensorDifference] = []
        for part in slices:
            if _outputs_of(world, part.rank) != "nothing":
                differences += _compare_outputs(part, expected, world, rounding)
            peers = [slices[rank] for rank in _batch_ranks(world, part.rank)]
            differences += _compare_parameters(
                part, peers, expected, whole_model, starts, rounding=rounding
            )
        return differences

    differences, allowed = compare_all(None), _TOLERANCE
    if any(difference.breach for difference in differences):
        progress("the whole model, with its weights rounded differently")
        differences = compare_all(rounding_noise(reference, batch, keywords, expected))
        allowed = f"{_TOLERANCE}; {_ROUNDED}"
    rows = summarize("slices", allowed, differences)
    notes = [
        Note(
            f"the slices of {world} ran as threads of one process with real communication, in fp32 "
            f"without TF32, autocast and dropout, on the first batch of {type(model).__name__}; "
            f"tolerance of a tensor: {allowed}",
            code="verify-slices",
        )
    ]
    return rows, notes


def _run_slices(
    whole_model: nn.Module,
    starts: dict[str, int],
    call: tuple[Any, Any],
    *,
    world: World,
    options: Options,
    progress: Progress,
) -> list[_Slice]:
    """Run a step of each rank's slice, all ranks in threads of this process.

    Args:
        whole_model: the model, in fp32.
        starts: position of the first element of each parameter in the whole model, from 1.
        call: positional and keyword arguments of the model, in fp32.
        world: the ranks.
        options: how to slice.
        progress: receives the number of each slice.
    """

    def run_slice(peers: ThreadedPeers) -> _Slice:
        rank_options = replace(options.in_world(world), rank=peers.rank, record_real_job=True)
        progress(f"slice {peers.rank + 1} of {world.size}")
        sliced = copy.deepcopy(whole_model)
        slicing_to_rank(peers, rank_options).slice_one(sliced)
        weights = {name: p.detach().clone() for name, p in sliced.named_parameters()}
        result = run_step(sliced, *call, what=_outputs_of(world, peers.rank))
        position_model = copy.deepcopy(whole_model)
        fill_with_positions(position_model, starts)
        slicing_to_rank(peers, rank_options).slice_one(position_model)
        positions = {name: p.data.double() for name, p in position_model.named_parameters()}
        return _Slice(peers.rank, world.line("cp", peers.rank), result, weights, positions)

    return ThreadedWorld(world.size).run(run_slice)


def _compare_outputs(
    part: _Slice, expected: StepResult, world: World, rounding: StepResult | None
) -> list[TensorDifference]:
    """Compare loss and logits of a slice with the whole model's."""
    label = f"rank {part.rank}"
    noise = float(rounding.loss) if rounding else 0.0
    differences = [
        compare_reordered("loss", "", label, part.result.loss, expected.loss, rounding=noise)
    ]
    logits, expected_logits = part.result.logits, expected.logits
    if logits is not None and expected_logits is not None:
        shards = world.sizes.get("tp", 1)
        # A vocabulary-parallel head leaves its logits sharded.
        if logits.shape[-1] * shards == expected_logits.shape[-1]:
            tp_rank = world.point(part.rank).get("tp", 0)
            expected_logits = expected_logits.chunk(shards, dim=-1)[tp_rank]
        noise = float(rounding.logits) if rounding and rounding.logits is not None else 0.0
        differences.append(
            compare_reordered("logits", "", label, logits, expected_logits, rounding=noise)
        )
    return differences


def _outputs_of(world: World, rank: int) -> Literal["nothing", "loss", "logits"]:
    """Return the outputs to compare: only the last pipeline stage has any.

    Under context parallelism its logits are those of a part of the sequence: only the loss counts.
    """
    if world.point(rank).get("pp", 0) < world.sizes.get("pp", 1) - 1:
        return "nothing"
    return "loss" if "cp" in world.sizes else "logits"


def _batch_ranks(world: World, rank: int) -> list[int]:
    """Return the ranks of the same tensor and pipeline index, which all run the same batch."""
    point = world.point(rank)
    return [
        candidate
        for candidate in range(world.size)
        if all(
            world.point(candidate)[axis] == point[axis] for axis in point if axis in ("tp", "pp")
        )
    ]


def _compare_parameters(
    part: _Slice,
    peers: list[_Slice],
    expected: StepResult,
    whole: nn.Module,
    starts: dict[str, int],
    *,
    rounding: StepResult | None,
) -> list[TensorDifference]:
    """Compare weights and gradients of a slice with the whole model's elements at their origins.

    A parameter that one rank has for several (an expert) gets the gradients of all their batches.
    Gradients of ranks that share a sequence are averaged, as data parallelism does.
    """
    largest = max((float(g.abs().max()) for g in expected.gradients.values()), default=0.0)
    parameters = dict(whole.named_parameters())
    changes = rounding.gradients if rounding else {}
    differences: list[TensorDifference] = []
    for name, positions in part.positions.items():
        origin, elements = origin_of(name, positions, starts)
        has_origin = elements.flatten() >= 0  # padding has no origin
        index = elements.flatten()[has_origin]
        label = f"{origin}, rank {part.rank}"
        weight = part.weights[name].flatten()[has_origin]
        whole_weight = parameters[origin].detach().flatten()[index]
        differences.append(compare_reordered("weights", "", label, weight, whole_weight))
        holders = [
            peer
            for peer in peers
            if name in peer.positions and torch.equal(peer.positions[name], positions)
        ]
        # Each rank of `peers` runs a batch, and each holder of the expert gets its share of them.
        batches = len(peers) // len(holders)
        sequence = [holder for holder in holders if holder.rank in part.shares_sequence]
        gradient = _mean_gradient(name, sequence)
        whole_gradient = expected.gradients.get(origin)
        if gradient is None and whole_gradient is None:
            continue
        gradient = torch.zeros_like(part.weights[name]) if gradient is None else gradient
        if whole_gradient is None:
            # An expert without tokens has no gradient in one model and zeros in the other.
            whole_gradient = torch.zeros_like(parameters[origin])
        differences.append(
            compare_reordered(
                "gradients",
                _module_class(whole, origin),
                label,
                gradient.flatten()[has_origin],
                whole_gradient.flatten()[index] * batches,
                floor=SLICES_FLOOR * largest,
                rounding=float(changes.get(origin, 0.0)) * batches,
            )
        )
    return differences


def _mean_gradient(name: str, slices: list[_Slice]) -> Tensor | None:
    """Return the mean over slices, where a missing gradient is zero; None if all lack it."""
    gradients = [part.result.gradients[name] for part in slices if name in part.result.gradients]
    return torch.stack(gradients).sum(0) / len(slices) if gradients else None


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
    with contextlib.suppress(OSError):  # free pages exclude reclaimable caches
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
