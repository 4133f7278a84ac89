"""Emulated c10d operators: the content of a collective's tensors when peers do not exist.

Every peer is assumed to have the same tensors as this rank. Exceptions are receives, whose content
is unknown and therefore random, and small integers that the script itself sends
(`onerank.capture.fake_world.message_payloads`). If sizes are equal, an emulated operator launches
at most one kernel, so that the profile stays close to the real job's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import ScriptObject, Tensor
from torch.distributed import distributed_c10d

from onerank.capture.fake_tensors import is_fake, is_small
from onerank.capture.fake_world.c10d_patches import SPARSE, override
from onerank.capture.fake_world.collective_launch import CollectiveLaunch, check_contiguous, raw
from onerank.capture.fake_world.message_payloads import IntegerPayloads
from onerank.ir.all_to_all import AllToAllBuffer
from onerank.ir.errors import CaptureError

if TYPE_CHECKING:
    from onerank.capture.fake_world.call_log import CallLog

# Standard deviation of freshly initialised weights: a receive often fills parameters or
# activations. Random, since a bf16 matrix product ran 13% faster on zeros (H200).
RECEIVED_STD = 0.02


class Receiver:
    """Fills receive buffers with random values."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        # Not the global generators: the job's dropout masks must not depend on the recorder.
        self._generators: dict[torch.device, torch.Generator] = {}

    def fill(self, tensor: Tensor) -> None:
        """Fill with small normal values, or zeros (valid ids) where the dtype is not floating."""
        tensor = raw(tensor)
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if tensor.is_meta or is_fake(tensor):
            return
        if not tensor.is_floating_point():
            tensor.zero_()
        elif tensor.element_size() == 1:  # no float8 kernel draws random numbers
            wide = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
            tensor.copy_(wide.normal_(0.0, RECEIVED_STD, generator=self._generator(tensor.device)))
        else:
            tensor.normal_(0.0, RECEIVED_STD, generator=self._generator(tensor.device))

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


# torch's group registry has no public names and no types.
_c10d: Any = distributed_c10d

_REDUCTIONS = {
    kind.value: name.lower() for name, kind in dist.ReduceOp.RedOpType.__members__.items()
}


def replicate(
    launch: CollectiveLaunch, output: Tensor, source: Tensor, collective: str = "all_gather"
) -> None:
    """Gather from equal peers: this rank's shard for every rank."""
    _check_multiple(collective, output, source, launch.group.size)
    check_contiguous(output)
    check_contiguous(source)
    launch.fill([(output, source)])


def take_chunk(launch: CollectiveLaunch, output: Tensor, source: Tensor) -> None:
    """Reduce-scatter without peers: this rank's piece of the input."""
    _check_multiple("reduce_scatter", source, output, launch.group.size)
    check_contiguous(output)
    check_contiguous(source)
    launch.reduce_scatter(output, source)


def _check_multiple(collective: str, large: Tensor, small: Tensor, world: int) -> None:
    if large.numel() != world * small.numel():
        raise CaptureError(
            f"{collective}: the full tensor has {large.numel()} elements, the shard "
            f"{small.numel()}; a group of {world} ranks needs "
            f"{world} x {small.numel()} = {world * small.numel()}",
            code="collective-sizes",
        )


def _buffer(tensors: Sequence[Tensor], rows: Sequence[int]) -> AllToAllBuffer:
    return AllToAllBuffer(sum(each.numel() * each.element_size() for each in tensors), rows)


def _are_counts(tensors: Sequence[Tensor]) -> bool:
    """Return whether fake tensors of integers are exchanged, such as counts of tokens for experts.

    Their numbers decide how many tokens this rank receives. On a device this rank receives the
    numbers that it sends.
    """
    first = tensors[0]
    return (
        is_fake(first)
        and is_small(first)
        and not first.dtype.is_floating_point
        and all(tensor.numel() == first.numel() for tensor in tensors)
    )


