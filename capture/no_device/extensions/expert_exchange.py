"""DeepEP and HybridEP: kernels that send tokens to the ranks of their experts, and back.

Both packages build CUDA code at import and hold no autograd functions, so modules stand in for the
whole packages. Signatures are those of DeepEP 1 (deep_ep/buffer.py, also `buffers/legacy.py` of
version 2.1) and of its branch hybrid-ep (2026-08).

A token travels once to each rank that has at least one of its experts, so a dispatch is an
all-to-all of these rows, and a combine is the reverse. Its kernel copies, sends and sums, and the
trace has the one collective; HybridEP also orders rows by expert, in a kernel before or after it.
Rows alone count: the 12 bytes of index and weight that accompany a token for each of its experts
do not. Buffers of the packages lie outside torch's allocator and are in no peak.

Peers send what this rank sends to itself, as with static routing
(`capture/parallelize/experts/routing.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from onerank.capture.no_device.extensions.emulated_modules import Extension, Launch
from onerank.capture.no_device.tensor_values import Known, UnknownValues

_PACKAGE = "deep_ep"

# Ranks that NVLink connects, as DeepEP's kernels assume (NUM_MAX_NVL_PEERS of configs.cuh).
_NVLINK_PEERS = 8


@dataclass(frozen=True)
class _Layout:
    """Which tokens travel between this rank and the others.

    Attributes:
        group: ranks that share the experts.
        tokens: tokens of this rank.
        visits: whether a token of this rank goes to a rank [tokens, ranks].
        local_choice: experts of each received token [received, k], numbered on this rank; -1 is
            none, or another rank's.
        per_expert: tokens that each expert of this rank receives.
    """

    group: Any
    tokens: int
    visits: Tensor
    local_choice: Tensor
    per_expert: list[int]

    @classmethod
    def of(cls, group: Any, choice: Tensor, experts: int) -> "_Layout":
        """Return the layout of a choice of experts [tokens, k], of which -1 are none."""
        ranks, rank = group.size(), group.rank()
        each = experts // ranks
        with unset_fake_temporarily():
            owners = torch.where(choice >= 0, choice // each, -1)
            visits = torch.stack([(owners == at).any(-1) for at in range(ranks)], dim=1)
            arriving = choice[visits[:, rank]]
            here = torch.where(arriving // each == rank, arriving % each, -1)
            here[arriving < 0] = -1
            local = here.repeat(ranks, 1)
            counts = torch.bincount(local[local >= 0], minlength=each)
        return cls(group, len(choice), visits, local, counts.tolist())

    @property
    def to_rank(self) -> list[int]:
        """Tokens that this rank sends to each rank."""
        with unset_fake_temporarily():
            return self.visits.sum(0).tolist()

    @property
    def received(self) -> int:
        """Tokens that this rank receives."""
        return len(self.local_choice)

    def exchange(self, rows: Tensor, result: Tensor, *, back: bool, later: bool) -> Any:
        """Send rows to the ranks of their experts, or back.

        Args:
            rows: this rank's tokens [n, ...], or received ones if `back`. A rank gets as many of
                the first rows as it has tokens to receive.
            result: the received tokens, or this rank's if `back`.
            back: whether received tokens return to their ranks.
            later: whether the caller, not the current stream, waits for the result.

        Returns:
            The work handle, if the caller waits.
        """
        counts, (own, whole) = self.to_rank, (result, rows) if back else (rows, result)
        here = counts[self.group.rank()]
        ours = [own[:count] for count in counts]
        theirs = [whole[at * here : (at + 1) * here] for at in range(len(counts))]
        sent, filled = (theirs, ours) if back else (ours, theirs)
        with torch.no_grad():
            return dist.all_to_all(filled, sent, group=self.group, async_op=later)


class _EventHandle:
    """An event of the current stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    def current_stream_wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


