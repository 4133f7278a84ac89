"""The purpose of sends and receives: activation or gradient, and of which micro-batch.

torch.distributed.pipelining batches the sends of one micro-batch with the receives of another,
between calls of the model. The stage that builds the batch knows the purpose of each operation.

A hand-written pipeline is classified by its backward passes: an activation that was sent is in the
autograd graph; a received one is a leaf of it; received gradients start a backward; gradients to be
sent are its results. By then the call has been issued, so the classification of the second step
is applied to all later steps that exchange the same messages.
"""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import stage
from torch.multiprocessing.reductions import StorageWeakRef

from onerank.capture.collective_record import WorkPhase
from onerank.capture.patches import patched
from onerank.capture.script.optimizer_steps import in_backward, is_traced

_stage: Any = stage

_Stage: Any = _stage._PipelineStageBase  # it has no public name

_STAGE = "torch.distributed.pipelining.stage._PipelineStageBase"

_STAGE_METHODS: dict[str, tuple[str, WorkPhase]] = {
    "get_fwd_recv_ops": ("recv", "forward"),
    "get_fwd_send_ops": ("send", "forward"),
    "get_bwd_recv_ops": ("recv", "backward"),
    "get_bwd_send_ops": ("send", "backward"),
}


class Purpose(NamedTuple):
    """Purpose of a send or receive: activations (forward) or gradients of a micro-batch."""

    phase: WorkPhase
    micro_batch: int | None


class StagePurposes:
    """Purposes of the sends and receives that pipeline stages have built and not yet issued."""

    def __init__(self) -> None:
        self._unissued: dict[tuple[str, int], Purpose] = {}  # by collective and data pointer

    def of(self, collective: str, tensors: Sequence[Tensor]) -> Purpose | None:
        """Return the purpose of a call that is issued now; None if no stage built it."""
        if not self._unissued:
            return None
        return self._unissued.pop((collective, tensors[0].data_ptr()), None)

    @contextlib.contextmanager
    def recorded(self) -> Generator[None]:
        """Record the operations that stages build while the context lasts."""
        with contextlib.ExitStack() as stack:
            for name, (collective, phase) in _STAGE_METHODS.items():
                recording = self._recording(getattr(_Stage, name), collective, phase)
                stack.enter_context(patched(_STAGE, {name: recording}))
            yield

    def _recording(
        self, original: Callable[..., list[dist.P2POp]], collective: str, phase: WorkPhase
    ) -> Callable[..., list[dist.P2POp]]:
        def build_ops(pipeline_stage: Any, micro_batch: int) -> list[dist.P2POp]:
            ops = original(pipeline_stage, micro_batch)
            for op in ops:
                self._unissued[collective, op.tensor.data_ptr()] = Purpose(phase, micro_batch)
            return ops

        return build_ops


class Key(NamedTuple):
    """The properties that identify a send or receive in every step."""

    collective: str
    group: str
    peer: int | None
    bytes: int


@dataclass(eq=False, slots=True)
class _Exchange:
    """One send or receive, and its classification so far.

    Attributes:
        key: its collective, group, peer and bytes.
        floating: whether it may be an activation or a gradient: shapes and token ids are integers.
        phase: its phase; None while unclassified.
        part: index of the backward that it belongs to, in the order in which backwards begin.
    """

    key: Key
    floating: bool
    phase: WorkPhase | None = None
    part: int | None = None


class RunningBackward(NamedTuple):
    """A backward that has begun: its index in the step, and its leaves that were received."""

    part: int
    leaves: list[Tensor]


