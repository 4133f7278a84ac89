"""Emulated c10d operators: the content of a collective's tensors when peers do not exist.

Every peer is assumed to hold what this rank holds. Exceptions are receives, whose content is
unknown, and small integers that the script itself sends
(`onerank.capture.fake_world.integer_payloads`). An emulated operator launches at most one kernel if
sizes agree, so that the profile stays close to the real job's. Values stay finite and dense:
kernels run up to 13% faster on zeros than on data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import ScriptObject, Tensor
from torch.distributed import distributed_c10d

from onerank.capture.fake_world.c10d_patches import SPARSE, override
from onerank.capture.fake_world.collective_launch import CollectiveLaunch, check_contiguous, raw
from onerank.capture.fake_world.integer_payloads import IntegerPayloads
from onerank.ir.errors import CaptureError

if TYPE_CHECKING:
    from onerank.capture.fake_world.recorder import Recorder

# The spread of freshly initialised weights: a receive often fills parameters or activations.
RECEIVED_STD = 0.02


class Receiver:
    """Fills what a peer would have sent, from separate generators.

    The job's global generators keep their state: a dropout mask must not depend on the recorder.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def fill(self, tensor: Tensor) -> None:
        """Fill with small normal values, or zeros (valid ids) where the dtype is not floating."""
        tensor = raw(tensor)
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if tensor.is_meta:
            return
        if not tensor.is_floating_point():
            tensor.zero_()
        elif tensor.element_size() == 1:  # no float8 kernel draws random numbers
            wide = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
            tensor.copy_(wide.normal_(0.0, RECEIVED_STD, generator=self._on(tensor.device)))
        else:
            tensor.normal_(0.0, RECEIVED_STD, generator=self._on(tensor.device))

    def _on(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


_registry: Any = distributed_c10d  # of groups; it has no public names and no types in torch

_REDUCTIONS = {
    kind.value: name.lower() for name, kind in dist.ReduceOp.RedOpType.__members__.items()
}


def replicate(
    issue: CollectiveLaunch, output: Tensor, source: Tensor, collective: str = "all_gather"
) -> None:
    """Gather from equal peers: the own shard in every place."""
    _check_multiple(collective, output, source, issue.group.size)
    check_contiguous(output)
    check_contiguous(source)
    issue.fill([(output, source)])


def take_chunk(issue: CollectiveLaunch, output: Tensor, source: Tensor, operation: Any) -> None:
    """Reduce-scatter with the identity as its sum: the own piece of the input."""
    _check_multiple("reduce_scatter", source, output, issue.group.size)
    check_contiguous(output)
    check_contiguous(source)
    issue.reduce_scatter(output, source, operation)


def _check_multiple(collective: str, large: Tensor, small: Tensor, world: int) -> None:
    if large.numel() != world * small.numel():
        raise CaptureError(
            f"{collective}: the full tensor has {large.numel()} elements, the shard "
            f"{small.numel()}; a group of {world} ranks needs "
            f"{world} x {small.numel()} = {world * small.numel()}",
            code="collective-sizes",
        )


class Kernels:
    """The `c10d::*` operators of a process without peers.

    Each takes its arguments by the names of the operator's schema, and returns what that promises.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._receiver = Receiver(seed=recorder.rank)
        self._values = IntegerPayloads(recorder)

    def install(self, undo: contextlib.ExitStack) -> None:
        """Override the operators, and let `undo` put torch's own back."""
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
        override(kernels, self._refusal, undo)

    def _refusal(self, operator: str, why: str) -> CaptureError:
        error = CaptureError(
            f"c10d::{operator} cannot be recorded: {why}", code="collective-unsupported"
        )
        self._recorder.refused = error  # a script may catch it
        return error

    def _issue(
        self,
        collective: str,
        args: Any,
        counted: Sequence[Tensor],
        touched: Sequence[Tensor] = (),
        *,
        stream: object = None,
        **details: Any,
    ) -> CollectiveLaunch:
        """Record a call; within the context that is returned it is emulated where it would run."""
        group = self._recorder.group_of(dist.ProcessGroup.unbox(args.process_group))
        if "asynchronous" not in details:
            details["asynchronous"] = args.async_op
        if hasattr(args, "reduce_op"):
            details["reduction"] = _REDUCTIONS[args.reduce_op.op()]
        tensors = [*counted, *touched]
        if collective == "barrier":  # has no payload, but an empty tensor that names the device
            tensors = [tensor for tensor in [getattr(args, "tensor", None)] if tensor is not None]
        call = self._recorder.record(collective, group, counted, **details)
        return CollectiveLaunch(self._recorder, group, call, tensors, stream)

    # A reduction of more than a few numbers is the identity, not W times the own value: repeated
    # sums would overflow.

    def _all_reduce(self, args: Any) -> object:
        if args.sparse_indices is not None:
            raise self._refusal("allreduce_", SPARSE)
        with self._issue("all_reduce", args, args.tensors) as issue:
            issue.reduce(args.tensors, args.reduce_op)
            return args.tensors, issue.done(args.tensors)

    def _all_reduce_coalesced(self, args: Any) -> object:
        with self._issue("all_reduce", args, args.tensors) as issue:
            issue.reduce(args.tensors, args.reduce_op)
            return issue.done(args.tensors)

    def _reduce(self, args: Any) -> object:
        with self._issue("reduce", args, args.tensors, peer=args.root_rank) as issue:
            if issue.group.rank == args.root_rank:
                issue.reduce(args.tensors, args.reduce_op)
            else:
                issue.keep(args.tensors)
            return issue.done(args.tensors)

    def _broadcast(self, args: Any) -> object:
        # Beyond small integers nobody here knows what the root holds; what this rank initialised
        # is the nearest.
        with self._issue("broadcast", args, args.tensors, peer=args.root_rank) as issue:
            self._values.broadcast(issue.group, args.root_rank, args.tensors)
            issue.keep(args.tensors)
            return args.tensors, issue.done(args.tensors)

    def _all_gather(self, args: Any) -> object:
        outputs = _flatten(args.output_tensors)
        with self._issue("all_gather", args, args.input_tensors, outputs) as issue:
            rows = zip(args.output_tensors, args.input_tensors, strict=True)
            sources = [own for row, own in rows for _ in row]
            issue.fill(list(zip(outputs, sources, strict=True)))
            return args.output_tensors, issue.done(outputs)

    def _all_gather_coalesced(self, args: Any) -> object:
        outputs = _flatten(args.output_lists)
        with self._issue("all_gather", args, args.input_list, outputs) as issue:
            sources = [own for _ in args.output_lists for own in args.input_list]
            issue.fill(list(zip(outputs, sources, strict=True)))
            return issue.done(outputs)

    def _all_gather_base(self, args: Any) -> object:
        with self._issue("all_gather", args, [args.input_tensor], [args.output_tensor]) as issue:
            replicate(issue, args.output_tensor, args.input_tensor)
            return args.output_tensor, issue.done([args.output_tensor])

    def _all_gather_base_coalesced(self, args: Any) -> object:
        with self._issue("all_gather", args, args.inputs, args.outputs) as issue:
            for output, source in zip(args.outputs, args.inputs, strict=True):
                replicate(issue, output, source)
            return issue.done(args.outputs)

    def _reduce_scatter(self, args: Any) -> object:
        inputs, outputs = _flatten(args.input_tensors), args.output_tensors
        with self._issue("reduce_scatter", args, inputs, outputs) as issue:
            rank = issue.group.rank
            self._take(issue, outputs, args.input_tensors)
            for row in args.input_tensors:
                issue.read([*row[:rank], *row[rank + 1 :]])
            return outputs, issue.done(outputs)

    def _reduce_scatter_base(self, args: Any) -> object:
        pair = [args.input_tensor], [args.output_tensor]
        with self._issue("reduce_scatter", args, *pair) as issue:
            take_chunk(issue, args.output_tensor, args.input_tensor, args.reduce_op)
            return args.output_tensor, issue.done([args.output_tensor])

    def _reduce_scatter_base_coalesced(self, args: Any) -> object:
        with self._issue("reduce_scatter", args, args.inputs, args.outputs) as issue:
            for output, source in zip(args.outputs, args.inputs, strict=True):
                take_chunk(issue, output, source, args.reduce_op)
            return issue.done(args.outputs)

    def _all_to_all(self, args: Any) -> object:
        outputs, inputs = args.output_tensors, args.input_tensors
        with self._issue("all_to_all", args, inputs, outputs) as issue:
            issue.fill(list(zip(outputs, inputs, strict=True)))
            return outputs, issue.done(outputs)

    def _all_to_all_base(self, args: Any) -> object:
        splits = {
            "in_split_sizes": args.input_split_sizes,
            "out_split_sizes": args.output_split_sizes,
        }
        with self._issue("all_to_all", args, [args.input], [args.output], **splits) as issue:
            check_contiguous(args.output)
            check_contiguous(args.input)
            issue.fill([(args.output, args.input)])
            return issue.done([args.output])

    def _gather(self, args: Any) -> object:
        outputs = _flatten(args.output_tensors)  # empty but on the root
        with self._issue("gather", args, args.input_tensors, outputs, peer=args.root_rank) as issue:
            rows = zip(args.output_tensors, args.input_tensors, strict=False)
            sources = [own for row, own in rows for _ in row]
            issue.fill(list(zip(outputs, sources, strict=True)))
            if not outputs:
                issue.read(args.input_tensors)
            return issue.done(outputs)

    def _gather_base(self, args: Any) -> object:
        outputs = [args.output_tensor] if args.output_tensor.numel() else []  # on the root alone
        pair = [args.input_tensor], outputs
        with self._issue("gather", args, *pair, peer=args.root_rank) as issue:
            for output in outputs:
                replicate(issue, output, args.input_tensor, "gather")
            if not outputs:
                issue.read([args.input_tensor])
            return args.output_tensor, issue.done(outputs)

    def _scatter(self, args: Any) -> object:
        outputs, inputs = args.output_tensors, args.input_tensors
        with self._issue("scatter", args, outputs, _flatten(inputs), peer=args.root_rank) as issue:
            known = self._values.scatter(issue.group, args.root_rank, outputs, inputs)
            if issue.group.rank == args.root_rank:
                self._take(issue, outputs, inputs)
            else:
                if not known:
                    self._fill(outputs)
                issue.keep(outputs)
            return outputs, issue.done(outputs)

    def _send(self, args: Any) -> object:
        with self._pair("send", args, peer=args.dst) as issue:
            self._values.send(issue.group.ranks[args.dst], args.tensors)
            issue.read(args.tensors)
            return issue.done(args.tensors)

    def _recv(self, args: Any) -> object:
        with self._pair("recv", args, peer=args.src) as issue:
            source = issue.group.ranks[args.src]
            known = self._values.receive("recv", source, None, args.tensors)
            return self._received(issue, args.tensors, known=known)

    def _recv_any_source(self, args: Any) -> object:
        with self._pair("recv", args, peer=None) as issue:
            return self._received(issue, args.tensors)

    def _received(
        self, issue: CollectiveLaunch, tensors: Sequence[Tensor], *, known: bool = False
    ) -> ScriptObject:
        if not known:
            self._fill(tensors)
        issue.keep(tensors)
        return issue.done(tensors)

    def _pair(self, collective: str, args: Any, peer: int | None) -> CollectiveLaunch:
        # A pair of ranks has a stream of its own, unless the call is one of a batch.
        group = dist.ProcessGroup.unbox(args.process_group)
        batched = group in _registry._world.pg_coalesce_state
        return self._issue(
            collective,
            args,
            args.tensors,
            peer=peer,
            tag=args.tag,
            asynchronous=True,
            stream=None if batched else peer,
        )

    def _barrier(self, args: Any) -> object:
        with self._issue("barrier", args, []) as issue:
            return issue.done([args.tensor])

    def _monitored_barrier(self, args: Any) -> None:
        with self._issue("barrier", args, [], asynchronous=False):
            pass

    def _take(
        self, issue: CollectiveLaunch, outputs: Sequence[Tensor], rows: Sequence[Sequence[Tensor]]
    ) -> None:
        own = [row[issue.group.rank] for row in rows]
        issue.fill(list(zip(outputs, own, strict=True)))

    def _fill(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._receiver.fill(tensor)


def _flatten(rows: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [tensor for row in rows for tensor in row]
