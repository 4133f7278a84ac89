"""Process groups and work counts in traces of other tools, which lack onerank's metadata.

Process groups are in a JSON file next to the traces, `{"1": [0, 1], ...}` (group name -> global
ranks), which ASTRA-sim reads as --comm-group-configuration; or in a METADATA node as torch records
it, `[{"pg_name": "1", "ranks": [0, 1]}, ...]`, where an empty list means all ranks. Counts of FLOPs
and bytes are in the nodes of STAGE's traces, which have no durations.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from onerank.ir.chakra.et_def_pb2 import GlobalMetadata, Node
from onerank.ir.enums import Kind
from onerank.ir.errors import FormatError, GraphError
from onerank.ir.graph import Graph
from onerank.ir.input_files import load_json
from onerank.ir.nodes import UNKNOWN
from onerank.ir.world import WORLD, ProcessGroup, World

GROUP_FILES = ("comm_groups.json", "comm_group.json")
"""Names of the file: in ASTRA-sim's examples, and as written by STAGE."""

# Names of the group of all ranks (ASTRA-sim's Workload.cc).
_DEFAULT_GROUPS = ("", "0")

RANK_FILE = re.compile(r"(.+)\.(0|[1-9][0-9]*)\.et")
_INIT = "process_group:init"


class _RecordedGroup(msgspec.Struct):
    """A group as torch records it in a METADATA node."""

    pg_name: str
    ranks: list[int]


def with_groups(graph: Graph, path: Path) -> Graph:
    """Return the graph with groups, rank and world from outside its metadata.

    A graph that has groups, or communicates only with all ranks, is unchanged. So is a graph
    without such a file or node. The rank comes from the name PREFIX.RANK.et. The world has as many
    ranks as there are traces with that prefix; for a single trace, as many as the groups contain.

    Args:
        graph: as read from `path`.
        path: the trace.

    Raises:
        FormatError: the file is malformed; a node uses a group that the file lacks or that does not
            contain the rank; or a group contains a rank outside the world.
    """
    used = _first_of_each(graph)
    has_peers = graph.mask(Kind.SEND, Kind.RECV).any()
    if graph.job.groups or (used.keys() <= {""} and not has_peers):
        return graph
    file = _groups_file(path)
    in_file, in_nodes = {} if file is None else read_groups(file), _recorded_groups(graph, path)
    for name in in_file.keys() & in_nodes.keys():
        if in_nodes[name] and in_file[name] != in_nodes[name]:
            raise FormatError(
                f'{path}: its node {_INIT} and {file} give group "{name}" different ranks '
                f"({shown_ranks(in_nodes[name])}; {shown_ranks(in_file[name])}); correct or remove "
                "one",
                code="groups-contradict",
            )
    # Where both name a group, they agree, or the node's list is empty and means all ranks.
    ranks_of_groups = in_file | in_nodes
    if not ranks_of_groups:
        return graph
    places = [file.name] if file is not None else []
    source = " and ".join([*places, f"its node {_INIT}"] if in_nodes else places)
    rank, world = _rank_and_world(path, ranks_of_groups)
    all_ranks = tuple(range(world))
    groups = {name: tuple(ranks) or all_ranks for name, ranks in ranks_of_groups.items()}
    groups |= {name: all_ranks for name in _DEFAULT_GROUPS if name in used and name not in groups}
    _check_ranks(groups, world, path.parent / source)
    _check_used(used, groups, rank, path, source)
    process_groups = tuple(ProcessGroup(name, ranks) for name, ranks in groups.items() if name)
    job = msgspec.structs.replace(graph.job, groups=process_groups, world=World({WORLD: world}))
    if rank is not None:
        job = msgspec.structs.replace(job, rank=rank)
    return Graph(graph.nodes, graph.edges, graph.strings, job, graph.foreign)


def read_groups(path: Path) -> dict[str, list[int]]:
    """Return group name -> ranks from a file.

    Raises:
        FormatError: the file is malformed. The message names the file and the place.
    """
    expected = '{"1": [0, 1], ...}, ranks by group, as ASTRA-sim reads it'
    groups = load_json(path, dict[str, list[int]], expected)
    for name, ranks in groups.items():
        _check_distinct(f'{path}: group "{name}"', ranks)
    return groups


