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
from torch.distributed.utils import _sync_module_states  # pyright: ignore
from torch.optim import Optimizer

from onerank.capture.parallelize.data.data_groups import DENSE, Groups, group_kind_of
from onerank.capture.parallelize.data.optimizers import (
    after_checks,
    elementwise,
    expand_state,
    pop_uniform_state,
)
from onerank.capture.parallelize.pipeline.stage import TIED
from onerank.capture.patches import patched
from onerank.ir.errors import SliceError

# DeepSpeed's reduce_bucket_size and nccl_start_alignment_factor, in elements
BUCKET_ELEMENTS = 500_000_000

ALIGNMENT = 2

# torch 2.13 renamed both and warns about the names that 2.11 has
_renamed = hasattr(dist, "all_gather_single")

_all_gather: Callable[..., Any] = getattr(
    dist, "all_gather_single" if _renamed else "all_gather_into_tensor"
)

_reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single" if _renamed else "reduce_scatter_tensor"
)


class Bucket:
    """Some parameters in one flat buffer, and the slice of it that this rank updates.

    Attributes:
        shard: the slice [padded / ranks], a parameter for the optimizer.
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
        self._filling: Tensor | None = None
        self._missing: set[Tensor] = set()
        self._in_flight: tuple[Any, Tensor, Tensor] | None = None
        self._sum: Tensor | None = None
        self._tied: Any = getattr(parameters[0], TIED, None)
        own = self._flat.chunk(group.size())[group.rank()]
        self.shard = nn.Parameter(own)
        self._noted: tuple[str, list[int]] | None = None

    def note_weights(self) -> None:
        """Remember what the weights sum to, if they have gradients that no step has used."""
        pending = self._filling, self._in_flight, self._sum, *(p.grad for p in self._views)
        if any(one is not None for one in pending):
            self._noted = self._weights()

    def forget_weights(self) -> None:
        """Take it that the weights may change."""
        self._noted = None

    def weights_changed(self) -> bool:
        """Whether the weights are others than were noted, or lie elsewhere."""
        return self._noted is not None and self._noted != self._weights()

    def _weights(self) -> tuple[str, list[int]]:
        total = str(self._flat.sum(dtype=torch.float64).item())  # "nan" is the same as itself
        return total, [parameter.data_ptr() for parameter in self._views]

    def take(self, parameter: Tensor) -> bool:
        """Move a parameter's gradient into the bucket; return whether that completes it."""
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            raise SliceError(
                f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, whose size "
                "is not known ahead: make its embedding with sparse=False",
                code="dp-sparse-gradient",
            )
        if self._filling is not None and parameter not in self._missing:
            self.launch()  # the micro-batch before did not complete it
        if self._filling is None:
            self._filling = torch.empty_like(self._flat)
            used = sum(length for _, length in self._views.values())
            self._filling[used:].zero_()
            self._missing = set(self._views)
        start, length = self._views[parameter]
        self._filling[start : start + length].copy_(parameter.grad.view(-1))
        parameter.grad = None
        self._missing.discard(parameter)
        return not self._missing

    def take_all(self) -> None:
        """Move the gradients of all parameters that have one into the bucket."""
        for parameter in self._views:
            if parameter.grad is not None:
                self.take(parameter)

    def launch(self) -> None:
        """Sum what the bucket holds over the ranks; parameters without a gradient count as zero."""
        if self._filling is None:
            return
        self.land()
        gradients, self._filling = self._filling, None
        for parameter in self._missing:
            start, length = self._views[parameter]
            gradients[start : start + length].zero_()
        gradients.div_(self._divisor)
        if self._group.size() == 1:
            self._in_flight = None, gradients, gradients
            return
        own = torch.empty_like(self.shard)
        work = _reduce_scatter(own, gradients, group=self._group, async_op=True)
        self._in_flight = work, gradients, own

    def land(self) -> None:
        """Wait for the sum and add it to those of the micro-batches before."""
        if self._in_flight is None:
            return
        work, _, own = self._in_flight
        self._in_flight = None
        if work is not None:
            work.wait()
        self._sum = own if self._sum is None else self._sum.add_(own)

    def finish(self) -> None:
        """Give the shard the gradients of the step."""
        self.launch()
        self.land()
        if self._sum is None:
            return
        if self._tied is not None:
            dist.all_reduce(self._sum, group=self._tied)
        before = self.shard.grad
        self.shard.grad = self._sum if before is None else before.add_(self._sum)
        self._sum = None

    def parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter that has elements in the shard, and their gradients."""
        if self.shard.grad is None:
            return
        first = self._group.rank() * self.shard.numel()
        for parameter, (start, length) in self._views.items():
            begin = max(start - first, 0)
            end = min(start + length - first, self.shard.numel())
            if begin < end:
                yield parameter, self.shard.grad[begin:end]

    def gather(self) -> None:
        """Collect the shards that the other ranks have updated."""
        if self._group.size() > 1:
            _all_gather(self._flat, self.shard.detach(), group=self._group)

    def watch(self, call: Callable[["Bucket", Tensor], None], undo: contextlib.ExitStack) -> None:
        """Have `call` told of each gradient that is complete, until `undo` is closed."""

        def arrived(parameter: Tensor) -> None:
            call(self, parameter)

        for parameter in self._views:
            handle = parameter.register_post_accumulate_grad_hook(arrived)
            undo.callback(handle.remove)


def buckets_of(parameters: list[Tensor]) -> list[list[Tensor]]:
    """Return the parameters of each bucket, in the order in which backward reaches them.

    An embedding that other pipeline stages have too has a bucket of its own, as in Megatron-LM
    (megatron/core/distributed/param_and_grad_buffer.py): its shards are alike on all of them.
    """
    sorts: dict[Any, list[list[Tensor]]] = {}
    for parameter in reversed(parameters):
        sort = parameter.dtype, parameter.device, group_kind_of(parameter), hasattr(parameter, TIED)
        parts = sorts.setdefault(sort, [[]])
        filled = sum(p.numel() for p in parts[-1])
        if parts[-1] and filled + parameter.numel() > BUCKET_ELEMENTS:
            parts.append([])
        parts[-1].append(parameter)
    return [part for parts in sorts.values() for part in parts]


_OUTSIDE = (
    "under --zero 1 and 2 gradients are summed, and reach the weights, in an optimizer's step "
    "alone. Use --ddp or --fsdp"
)

_WATCHED_STEPS = 2


class ShardedOptimizers:
    """The optimizers that step on shards; `early` sums gradients during backward (stage 2)."""

    def __init__(self, groups: Groups, *, early: bool) -> None:
        self._groups = groups
        self._early = early
        self._buckets: dict[Optimizer, list[Bucket]] = {}
        self._owners: dict[Tensor, Optimizer] = {}
        self._flying: Bucket | None = None
        self._steps = 0
        self._undo = contextlib.ExitStack()

    def equalise(self, module: nn.Module) -> None:
        """Give every rank the first one's parameters and buffers, as DDP and DeepSpeed do."""
        experts = {name for name, p in module.named_parameters() if group_kind_of(p) != DENSE}
        group = self._groups.of(DENSE)
        _sync_module_states(module, group, 250 * 2**20, 0, experts)

    def adopt(self, optimizer: Optimizer) -> None:
        """Shard what an optimizer steps on, before it has states."""
        kind = type(optimizer).__name__
        if not elementwise(optimizer):  # a slice of a flat buffer is no matrix
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
            mine = [self._bucket(part) for part in parts]
            for part, bucket in zip(parts, mine, strict=True):
                optimizer.state[bucket.shard] = expand_state(
                    pop_uniform_state(optimizer, *part), bucket.shard
                )
            self._owners.update((parameter, optimizer) for parameter in trained)
            self._owners.update((bucket.shard, optimizer) for bucket in mine)
            group["params"] = [bucket.shard for bucket in mine]
            buckets += mine
        self._buckets[optimizer] = buckets
        if self._early:
            for bucket in buckets:
                bucket.watch(self._arrived, self._undo)

    def _bucket(self, parameters: list[Tensor]) -> Bucket:
        group = self._groups.of(group_kind_of(parameters[0]))
        return Bucket(parameters, group, self._groups.size)

    def _arrived(self, bucket: Bucket, parameter: Tensor) -> None:
        if not bucket.take(parameter):
            return
        self._land()  # its buffer is free for the bucket after this one
        bucket.launch()
        self._flying = bucket
        engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore
        engine.queue_callback(self._land)  # at the end of this backward

    def _land(self) -> None:
        if self._flying is not None:
            self._flying.land()
            self._flying = None

    def finish(self, optimizer: Optimizer) -> None:
        """Have the shards of an optimizer hold the gradients of the step."""
        for bucket in self._buckets.get(optimizer, ()):
            bucket.take_all()
            bucket.finish()

    def before_step(self, optimizer: Optimizer) -> None:
        """Shard an optimizer that was not known before, and sum its gradients."""
        if optimizer not in self._buckets:
            self.adopt(optimizer)
        self.finish(optimizer)
        own = {id(bucket.shard) for bucket in self._buckets[optimizer]}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in own:
                    raise SliceError(
                        f"{type(optimizer).__name__} got a parameter of shape "
                        f"{tuple(parameter.shape)} after its first step: under --zero 1 and 2 all "
                        "must be there before",
                        code="zero-late-parameter",
                    )

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Gather the parameters that the other ranks have updated."""
        self._steps += 1
        for bucket in self._buckets[optimizer]:
            bucket.gather()
        self.forget(optimizer)

    def after_backward(self) -> None:
        """Note what the weights are, in the first steps."""
        if self._steps < _WATCHED_STEPS:
            for bucket in itertools.chain.from_iterable(self._buckets.values()):
                bucket.note_weights()

    def before_forward(self) -> None:
        """See that no weights were changed since a backward whose step is still to come."""
        for optimizer, buckets in self._buckets.items():
            if any(bucket.weights_changed() for bucket in buckets):
                raise SliceError(
                    f"weights of {type(optimizer).__name__} were changed between a backward and "
                    "its step, and the model is called with them (sharpness-aware minimisation): "
                    f"{_OUTSIDE}",
                    code="zero-weights-changed",
                )

    def forget(self, optimizer: Optimizer) -> None:
        """Free the gradients of a step that was taken, or skipped."""
        for bucket in self._buckets.get(optimizer, ()):
            bucket.shard.grad = None
            bucket.forget_weights()

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Let clipping and GradScaler see the summed gradients of all shards."""
        utils: Any = nn.utils
        clip, clip_value = utils.clip_grad_norm_, utils.clip_grad_value_

        def clip_grad_norm_(
            parameters: Any, max_norm: float, norm_type: float = 2.0, *args: Any, **kwargs: Any
        ) -> Tensor:
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            shards: list[Tensor] = [bucket.shard for bucket in self._summed(given)]
            if not shards:
                return clip(given, max_norm, norm_type, *args, **kwargs)
            total = self._norm(shards, norm_type)
            utils.clip_grads_with_norm_(shards, max_norm, total)
            return total

        def clip_grad_value_(parameters: Any, *args: Any, **kwargs: Any) -> None:
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            shards = [bucket.shard for bucket in self._summed(given)]
            clip_value(shards or given, *args, **kwargs)

        def find_anywhere(found: Sequence[Tensor], _: Optimizer) -> None:
            for one in found:
                dist.all_reduce(one, op=dist.ReduceOp.MAX, group=self._groups.of(DENSE))

        with (
            patched(
                "torch.nn.utils",
                {"clip_grad_norm_": clip_grad_norm_, "clip_grad_value_": clip_grad_value_},
            ),
            self._undo,
            after_checks(find_anywhere, before=self.finish),
        ):
            yield

    def parts_of(
        self, parameters: list[Tensor]
    ) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        """Return what the optimizers of the parameters step on, their gradients summed.

        And each parameter that this rank's shards have elements of, with their gradients.
        """
        buckets = self._summed(parameters)
        return [bucket.shard for bucket in buckets], [
            part for bucket in buckets for part in bucket.parts()
        ]

    def _summed(self, parameters: list[Tensor]) -> list[Bucket]:
        """Return the buckets of the parameters, their gradients summed over the ranks."""
        given = {id(p) for p in parameters}
        known = {self._owners[p]: None for p in parameters if p in self._owners}
        for optimizer in known:
            shards = {id(bucket.shard) for bucket in self._buckets[optimizer]}
            whole = {id(p) for p, owner in self._owners.items() if owner is optimizer} - shards
            if not (whole <= given or shards <= given):
                raise SliceError(
                    f"clipping got {len(whole & given)} of the {len(whole)} parameters that "
                    f"{type(optimizer).__name__} steps: under --zero 1 and 2 their gradients lie "
                    "in flat buffers and are clipped together",
                    code="zero-partial-clipping",
                )
            self.finish(optimizer)
        return [bucket for optimizer in known for bucket in self._buckets[optimizer]]

    def _norm(self, shards: list[Tensor], kind: float) -> Tensor:
        """Return the norm of the gradients of all ranks' shards."""
        gradients = [shard.grad for shard in shards if shard.grad is not None]
        own: Tensor = nn.utils.get_total_norm(gradients, kind)
        group = self._groups.of(DENSE)  # the planes of experts lie inside it
        if kind == float("inf"):
            dist.all_reduce(own, op=dist.ReduceOp.MAX, group=group)
            return own
        power = own.pow(kind)
        dist.all_reduce(power, group=group)
        return power.pow(1.0 / kind)
