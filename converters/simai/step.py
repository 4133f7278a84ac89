"""A graph's step in scopes: what each layer or sub-module computes and communicates."""

import re
from collections import Counter
from dataclasses import dataclass

from onerank.converters.gpu_time import REMEDY
from onerank.converters.pipeline import AXIS
from onerank.converters.simai.gradients import Split, split_gradients
from onerank.converters.simai.rows import Scope
from onerank.converters.simai.slots import Losses, Slot, Slots
from onerank.ir import Graph, Kind, Phase
from onerank.ir.errors import ExportError
from onerank.ir.grain import Grain, scopes_of

EMBEDDING = "embedding_layer"
"""SimAI leaves rows of this name out of the pipeline's bubble."""


@dataclass(slots=True)
class Step:
    """A graph's step in scopes.

    Attributes:
        graph: the graph.
        micro_batches: scopes of each captured micro-batch, in the order of its forward.
        updates: the optimizer's.
        evaluation: forwards that train nothing, once a step.
        split: which nodes of the backward are for weights.
        losses: communication that the format cannot say.
        sent_bytes: most that a micro-batch sends on, forward or backward.
        phaseless_ns: compute of no phase.
    """

    graph: Graph
    micro_batches: list[list[Scope]]
    updates: Scope
    evaluation: Scope
    split: Split
    losses: Losses
    sent_bytes: int
    phaseless_ns: int

    @property
    def total_ns(self) -> int:
        """Compute of the step as captured."""
        compute = self.graph.gpu_compute
        return int(self.graph.nodes.duration_ns[compute].sum())


def step_of(graph: Graph, grain: Grain) -> Step:
    """Lay a graph's step out in scopes.

    Raises:
        ExportError: the graph holds no GPU time, or a communication that is not told in full.
        GraphError: the graph has a cycle.
    """
    if not (graph.gpu_compute & (graph.nodes.duration_ns > 0)).any():
        raise ExportError(
            "the graph holds no GPU time, so a workload of it would be empty. " + REMEDY
        )
    device = (graph.gpu_compute | graph.communication).tolist()
    indices: list[int] = graph.topological_order().tolist()
    order = [index for index in indices if device[index]]
    split, losses = split_gradients(graph, order), Losses()
    slots = Slots(graph, losses)
    names = _names(graph, grain)
    made: dict[int, dict[str, Scope]] = {}
    staged = graph.job.world.sizes.get(AXIS, 1) > 1
    updates = Scope(EMBEDDING if staged else "optimizer")
    evaluation = Scope(EMBEDDING if staged else "evaluation")
    evaluating: list[bool] = graph.evaluating.tolist()
    sent, phaseless_ns = Counter[tuple[int, Phase]](), 0
    behind_backward = False
    number = 0
    newest = ""  # module whose backward a gradient bucket follows
    for index in order:
        node = graph.node(index)
        told = node.value("micro_batch")
        number = number if told < 0 else told  # without one it goes with what came before
        forward = node.phase in (Phase.FORWARD, Phase.NONE)
        slot = Slot.FORWARD if forward else Slot.INPUT
        if node.phase is not Phase.NONE:
            behind_backward = node.phase is Phase.BACKWARD
        elif behind_backward and node.kind.is_communication:
            slot = Slot.WEIGHT  # of gradients that the script reduces itself
        if split.weights[index] or node.phase is Phase.OPTIMIZER:
            slot = Slot.WEIGHT
        name = names[index]
        if node.kind.is_communication:
            name = name if node.text("module") else newest or name
        elif node.phase is not Phase.OPTIMIZER:
            newest = name
        if node.phase is Phase.NONE and not node.kind.is_communication:
            phaseless_ns += node.duration_ns
        if node.kind is Kind.SEND and not evaluating[index]:
            sent[number, node.phase] += max(node.value("comm_bytes"), 0)
        scope = evaluation if evaluating[index] else updates
        if node.phase is not Phase.OPTIMIZER and not evaluating[index]:
            scope = made.setdefault(number, {}).setdefault(name, Scope(name))
        if not node.kind.is_communication:
            scope.compute(slot, node.duration_ns)
        elif (call := slots.place(node, slot)) is not None:
            scope.communicate(call, slot)
    batches = [[*made[number].values()] for number in sorted(made)]
    return Step(graph, batches or [[]], updates, evaluation, split, losses,
                max(sent.values(), default=0), phaseless_ns)  # fmt: skip


def _names(graph: Graph, grain: Grain) -> list[str]:
    """Return the name of each node's row."""
    if not graph.job.modules:
        return [_clean(path) or "other" for path in graph.text("module")]
    scoping = scopes_of(graph, grain)
    names = [_clean(scope.path) or scope.role for scope in scoping.scopes]
    for at, scope in enumerate(scoping.scopes):
        if scope.role == "other" and scope.path:
            names[at] += ".other"
    positions: list[int] = scoping.of.tolist()
    return [names[position] for position in positions]


def _clean(path: str) -> str:
    return re.sub(r"\s+", "_", path)
