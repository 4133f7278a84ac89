"""Rules on one rank's nodes together: how many get ready, what runs first, how time adds up."""

from onerank.ir.chakra import Record
from onerank.ir.check.calls import NodeType
from onerank.ir.check.configuration import System
from onerank.ir.check.contract import Setting, integer
from onerank.ir.check.findings import Report
from onerank.ir.check.structure import Dag, Structure

READY_BOUND = 64
"""Ready nodes at once up to which ASTRA-sim's rescans stay cheap."""

_DRIFT = 0.001
"""Share by which compute may last longer or shorter than measured."""


def check_graph(structure: Structure, setting: Setting, report: Report) -> None:
    """Check how many nodes get ready at once, what runs at time 0, and how time adds up."""
    dag, schedule = structure.dag, structure.schedule
    if schedule.width > READY_BOUND:
        after = schedule.widest_after
        when = "at the start" if after is None else f"after node {dag.ids[after]}"
        report.add(
            "ready-width",
            setting.file,
            None if after is None else dag.ids[after],
            f"{schedule.width} nodes are ready at once {when}; ASTRA-sim rescans all of them at "
            f"every event: keep it to {READY_BOUND} by chaining the nodes of each stream",
        )
    nodes = structure.records.nodes
    _check_control(nodes, setting.file, report)
    system = setting.system
    if system is not None and system.is_on("roofline-enabled"):
        _check_start(nodes, dag, setting.file, system, report)
    else:
        _check_drift(nodes, setting.file, report)


def _check_control(nodes: list[Record], file: str, report: Report) -> None:
    for node in nodes:
        alone = set(node.ctrl_deps) - set(node.data_deps)
        if alone:
            report.add(
                "control-edge",
                file,
                node.id,
                f"node {node.id} ({node.name!r}) waits for node {min(alone)} by ctrl_deps alone, "
                "which older feeders do not read: name it in data_deps too",
                cause="control",
            )


def _check_drift(nodes: list[Record], file: str, report: Report) -> None:
    """Compare what compute lasts in whole microseconds with what `duration_ns` says."""
    exact = simulated = 0
    for node in nodes:
        duration = integer(node, "duration_ns")
        if node.type == NodeType.COMP and duration is not None:
            exact += duration
            simulated += node.duration_micros * 1000 or 1  # 0 us run as 1 ns
    if abs(simulated - exact) > max(1000, exact * _DRIFT):
        report.add(
            "time-drift",
            file,
            None,
            f"compute lasts {exact} ns by its duration_ns, and {simulated} ns as simulated by "
            "duration_micros: round so that the remainder goes to the next node, or use the "
            "roofline encoding",
        )


def _check_start(nodes: list[Record], dag: Dag, file: str, system: System, report: Report) -> None:
    by_id = {node.id: node for node in nodes}
    roots = (by_id[dag.ids[index]] for index, waits in enumerate(dag.waits) if waits == 0)
    first = next((node for node in roots if node.type == NodeType.COMP), None)
    if first is None:
        return
    num_ops, tensor_size = integer(first, "num_ops"), integer(first, "tensor_size")
    if num_ops is None or tensor_size is None:
        return
    if num_ops == 0 or system.roofline_ns(num_ops, tensor_size) == 0:
        report.add(
            "zero-at-start",
            file,
            first.id,
            f"node {first.id} ({first.name!r}) runs at time 0 and, with num_ops {num_ops}, takes "
            "0 ns; ASTRA-sim asserts: give the first node at least 1 ns",
        )
