"""Publish an export: check all ranks, then make the directory appear complete or not at all."""

import os
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec
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
from onerank.converters.targets.astra_sim.lower import Step, lower, tag_of
from onerank.converters.targets.astra_sim.write_traces import COMM, Workload
from onerank.ir import Edges, Graph, Job, Kind, Nodes, StringTable
from onerank.ir.atomic_write import replace_file
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


MANIFEST = "export.json"
"""Names the files that an export wrote: the only ones that a later export may remove."""


class _Manifest(msgspec.Struct, forbid_unknown_fields=True):
    files: list[str]


def check_target(directory: Path, *, overwrite: bool = False) -> None:
    """Refuse a directory that holds files which no export wrote.

    Args:
        directory: where the export goes.
        overwrite: leave such files where they are; replace those of the export's own names.

    Raises:
        ExportError: a file is there, or a directory with other content.
    """
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ExportError(
            f"{directory} is a file; name a directory to export to", code="export-output-is-file"
        )
    others = sorted({path.name for path in directory.iterdir()} - _written(directory))
    if others and not overwrite:
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        raise ExportError(
            f"{directory} holds what no export wrote: {', '.join(others[:_NAMED])}{more}; name "
            "another directory, or give --overwrite to keep these files and write beside them",
            code="export-output-not-ours",
        )


_NAMED = 5


def _written(directory: Path) -> set[str]:
    """Return the names of an earlier export's files that are there, the manifest's included.

    Raises:
        ExportError: the manifest is not one that an export wrote.
    """
    path = directory / MANIFEST
    try:
        names = msgspec.json.decode(path.read_bytes(), type=_Manifest).files
    except FileNotFoundError:
        return set()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ExportError(
            f"{path}: is no list of an export's files ({error}); name another directory",
            code="export-manifest-malformed",
        ) from None
    # A name with a separator would reach outside the directory.
    own = {name for name in names if Path(name).name == name and "\0" not in name}
    return {name for name in (*own, MANIFEST) if (directory / name).is_file()}


@contextmanager
def published(
    directory: Path,
    check: Callable[[Path], list[Finding]] = check_workload,
) -> Generator[Path]:
    """Yield a directory to fill; check it, then move its files to their place.

    `check_target` has allowed the place.

    An existing directory stays, and in it every file that no export wrote. The files of an earlier
    export leave it.

    Raises:
        ExportError: the check has findings; they are listed and nothing is left.
        OSError: nothing can be written there; the error names the directory.
    """
    target = directory.resolve()
    try:
        with _scratch(target) as scratch:
            made = Path(scratch, "made")
            made.mkdir()
            yield made
            names = sorted(path.name for path in made.iterdir())
            manifest = msgspec.json.encode(_Manifest([*names, MANIFEST]))
            replace_file(made / MANIFEST, msgspec.json.format(manifest) + b"\n")
            _refuse(check(made))
            if target.exists():
                _swap(made, target, Path(scratch, "replaced"))
            else:
                os.replace(made, target)
    except OSError as error:
        error.filename, error.filename2 = str(directory), None
        raise


def _scratch(target: Path) -> tempfile.TemporaryDirectory[str]:
    """Return a scratch directory on the target's file system.

    It is beside a target that is yet to be made, and in one that is there: the parent of the latter
    may belong to someone else or to another file system.
    """
    if target.exists():
        return tempfile.TemporaryDirectory(prefix=SCRATCH, dir=target)
    target.parent.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(prefix=SCRATCH, dir=target.parent)


SCRATCH = ".onerank-export-"


def _swap(made: Path, target: Path, replaced: Path) -> None:
    """Move the files of `made` to `target`, and what they replace to `replaced`.

    Undoes all moves if one fails.

    Raises:
        ExportError: a directory has the name of one of the files.
    """
    replaced.mkdir()
    new = [path.name for path in made.iterdir()]
    if taken := [name for name in sorted(new) if (target / name).is_dir()]:
        raise ExportError(
            f"{target / taken[0]} is a directory, where the export writes a file; move it, or name "
            "another directory",
            code="export-output-not-ours",
        )
    old = _written(target) | {name for name in new if (target / name).exists()}
    moves = [(target / name, replaced / name) for name in sorted(old)]
    moves += [(made / name, target / name) for name in new]
    done: list[tuple[Path, Path]] = []
    try:
        for source, destination in moves:
            os.replace(source, destination)
            done.append((source, destination))
    except OSError:
        for source, destination in reversed(done):
            os.replace(destination, source)
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
