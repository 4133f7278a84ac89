"""The compute and communication of one rank's step, by micro-batch and scope of the model."""

import re
from collections import Counter
from dataclasses import dataclass

from onerank.converters.expand.host_delays import REMEDY
from onerank.converters.expand.pipeline import AXIS
from onerank.converters.targets.simai.gradients import GradientSplit, split_gradients
from onerank.converters.targets.simai.rows import (
    Losses,
    ModuleRows,
    Slot,
    SlotAssigner,
    leaves_stage,
)
from onerank.ir import Graph, Kind, Node, Phase
from onerank.ir.coarsen import CoarseGranularity, scopes_of
from onerank.ir.errors import ExportError

EMBEDDING = "embedding_layer"
"""SimAI excludes rows of this name from the pipeline's bubble."""


@dataclass(slots=True)
class LayerTimes:
    """One rank's step, by scope.

    Attributes:
        graph: the step.
        micro_batches: scopes of each captured micro-batch, in forward order.
        updates: the optimizer.
        evaluation: forwards without a backward, once per step.
        split: nodes of the backward that compute weight gradients.
        losses: communication that the format cannot express.
        sent_bytes: maximum over micro-batches and phases of the bytes sent to other stages.
        phaseless_ns: compute without a phase.
    """

    graph: Graph
    micro_batches: list[list[ModuleRows]]
    updates: ModuleRows
    evaluation: ModuleRows
    split: GradientSplit
    losses: Losses
    sent_bytes: int
    phaseless_ns: int

    @property
    def total_ns(self) -> int:
        """Compute time of the step as captured."""
        compute = self.graph.gpu_compute
        return int(self.graph.nodes.duration_ns[compute].sum())


def layer_times(graph: Graph, granularity: CoarseGranularity) -> LayerTimes:
    """Return the compute and communication of each scope of a step.

    Args:
        graph: one rank's step.
        granularity: scope of a row; without module roles in the trace, each module is a scope.

    Raises:
        ExportError: the graph has no GPU time, or a communication without bytes or group.
        GraphError: the graph has a cycle.
    """
    if not (graph.gpu_compute & (graph.nodes.duration_ns > 0)).any():
        raise ExportError(
            f"the graph has no GPU time, so its workload would be empty\n  {REMEDY}",
            code="export-empty-graph",
        )
    device = (graph.gpu_compute | graph.communication).tolist()
    indices: list[int] = graph.topological_order().tolist()
    order = [index for index in indices if device[index]]
    split, losses = split_gradients(graph, order), Losses()
    rows = _RowsOfStep(graph, _row_names(graph, granularity), split, losses)
    for index in order:
        rows.add(index)
    return LayerTimes(graph, rows.micro_batches or [[]], rows.updates, rows.evaluation, split,
                losses, max(rows.sent_bytes.values(), default=0), rows.phaseless_ns)  # fmt: skip


class _RowsOfStep:
    """Adds the nodes of a step, in dependency order, to the rows of their micro-batch and scope.

    Attributes:
        updates: the optimizer.
        evaluation: forwards without a backward.
        sent_bytes: bytes sent to other stages, by micro-batch and phase.
        phaseless_ns: compute without a phase.
    """

    def __init__(
        self, graph: Graph, names: list[str], split: GradientSplit, losses: Losses
    ) -> None:
        self._graph = graph
        self._names = names
        self._of_weights = split.weights
        self._slots = SlotAssigner(graph, losses)
        self._evaluating: list[bool] = graph.evaluating.tolist()
        self._scopes: dict[int, dict[str, ModuleRows]] = {}
        # Optimizer and evaluation run once per step. SimAI's bubble is the time of all rows that
        # are not called embedding_layer, times (PP - 1) / (ga * vpp).
        in_pipeline = graph.job.world.sizes.get(AXIS, 1) > 1
        self.updates = ModuleRows(EMBEDDING if in_pipeline else "optimizer")
        self.evaluation = ModuleRows(EMBEDDING if in_pipeline else "evaluation")
        self.sent_bytes = Counter[tuple[int, Phase]]()
        self.phaseless_ns = 0
        self._micro_batch = 0
        self._after_backward = False
        # Scope of the newest compute, to which a gradient bucket belongs.
        self._newest = ""

    @property
    def micro_batches(self) -> list[list[ModuleRows]]:
        """Rows of the scopes of each micro-batch, in forward order."""
        return [[*self._scopes[number].values()] for number in sorted(self._scopes)]

    def add(self, index: int) -> None:
        """Add the node at `index`, which computes or communicates."""
        node = self._graph.node(index)
        # A node without a micro-batch belongs to that of the node before it.
        if (recorded := node.value("micro_batch")) >= 0:
            self._micro_batch = recorded
        slot, rows = self._slot_of(index, node), self._rows_of(index, node)
        is_sent = node.kind is Kind.SEND and not self._evaluating[index]
        if is_sent and leaves_stage(self._graph.job, node):
            sent_bytes = max(node.value("comm_bytes"), 0)
            self.sent_bytes[self._micro_batch, node.phase] += sent_bytes
        if not node.kind.is_communication:
            if node.phase is Phase.NONE:
                self.phaseless_ns += node.duration_ns
            rows.compute(slot, node.duration_ns)
        elif (call := self._slots.assign(node, slot)) is not None:
            rows.communicate(call, slot)

    def _slot_of(self, index: int, node: Node) -> Slot:
        if node.phase is not Phase.NONE:
            self._after_backward = node.phase is Phase.BACKWARD
        # A script that reduces its gradients itself does so after the backward, outside of any
        # phase. SimAI overlaps only weight-gradient communication with compute.
        reduces_gradients = (
            node.phase is Phase.NONE and self._after_backward and node.kind.is_communication
        )
        if self._of_weights[index] or node.phase is Phase.OPTIMIZER or reduces_gradients:
            return Slot.WEIGHT
        return Slot.FORWARD if node.phase in (Phase.FORWARD, Phase.NONE) else Slot.INPUT

    def _rows_of(self, index: int, node: Node) -> ModuleRows:
        name = self._names[index]
        if node.kind.is_communication:
            name = name if node.text("module") else self._newest or name
        elif node.phase is not Phase.OPTIMIZER:
            self._newest = name
        if self._evaluating[index]:
            return self.evaluation
        if node.phase is Phase.OPTIMIZER:
            return self.updates
        return self._scopes.setdefault(self._micro_batch, {}).setdefault(name, ModuleRows(name))


def _row_names(graph: Graph, granularity: CoarseGranularity) -> list[str]:
    """Return the row name of each node."""
    if not graph.job.modules:
        return [_without_spaces(path) or "other" for path in graph.text("module")]
    scoping = scopes_of(graph, granularity)
    names = [_without_spaces(scope.path) or scope.role for scope in scoping.scopes]
    for at, scope in enumerate(scoping.scopes):
        if scope.role == "other" and scope.path:
            names[at] += ".other"
    positions: list[int] = scoping.of.tolist()
    return [names[position] for position in positions]


def _without_spaces(path: str) -> str:
    # SimAI splits a row into its columns at white space.
    return re.sub(r"\s+", "_", path)
