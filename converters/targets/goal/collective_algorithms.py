"""Decompose collectives into the messages that NCCL's algorithms send.

- ring: all-reduce, all-gather, reduce-scatter; broadcast and reduce along a chain.
- tree: all-reduce over double binary trees (Sanders, Speck, Träff 2009), laid out as in NCCL 2.28
  (`ncclGetBtree` and `ncclGetDtree` in `src/graph/trees.cc`; the balanced pattern in
  `src/graph/connect.cc`): a binary tree over nodes and its complement, with a chain inside each
  node. The first child joins the first GPU of a node, the second child the second GPU. Each channel
  starts its chains at another GPU.
- doubling: all-gather and reduce-scatter with one GPU per node (PAT: Jeaugey 2025, arXiv
  2506.20252).
- pairs: all-to-all as a pairwise exchange, gather, scatter.

NCCL chooses the algorithm and the number of channels by size and topology
(`onerank.converters.nccl`). Bytes are payload: the flags of the LL protocols and the time of
reductions are not modelled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from onerank.converters.nccl import H100, Choice, Interconnect, Topology, choose
from onerank.ir import Collective

ROOT = -1


def tree(nodes: Sequence[Sequence[int]], number: int) -> list[int]:
    """Return the parent of each position, `ROOT` for the root.

    Args:
        nodes: positions of each node, in order.
        number: of the tree; odd ones are complements, and every second begins one GPU later.
    """
    parents = [ROOT] * sum(len(node) for node in nodes)
    turned = [_turned(node, number // 2) for node in nodes]
    above = [_parent(len(nodes), node, complement=number % 2 == 1) for node in range(len(nodes))]
    joined = [0] * len(nodes)  # children so far
    for node, chain in enumerate(turned):
        for place in range(1, len(chain)):
            parents[chain[place]] = chain[place - 1]
        if above[node] != ROOT:
            upper = turned[above[node]]
            parents[chain[0]] = upper[min(joined[above[node]], len(upper) - 1)]
            joined[above[node]] += 1
    return parents


def depth(nodes: Sequence[Sequence[int]]) -> int:
    """Return NCCL's measure of a tree's depth: hops inside a node, and levels of nodes."""
    return max(len(node) for node in nodes) - 1 + (len(nodes).bit_length() - 1)


def _turned(node: Sequence[int], by: int) -> list[int]:
    first = by % len(node)
    return [*node[first:], *node[:first]]


def _parent(count: int, node: int, *, complement: bool) -> int:
    if not complement:
        return _binary(count, node)
    if count % 2:  # shifted by one
        up = _binary(count, (node - 1) % count)
        return ROOT if up == ROOT else (up + 1) % count
    up = _binary(count, count - 1 - node)  # mirrored
    return ROOT if up == ROOT else count - 1 - up


def _binary(count: int, node: int) -> int:
    """Return the parent in a tree whose leaves are the odd numbers and whose root is 0."""
    if node == 0:
        return ROOT
    bit = node & -node
    up = (node ^ bit) | (bit << 1)
    return up if up < count else node ^ bit


_BARRIER_BYTES = 4

_CHUNK_BYTES = 512 << 10  # of a channel: an eighth of NCCL_BUFFSIZE

_MOST_CHUNKS = 256  # by then filling the pipeline is no time

_NAMES = {Collective.REDUCE_SCATTER_BLOCK: "reduce_scatter"}


class Message(NamedTuple):
    """A send or receive of one member of a group.

    Attributes:
        sends: whether it is a send.
        peer: position of the other end in the group.
        size_bytes: payload.
        step: the same number at both ends, and no other between the two.
        after: places in the member's list of what must have ended before.
        behind: place of the send that must have started before; None for none.
    """

    sends: bool
    peer: int
    size_bytes: int
    step: int
    after: tuple[int, ...] = ()
    behind: int | None = None


@dataclass(frozen=True)
class Call:
    """A collective of a group.

    Attributes:
        collective: which.
        size_bytes: input of a member; of an all-gather its own shard.
        nodes: positions of the members, by the node they are on.
        root: position of the root of a broadcast, reduce, gather or scatter.
        interconnect: what the GPUs are, which NCCL's choice depends on.
    """

    collective: Collective
    size_bytes: int
    nodes: tuple[tuple[int, ...], ...]
    root: int = 0
    interconnect: Interconnect = H100

    @property
    def ranks(self) -> int:
        """Members of the group."""
        return sum(len(node) for node in self.nodes)

    @cached_property
    def choice(self) -> Choice:
        """NCCL's algorithm and channels."""
        name = _NAMES.get(self.collective, self.collective.name.lower())
        return choose(
            name, self.size_bytes, Topology(self.ranks, len(self.nodes), self.interconnect)
        )


