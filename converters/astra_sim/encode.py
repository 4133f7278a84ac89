"""Write a step as Chakra traces, one file per rank, in two encodings of time."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from onerank.converters.astra_sim.expand import Layout, Place
from onerank.converters.astra_sim.lower import Step
from onerank.converters.astra_sim.peers import tag_of
from onerank.ir import Graph, Kind
from onerank.ir.chakra import Attribute, Record, Records, write_records

VERSION = "1.0.0"
COMP = 4
COMM = {Kind.SEND: 5, Kind.RECV: 6, Kind.COLLECTIVE: 7}


@dataclass(frozen=True, slots=True)
class Workload:
    """A step, and where its communications go on the ranks that have it.

    Attributes:
        graph: the graph the step was lowered from.
        step: the nodes, the same on all of `ranks`.
        places: place of each communication, by graph index.
        layout: the grid of ranks.
        ranks: the ranks that have this step.
        numbers: number of each group, by its ranks.
    """

    graph: Graph
    step: Step
    places: dict[int, Place]
    layout: Layout
    ranks: Sequence[int]
    numbers: dict[tuple[int, ...], int]

    def end(self, place: Place, rank: int) -> int:
        """Return the group's number, or for a send or receive the peer, of a place on `rank`."""
        if place.shift:
            return self.layout.shifted(rank, place.shift)
        return self.numbers[place.group(self.layout, rank)]


def write_ranks(workload: Workload, prefix: Path, *, roofline: bool) -> None:
    """Write `PREFIX.R.et` for each rank R of a step; ranks with the same ends share one encoding.

    Compute carries its time as `duration_micros`, or (roofline) as operations of 1 ps each.
    """
    template = _records(workload, roofline=roofline)
    places = set(workload.places.values())
    written: dict[tuple[int, ...], Path] = {}
    for rank in workload.ranks:
        path = prefix.with_name(f"{prefix.name}.{rank}.et")
        ends = {place: workload.end(place, rank) for place in places}
        alike = tuple(ends.values())
        if alike in written:
            shutil.copyfile(written[alike], path)
            continue
        records = [
            _aimed(record, ends[workload.places[index]], rank)
            if index in workload.places
            else record
            for index, record in zip(workload.step.index, template, strict=True)
        ]
        write_records(Records(path, VERSION, {}, records))
        written[alike] = path


def micros(durations_ns: list[int]) -> list[int]:
    """Round each duration to microseconds so that no running sum is off by a microsecond.

    ASTRA-sim runs 0 us as 1 ns; the rounding counts that in.
    """
    rounded: list[int] = []
    ahead = 0
    for duration in durations_ns:
        whole = max((duration - ahead + 500) // 1000, 0)
        rounded.append(whole)
        ahead += (whole * 1000 or 1) - duration
    return rounded


def _records(workload: Workload, *, roofline: bool) -> list[Record]:
    """Return the records that all ranks have in common; communications lack their ends."""
    graph, step = workload.graph, workload.step
    names = graph.strings.decode(graph.nodes.name[step.index])
    exact = graph.nodes.duration_ns[step.index].tolist()
    is_compute = graph.gpu_compute[step.index].tolist()
    whole = iter(micros([ns for ns, compute in zip(exact, is_compute, strict=True) if compute]))
    records: list[Record] = []
    for number, (index, ns) in enumerate(zip(step.index, exact, strict=True)):
        attributes = {
            "is_cpu_op": Attribute("bool_val", value=False),
            "duration_ns": Attribute("int64_val", ns),
        }
        if is_compute[number]:
            kind, duration_micros = COMP, next(whole)
            if roofline:
                attributes["num_ops"] = Attribute("int64_val", ns * 1000 + 500)
                attributes["tensor_size"] = Attribute("uint64_val", 1)
        else:
            node = graph.node(index)
            kind, duration_micros = COMM[node.kind], ns // 1000
            attributes["comm_size"] = Attribute("int64_val", node.value("comm_bytes"))
            if node.kind is Kind.COLLECTIVE:
                attributes["comm_type"] = Attribute("int64_val", int(node.collective))
            else:
                attributes["comm_tag"] = Attribute("int32_val", tag_of(node))
        awaited = tuple(step.waits_for[number])
        records.append(
            Record(number, number, names[number], kind, (), awaited, duration_micros, attributes)
        )
    return records


def _aimed(record: Record, end: int, rank: int) -> Record:
    """Return a communication with its group, or with its peer and own rank."""
    if record.type == COMM[Kind.COLLECTIVE]:
        ends = {"pg_name": Attribute("string_val", str(end))}
    else:
        source, target = (rank, end) if record.type == COMM[Kind.SEND] else (end, rank)
        ends = {
            "comm_src": Attribute("int32_val", source),
            "comm_dst": Attribute("int32_val", target),
        }
    return replace(record, attributes={**record.attributes, **ends})