class BackwardMatcher:
    """Classifies the sends and receives of one step by the step's backwards.

    Each backward of the step is a part: one micro-batch of one chunk of layers. Tensors are
    identified by their storages, since scripts send detached copies and views.
    """

    def __init__(self) -> None:
        self._exchanges: list[_Exchange] = []  # in issue order
        # Sent activations, by the operator that computed them, or by storage if detached.
        self._sent_by_operator: defaultdict[Any, list[_Exchange]] = defaultdict(list)
        self._sent_detached: dict[StorageWeakRef, _Exchange] = {}
        self._received: dict[StorageWeakRef, _Exchange] = {}
        self._gradient_parts: dict[StorageWeakRef, int] = {}  # gradients of received tensors
        self._parameters: list[set[int]] = []  # ids of the parameters that each part reaches

    def add(self, key: Key, tensor: Tensor, *, within: bool) -> None:
        """Add the tensor of a send or receive.

        `within` is whether autograd runs: an output that a running backward recomputes belongs to
        no later backward.
        """
        exchange = _Exchange(key, tensor.dtype.is_floating_point)
        self._exchanges.append(exchange)
        storage = _storage(tensor)
        if not exchange.floating or storage is None:
            return
        if key.collective == "recv":
            self._received[storage] = exchange
        elif storage in self._gradient_parts:
            exchange.phase, exchange.part = "backward", self._gradient_parts[storage]
        elif tensor.grad_fn is None:
            self._sent_detached[storage] = exchange
        else:
            self._sent_by_operator[tensor.grad_fn].append(exchange)
            exchange.phase = None if within else "forward"

    def begin(self, outputs: Sequence[Any], gradients: Sequence[Any]) -> RunningBackward | None:
        """Classify the exchanges of a backward that begins at `outputs` with their `gradients`.

        Returns None if it involves no sent or received tensor.
        """
        if not self._exchanges:
            return None
        forward = _pop_exchanges(self._sent_detached, outputs)
        operators, leaves = _walk_graph(outputs)
        forward += [
            exchange
            for operator in operators
            for exchange in self._sent_by_operator.get(operator, ())
        ]
        received = [leaf for leaf in leaves if _storage(leaf) in self._received]
        forward += [self._received[storage] for leaf in received if (storage := _storage(leaf))]
        backward = _pop_exchanges(self._received, gradients)
        if not forward and not backward:
            return None
        # Several backwards may go through the same exchanges: together they are one part.
        parts = {exchange.part for exchange in (*forward, *backward)} - {None}
        part = min((part for part in parts if part is not None), default=len(self._parameters))
        if part == len(self._parameters):
            self._parameters.append(set())
        self._parameters[part] |= {id(leaf) for leaf in leaves if isinstance(leaf, nn.Parameter)}
        for exchange in forward:
            exchange.phase, exchange.part = "forward", part
        for exchange in backward:
            exchange.phase, exchange.part = "backward", part
        return RunningBackward(part, received)

    def end(self, backward: RunningBackward, results: Any) -> None:
        """Register the gradients that a backward leaves in its received leaves or returns."""
        returned: Sequence[Any] = results if isinstance(results, tuple) else ()
        for gradient in (*returned, *(leaf.grad for leaf in backward.leaves)):
            if (storage := _storage(gradient)) is not None:
                self._gradient_parts[storage] = backward.part

    def purposes(self) -> list[tuple[Key, Purpose | None]]:
        """Return the purpose of each send and receive in issue order; None if unclassified."""
        self._classify_by_direction()
        micro_batches = self._micro_batches()
        return [
            (
                exchange.key,
                exchange.phase and Purpose(exchange.phase, micro_batches.get(exchange.part)),
            )
            for exchange in self._exchanges
        ]

    def _classify_by_direction(self) -> None:
        """Classify as gradients what mirrors the activations exchanged with the same peer.

        It applies if one direction has only activations, and the other has only unclassified
        messages of the same sizes. Gradients travel in the order of the backwards.
        """
        directions: defaultdict[tuple[str, int | None], dict[str, list[_Exchange]]]
        directions = defaultdict(lambda: {"send": [], "recv": []})
        for exchange in self._exchanges:
            if exchange.floating:
                channel = exchange.key.group, exchange.key.peer
                directions[channel][exchange.key.collective].append(exchange)
        for channel in directions.values():
            for activations, answers in (
                (channel["send"], channel["recv"]),
                (channel["recv"], channel["send"]),
            ):
                same_sizes = _sizes(activations) == _sizes(answers)
                forward = all(exchange.phase == "forward" for exchange in activations)
                if not same_sizes or not forward or any(answer.phase for answer in answers):
                    continue
                parts = sorted(e.part for e in activations if e.part is not None)
                for index, answer in enumerate(answers):
                    answer.phase = "backward"
                    answer.part = parts[index] if len(parts) == len(answers) else None

    def _micro_batches(self) -> dict[int | None, int]:
        """Return the micro-batch of each part: its index among the parts of the same layers.

        Empty if the chunks of layers differ in their number of parts, or the parts of a chunk in
        what they exchange: a part may then cover several micro-batches.
        """
        exchanged: list[Counter[Key]] = [Counter() for _ in self._parameters]
        order: dict[int, None] = {}  # parts in the order of their forwards
        for exchange in self._exchanges:
            if exchange.phase == "forward" and exchange.part is not None:
                exchanged[exchange.part][exchange.key] += 1
                order[exchange.part] = None
        chunks: list[list[int]] = []
        for part in order:
            parameters = self._parameters[part]
            for chunk in chunks:
                first = self._parameters[chunk[0]]
                shared = len(parameters & first)
                # More than half: a tied embedding is shared by chunks, and frozen or unused
                # parameters differ.
                if parameters == first or 2 * shared > max(len(parameters), len(first)):
                    chunk.append(part)
                    break
            else:
                chunks.append([part])
        if len(order) < len(exchanged) or len({len(chunk) for chunk in chunks}) > 1:
            return {}
        for chunk in chunks:
            first = exchanged[chunk[0]]
            if any(exchanged[part] != first for part in chunk):
                return {}
            if len(chunk) == 1 and max(first.values()) > 1:
                return {}
        return {part: index for chunk in chunks for index, part in enumerate(chunk)}