def _groups_file(path: Path) -> Path | None:
    """Return the file next to a trace that contains its groups; None if there is none."""
    files = group_files(path.parent, path.name)
    if len(files) > 1:
        raise FormatError(
            f"{files[0]} and {files[1].name} both contain groups of {path.name}; remove one",
            code="groups-ambiguous",
        )
    return files[0] if files else None


def group_files(directory: Path, trace: str) -> list[Path]:
    """Return the files with the process groups of a trace, in the order of the names searched.

    If none of `GROUP_FILES` exists, PREFIX.json next to PREFIX.RANK.et is used: STAGE's main.py
    writes the groups there.
    """
    files = [directory / name for name in GROUP_FILES if (directory / name).is_file()]
    rank = RANK_FILE.fullmatch(trace)
    if files or rank is None:
        return files
    of_prefix = directory / f"{rank[1]}.json"
    return [of_prefix] if of_prefix.is_file() else []


def _recorded_groups(graph: Graph, path: Path) -> dict[str, list[int]]:
    """Return group name -> ranks from METADATA nodes."""
    groups: dict[str, list[int]] = {}
    for index in np.flatnonzero(graph.mask(Kind.METADATA)).tolist():
        node = graph.node(index)
        if _INIT not in node.name:
            continue
        place = f"{path}: node {node.id} ({node.name!r})"
        try:
            # torch writes `["[{...}]"]` without escaping the inner quotes. That is not valid JSON,
            # so the outer brackets and quotes are cut off.
            text = node.text("input_values")[2:-2]
            recorded = msgspec.json.decode(text.encode(), type=list[_RecordedGroup])
        except msgspec.MsgspecError as error:
            raise FormatError(
                f'{place}: {error}; expected [{{"pg_name": "1", "ranks": [0, 1]}}, ...] in its '
                "input values, as torch records its groups",
                code="groups-malformed-node",
            ) from error
        for group in recorded:
            _check_distinct(f'{place}: group "{group.pg_name}"', group.ranks)
            groups[group.pg_name] = group.ranks
    return groups


def _check_distinct(place: str, ranks: list[int]) -> None:
    distinct: set[int] = set()
    for rank in ranks:
        if rank < 0 or rank in distinct:
            problem = "is not a rank" if rank < 0 else "occurs twice"
            raise FormatError(
                f"{place}: {rank} {problem}; expected distinct ranks from 0", code="groups-bad-rank"
            )
        distinct.add(rank)


def _rank_and_world(path: Path, groups: Mapping[str, list[int]]) -> tuple[int | None, int]:
    """Return the trace's rank (None if its name has none) and the number of ranks."""
    ranks_in_groups = 1 + max((rank for ranks in groups.values() for rank in ranks), default=0)
    match = RANK_FILE.fullmatch(path.name)
    if match is None:
        return None, ranks_in_groups
    matches = (RANK_FILE.fullmatch(trace.name) for trace in path.parent.glob("*.et"))
    ranks = [int(trace[2]) for trace in matches if trace and trace[1] == match[1]]
    # A single trace usually is an excerpt of a larger job. Several traces count as the whole job.
    return int(match[2]), max(ranks) + 1 if len(ranks) > 1 else ranks_in_groups


def _first_of_each(graph: Graph) -> dict[str, int]:
    """Return the id of the first collective of each group, by the group's name."""
    collectives = np.flatnonzero(graph.mask(Kind.COLLECTIVE))
    codes, first = np.unique(graph.nodes.group[collectives], return_index=True)
    ids = graph.nodes.id[collectives[first]].tolist()
    return dict(zip(graph.strings.decode(codes), ids, strict=True))


def _check_ranks(groups: Mapping[str, tuple[int, ...]], world: int, source: Path) -> None:
    for name, ranks in groups.items():
        if max(ranks) >= world:
            raise FormatError(
                f'{source}: group "{name}" contains rank {max(ranks)}, but the traces next to it '
                f"are those of ranks 0 to {world - 1}; add the other traces or correct the group",
                code="groups-missing-traces",
            )


