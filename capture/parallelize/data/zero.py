"""ZeRO stages 1 and 2 (arXiv:1910.02054): gradient buckets and sharded optimizer steps.

As in DeepSpeed (`deepspeed/runtime/zero/stage_1_and_2.py`): the parameters of a group become views
of flat buffers padded to twice the number of ranks. The optimizer's parameters become the rank's
slices of these buffers, so that states of any optimizer class are sharded. After the step the
buffers are all-gathered. Gradients are summed in buckets of 500,000,000 elements
(`reduce_bucket_size`) and divided by the number of ranks first:

- Stage 1: once per step, when the step, clipping or unscaling needs them; until then every rank
  holds whole gradients.
- Stage 2: during each backward, as soon as a bucket is complete, one bucket in flight while the
  next fills. Whole gradients are freed; those of the shard accumulate over micro-batches.

DeepSpeed by default all-reduces a bucket and keeps its part. Here a bucket is reduce-scattered and
every rank owns a slice of each bucket, as in Megatron-LM's distributed optimizer
(`megatron/core/distributed/param_and_grad_buffer.py`). States have the dtype of the script's
parameters: no fp32 copy is added.
"""

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.utils import _sync_module_states
from torch.optim import Optimizer

from onerank.capture.parallelize.autograd_collectives import all_gather, reduce_scatter
from onerank.capture.parallelize.data.data_groups import DataGroups, group_kind_of
from onerank.capture.parallelize.data.optimizers import (
    after_checks,
    elementwise,
    expand_state,
    pop_uniform_state,
)
from onerank.capture.parallelize.parameter_kinds import DENSE
from onerank.capture.parallelize.pipeline.stage import TIED
from onerank.capture.patches import patched
from onerank.ir.errors import SliceError

# DeepSpeed's reduce_bucket_size and nccl_start_alignment_factor, in elements
BUCKET_ELEMENTS = 500_000_000

ALIGNMENT = 2