def _sizes(exchanges: Iterable[_Exchange]) -> Counter[int]:
    return Counter(exchange.key.bytes for exchange in exchanges)


def _pop_exchanges(
    exchanges: dict[StorageWeakRef, _Exchange], tensors: Iterable[Any]
) -> list[_Exchange]:
    """Remove and return the exchanges whose storages belong to the tensors."""
    storages = [
        storage for tensor in tensors if (storage := _storage(tensor)) in exchanges and storage
    ]
    return [exchanges.pop(storage) for storage in storages]


def _storage(tensor: Any) -> StorageWeakRef | None:
    """Return the identity of a plain tensor's storage, which stays unique after it is freed."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return StorageWeakRef(tensor.untyped_storage()) if plain else None


def _walk_graph(outputs: Iterable[Any]) -> tuple[set[Any], list[Tensor]]:
    """Return the operators of the autograd graph below `outputs`, and its leaf tensors."""
    pending = [
        output.grad_fn for output in outputs if isinstance(output, Tensor) and output.grad_fn
    ]
    operators: set[Any] = set(pending)
    leaves: list[Tensor] = []
    while pending:
        operator: Any = pending.pop()
        if type(operator).__name__ == "AccumulateGrad":
            leaves.append(operator.variable)
        for previous, _ in operator.next_functions:
            if previous is not None and previous not in operators:
                operators.add(previous)
                pending.append(previous)
    return operators, leaves


_CLASSIFIED_STEP = 1  # index of the second step


class StepPurposes:
    """Purposes of a script's sends and receives, by their index among those of a step."""

    def __init__(self) -> None:
        self._steps = 0
        self._index = 0
        self._known: list[tuple[Key, Purpose | None]] = []
        self._matcher: BackwardMatcher | None = None  # only during the classified step

    def next_step(self) -> None:
        """Count a step; after the classified one, keep its purposes for all later steps."""
        if self._matcher is not None:
            self._known, self._matcher = self._matcher.purposes(), None
        self._steps += 1
        self._index = 0
        if self._steps == _CLASSIFIED_STEP:
            self._matcher = BackwardMatcher()

    def of(self, key: Key, tensors: Sequence[Tensor]) -> Purpose | None:
        """Return the purpose of a call that is issued now; None if it is unknown."""
        if self._matcher is not None:
            self._matcher.add(key, tensors[0], within=in_backward())
        if self._index >= len(self._known):
            return None
        known_key, purpose = self._known[self._index]
        # After the first mismatch the rest of the step stays unclassified: indices are off.
        self._index = self._index + 1 if known_key == key else len(self._known)
        return purpose if known_key == key else None

    @contextlib.contextmanager
    def watched(self) -> Generator[None]:
        """Observe each outermost backward while the context lasts."""
        autograd: Any = torch.autograd
        run_backward = autograd._engine_run_backward

        def watched(outputs: Sequence[Any], gradients: Sequence[Any], *args: Any, **kw: Any) -> Any:
            # A backward within a backward (activation checkpointing) belongs to the outer one.
            matcher = None if in_backward() or is_traced() else self._matcher
            backward = None if matcher is None else matcher.begin(outputs, gradients)
            results = run_backward(outputs, gradients, *args, **kw)
            if matcher is not None and backward is not None:
                matcher.end(backward, results)
            return results

        with patched("torch.autograd", {"_engine_run_backward": watched}):
            yield