def _check_used(
    used: Mapping[str, int],
    groups: Mapping[str, tuple[int, ...]],
    rank: int | None,
    path: Path,
    source: str,
) -> None:
    for name, node in used.items():
        if name not in groups:
            raise FormatError(
                f'{path}: node {node} uses group "{name}", which {source} does not contain '
                f"(it has {', '.join(groups)}); add it there",
                code="groups-unknown-group",
            )
        if rank is not None and rank not in groups[name]:
            raise FormatError(
                f'{path}: node {node} uses group "{name}", whose ranks '
                f"{shown_ranks(groups[name])} ({source}) do not include the trace's rank {rank}",
                code="groups-rank-not-member",
            )


def shown_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text; more than 8 are shortened to the first 4 and the last 3."""
    names = [str(rank) for rank in ranks]
    return ", ".join(names if len(names) <= 8 else [*names[:4], "...", *names[-3:]])


MOST = 1 << 58
"""Largest number of operations or bytes of a node; no figure derived from it exceeds 64 bits."""
NUM_OPS, TENSOR_SIZE, OP_TYPE = "num_ops", "tensor_size", "op_type"
# STAGE's values of a file's `schema`, and of `op_type` for a GEMM.
_STAGE, _EINSUM = "symbolic_tensor_network", "M"


def is_counted(graph: Graph) -> bool:
    """Return whether no compute node of the graph has a time, and some have FLOPs."""
    compute = graph.gpu_compute
    times, flops = graph.nodes.duration_ns[compute], graph.nodes.flops[compute]
    return len(times) > 0 and not times.any() and bool((flops > 0).any())


def counts_elements(graph: Graph) -> bool:
    """Return whether tensor and communication sizes of the graph count elements, not bytes.

    STAGE counts elements (`Tensor.eval_size` in its tensor.py), whatever its `--mixed_precision`.
    """
    if graph.foreign is None:
        return False
    attributes = GlobalMetadata.FromString(graph.foreign).attr
    return any(
        attribute.name == "schema" and attribute.string_val == _STAGE for attribute in attributes
    )


def with_counted_work(graph: Graph) -> Graph:
    """Return the graph with FLOPs and bytes set for compute nodes that have no duration.

    STAGE writes `num_ops` and `tensor_size` instead of durations; ASTRA-sim's roofline derives a
    duration from them (Workload.cc, `issue_comp`). All of `tensor_size` counts as read. STAGE
    counts a multiplication and its addition as one operation (ops/einsum.py); these are two FLOPs.

    Raises:
        GraphError: a count is out of range.
    """
    nodes = graph.nodes
    is_uncounted = graph.gpu_compute & (nodes.duration_ns == 0) & (nodes.flops == UNKNOWN)
    columns = {name: getattr(nodes, name).copy() for name in ("flops", "bytes_read")}
    columns["bytes_written"] = nodes.bytes_written.copy()
    any_counted, stage = False, counts_elements(graph)
    for index in np.flatnonzero(is_uncounted).tolist():
        message = nodes.foreign[index]
        if message is None:
            continue
        counts = {
            attribute.name: getattr(attribute, attribute.WhichOneof("value") or "name")
            for attribute in Node.FromString(message).attr
            if attribute.name in (NUM_OPS, TENSOR_SIZE, OP_TYPE)
        }
        flops, size = counts.get(NUM_OPS), counts.get(TENSOR_SIZE)
        if not isinstance(flops, int) or not isinstance(size, int) or min(flops, size) < 0:
            continue
        if max(flops, size) > MOST:
            node = graph.node(index)
            raise GraphError(
                f"node {node.id} ({node.name!r}) counts {flops} operations and a size of {size}: "
                f"expected {MOST} at most",
                code="graph-counts-too-large",
            )
        per_count = 2 if stage and counts.get(OP_TYPE) == _EINSUM else 1
        columns["flops"][index], columns["bytes_read"][index] = per_count * flops, size
        columns["bytes_written"][index] = 0
        any_counted = True
    return replace(graph, nodes=replace(nodes, **columns)) if any_counted else graph
