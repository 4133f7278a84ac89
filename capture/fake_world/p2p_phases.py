"""The purpose of sends and receives: activation or gradient, and of which micro-batch.

torch.distributed.pipelining batches the sends of one micro-batch with the receives of another,
between calls of the model. The stage that builds the batch knows the purpose of each part.

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
from onerank.capture.script.step_hooks import in_backward, is_traced

_stage: Any = stage

_Stage: Any = _stage._PipelineStageBase  # it has no public name

_STAGE = "torch.distributed.pipelining.stage._PipelineStageBase"

_MADE: dict[str, tuple[str, WorkPhase]] = {
    "get_fwd_recv_ops": ("recv", "forward"),
    "get_fwd_send_ops": ("send", "forward"),
    "get_bwd_recv_ops": ("recv", "backward"),
    "get_bwd_send_ops": ("send", "backward"),
}


class Purpose(NamedTuple):
    """What a send or receive is for: activations (forward) or gradients of a micro-batch."""

    phase: WorkPhase
    micro_batch: int | None


class StagePurposes:
    """What the sends and receives are for that stages have made, and nobody has issued yet."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], Purpose] = {}

    def of(self, collective: str, tensors: Sequence[Tensor]) -> Purpose | None:
        """Return what a call is for that is issued now; None where no stage made it."""
        return self._made.pop((collective, tensors[0].data_ptr()), None) if self._made else None

    @contextlib.contextmanager
    def recorded(self) -> Generator[None]:
        """Note what stages make while the context lasts."""
        with contextlib.ExitStack() as stack:
            for name, made in _MADE.items():
                noting = self._noting(getattr(_Stage, name), *made)
                stack.enter_context(patched(_STAGE, {name: noting}))
            yield

    def _noting(
        self, original: Callable[..., list[dist.P2POp]], collective: str, phase: WorkPhase
    ) -> Callable[..., list[dist.P2POp]]:
        def ops(own: Any, micro_batch: int) -> list[dist.P2POp]:
            made = original(own, micro_batch)
            for op in made:
                self._made[collective, op.tensor.data_ptr()] = Purpose(phase, micro_batch)
            return made

        return ops


class Key(NamedTuple):
    """The properties that a send or receive has in common in every step."""

    collective: str
    group: str
    peer: int | None
    bytes: int


@dataclass(eq=False, slots=True)
class _Exchange:
    """One send or receive, and what is known of it.

    Attributes:
        key: see there.
        real: whether it may be an activation or a gradient: shapes and token ids are integers.
        phase: what it is for.
        part: the backward that it belongs to, counted as they begin.
    """

    key: Key
    real: bool
    phase: WorkPhase | None = None
    part: int | None = None


class Begun(NamedTuple):
    """A backward that runs: which it is, and the leaves of it that were received."""

    part: int
    leaves: list[Tensor]