class Bucket:
    """Parameters in one flat buffer, and the slice of the buffer that this rank updates.

    Args:
        parameters: parameters of one dtype, device and kind; they become views of the buffer.
        group: the ranks that hold the same parameters.
        divisor: number of ranks that a gradient is averaged over.

    Attributes:
        shard: the slice [padded / ranks], as a parameter for the optimizer.
    """

    def __init__(self, parameters: list[Tensor], group: dist.ProcessGroup, divisor: int) -> None:
        self._group = group
        self._divisor = divisor
        self._views: dict[Tensor, tuple[int, int]] = {}
        end = 0
        for parameter in parameters:
            self._views[parameter] = end, parameter.numel()
            end += parameter.numel()
        unit = ALIGNMENT * group.size()
        self._flat = parameters[0].new_zeros(-(-end // unit) * unit)
        for parameter, (start, length) in self._views.items():
            view = self._flat[start : start + length].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
        self._buffer: Tensor | None = None
        self._missing: set[Tensor] = set()
        self._reduction: tuple[Any, Tensor, Tensor] | None = None
        self._sum: Tensor | None = None
        self._tied: Any = getattr(parameters[0], TIED, None)
        # A view of the buffer, so that the optimizer's update lands in it.
        self.shard = nn.Parameter(self._flat.chunk(group.size())[group.rank()])
        self._checksum: tuple[str, list[int]] | None = None

    def record_checksum(self) -> None:
        """Record a checksum of the weights if they have gradients that no step has used."""
        pending = self._buffer, self._reduction, self._sum, *(p.grad for p in self._views)
        if any(gradient is not None for gradient in pending):
            self._checksum = self._compute_checksum()

    def discard_checksum(self) -> None:
        """Discard the checksum: the weights may change now."""
        self._checksum = None

    def weights_changed(self) -> bool:
        """Return whether the weights or their addresses differ from the recorded ones."""
        return self._checksum is not None and self._checksum != self._compute_checksum()

    def _compute_checksum(self) -> tuple[str, list[int]]:
        # As text, because nan != nan.
        total = str(self._flat.sum(dtype=torch.float64).item())
        return total, [parameter.data_ptr() for parameter in self._views]

    def move_gradient(self, parameter: Tensor) -> bool:
        """Move a parameter's gradient into the bucket; return whether that completes it."""
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            raise SliceError(
                f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, whose size "
                "depends on the data: create its embedding with sparse=False",
                code="dp-sparse-gradient",
            )
        if self._buffer is not None and parameter not in self._missing:
            # A second gradient of the parameter belongs to the next micro-batch. The bucket is
            # incomplete, because some parameters got no gradient in the previous one.
            self.start_reduction()
        if self._buffer is None:
            self._buffer = torch.empty_like(self._flat)
            used = sum(length for _, length in self._views.values())
            # The norm of the shards includes the padding.
            self._buffer[used:].zero_()
            self._missing = set(self._views)
        start, length = self._views[parameter]
        self._buffer[start : start + length].copy_(parameter.grad.view(-1))
        parameter.grad = None
        self._missing.discard(parameter)
        return not self._missing

    def move_gradients(self) -> None:
        """Move the gradients of all parameters that have one into the bucket."""
        for parameter in self._views:
            if parameter.grad is not None:
                self.move_gradient(parameter)

    def start_reduction(self) -> None:
        """Start the reduce-scatter of the bucket; missing gradients count as zero."""
        if self._buffer is None:
            return
        self.finish_reduction()
        gradients, self._buffer = self._buffer, None
        for parameter in self._missing:
            start, length = self._views[parameter]
            gradients[start : start + length].zero_()
        # Before the sum, as DeepSpeed does: the sum of fp16 gradients could overflow.
        gradients.div_(self._divisor)
        if self._group.size() == 1:
            self._reduction = None, gradients, gradients
            return
        shard_sum = torch.empty_like(self.shard)
        work = reduce_scatter(shard_sum, gradients, group=self._group, async_op=True)
        self._reduction = work, gradients, shard_sum

    def finish_reduction(self) -> None:
        """Wait for the sum and add it to the sums of previous micro-batches."""
        if self._reduction is None:
            return
        work, _, shard_sum = self._reduction
        self._reduction = None
        if work is not None:
            work.wait()
        self._sum = shard_sum if self._sum is None else self._sum.add_(shard_sum)

    def finish(self) -> None:
        """Set the shard's gradient to the sum of the step."""
        self.start_reduction()
        self.finish_reduction()
        if self._sum is None:
            return
        if self._tied is not None:
            # Each stage's shard covers the same rows, because the embedding has its own bucket.
            dist.all_reduce(self._sum, group=self._tied)
        before = self.shard.grad
        self.shard.grad = self._sum if before is None else before.add_(self._sum)
        self._sum = None

    def parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter with elements in the shard, and the gradients of these elements."""
        if self.shard.grad is None:
            return
        first = self._group.rank() * self.shard.numel()
        for parameter, (start, length) in self._views.items():
            begin = max(start - first, 0)
            end = min(start + length - first, self.shard.numel())
            if begin < end:
                yield parameter, self.shard.grad[begin:end]

    def gather(self) -> None:
        """All-gather the shards that the other ranks have updated."""
        if self._group.size() > 1:
            all_gather(self._flat, self.shard.detach(), group=self._group)

    def watch(
        self, on_gradient: Callable[["Bucket", Tensor], None], undo: contextlib.ExitStack
    ) -> None:
        """Call `on_gradient` after each accumulated gradient, until `undo` is closed."""

        def gradient_ready(parameter: Tensor) -> None:
            on_gradient(self, parameter)

        for parameter in self._views:
            handle = parameter.register_post_accumulate_grad_hook(gradient_ready)
            undo.callback(handle.remove)


def buckets_of(parameters: list[Tensor]) -> list[list[Tensor]]:
    """Return the parameters of each bucket, in reverse order: as the backward reaches them.

    An embedding that pipeline stages share gets a separate bucket, as in Megatron-LM
    (megatron/core/distributed/param_and_grad_buffer.py), so that its shards match on all stages.
    """
    by_kind: dict[Any, list[list[Tensor]]] = {}
    for parameter in reversed(parameters):
        kind = parameter.dtype, parameter.device, group_kind_of(parameter), hasattr(parameter, TIED)
        parts = by_kind.setdefault(kind, [[]])
        filled = sum(p.numel() for p in parts[-1])
        # A larger parameter gets a separate bucket, since it is never split.
        if parts[-1] and filled + parameter.numel() > BUCKET_ELEMENTS:
            parts.append([])
        parts[-1].append(parameter)
    return [part for parts in by_kind.values() for part in parts]


_OUTSIDE = (
    "--zero 1 and 2 reduce gradients and update weights only in an optimizer's step\n"
    "  use --ddp or --fsdp"
)

# Later steps repeat the first, and a checksum reads all weights.
_WATCHED_STEPS = 2


class ShardedOptimizers:
    """The optimizers that step on shards.

    Args:
        groups: the data-parallel groups.
        reduces_early: whether gradients are reduced during the backward (stage 2).
    """

    def __init__(self, groups: DataGroups, *, reduces_early: bool) -> None:
        self._groups = groups
        self._reduces_early = reduces_early
        self._buckets: dict[Optimizer, list[Bucket]] = {}
        self._owners: dict[Tensor, Optimizer] = {}
        self._bucket_in_flight: Bucket | None = None
        self._steps = 0
        self._undo = contextlib.ExitStack()

    def broadcast_weights(self, module: nn.Module) -> None:
        """Broadcast the first rank's parameters and buffers, as DDP and DeepSpeed do."""
        experts = {name for name, p in module.named_parameters() if group_kind_of(p) != DENSE}
        group = self._groups.of(DENSE)
        # DDP's `broadcast_bucket_size`, in bytes, and its first rank.
        _sync_module_states(module, group, 250 * 2**20, 0, experts)

    def shard_optimizer(self, optimizer: Optimizer) -> None:
        """Replace an optimizer's parameters by shards, before its first step."""
        kind = type(optimizer).__name__
        # A slice of a flat buffer is a vector that may cover parts of several parameters.
        if not elementwise(optimizer):
            raise SliceError(
                f"{kind} does not update element by element, so it cannot step on slices of flat "
                "buffers as --zero 1 and 2 need: use --ddp, or --fsdp if it takes DTensors",
                code="zero-not-elementwise",
            )
        stepped = {p for group in optimizer.param_groups for p in group["params"]}
        if others := {type(self._owners[p]).__name__ for p in stepped & self._owners.keys()}:
            raise SliceError(
                f"{kind} and {', '.join(sorted(others))} hold the same parameters (sharpness-aware "
                f"minimisation, averaging): {_OUTSIDE}",
                code="zero-shared-parameters",
            )
        buckets: list[Bucket] = []
        for group in optimizer.param_groups:
            trained: list[Tensor] = [p for p in group["params"] if p.requires_grad]
            parts = buckets_of(trained)
            added = [self._new_bucket(part) for part in parts]
            for part, bucket in zip(parts, added, strict=True):
                optimizer.state[bucket.shard] = expand_state(
                    pop_uniform_state(optimizer, *part), bucket.shard
                )
            self._owners.update((parameter, optimizer) for parameter in trained)
            self._owners.update((bucket.shard, optimizer) for bucket in added)
            group["params"] = [bucket.shard for bucket in added]
            buckets += added
        self._buckets[optimizer] = buckets
        if self._reduces_early:
            for bucket in buckets:
                bucket.watch(self._gradient_ready, self._undo)

    def _new_bucket(self, parameters: list[Tensor]) -> Bucket:
        group = self._groups.of(group_kind_of(parameters[0]))
        return Bucket(parameters, group, self._groups.size)

    def _gradient_ready(self, bucket: Bucket, parameter: Tensor) -> None:
        if not bucket.move_gradient(parameter):
            return
        self._finish_reduction()  # so that at most one bucket is in flight
        bucket.start_reduction()
        self._bucket_in_flight = bucket
        engine: Any = torch.autograd.Variable._execution_engine
        # The last bucket of a backward is in flight when the backward ends; the engine runs queued
        # callbacks there.
        engine.queue_callback(self._finish_reduction)

    def _finish_reduction(self) -> None:
        if self._bucket_in_flight is not None:
            self._bucket_in_flight.finish_reduction()
            self._bucket_in_flight = None

    def finish(self, optimizer: Optimizer) -> None:
        """Reduce the step's gradients into the shards of an optimizer."""
        for bucket in self._buckets.get(optimizer, ()):
            bucket.move_gradients()
            bucket.finish()

    def before_step(self, optimizer: Optimizer) -> None:
        """Shard an optimizer on its first step, and reduce its gradients."""
        if optimizer not in self._buckets:
            self.shard_optimizer(optimizer)
        self.finish(optimizer)
        shards = {id(bucket.shard) for bucket in self._buckets[optimizer]}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in shards:
                    raise SliceError(
                        f"{type(optimizer).__name__} got a parameter of shape "
                        f"{tuple(parameter.shape)} after its first step\n  add all "
                        "parameters before it under --zero 1 and 2",
                        code="zero-late-parameter",
                    )

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Gather the parameters that the other ranks have updated."""
        self._steps += 1
        for bucket in self._buckets[optimizer]:
            bucket.gather()
        self.free_gradients(optimizer)

    def after_backward(self) -> None:
        """Record checksums of the weights in the first steps."""
        if self._steps < _WATCHED_STEPS:
            for bucket in itertools.chain.from_iterable(self._buckets.values()):
                bucket.record_checksum()

    def before_forward(self) -> None:
        """Check that weights are unchanged between a backward and its step."""
        for optimizer, buckets in self._buckets.items():
            if any(bucket.weights_changed() for bucket in buckets):
                raise SliceError(
                    f"weights of {type(optimizer).__name__} changed between a backward and its "
                    "step, and the model was called with them (sharpness-aware minimisation): "
                    f"{_OUTSIDE}",
                    code="zero-weights-changed",
                )

    def free_gradients(self, optimizer: Optimizer) -> None:
        """Free the gradients after a step that ran or was skipped."""
        for bucket in self._buckets.get(optimizer, ()):
            bucket.shard.grad = None
            bucket.discard_checksum()

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Patch clipping and GradScaler to work on the reduced gradients of all shards."""
        utils: Any = nn.utils
        clip, clip_value = utils.clip_grad_norm_, utils.clip_grad_value_

        def clip_grad_norm_(
            parameters: Any, max_norm: float, norm_type: float = 2.0, *args: Any, **kwargs: Any
        ) -> Tensor:
            listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            shards: list[Tensor] = [bucket.shard for bucket in self._reduced(listed)]
            if not shards:
                return clip(listed, max_norm, norm_type, *args, **kwargs)
            total = self._norm(shards, norm_type)
            utils.clip_grads_with_norm_(shards, max_norm, total)
            return total

        def clip_grad_value_(parameters: Any, *args: Any, **kwargs: Any) -> None:
            listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            shards = [bucket.shard for bucket in self._reduced(listed)]
            clip_value(shards or listed, *args, **kwargs)

        def reduce_flags(flags: Sequence[Tensor], _: Optimizer) -> None:
            for flag in flags:
                dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._groups.of(DENSE))

        with (
            patched(
                "torch.nn.utils",
                {"clip_grad_norm_": clip_grad_norm_, "clip_grad_value_": clip_grad_value_},
            ),
            self._undo,
            after_checks(reduce_flags, before=self.finish),
        ):
            yield

    def parts_of(
        self, parameters: list[Tensor]
    ) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        """Return the shards of the parameters' optimizers, with reduced gradients.

        Also return each parameter with elements in this rank's shards, with these gradients.
        """
        buckets = self._reduced(parameters)
        return [bucket.shard for bucket in buckets], [
            part for bucket in buckets for part in bucket.parts()
        ]

    def _reduced(self, parameters: list[Tensor]) -> list[Bucket]:
        """Return the buckets of the parameters after reducing their gradients."""
        requested = {id(p) for p in parameters}
        known = {self._owners[p]: None for p in parameters if p in self._owners}
        for optimizer in known:
            shards = {id(bucket.shard) for bucket in self._buckets[optimizer]}
            whole = {id(p) for p, owner in self._owners.items() if owner is optimizer} - shards
            if not (whole <= requested or shards <= requested):
                raise SliceError(
                    f"clipping got {len(whole & requested)} of the {len(whole)} parameters that "
                    f"{type(optimizer).__name__} steps: under --zero 1 and 2 their gradients lie "
                    "in flat buffers: clip all of them together",
                    code="zero-partial-clipping",
                )
            self.finish(optimizer)
        return [bucket for optimizer in known for bucket in self._buckets[optimizer]]

    def _norm(self, shards: list[Tensor], kind: float) -> Tensor:
        """Return the norm of the gradients of all ranks' shards."""
        gradients = [shard.grad for shard in shards if shard.grad is not None]
        norm: Tensor = nn.utils.get_total_norm(gradients, kind)
        group = self._groups.of(DENSE)  # contains the groups of the experts
        if kind == float("inf"):
            dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=group)
            return norm
        power = norm.pow(kind)
        dist.all_reduce(power, group=group)
        return power.pow(1.0 / kind)
