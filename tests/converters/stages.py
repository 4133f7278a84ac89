"""Small pipeline stages as `capture run --pp` writes them, with round durations."""

import json
from typing import Any

from onerank.ir import (
    Collective,
    Graph,
    GraphBuilder,
    Job,
    Kind,
    Measurement,
    Phase,
    Pipeline,
    ProcessGroup,
    RankClass,
    Reason,
    World,
)

FORWARD_NS, INPUT_NS, WEIGHT_NS, OPTIMIZER_NS = 1_000_000, 1_000_000, 1_000_000, 500_000
HIDDEN_BYTES = 64
RECEIVED, SENT, GRADIENT, INPUT, WEIGHT, TIED = range(1, 7)  # storages


class Step:
    """Nodes of a stage, one after another on one stream."""

    def __init__(self, *, scale: int, operands: bool) -> None:
        self.builder = GraphBuilder()
        self._scale = scale
        self._operands = operands
        self._newest: int | None = None
        self._place: dict[str, Any] = {}

    def at(self, phase: Phase, micro_batch: int = -1) -> None:
        """Set phase and micro-batch of the following nodes."""
        self._place = {"phase": phase, "micro_batch": micro_batch}

    def kernel(self, name: str, ns: int, *, reads: int, writes: int = 0) -> None:
        """Add a kernel of `ns`, divided by the scale; its operator is `name`."""
        columns = {"kind": Kind.KERNEL, "op": name, "duration_ns": max(ns // self._scale, 1)}
        if self._operands and writes:
            columns["output_values"] = _tensor(writes)
        self._add(name=name, reads=reads, **columns)

    def message(self, kind: Kind, peer: int, storage: int) -> None:
        """Add a send or receive."""
        end = "comm_dst" if kind is Kind.SEND else "comm_src"
        columns = {end: peer, "comm_bytes": HIDDEN_BYTES, "comm_tag": 0, "group": "pp"}
        self._add(name=kind.name.lower(), kind=kind, reads=storage, **columns)

    def all_reduce(self, group: str, storage: int) -> None:
        """Add an all-reduce in place."""
        columns = {"collective": Collective.ALL_REDUCE, "comm_bytes": 1024, "group": group}
        self._add(name=group, kind=Kind.COLLECTIVE, reads=storage, **columns)

    def _add(self, *, reads: int, **columns: Any) -> None:
        if self._operands:
            columns["input_values"] = _tensor(reads)
        index = self.builder.add(stream=7, **self._place, **columns)
        if self._newest is not None:
            self.builder.edge(self._newest, index, Reason.STREAM_ORDER)
        self._newest = index


def stage(
    number: int,
    stages: int = 4,
    *,
    captured: int = 3,
    world: World | None = None,
    scale: int = 1,
    operands: bool = True,
    at: dict[str, int] | None = None,
    evaluated: int | None = None,
) -> Graph:
    """Return stage `number`: per micro-batch a kernel forward and two backward, then one more.

    `scale` divides the durations; `operands` says whether the trace records operands; `at` is
    the rank's place on the other axes; before micro-batch `evaluated` comes an evaluation.
    """
    world = world or World.of(pp=stages)
    rank = world.first({"pp": number, **(at or {})})
    line = world.line("pp", rank)
    step = Step(scale=scale, operands=operands)

    def forward(name: str) -> None:
        if number > 0:
            step.message(Kind.RECV, line[number - 1], RECEIVED)
        step.kernel(name, FORWARD_NS, reads=RECEIVED, writes=SENT)
        if "tp" in world.sizes:
            step.all_reduce("tp", SENT)
        if number < stages - 1:
            step.message(Kind.SEND, line[number + 1], SENT)

    for micro_batch in range(captured + 1):
        if micro_batch == evaluated:
            step.at(Phase.FORWARD)
            forward("evaluation")
        if micro_batch == captured:
            break
        step.at(Phase.FORWARD, micro_batch)
        forward("forward")
        step.at(Phase.BACKWARD, micro_batch)
        if number < stages - 1:
            step.message(Kind.RECV, line[number + 1], GRADIENT)
        step.kernel("input", INPUT_NS, reads=GRADIENT, writes=INPUT)
        step.kernel("weight", WEIGHT_NS, reads=GRADIENT, writes=WEIGHT)
        if number > 0:
            step.message(Kind.SEND, line[number - 1], INPUT)
        else:
            step.kernel("aten::embedding_dense_backward", 1, reads=INPUT, writes=TIED)
    replicas = "+".join(axis for axis in ("dp", "cp") if axis in world.sizes)
    step.at(Phase.OPTIMIZER)
    if replicas:
        step.all_reduce(replicas, WEIGHT)
    if number in (0, stages - 1):
        step.all_reduce("embedding", TIED)
    step.kernel("optimizer", OPTIMIZER_NS, reads=WEIGHT)
    lines = [
        axis for axis in ("pp", "tp", replicas) if axis and {*axis.split("+")} <= {*world.sizes}
    ]
    groups = [ProcessGroup(axis, world.line(axis, rank), axis) for axis in lines]
    groups.append(ProcessGroup("embedding", (line[0], line[-1])))
    equal_stages = [(0,), tuple(range(1, stages - 1)), (stages - 1,)]
    classes = [RankClass(world.at({"pp": ones[0]}), {"pp": ones}) for ones in equal_stages if ones]
    memory = Measurement(
        start_memory_bytes=1000, peak_memory_bytes=1600, activation_bytes=(500,) * captured
    )
    return step.builder.build(
        Job(
            world=world,
            rank=rank,
            groups=tuple(groups),
            measurement=memory,
            pipeline=Pipeline(number, (1,) * stages),
            classes=tuple(classes),
        )
    )


def captures(stages: int = 4, **options: Any) -> list[Graph]:
    """Return the stages to capture: the first, a middle one, the last."""
    return [stage(number, stages, **options) for number in sorted({0, 1, stages - 1})]


def _tensor(storage: int) -> str:
    return json.dumps([[storage, storage, 0, 16, 4, "cuda:0"]])
