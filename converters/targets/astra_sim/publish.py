"""Publish an export: check all ranks, then make the directory appear complete or not at all."""

import os
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from onerank.converters.targets.astra_sim.check import (
    Call,
    CommProgram,
    Dag,
    End,
    Finding,
    NodeType,
    Program,
    check_workload,
    lowest_id_first,
)
from onerank.converters.targets.astra_sim.config_files import GROUPS, SCRIPT
from onerank.converters.targets.astra_sim.write_traces import COMM, Workload
from onerank.converters.targets.lower import Step, lower, tag_of
from onerank.ir import Edges, Graph, Job, Kind, Nodes, StringTable
from onerank.ir.errors import ExportError


def programs(workload: Workload, name: str) -> dict[int, Program]:
    """Return each rank's communication, and what of it waits for what.

    Args:
        workload: a step and its ranks.
        name: prefix of the files.
    """
    numbers, dag = _communication(workload)
    order = lowest_id_first(dag).order
    indices = [workload.step.index[number] for number in numbers]
    kinds = {index: workload.graph.node(index).kind for index in indices}
    slots = {
        end: slot
        for slot, end in enumerate(
            dict.fromkeys((kinds[index], workload.places[index]) for index in indices)
        )
    }
    ends = {place: workload.ends(place) for _, place in slots}
    first = min(workload.ranks)
    calls: list[Call | None] = [
        _call(workload.graph, index, number, ends[workload.places[index]][first], first)
        for number, index in zip(numbers, indices, strict=True)
    ]
    own: list[int | None] = [slots[kinds[index], workload.places[index]] for index in indices]
    course = CommProgram(dag, order, calls, own)
    return {
        rank: Program(
            f"{name}.{rank}.et",
            course,
            [_end(kind, ends[place][rank], rank) for kind, place in slots],
        )
        for rank in workload.ranks
    }


def _communication(workload: Workload) -> tuple[list[int], Dag]:
    """Return the numbers of a step's communications, and their dependencies through compute."""
    step = workload.step
    counts = [len(awaited) for awaited in step.waits_for]
    source = np.array([one for awaited in step.waits_for for one in awaited], dtype=np.int64)
    target = np.repeat(np.arange(len(step)), counts)
    edges = Edges.from_pairs(len(step), source, target, np.zeros(len(source), dtype=np.uint8))
    graph = Graph(Nodes.of(len(step)), edges, StringTable(), Job())
    lanes = [index if index in workload.places else None for index in step.index]
    for number, index in enumerate(step.index):
        if workload.graph.node(index).kind in (Kind.COLLECTIVE, Kind.SEND):
            lanes[number] = -1  # they are one chain
    contracted: Step = lower(graph, lanes)
    numbers = sorted(contracted.index)
    place = {number: at for at, number in enumerate(numbers)}
    waits = [0] * len(numbers)
    followers: list[list[int]] = [[] for _ in numbers]
    for number, awaited in zip(contracted.index, contracted.waits_for, strict=True):
        waits[place[number]] = len(awaited)
        for other in awaited:
            followers[place[contracted.index[other]]].append(place[number])
    starts = np.concatenate([[0], np.cumsum([len(those) for those in followers])]).astype(int)
    return numbers, Dag(
        numbers, waits, starts.tolist(), [one for those in followers for one in those]
    )


def _call(graph: Graph, index: int, number: int, other: int, rank: int) -> Call:
    node = graph.node(index)
    size = node.value("comm_bytes")
    kind = NodeType(COMM[node.kind])
    end = _end(node.kind, other, rank)
    if isinstance(end, str):
        return Call(number, kind, size, collective=int(node.collective), group=end)
    return Call(number, kind, size, source=end[0], target=end[1], tag=tag_of(node))


def _end(kind: Kind, other: int, rank: int) -> End:
    """Return whom a rank meets, given a group's number or a peer."""
    if kind is Kind.COLLECTIVE:
        return str(other)
    return (rank, other) if kind is Kind.SEND else (other, rank)


_SHOWN = 20


def check_target(directory: Path) -> None:
    """Refuse a place that holds something other than an earlier export.

    Raises:
        ExportError: a file is there, or a directory with other content.
    """
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ExportError(
            f"{directory} is a file; name a directory to export to", code="export-output-is-file"
        )
    is_export = (directory / GROUPS).is_file() and (directory / SCRIPT).is_file()
    if not is_export and any(directory.iterdir()):
        raise ExportError(
            f"{directory} is neither empty nor an earlier export (with {GROUPS} and {SCRIPT}), so "
            "it is not replaced; name another directory",
            code="export-output-not-ours",
        )


@contextmanager
def published(
    directory: Path, check: Callable[[Path], list[Finding]] = check_workload
) -> Generator[Path]:
    """Yield a directory to fill; check it, then move it to its final name.

    Raises:
        ExportError: the check has findings; they are listed and nothing is left.
        OSError: nothing can be written there.
    """
    target = directory.resolve()
    with _beside(target) as scratch:
        made = Path(scratch, "made")
        made.mkdir()
        yield made
        _refuse(check(made))
        replaced = Path(scratch, "replaced")
        if target.exists():
            os.replace(target, replaced)
        try:
            os.replace(made, target)
        except OSError:
            if replaced.exists():
                os.replace(replaced, target)
            raise


def _beside(target: Path) -> tempfile.TemporaryDirectory[str]:
    """Return a scratch directory on the target's file system; an error names the target."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        error.filename, error.filename2 = str(target), None
        raise


def _refuse(findings: list[Finding]) -> None:
    if not findings:
        return
    lines = [
        f"  {finding.file}{'' if finding.node is None else f', node {finding.node}'}: "
        f"{finding.message} [{finding.rule}]"
        for finding in findings[:_SHOWN]
    ]
    if len(findings) > _SHOWN:
        lines.append(f"  and {len(findings) - _SHOWN} more")
    raise ExportError(
        "\n".join([f"ASTRA-sim could not run this workload ({len(findings)} findings):", *lines]),
        code="export-check-failed",
    )