class _Work:
    """The event after an exchange."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def current_stream_wait(self) -> None:
        self._work.wait()


class _EventOverlap:
    """An event to wait for, also at the end of a `with` statement."""

    def __init__(self, event: Any = None, extra_tensors: Any = None) -> None:
        self.event, self.extra_tensors = event, extra_tensors

    def current_stream_wait(self, release_handle: bool = False) -> None:
        assert self.event is not None, "DeepEP returns an event where async_finish is set"
        self.event.current_stream_wait()
        if release_handle:
            self.event = None

    def __enter__(self) -> "_EventOverlap":
        return self

    def __exit__(self, *_: object) -> None:
        if self.event is not None:
            self.event.current_stream_wait()


class _Config:
    """Sizes of the buffers, which no memory of torch holds."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        del hidden_bytes, num_ranks
        return 0

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


@dataclass(frozen=True)
class _Kernels:
    """Records launches of both packages, and knows the numbers of tensors."""

    launch: Launch
    known: Known
    unknown: UnknownValues

    def numbers(self, tensor: Tensor, call: str) -> Tensor:
        """Return the numbers of a choice of experts.

        Raises:
            CaptureError: no static routing gave them.
        """
        numbers = self.known.get(tensor)
        return self.unknown.refuse(f"{_PACKAGE}::{call}") if numbers is None else numbers

    def filled(self, numbers: Tensor | Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor of the GPU with known numbers, which a kernel writes."""
        with unset_fake_temporarily():
            real = torch.as_tensor(numbers).to(dtype)
        result = torch.empty(real.shape, dtype=dtype, device="cuda")
        self.known.set(result, real)
        return result


class _Communicator:
    """A buffer of either package."""

    kernels: _Kernels

    def __init__(self, group: Any, *sizes: Any, **settings: Any) -> None:
        del settings
        self.group, self.group_size, self.rank = group, group.size(), group.rank()
        self.num_nvl_bytes, self.num_rdma_bytes = (*sizes[:2], 0, 0)[:2]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        function = f"{_PACKAGE}::{type(self).__name__}.{name}"

        def refuse(*_: Any, **__: Any) -> NoReturn:
            self.kernels.unknown.refuse_extension(function)

        return refuse


class _Buffer(_Communicator):
    """`deep_ep.Buffer`: rows are [tokens, hidden]; each call returns an event to wait for."""

    num_sms = 20

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        _Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> _Config:
        return _Config(num_ranks)

    get_combine_config = get_dispatch_config

    @staticmethod
    def capture() -> _EventOverlap:
        return _EventOverlap(_EventHandle())

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int, **waits: Any) -> Any:
        """Return how many tokens each rank, node and expert gets, and which tokens a rank gets."""
        kernels = self.kernels
        choice = kernels.numbers(topk_idx, "Buffer.get_dispatch_layout")
        layout = _Layout.of(self.group, choice, num_experts)
        with unset_fake_temporarily():
            visits = layout.visits
            nodes = visits.unflatten(1, (-1, min(_NVLINK_PEERS, self.group_size))).any(-1).sum(0)
            per_expert = torch.bincount(choice[choice >= 0], minlength=num_experts)
        to_rank = kernels.filled(layout.to_rank, torch.int32)
        several = self.group_size > _NVLINK_PEERS
        to_node = kernels.filled(nodes, torch.int32) if several else None
        to_expert = kernels.filled(per_expert, torch.int32)
        in_rank = kernels.filled(visits, torch.bool)
        written = [each for each in (to_rank, to_node, to_expert, in_rank) if each is not None]
        numbers = [kernels.known.get(each) for each in written]
        kernels.launch("get_dispatch_layout", [topk_idx], written)
        for tensor, value in zip(written, numbers, strict=True):
            kernels.known.overwrite(tensor, value)
        event = _EventHandle() if waits.get("async_finish") else None
        return to_rank, to_node, to_expert, in_rank, _EventOverlap(event)

    def dispatch(self, x: Any, handle: Any = None, **given: Any) -> Any:
        """Send tokens to the ranks of their experts.

        Args:
            x: [tokens, hidden], or a pair of it in 8 bits and its scales.
            handle: of an earlier dispatch, whose layout repeats.
            given: `topk_idx`, `topk_weights`, `num_tokens_per_expert`, `async_finish` and others.
                With `num_worst_tokens` the results have as many rows, of which the last stay
                unused, and the host learns no counts.

        Returns:
            Received rows, their local experts and weights, tokens of each expert, the handle, and
            the event.
        """
        kernels, later = self.kernels, bool(given.get("async_finish"))
        rows, scales = x if isinstance(x, tuple) else (x, None)
        choice, weights, per_expert = None, None, None
        if handle is None:
            experts = given["num_tokens_per_expert"].shape[0]
            numbers = kernels.numbers(given["topk_idx"], "Buffer.dispatch")
            layout = _Layout.of(self.group, numbers, experts)
            worst = given.get("num_worst_tokens") or 0
            allocated = worst or layout.received
            unused = allocated - layout.received
            assert unused >= 0, "DeepEP receives at most num_worst_tokens"
            with unset_fake_temporarily():
                local = nn.functional.pad(layout.local_choice, (0, 0, 0, unused), value=-1)
            choice = kernels.filled(local, given["topk_idx"].dtype)
            if given.get("topk_weights") is not None:
                weights = given["topk_weights"].new_empty(choice.shape)
            per_expert = []
            if not worst:
                # The host polls the counts that the kernel writes, to allocate the result.
                torch.cuda.current_stream().synchronize()
                align = given.get("expert_alignment") or 1
                per_expert = [-(-count // align) * align for count in layout.per_expert]
        else:
            layout, allocated = handle
        received = rows.new_empty((allocated, *rows.shape[1:]))
        work = layout.exchange(rows, received, back=False, later=later)
        result: Any = received
        if scales is not None:
            result = received, scales.new_empty((allocated, *scales.shape[1:]))
        event = _EventOverlap(_Work(work) if later else None)
        return result, choice, weights, per_expert, (layout, allocated), event

    def combine(
        self, x: Tensor, handle: Any, topk_weights: Tensor | None = None, **given: Any
    ) -> tuple[Tensor, Tensor | None, _EventOverlap]:
        """Send rows back, and sum those of a token.

        Returns:
            Rows of this rank's tokens, the sums of their weights, and the event.
        """
        layout, _ = handle
        later = bool(given.get("async_finish"))
        combined = x.new_empty((layout.tokens, *x.shape[1:]))
        work = layout.exchange(x, combined, back=True, later=later)
        weights = None
        if topk_weights is not None:
            weights = topk_weights.new_empty((layout.tokens, *topk_weights.shape[1:]))
        return combined, weights, _EventOverlap(_Work(work) if later else None)


class _HybridBuffer(_Communicator):
    """`deep_ep.HybridEPBuffer`: rows arrive in the order of their experts."""

    def dispatch_with_permute(
        self, *, hidden: Tensor, handle: Any = None, **given: Any
    ) -> tuple[Any, ...]:
        """Send tokens to the ranks of their experts, and order them by expert.

        Args:
            hidden: [tokens, hidden].
            handle: of an earlier dispatch, whose layout repeats.
            given: `routing_map` [tokens, experts] or `topk_idx` and `num_of_experts`; `probs`,
                `pad_multiple`, `non_blocking`, `fuse_permute_dispatch` and others. With
                `non_blocking` the results have `num_permuted_tokens` rows, of which the last stay
                unused, and the counts stay on the GPU.

        Returns:
            Ordered rows, their weights, scales, rows of each expert, and the handle.
        """
        kernels = self.kernels
        layout: _Layout = self._layout(given) if handle is None else handle[0]
        align = given.get("pad_multiple") or 1
        per_expert = [-(-count // align) * align for count in layout.per_expert]
        filled = sum(per_expert)
        if handle is not None:
            allocated: int = handle[2]
        elif given.get("non_blocking"):
            allocated = int(given["num_permuted_tokens"])
            assert allocated >= filled, "HybridEP drops rows beyond num_permuted_tokens"
        else:
            allocated = filled
            torch.cuda.current_stream().synchronize()
        ordered = hidden.new_empty((allocated, *hidden.shape[1:]))
        # Rows arrive in a buffer of the package; the result, which has at least as many rows,
        # stands for it.
        arrived = ordered[: layout.received]
        layout.exchange(hidden, arrived, back=False, later=False)
        if not given.get("fuse_permute_dispatch"):
            kernels.launch("permute_rows", [arrived], [ordered[:filled]])
        probs = given.get("probs")
        weights = None if probs is None else probs.new_empty(allocated)
        with unset_fake_temporarily():
            counts = torch.tensor(per_expert)
        counts = kernels.filled(counts, counts.dtype) if given.get("non_blocking") else counts
        overflow = kernels.filled([0], torch.int32)
        return ordered, weights, None, counts, (layout, filled, allocated, overflow)

    def combine_with_unpermute(
        self, *, hidden: Tensor, handle: Any, probs: Tensor | None = None, **given: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Sum the rows of a token on this rank, send them back, and sum those of all ranks.

        Returns:
            Rows of this rank's tokens, and their weights for all experts [tokens, experts].
        """
        layout, filled, *_ = handle
        leaving = hidden[: layout.received]
        if not given.get("fuse_unpermute_combine"):
            self.kernels.launch("unpermute_rows", [hidden[:filled]], [leaving])
        combined = hidden.new_empty((layout.tokens, *hidden.shape[1:]))
        layout.exchange(leaving, combined, back=True, later=False)
        experts = len(layout.per_expert) * self.group_size
        weights = None if probs is None else probs.new_empty((layout.tokens, experts))
        return combined, weights

    def _layout(self, given: dict[str, Any]) -> _Layout:
        call = "HybridEPBuffer.dispatch_with_permute"
        routed, choice = given.get("routing_map"), given.get("topk_idx")
        if routed is None:
            assert choice is not None, "HybridEP needs a routing map or the chosen experts"
            numbers = self.kernels.numbers(choice, call)
            return _Layout.of(self.group, numbers, given["num_of_experts"])
        chosen = self.kernels.numbers(routed, call)
        with unset_fake_temporarily():
            most = max(1, int(chosen.sum(-1).max()))
            # The chosen experts come first, and -1 fills the other slots.
            order = chosen.int().argsort(dim=-1, descending=True, stable=True)[:, :most]
            numbers = torch.where(chosen.gather(-1, order), order, -1)
        return _Layout.of(self.group, numbers, routed.shape[-1])


def expert_exchange(launch: Launch, known: Known, unknown: UnknownValues) -> list[Extension]:
    """Return the modules of DeepEP.

    Args:
        launch: records a launch.
        known: numbers of tensors.
        unknown: refuses a choice of experts that no routing gave.
    """
    kernels = _Kernels(launch, known, unknown)
    buffer = type("Buffer", (_Buffer,), {"kernels": kernels})
    hybrid = type("HybridEPBuffer", (_HybridBuffer,), {"kernels": kernels})
    events = {"EventHandle": _EventHandle, "EventOverlap": _EventOverlap}
    whole = {
        "__path__": [],
        "Buffer": buffer,
        "HybridEPBuffer": hybrid,
        "Config": _Config,
        "topk_idx_t": torch.int64,
        **events,
    }
    return [
        Extension(_PACKAGE, _PACKAGE, _PACKAGE, values=whole),
        Extension(f"{_PACKAGE}.utils", _PACKAGE, _PACKAGE, values=events),
    ]
