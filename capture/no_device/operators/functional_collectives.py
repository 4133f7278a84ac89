"""Functional collectives, as of DTensor, and torch's products fused with a collective."""

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as distributed_c10d
from torch.fx.experimental import proxy_tensor

from onerank.capture.fake_world.call_log import symmetric_memory_calls
from onerank.capture.patches import rebound
from onerank.ir.errors import CaptureError

_c10d: Any = distributed_c10d  # groups and options have no types in torch


class FunctionalCollectives:
    """The functional collectives of DTensor, by the c10d operators that torch's C++ code calls.

    torch's kernels for the meta device, which fake tensors would take, communicate nothing.
    """

    def __init__(self, number_of: Callable[[Tensor], int]) -> None:
        """Create it.

        Args:
            number_of: returns the number of a tensor's storage.
        """
        self._number_of = number_of
        self._works: dict[int, Any] = {}

    def run(self, name: str, operands: Sequence[Any]) -> Any:
        """Run an operator; the dispatch mode is on and records the operators that it calls.

        Args:
            name: operator without namespace.
            operands: its arguments, in the schema's order.

        Raises:
            CaptureError: the operator is not known.
        """
        run: Callable[..., Any] | None = getattr(self, f"_{name}", None)
        if run is None:
            raise CaptureError(
                f"_c10d_functional::{name} cannot be recorded without a device\n"
                "  use another collective, or capture on a GPU or a CPU",
                code="no-device-collective",
            )
        return run(*operands)

    def _started(self, work: Any, outputs: Sequence[Tensor]) -> None:
        for output in outputs:
            self._works[self._number_of(output)] = work

    def _wait_tensor(self, tensor: Tensor) -> Tensor:
        work = self._works.pop(self._number_of(tensor), None)
        if work is not None:
            work.wait()
        return tensor

    def _all_reduce(self, tensor: Tensor, operation: str, group: str) -> Tensor:
        return self._all_reduce_(
            # torch's Functional.cpp clones its input into this layout, too.
            tensor.clone(memory_format=torch.contiguous_format),
            operation,
            group,
        )

    def _all_reduce_(self, tensor: Tensor, operation: str, group: str) -> Tensor:
        options = _c10d.AllreduceOptions()
        options.reduceOp = _reduction(operation)
        self._started(_group(group).allreduce([tensor], options), [tensor])
        return tensor

    def _all_reduce_coalesced(
        self, tensors: Sequence[Tensor], operation: str, group: str
    ) -> list[Tensor]:
        return self._all_reduce_coalesced_([tensor.clone() for tensor in tensors], operation, group)

    def _all_reduce_coalesced_(
        self, tensors: Sequence[Tensor], operation: str, group: str
    ) -> list[Tensor]:
        options = _c10d.AllreduceCoalescedOptions()
        options.reduceOp = _reduction(operation)
        self._started(_group(group).allreduce_coalesced([*tensors], options), tensors)
        return [*tensors]

    def _all_gather_into_tensor(self, tensor: Tensor, size: int, group: str) -> Tensor:
        output = tensor.new_empty((tensor.shape[0] * size, *tensor.shape[1:]))
        return self._all_gather_into_tensor_out(tensor, size, group, output)

    def _all_gather_into_tensor_out(
        self, tensor: Tensor, _: int, group: str, output: Tensor
    ) -> Tensor:
        work = _group(group)._allgather_base(output, tensor, _c10d.AllgatherOptions())
        self._started(work, [output])
        return output

    def _all_gather_into_tensor_coalesced(
        self, tensors: Sequence[Tensor], size: int, group: str
    ) -> list[Tensor]:
        outputs = [x.new_empty((x.shape[0] * size, *x.shape[1:])) for x in tensors]
        work = _group(group).allgather_into_tensor_coalesced(outputs, [*tensors])
        self._started(work, outputs)
        return outputs

    def _reduce_scatter_tensor(
        self, tensor: Tensor, operation: str, size: int, group: str
    ) -> Tensor:
        output = tensor.new_empty((tensor.shape[0] // size, *tensor.shape[1:]))
        options = _c10d.ReduceScatterOptions()
        options.reduceOp = _reduction(operation)
        self._started(_group(group)._reduce_scatter_base(output, tensor, options), [output])
        return output

    def _reduce_scatter_tensor_coalesced(
        self, tensors: Sequence[Tensor], operation: str, size: int, group: str
    ) -> list[Tensor]:
        outputs = [x.new_empty((x.shape[0] // size, *x.shape[1:])) for x in tensors]
        options = _c10d.ReduceScatterOptions()
        options.reduceOp = _reduction(operation)
        work = _group(group).reduce_scatter_tensor_coalesced(outputs, [*tensors], options)
        self._started(work, outputs)
        return outputs

    def _all_to_all_single(
        self, tensor: Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int], group: str
    ) -> Tensor:
        # The schema has the sizes of the output before those of the input.
        output = tensor.new_empty((sum(out_sizes), *tensor.shape[1:]))
        work = _group(group).alltoall_base(output, tensor, [*out_sizes], [*in_sizes])
        self._started(work, [output])
        return output

    def _shard_dim_alltoall(
        self, tensor: Tensor, gather_dim: int, shard_dim: int, group: str
    ) -> Tensor:
        """Move the dimension by which a DTensor is sharded, as `_dtensor::shard_dim_alltoall`."""
        size = _group(group).size()
        parts = tensor.unflatten(shard_dim, (size, tensor.shape[shard_dim] // size))
        sent = parts.movedim(shard_dim, 0).contiguous()
        received = torch.empty_like(sent)
        _group(group).alltoall_base(received, sent, [], []).wait()
        moved = received.movedim(0, gather_dim).contiguous()
        return moved.flatten(gather_dim, gather_dim + 1)

    def _broadcast(self, tensor: Tensor, source: int, group: str) -> Tensor:
        return self._broadcast_(tensor.clone(), source, group)

    def _broadcast_(self, tensor: Tensor, source: int, group: str) -> Tensor:
        options = _c10d.BroadcastOptions()
        options.rootRank = source
        self._started(_group(group).broadcast([tensor], options), [tensor])
        return tensor


FUNCTIONAL_COLLECTIVES = "torch.distributed._functional_collectives"


def waits_at_first_use() -> AbstractContextManager[None]:
    """Let a functional collective return before it is complete, as on a GPU.

    torch takes fake tensors for those of a compiler. It would then wait at once, so that nothing
    overlaps the collective, and would compute the placements of DTensors at each call.
    """
    return rebound(
        FUNCTIONAL_COLLECTIVES,
        {"_are_we_tracing": _traces, "_wrap_tensor_autograd": _in_flight},
    )


def _traces() -> bool:
    """Return whether torch.compile traces the running code, or proxies record it."""
    return torch.compiler.is_compiling() or proxy_tensor.get_proxy_mode() is not None


class _InFlight(torch.autograd.Function):
    """Wraps a result in an `AsyncCollectiveTensor`, through which gradients pass."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        del ctx
        return importlib.import_module(FUNCTIONAL_COLLECTIVES).AsyncCollectiveTensor(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        del ctx
        return gradients[0]


def _in_flight(tensor: Tensor) -> Any:
    """Return the result of a collective that may still run."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return _InFlight.apply(tensor)
    return importlib.import_module(FUNCTIONAL_COLLECTIVES).AsyncCollectiveTensor(tensor)


def _group(name: str) -> Any:
    return _c10d._resolve_process_group(name)


def _reduction(name: str) -> Any:
    return _c10d.ReduceOp(getattr(_c10d.ReduceOp, name.upper()))


SYMMETRIC_MEMORY = "torch.distributed._symmetric_memory"


def fused_products() -> dict[str, Any]:
    """Return what replaces the pipelines of torch's products that are fused with a collective.

    These products implement asynchronous tensor parallelism: `fused_all_gather_matmul`, for one,
    multiplies the rows of one rank while those of the next arrive, on two streams in turn. A GPU
    copies the rows from the memory of the other rank. In each round of copies, every rank reads
    from one other rank; here the round is recorded as an all-to-all. Barriers are where torch's
    functions have them.
    """
    return {
        "_pipelined_multi_all_gather_and_consume": _gather_and_consume,
        "_pipelined_produce_and_all2all": _produce_and_exchange,
        "_should_use_multimem_all_gather_matmul": _never,
    }


def _never(*_: Any) -> bool:
    return False


def _gather_and_consume(
    shard: Sequence[Tensor],
    shard_consumer: Callable[[Sequence[Tensor], int], None],
    ag_out: Sequence[Tensor],
    group_name: str,
    ag_out_needed: bool = True,
) -> None:
    group = _group(group_name)
    pieces = [tensor.chunk(group.size()) for tensor in ag_out]
    rank, streams = group.rank(), _two_streams()
    _barrier(group)
    # On a GPU this copy writes the symmetric memory that the other ranks read.
    _copy([piece[rank] for piece in pieces], shard)
    _barrier(group)
    streams[1].wait_stream(streams[0])
    shard_consumer(shard, rank)
    for step in range(1, group.size()):
        sender = (rank + step) % group.size()
        with streams[step % 2]:
            received = [piece[sender] for piece in pieces]
            for target, source in zip(received, shard, strict=True):
                _exchange(group, target, source, step)
            shard_consumer(received, sender)
    if ag_out_needed:
        with streams[group.size() % 2]:
            _copy([piece[rank] for piece in pieces], shard)
    streams[0].wait_stream(streams[1])
    _barrier(group)


def _produce_and_exchange(
    chunk_producer: Callable[[int, Tensor], None],
    output: Tensor,
    group_name: str,
    out_chunk_dim: int = 0,
) -> None:
    group = _group(group_name)
    chunks = output.chunk(group.size(), dim=out_chunk_dim)
    rank, streams = group.rank(), _two_streams()
    _barrier(group)
    streams[1].wait_stream(streams[0])
    for step in range(1, group.size()):
        target = chunks[(rank - step) % group.size()]
        with streams[step % 2]:
            # In place: on a GPU the other ranks read symmetric memory, which the caching allocator
            # does not count.
            chunk_producer((rank + step) % group.size(), target)
            _barrier(group)
            _exchange(group, target, target, step)
            _barrier(group)
    chunk_producer(rank, chunks[rank])
    streams[0].wait_stream(streams[1])
    _barrier(group)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _exchange(group: Any, target: Tensor, source: Tensor, step: int) -> None:
    """Record a round of copies, in which each rank reads from the rank `step` ranks ahead."""
    rank, size = group.rank(), group.size()
    received, sent = [0] * size, [0] * size
    received[(rank + step) % size] = sent[(rank - step) % size] = len(source)
    with symmetric_memory_calls():
        group.alltoall_base(target, source, received, sent).wait()


def _barrier(group: Any) -> None:
    """Record a barrier of symmetric memory on the current stream."""
    options = _c10d.BarrierOptions()
    options.asyncOp = False
    with symmetric_memory_calls():
        group.barrier(options)


def _two_streams() -> tuple[Any, Any]:
    """Return the current stream, and the one that alternates with it."""
    symmetric_memory: Any = importlib.import_module(SYMMETRIC_MEMORY)
    return torch.cuda.current_stream(), symmetric_memory._get_backend_stream()