def steps(call: Call) -> int:
    """Return the number of steps: those of the messages are below."""
    count = call.ranks
    if call.collective in _PAIRS:
        return count
    if call.collective in (Collective.BROADCAST, Collective.REDUCE):
        return _chunks(call.size_bytes, call.choice.channels, 0)
    if call.collective in (Collective.ALL_REDUCE, Collective.BARRIER):
        if call.choice.algorithm == "tree":
            return 2 * len(_trees(call)) * _tree_chunks(call)
        return 2 * (count - 1)
    return len(_distances(call)) if call.choice.algorithm == "pat" else count - 1


@lru_cache(maxsize=4096)
def messages(call: Call, position: int) -> list[Message]:
    """Return what a member sends and receives."""
    if call.collective in (Collective.ALL_REDUCE, Collective.BARRIER):
        return (_by_trees if call.choice.algorithm == "tree" else _around)(call, position)
    if call.choice.algorithm == "pat":
        return _by_doubling(call, position)
    return _OTHERS[call.collective](call, position)


def _share(size: int, parts: int, part: int) -> int:
    """Return the bytes of one of nearly equal parts, 1 at least."""
    return max(1, size * (part + 1) // parts - size * part // parts)


def _ring(
    count: int, position: int, first: int, last: int, size: Callable[[int], int]
) -> list[Message]:
    """Pass parts around: in step s a member sends what it got in step s - 1.

    Args:
        count: members.
        position: of this one.
        first: number of the first step.
        last: number behind the last step.
        size: bytes of the part that begins at a position.
    """
    made: list[Message] = []
    got: int | None = None
    sent: int | None = None
    for step in range(first, last):
        after = () if got is None else (got,)
        bytes_out, bytes_in = size((position - step) % count), size((position - 1 - step) % count)
        made.append(Message(True, (position + 1) % count, bytes_out, step, after, sent))
        made.append(Message(False, (position - 1) % count, bytes_in, step))
        sent, got = len(made) - 2, len(made) - 1
    return made


def _around(call: Call, position: int) -> list[Message]:
    """An all-reduce: each part goes around once to be summed and once to be spread."""
    whole = _BARRIER_BYTES if call.collective is Collective.BARRIER else call.size_bytes
    count = call.ranks
    return _ring(count, position, 0, 2 * (count - 1), lambda part: _share(whole, count, part))


def _spread(call: Call, position: int) -> list[Message]:
    """An all-gather: each shard goes around."""
    return _ring(call.ranks, position, 0, call.ranks - 1, lambda _: max(1, call.size_bytes))


def _gather_sums(call: Call, position: int) -> list[Message]:
    """A reduce-scatter: each part goes around, summed on its way."""
    count = call.ranks
    return _ring(count, position, 0, count - 1, lambda part: _share(call.size_bytes, count, part))


def _distances(call: Call) -> list[int]:
    """Return how far the steps of PAT reach: a gather's farthest first, while it has least."""
    distances = [1 << power for power in range((call.ranks - 1).bit_length())]
    return distances if call.collective in _SUMS else distances[::-1]


def _by_doubling(call: Call, position: int) -> list[Message]:
    """Pass on all that came so far, in as many steps as the group can be doubled to."""
    count = call.ranks
    shard = call.size_bytes // count if call.collective in _SUMS else call.size_bytes
    made: list[Message] = []
    got: tuple[int, ...] = ()
    for step, distance in enumerate(_distances(call)):
        size = max(1, shard) * -(-(count - distance) // (2 * distance))
        behind = None if step == 0 else 2 * (step - 1)
        made.append(Message(True, (position + distance) % count, size, step, got, behind))
        made.append(Message(False, (position - distance) % count, size, step))
        got = (*got, len(made) - 1)
    return made


def _chunks(size: int, channels: int, deep: int) -> int:
    """Return the pieces that follow each other, as `computeCollWorkFunc` of NCCL cuts them."""
    chunk = _CHUNK_BYTES
    for least, smallest in ((deep * 8, 128 << 10), (deep * 4, 64 << 10), (deep, 32 << 10)):
        while size // (channels * chunk) < least and chunk > smallest:
            chunk //= 2
    return min(max(1, -(-size // (channels * chunk))), _MOST_CHUNKS)


def _chain(call: Call, position: int) -> list[Message]:
    """A broadcast goes from the root along the ring, a reduce along it to the root."""
    count, chunks = call.ranks, steps(call)
    place = (position - call.root) % count
    down = call.collective is Collective.BROADCAST
    before, behind = (-1, 1) if down else (1, -1)
    has_before = place > 0 if down else place < count - 1
    has_behind = place < count - 1 if down else place > 0
    made: list[Message] = []
    sent: int | None = None
    for chunk in range(chunks):
        size = _share(call.size_bytes, chunks, chunk)
        after: tuple[int, ...] = ()
        if has_before:
            made.append(Message(False, (position + before) % count, size, chunk))
            after = (len(made) - 1,)
        if has_behind:
            made.append(Message(True, (position + behind) % count, size, chunk, after, sent))
            sent = len(made) - 1
    return made


def _trees(call: Call) -> list[list[int]]:
    """Return the trees, two for each GPU of a node that a channel begins at."""
    heads = min(*(len(node) for node in call.nodes), max(1, call.choice.channels // 2))
    return [tree(call.nodes, number) for number in range(2 * heads)]


def _tree_chunks(call: Call) -> int:
    return _chunks(call.size_bytes, call.choice.channels, depth(call.nodes))


def _by_trees(call: Call, position: int) -> list[Message]:
    """An all-reduce: each tree sums its share on the way up and spreads it on the way down."""
    trees, chunks = _trees(call), _tree_chunks(call)
    whole = _BARRIER_BYTES if call.collective is Collective.BARRIER else call.size_bytes
    made: list[Message] = []
    newest: dict[int, int] = {}  # last send to each peer: chunks keep their order

    def send(peer: int, size: int, step: int, after: Sequence[int]) -> None:
        made.append(Message(True, peer, size, step, tuple(after), newest.get(peer)))
        newest[peer] = len(made) - 1

    def receive(peer: int, size: int, step: int) -> int:
        made.append(Message(False, peer, size, step))
        return len(made) - 1

    for number, parents in enumerate(trees):
        up = parents[position]
        below = [child for child, parent in enumerate(parents) if parent == position]
        for chunk in range(chunks):
            size = _share(whole, len(trees) * chunks, number * chunks + chunk)
            step = 2 * (number * chunks + chunk)
            got = [receive(child, size, step) for child in below]
            if up != ROOT:
                send(up, size, step, got)
                got = [receive(up, size, step + 1)]
            for child in below:
                send(child, size, step + 1, got)
    return made


def _exchange(call: Call, position: int) -> list[Message]:
    """Each member sends a part to each: in step s to the one that is s further."""
    count = call.ranks
    made: list[Message] = []
    sent: int | None = None
    for step in range(1, count):
        to, source = (position + step) % count, (position - step) % count
        size_out, size_in = (_share(call.size_bytes, count, part) for part in (to, position))
        made.append(Message(True, to, size_out, step, (), sent))
        sent = len(made) - 1
        made.append(Message(False, source, size_in, step))
    return made


def _star(call: Call, position: int) -> list[Message]:
    """A gather or scatter: the root has a message for each."""
    to_root = call.collective is Collective.GATHER
    count = call.ranks

    def size(member: int) -> int:
        return max(1, call.size_bytes) if to_root else _share(call.size_bytes, count, member)

    if position != call.root:
        step = (position - call.root) % count
        return [Message(to_root, call.root, size(position), step)]
    made: list[Message] = []
    for step in range(1, count):
        member = (call.root + step) % count
        behind = step - 2 if step > 1 and not to_root else None
        made.append(Message(not to_root, member, size(member), step, (), behind))
    return made


_SUMS = (Collective.REDUCE_SCATTER, Collective.REDUCE_SCATTER_BLOCK)

_PAIRS = (Collective.ALL_TO_ALL, Collective.GATHER, Collective.SCATTER)

_OTHERS: dict[Collective, Callable[[Call, int], list[Message]]] = {
    Collective.ALL_GATHER: _spread,
    Collective.REDUCE_SCATTER: _gather_sums,
    Collective.REDUCE_SCATTER_BLOCK: _gather_sums,
    Collective.BROADCAST: _chain,
    Collective.REDUCE: _chain,
    Collective.ALL_TO_ALL: _exchange,
    Collective.GATHER: _star,
    Collective.SCATTER: _star,
}

SUPPORTED = (Collective.ALL_REDUCE, Collective.BARRIER, *_OTHERS)