class Backwards:
    """The sends and receives of a step, distinguished by its backwards."""

    def __init__(self) -> None:
        self._all: list[_Exchange] = []
        self._made_by: defaultdict[Any, list[_Exchange]] = defaultdict(list)  # what was sent
        self._sent: dict[StorageWeakRef, _Exchange] = {}  # without a history
        self._received: dict[StorageWeakRef, _Exchange] = {}
        self._left: dict[StorageWeakRef, int] = {}  # gradients of what was received: their part
        self._parameters: list[set[int]] = []  # of each part

    def add(self, key: Key, tensor: Tensor, *, within: bool) -> None:
        """Take note of a tensor that is sent, or received into.

        `within` is whether autograd runs: what it makes anew is no part of a backward to come.
        """
        one = _Exchange(key, tensor.dtype.is_floating_point)
        self._all.append(one)
        storage = _storage(tensor)
        if not one.real or storage is None:
            return
        if key.collective == "recv":
            self._received[storage] = one
        elif storage in self._left:
            one.phase, one.part = "backward", self._left[storage]
        elif tensor.grad_fn is None:
            self._sent[storage] = one
        else:
            self._made_by[tensor.grad_fn].append(one)
            one.phase = None if within else "forward"

    def begin(self, outputs: Sequence[Any], gradients: Sequence[Any]) -> Begun | None:
        """Take note of a backward that begins at `outputs` with their `gradients`.

        Returns None where nothing of it was sent or received.
        """
        if not self._all:
            return None
        forward = _of(self._sent, outputs)
        operators, leaves = _graph(outputs)
        forward += [one for made_by in operators for one in self._made_by.get(made_by, ())]
        received = [leaf for leaf in leaves if _storage(leaf) in self._received]
        forward += [self._received[storage] for leaf in received if (storage := _storage(leaf))]
        backward = _of(self._received, gradients)
        if not forward and not backward:
            return None
        parts = {one.part for one in (*forward, *backward)} - {None}
        part = min((part for part in parts if part is not None), default=len(self._parameters))
        if part == len(self._parameters):
            self._parameters.append(set())
        self._parameters[part] |= {id(leaf) for leaf in leaves if isinstance(leaf, nn.Parameter)}
        for one in forward:
            one.phase, one.part = "forward", part
        for one in backward:
            one.phase, one.part = "backward", part
        return Begun(part, received)

    def end(self, begun: Begun, results: Any) -> None:
        """Take note of what a backward leaves: at its leaves, or as its results."""
        given: Sequence[Any] = results if isinstance(results, tuple) else ()
        for gradient in (*given, *(leaf.grad for leaf in begun.leaves)):
            if (storage := _storage(gradient)) is not None:
                self._left[storage] = begun.part

    def told(self) -> list[tuple[Key, Purpose | None]]:
        """Return what each send and receive is for, in their order; None where nothing shows it."""
        self._settle_answers()
        numbers = self._numbers()
        return [
            (one.key, one.phase and Purpose(one.phase, numbers.get(one.part))) for one in self._all
        ]

    def _settle_answers(self) -> None:
        """Tell gradients by their way: as many as the activations that alone went the other.

        They come and go in the order of the backwards.
        """
        ways: defaultdict[tuple[str, int | None], dict[str, list[_Exchange]]]
        ways = defaultdict(lambda: {"send": [], "recv": []})
        for one in self._all:
            if one.real:
                ways[one.key.group, one.key.peer][one.key.collective].append(one)
        for way in ways.values():
            for there, back in (way["send"], way["recv"]), (way["recv"], way["send"]):
                alike = Counter(o.key.bytes for o in there) == Counter(o.key.bytes for o in back)
                forward = all(one.phase == "forward" for one in there)
                if alike and forward and all(one.phase is None for one in back):
                    parts = [one.part for one in there]
                    known = sorted(part for part in parts if part is not None)
                    for place, one in enumerate(back):
                        one.phase = "backward"
                        one.part = known[place] if len(known) == len(back) else None

    def _numbers(self) -> dict[int | None, int]:
        """Return the micro-batch of each part: its place among those of the same layers.

        None has any where chunks of layers differ in how many they have, or parts of a chunk in
        what they send and receive, so that some may be of several.
        """
        passed: list[Counter[Key]] = [Counter() for _ in self._parameters]
        order: dict[int, None] = {}
        for one in self._all:
            if one.phase == "forward" and one.part is not None:
                passed[one.part][one.key] += 1
                order[one.part] = None
        chunks: list[list[int]] = []
        for part in order:
            own = self._parameters[part]
            for chunk in chunks:
                first = self._parameters[chunk[0]]
                if own == first or 2 * len(own & first) > max(len(own), len(first)):
                    chunk.append(part)
                    break
            else:
                chunks.append([part])
        counts = {len(chunk) for chunk in chunks}
        for chunk in chunks:
            alike = all(passed[part] == passed[chunk[0]] for part in chunk)
            several = len(chunk) == 1 and max(passed[chunk[0]].values()) > 1
            if len(order) < len(passed) or len(counts) > 1 or not alike or several:
                return {}
        return {part: number for chunk in chunks for number, part in enumerate(chunk)}


def _of(known: dict[StorageWeakRef, _Exchange], tensors: Iterable[Any]) -> list[_Exchange]:
    """Take out what is known of the memory of tensors."""
    storages = [storage for tensor in tensors if (storage := _storage(tensor)) in known and storage]
    return [known.pop(storage) for storage in storages]


def _storage(tensor: Any) -> StorageWeakRef | None:
    """Return what tells the memory of a plain tensor from any other's, also once it is free."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return StorageWeakRef(tensor.untyped_storage()) if plain else None


def _graph(outputs: Iterable[Any]) -> tuple[set[Any], list[Tensor]]:
    """Return the operators that a backward goes through, and the leaves where it ends."""
    pending = [
        output.grad_fn for output in outputs if isinstance(output, Tensor) and output.grad_fn
    ]
    operators: set[Any] = set(pending)
    leaves: list[Tensor] = []
    while pending:
        operator: Any = pending.pop()
        if type(operator).__name__ == "AccumulateGrad":
            leaves.append(operator.variable)
        for before, _ in operator.next_functions:
            if before is not None and before not in operators:
                operators.add(before)
                pending.append(before)
    return operators, leaves


_SECOND = 1


class StepPurposes:
    """The sends and receives of a script, by their place among those of a step."""

    def __init__(self) -> None:
        self._steps = 0
        self._place = 0
        self._known: list[tuple[Key, Purpose | None]] = []
        self._backwards: Backwards | None = None

    def next_step(self) -> None:
        """Take note that the script has taken a step."""
        if self._backwards is not None:
            self._known, self._backwards = self._backwards.told(), None
        self._steps += 1
        self._place = 0
        if self._steps == _SECOND:
            self._backwards = Backwards()

    def of(self, key: Key, tensors: Sequence[Tensor]) -> Purpose | None:
        """Return what a call is for that is issued now; None where that is not known."""
        if self._backwards is not None:
            self._backwards.add(key, tensors[0], within=in_backward())
        if self._place >= len(self._known):
            return None
        alike, purpose = self._known[self._place]
        self._place = self._place + 1 if alike == key else len(self._known)
        return purpose if alike == key else None

    @contextlib.contextmanager
    def watched(self) -> Generator[None]:
        """See each backward that no other one calls while the context lasts."""
        autograd: Any = torch.autograd
        run = autograd._engine_run_backward

        def watched(outputs: Sequence[Any], gradients: Sequence[Any], *args: Any, **kw: Any) -> Any:
            backwards = None if in_backward() or is_traced() else self._backwards
            begun = None if backwards is None else backwards.begin(outputs, gradients)
            results = run(outputs, gradients, *args, **kw)
            if backwards is not None and begun is not None:
                backwards.end(begun, results)
            return results

        with patched("torch.autograd", {"_engine_run_backward": watched}):
            yield
