"""A small machine that runs GOAL text in the LogGP model, without overheads."""

import heapq
import re
from collections import defaultdict
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

_OPERATION = re.compile(
    r"l(\d+): (?:calc (\d+) cpu (\d+)"
    r"|(send|recv) (\d+)b (?:to|from) (\d+) tag (\d+) cpu (\d+) nic 0)"
)
_WAIT = re.compile(r"l(\d+) (requires|irequires) l(\d+)")


@dataclass
class Operation:
    """A line of a rank: what it does, and the labels it waits for."""

    kind: str
    amount: int
    cpu: int
    peer: int = -1
    tag: int = -1
    requires: list[int] = field(default_factory=list)
    irequires: list[int] = field(default_factory=list)


def parse(path: Path) -> list[list[Operation]]:
    """Return the operations of every rank; a line of another form is a failure."""
    lines = path.read_text().splitlines()
    assert lines[0].startswith("num_ranks ")
    ranks: list[list[Operation]] = []
    for line in lines[1:]:
        if line.startswith("rank "):
            assert line == f"rank {len(ranks)} {{"
            ranks.append([])
        elif operation := _OPERATION.fullmatch(line):
            label, ns, cpu, kind, size, peer, tag, own = operation.groups()
            assert int(label) == len(ranks[-1])
            made = (
                Operation("calc", int(ns), int(cpu))
                if ns is not None
                else Operation(kind, int(size), int(own), int(peer), int(tag))
            )
            ranks[-1].append(made)
        elif wait := _WAIT.fullmatch(line):
            waiting, how, awaited = wait.groups()
            assert int(awaited) < len(ranks[-1])
            getattr(ranks[-1][int(waiting)], how).append(int(awaited))
        else:
            assert line == "}", line
    assert len(ranks) == int(lines[0].split()[1])
    return ranks


def run(ranks: list[list[Operation]], gap_per_byte: Fraction = Fraction(0)) -> list[int]:
    """Return when each rank ends; a message without its other end, or a deadlock, is a failure."""
    _check_tags(ranks)
    machine = _Machine(ranks, gap_per_byte)
    machine.run()
    stuck = [(rank, at) for rank, ends in enumerate(machine.ended) for at, end in enumerate(ends)
             if end is None]  # fmt: skip
    assert not stuck, f"never ran: {stuck[:5]} of {len(stuck)}"
    return [max((end or 0 for end in ends), default=0) for ends in machine.ended]


class _Machine:
    """All ranks, each with its cpus and one interface."""

    def __init__(self, ranks: list[list[Operation]], gap_per_byte: Fraction) -> None:
        self.ranks, self.gap = ranks, gap_per_byte
        self.ended: list[list[int | None]] = [[None] * len(ops) for ops in ranks]
        self.started = [[False] * len(ops) for ops in ranks]
        self.events: list[tuple[int, int, int, int]] = []  # time, order (-1: ends), rank, label
        self.free: defaultdict[tuple[int, object], int] = defaultdict(int)
        self.arrived: dict[tuple[int, int, int], int] = {}
        self.posted: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.followers: list[defaultdict[int, list[int]]] = [defaultdict(list) for _ in ranks]
        for rank, ops in enumerate(ranks):
            for label, op in enumerate(ops):
                for awaited in (*op.requires, *op.irequires):
                    self.followers[rank][awaited].append(label)

    def run(self) -> None:
        for rank, ops in enumerate(self.ranks):
            for label in range(len(ops)):
                self.offer(rank, label, 0)
        while self.events:
            now, order, rank, label = heapq.heappop(self.events)
            if order < 0:
                self.finish(rank, label, now)
            elif not self.started[rank][label]:
                self.start(rank, label, now)

    def offer(self, rank: int, label: int, now: int) -> None:
        op = self.ranks[rank][label]
        ended, started = self.ended[rank], self.started[rank]
        if all(ended[other] is not None for other in op.requires) and all(
            started[other] for other in op.irequires
        ):
            heapq.heappush(self.events, (now, label, rank, label))

    def start(self, rank: int, label: int, now: int) -> None:
        op = self.ranks[rank][label]
        place = (rank, {"calc": op.cpu, "send": "nic"}.get(op.kind, f"none {label}"))
        if self.free[place] > now:
            heapq.heappush(self.events, (self.free[place], label, rank, label))
            return
        self.started[rank][label] = True
        if op.kind == "calc":
            self.free[place] = now + op.amount
            heapq.heappush(self.events, (now + op.amount, -1, rank, label))
        elif op.kind == "send":
            key, there = (rank, op.peer, op.tag), now + int((op.amount - 1) * self.gap)
            self.free[place] = self.arrived[key] = there
            heapq.heappush(self.events, (now, -1, rank, label))
            if key in self.posted:
                heapq.heappush(self.events, (there, -1, *self.posted[key]))
        else:
            key = (op.peer, rank, op.tag)
            self.posted[key] = rank, label
            if key in self.arrived:
                heapq.heappush(self.events, (max(now, self.arrived[key]), -1, rank, label))
        for other in self.followers[rank][label]:
            if label in self.ranks[rank][other].irequires:
                self.offer(rank, other, now)

    def finish(self, rank: int, label: int, now: int) -> None:
        self.ended[rank][label] = now
        for other in self.followers[rank][label]:
            if label in self.ranks[rank][other].requires:
                self.offer(rank, other, now)


def _check_tags(ranks: list[list[Operation]]) -> None:
    """Check that every message has one send and one receive of its size, and a tag of its own."""
    sends: dict[tuple[int, int, int], int] = {}
    receives: dict[tuple[int, int, int], int] = {}
    for rank, ops in enumerate(ranks):
        for op in ops:
            if op.kind == "calc":
                continue
            found, key = (sends, (rank, op.peer, op.tag))
            if op.kind == "recv":
                found, key = (receives, (op.peer, rank, op.tag))
            assert key not in found, f"two messages {key}"
            found[key] = op.amount
    assert sends == receives