class C10dOperators:
    """The `c10d::*` operators of a process without peers.

    Each method takes the arguments by their names in the operator's schema, and returns values of
    the schema's types.

    Attributes:
        functions: while installed, operator without `c10d::` -> the function that emulates it.
    """

    def __init__(self, call_log: CallLog) -> None:
        self.functions: dict[str, Callable[..., Any]] = {}
        self._call_log = call_log
        self._receiver = Receiver(seed=call_log.rank)
        self._integers = IntegerPayloads(call_log)

    def install(self, undo: contextlib.ExitStack) -> None:
        """Override the operators; `undo` restores torch's kernels."""
        kernels: dict[str, Callable[[Any], object]] = {
            "allreduce_": self._all_reduce,
            "allreduce_coalesced_": self._all_reduce_coalesced,
            "reduce_": self._reduce,
            "broadcast_": self._broadcast,
            "allgather_": self._all_gather,
            "allgather_coalesced_": self._all_gather_coalesced,
            "_allgather_base_": self._all_gather_base,
            "allgather_into_tensor_coalesced_": self._all_gather_base_coalesced,
            "reduce_scatter_": self._reduce_scatter,
            "_reduce_scatter_base_": self._reduce_scatter_base,
            "reduce_scatter_tensor_coalesced_": self._reduce_scatter_base_coalesced,
            "alltoall_": self._all_to_all,
            "alltoall_base_": self._all_to_all_base,
            "gather_": self._gather,
            "gather_into_tensor_": self._gather_base,
            "scatter_": self._scatter,
            "send": self._send,
            "recv_": self._recv,
            "recv_any_source_": self._recv_any_source,
            "barrier": self._barrier,
            "monitored_barrier_": self._monitored_barrier,
        }
        self.functions = override(kernels, self._refusal, undo)

    def _refusal(self, operator: str, reason: str) -> CaptureError:
        error = CaptureError(
            f"c10d::{operator} cannot be recorded: {reason}", code="collective-unsupported"
        )
        # A script may catch it, and the trace would lack the call.
        self._call_log.refused = error
        return error

    def _launch(
        self,
        collective: str,
        args: Any,
        payload: Sequence[Tensor],
        other_tensors: Sequence[Tensor] = (),
        *,
        stream: object = None,
        **details: Any,
    ) -> CollectiveLaunch:
        """Record a call, and return the context in which it is emulated on its stream.

        Args:
            collective: as in `CommCall`.
            args: the operator's arguments.
            payload: the tensors whose bytes count.
            other_tensors: tensors that it also reads or writes.
            stream: selects one of the group's streams.
            details: further arguments of `CallLog.record`.

        Raises:
            CaptureError: the payload is sparse. On a device torch dispatches sparse tensors to
                kernels that refuse all of them.
        """
        if any(tensor.layout == torch.sparse_coo for tensor in payload):
            raise self._refusal(collective, SPARSE)
        begun_ns = time.perf_counter_ns()
        group = self._call_log.group_of(dist.ProcessGroup.unbox(args.process_group))
        # Sends and receives have no such argument: c10d issues all of them asynchronously.
        if "asynchronous" not in details:
            details["asynchronous"] = args.async_op
        if hasattr(args, "reduce_op"):
            details["reduction"] = _REDUCTIONS[args.reduce_op.op()]
        tensors = [*payload, *other_tensors]
        # A barrier has no payload, but an empty tensor that has the device.
        if collective == "barrier":
            tensors = [tensor for tensor in [getattr(args, "tensor", None)] if tensor is not None]
        call = self._call_log.record(collective, group, payload, **details)
        return CollectiveLaunch(self._call_log, group, call, tensors, stream, begun_ns=begun_ns)

    # A reduction of more than a few numbers is the identity, not W times this rank's value:
    # repeated sums would overflow.

    def _all_reduce(self, args: Any) -> object:
        if args.sparse_indices is not None:
            raise self._refusal("allreduce_", SPARSE)
        with self._launch("all_reduce", args, args.tensors) as launch:
            launch.reduce(args.tensors)
            return args.tensors, launch.finish(args.tensors)

    def _all_reduce_coalesced(self, args: Any) -> object:
        with self._launch("all_reduce", args, args.tensors) as launch:
            launch.reduce(args.tensors)
            return launch.finish(args.tensors)

    def _reduce(self, args: Any) -> object:
        with self._launch("reduce", args, args.tensors, peer=args.root_rank) as launch:
            if launch.group.rank == args.root_rank:
                launch.reduce(args.tensors)
            else:
                launch.keep(args.tensors)
            return launch.finish(args.tensors)

    def _broadcast(self, args: Any) -> object:
        # The root's values are unknown, except small integers: what this rank initialised comes
        # closest.
        with self._launch("broadcast", args, args.tensors, peer=args.root_rank) as launch:
            self._integers.broadcast(launch.group, args.root_rank, args.tensors)
            launch.keep(args.tensors)
            return args.tensors, launch.finish(args.tensors)

    def _all_gather(self, args: Any) -> object:
        outputs = _flatten(args.output_tensors)
        with self._launch("all_gather", args, args.input_tensors, outputs) as launch:
            rows = zip(args.output_tensors, args.input_tensors, strict=True)
            sources = [source for row, source in rows for _ in row]
            launch.fill(list(zip(outputs, sources, strict=True)))
            return args.output_tensors, launch.finish(outputs)

    def _all_gather_coalesced(self, args: Any) -> object:
        outputs = _flatten(args.output_lists)
        with self._launch("all_gather", args, args.input_list, outputs) as launch:
            sources = [source for _ in args.output_lists for source in args.input_list]
            launch.fill(list(zip(outputs, sources, strict=True)))
            return launch.finish(outputs)

    def _all_gather_base(self, args: Any) -> object:
        with self._launch("all_gather", args, [args.input_tensor], [args.output_tensor]) as launch:
            replicate(launch, args.output_tensor, args.input_tensor)
            return args.output_tensor, launch.finish([args.output_tensor])

    def _all_gather_base_coalesced(self, args: Any) -> object:
        with self._launch("all_gather", args, args.inputs, args.outputs) as launch:
            for output, source in zip(args.outputs, args.inputs, strict=True):
                replicate(launch, output, source)
            return launch.finish(args.outputs)

    def _reduce_scatter(self, args: Any) -> object:
        inputs, outputs = _flatten(args.input_tensors), args.output_tensors
        with self._launch("reduce_scatter", args, inputs, outputs) as launch:
            rank = launch.group.rank
            self._take_parts(launch, outputs, args.input_tensors)
            # The call's kernel reads the parts of all ranks, and `_take_parts` only that of this
            # rank.
            for row in args.input_tensors:
                launch.read([*row[:rank], *row[rank + 1 :]])
            return outputs, launch.finish(outputs)

    def _reduce_scatter_base(self, args: Any) -> object:
        pair = [args.input_tensor], [args.output_tensor]
        with self._launch("reduce_scatter", args, *pair) as launch:
            take_chunk(launch, args.output_tensor, args.input_tensor)
            return args.output_tensor, launch.finish([args.output_tensor])

    def _reduce_scatter_base_coalesced(self, args: Any) -> object:
        with self._launch("reduce_scatter", args, args.inputs, args.outputs) as launch:
            for output, source in zip(args.outputs, args.inputs, strict=True):
                take_chunk(launch, output, source)
            return launch.finish(args.outputs)

    def _all_to_all(self, args: Any) -> object:
        outputs, inputs = args.output_tensors, args.input_tensors
        rows = [[tensor.numel() for tensor in tensors] for tensors in (inputs, outputs)]
        if all(len({*parts}) <= 1 for parts in rows):
            rows = [[], []]
        exchange = _buffer(inputs, rows[0]), _buffer(outputs, rows[1])
        with self._launch("all_to_all", args, inputs, outputs, exchange=exchange) as launch:
            sources = inputs
            if _are_counts([*inputs, *outputs]):
                # A peer with the same routing sends what this rank sends to itself.
                sources = [inputs[launch.group.rank]] * len(inputs)
            launch.fill(list(zip(outputs, sources, strict=True)))
            return outputs, launch.finish(outputs)

    def _all_to_all_base(self, args: Any) -> object:
        inputs, outputs = [args.input], [args.output]
        exchange = (
            _buffer(inputs, args.input_split_sizes),
            _buffer(outputs, args.output_split_sizes),
        )
        with self._launch("all_to_all", args, inputs, outputs, exchange=exchange) as launch:
            check_contiguous(args.output)
            check_contiguous(args.input)
            source, size = args.input, launch.group.size
            # Functional collectives pass equal split sizes; callers of c10d leave them empty.
            equal = all(len({*buffer.rows}) <= 1 for buffer in exchange)
            if _are_counts([source, args.output]) and equal:
                source = source.view(-1).chunk(size)[launch.group.rank]
            launch.fill([(args.output, source)])
            return launch.finish([args.output])

    def _gather(self, args: Any) -> object:
        outputs = _flatten(args.output_tensors)  # empty except on the root
        with self._launch(
            "gather", args, args.input_tensors, outputs, peer=args.root_rank
        ) as launch:
            rows = zip(args.output_tensors, args.input_tensors, strict=False)
            sources = [source for row, source in rows for _ in row]
            launch.fill(list(zip(outputs, sources, strict=True)))
            if not outputs:
                launch.read(args.input_tensors)
            return launch.finish(outputs)

    def _gather_base(self, args: Any) -> object:
        outputs = (
            [args.output_tensor] if args.output_tensor.numel() else []
        )  # empty except on the root
        pair = [args.input_tensor], outputs
        with self._launch("gather", args, *pair, peer=args.root_rank) as launch:
            for output in outputs:
                replicate(launch, output, args.input_tensor, "gather")
            if not outputs:
                launch.read([args.input_tensor])
            return args.output_tensor, launch.finish(outputs)

    def _scatter(self, args: Any) -> object:
        outputs, inputs = args.output_tensors, args.input_tensors
        with self._launch(
            "scatter", args, outputs, _flatten(inputs), peer=args.root_rank
        ) as launch:
            known = self._integers.scatter(launch.group, args.root_rank, outputs, inputs)
            if launch.group.rank == args.root_rank:
                self._take_parts(launch, outputs, inputs)
            else:
                # Before `keep`, which only counts the bytes of the call's kernel.
                if not known:
                    self._fill(outputs)
                launch.keep(outputs)
            return outputs, launch.finish(outputs)

    def _send(self, args: Any) -> object:
        with self._pair("send", args, peer=args.dst) as launch:
            self._integers.send(launch.group.ranks[args.dst], args.tensors)
            launch.read(args.tensors)
            return launch.finish(args.tensors)

    def _recv(self, args: Any) -> object:
        with self._pair("recv", args, peer=args.src) as launch:
            source = launch.group.ranks[args.src]
            is_known = self._integers.receive("recv", source, None, args.tensors)
            return self._received(launch, args.tensors, is_known=is_known)

    def _recv_any_source(self, args: Any) -> object:
        with self._pair("recv", args, peer=None) as launch:
            return self._received(launch, args.tensors)

    def _received(
        self, launch: CollectiveLaunch, tensors: Sequence[Tensor], *, is_known: bool = False
    ) -> ScriptObject:
        if not is_known:
            self._fill(tensors)
        launch.keep(tensors)
        return launch.finish(tensors)

    def _pair(self, collective: str, args: Any, peer: int | None) -> CollectiveLaunch:
        # ProcessGroupNCCL has a stream per pair of ranks, but runs a batch on the group's stream.
        group = dist.ProcessGroup.unbox(args.process_group)
        batched = group in _c10d._world.pg_coalesce_state
        return self._launch(
            collective,
            args,
            args.tensors,
            peer=peer,
            tag=args.tag,
            asynchronous=True,
            stream=None if batched else peer,
        )

    def _barrier(self, args: Any) -> object:
        with self._launch("barrier", args, []) as launch:
            return launch.finish([args.tensor])

    def _monitored_barrier(self, args: Any) -> None:
        with self._launch("barrier", args, [], asynchronous=False):
            pass

    def _take_parts(
        self, launch: CollectiveLaunch, outputs: Sequence[Tensor], rows: Sequence[Sequence[Tensor]]
    ) -> None:
        parts = [row[launch.group.rank] for row in rows]
        launch.fill(list(zip(outputs, parts, strict=True)))

    def _fill(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._receiver.fill(tensor)


def _flatten(rows: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [tensor for row in rows for tensor in row]
