"""Decompose collectives into the messages of NCCL's algorithms.

- ring: all-reduce, all-gather, reduce-scatter; broadcast and reduce along a chain.
- tree: all-reduce over double binary trees (Sanders, Speck, Träff 2009), laid out as in NCCL 2.28
  (`ncclGetBtree` and `ncclGetDtree` in `src/graph/trees.cc`; the balanced pattern in
  `src/graph/connect.cc`): a binary tree over nodes and its complement, with a chain inside each
  node. The first child joins the first GPU of a node, the second child the second GPU. Each pair of
  trees starts its chains at another GPU.
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
from itertools import pairwise
from typing import NamedTuple

from onerank.converters.nccl import H100, Choice, Interconnect, Topology, choose
from onerank.ir import Collective

# NCCL reduces one float for a barrier.
_BARRIER_BYTES = 4

# Chunk of a channel: an eighth (NCCL_STEPS) of the default NCCL_BUFFSIZE of 4 MiB.
_CHUNK_BYTES = 512 << 10

# Limit on the simulated chunks; with more, filling the pipeline takes negligible time.
_MOST_CHUNKS = 256

_SUMS = (Collective.REDUCE_SCATTER, Collective.REDUCE_SCATTER_BLOCK)

_PAIRS = (Collective.ALL_TO_ALL, Collective.GATHER, Collective.SCATTER)


class Message(NamedTuple):
    """A send or receive of one member of a group.

    Attributes:
        sends: True for a send, False for a receive.
        peer: position of the other end in the group.
        size_bytes: payload.
        step: number that both ends have, and no other message between them.
        after: positions in the member's list of the messages that must have ended.
        started: position of the send that must have started, or None.
    """

    sends: bool
    peer: int
    size_bytes: int
    step: int
    after: tuple[int, ...] = ()
    started: int | None = None


@dataclass(frozen=True)
class CollectiveCall:
    """A collective of a group.

    Attributes:
        collective: kind of the collective.
        size_bytes: input of a member; for an all-gather its shard.
        nodes: for each node the positions of its GPUs in the group.
        root: position of the root of a broadcast, reduce, gather or scatter.
        interconnect: links between the GPUs, by which NCCL chooses the algorithm.
    """

    collective: Collective
    size_bytes: int
    nodes: tuple[tuple[int, ...], ...]
    root: int = 0
    interconnect: Interconnect = H100

    @property
    def ranks(self) -> int:
        """Number of members of the group."""
        return sum(len(node) for node in self.nodes)

    @cached_property
    def choice(self) -> Choice:
        """NCCL's algorithm and channels."""
        topology = Topology(self.ranks, len(self.nodes), self.interconnect)
        return choose(self.collective.name.lower(), self.size_bytes, topology)


def count_steps(call: CollectiveCall) -> int:
    """Return the number of steps; the messages have steps from 0 to below that."""
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


# The layers of a model repeat their calls, so that the same messages are needed many times.
@lru_cache(maxsize=4096)
def messages(call: CollectiveCall, position: int) -> list[Message]:
    """Return the messages that the member at `position` sends and receives, in order."""
    if call.collective in (Collective.ALL_REDUCE, Collective.BARRIER):
        return (_tree_all_reduce if call.choice.algorithm == "tree" else _ring_all_reduce)(
            call, position
        )
    if call.choice.algorithm == "pat":
        return _recursive_doubling(call, position)
    return _DECOMPOSERS[call.collective](call, position)


def _share(size: int, parts: int, part: int) -> int:
    """Return the bytes of one of nearly equal parts, at least 1."""
    # Differences of running sums, so that the parts add up to the size.
    return max(1, size * (part + 1) // parts - size * part // parts)


def _ring(
    count: int, position: int, first: int, last: int, size: Callable[[int], int]
) -> list[Message]:
    """Return the messages of a ring: in step s a member sends the part received in step s - 1.

    Args:
        count: number of members.
        position: position of the member.
        first: number of the first step.
        last: number of the last step plus one.
        size: returns the bytes of the part that starts at a position.
    """
    ring: list[Message] = []
    received: int | None = None
    sent: int | None = None
    for step in range(first, last):
        after = () if received is None else (received,)
        bytes_out, bytes_in = size((position - step) % count), size((position - 1 - step) % count)
        # Sends of a ring start in order: NCCL's channel is one FIFO.
        ring.append(Message(True, (position + 1) % count, bytes_out, step, after, sent))
        ring.append(Message(False, (position - 1) % count, bytes_in, step))
        sent, received = len(ring) - 2, len(ring) - 1
    return ring


def _ring_all_reduce(call: CollectiveCall, position: int) -> list[Message]:
    """Each part goes around the ring twice: to be summed, then to be distributed."""
    whole = _BARRIER_BYTES if call.collective is Collective.BARRIER else call.size_bytes
    count = call.ranks
    return _ring(count, position, 0, 2 * (count - 1), lambda part: _share(whole, count, part))


def _ring_all_gather(call: CollectiveCall, position: int) -> list[Message]:
    """Each shard goes around the ring."""
    return _ring(call.ranks, position, 0, call.ranks - 1, lambda _: max(1, call.size_bytes))


def _ring_reduce_scatter(call: CollectiveCall, position: int) -> list[Message]:
    """Each part goes around the ring and is summed on its way."""
    count = call.ranks
    return _ring(count, position, 0, count - 1, lambda part: _share(call.size_bytes, count, part))


def _distances(call: CollectiveCall) -> list[int]:
    """Return the distance of each step's peers in PAT.

    An all-gather starts with the farthest peer, while a member has the fewest shards.
    """
    distances = [1 << power for power in range((call.ranks - 1).bit_length())]
    return distances if call.collective in _SUMS else distances[::-1]


def _recursive_doubling(call: CollectiveCall, position: int) -> list[Message]:
    """PAT: in each step a member sends all shards (sums) that it has; log2(members) steps."""
    count = call.ranks
    shard = call.size_bytes // count if call.collective in _SUMS else call.size_bytes
    doubling: list[Message] = []
    received: tuple[int, ...] = ()
    for step, distance in enumerate(_distances(call)):
        size = max(1, shard) * -(-(count - distance) // (2 * distance))
        # Each step adds a send and then a receive, so this is the send of the step before.
        started = None if step == 0 else 2 * (step - 1)
        doubling.append(Message(True, (position + distance) % count, size, step, received, started))
        doubling.append(Message(False, (position - distance) % count, size, step))
        # A later step forwards everything received so far, so it waits for all of it.
        received = (*received, len(doubling) - 1)
    return doubling


def _chunks(size: int, channels: int, hops: int) -> int:
    """Return the number of pipelined chunks per channel, as NCCL's `computeCollWorkFunc` cuts."""
    chunk = _CHUNK_BYTES
    for least, smallest in ((hops * 8, 128 << 10), (hops * 4, 64 << 10), (hops, 32 << 10)):
        while size // (channels * chunk) < least and chunk > smallest:
            chunk //= 2
    return min(max(1, -(-size // (channels * chunk))), _MOST_CHUNKS)


def _chain(call: CollectiveCall, position: int) -> list[Message]:
    """Broadcast from the root along the ring, or reduce along the ring to the root."""
    count, chunks = call.ranks, count_steps(call)
    place = (position - call.root) % count
    down = call.collective is Collective.BROADCAST
    source, destination = (-1, 1) if down else (1, -1)
    receives = place > 0 if down else place < count - 1
    sends = place < count - 1 if down else place > 0
    chain: list[Message] = []
    sent: int | None = None
    for chunk in range(chunks):
        size = _share(call.size_bytes, chunks, chunk)
        after: tuple[int, ...] = ()
        if receives:
            chain.append(Message(False, (position + source) % count, size, chunk))
            after = (len(chain) - 1,)
        if sends:
            chain.append(Message(True, (position + destination) % count, size, chunk, after, sent))
            sent = len(chain) - 1
    return chain


def _trees(call: CollectiveCall) -> list[list[int]]:
    """Return the trees: a pair for each GPU of a node at which a channel starts."""
    # NCCL duplicates its channels for the pair of trees, so half of them have their own start.
    heads = min(*(len(node) for node in call.nodes), max(1, call.choice.channels // 2))
    return [tree(call.nodes, number) for number in range(2 * heads)]


def _tree_chunks(call: CollectiveCall) -> int:
    return _chunks(call.size_bytes, call.choice.channels, depth(call.nodes))


def _tree_all_reduce(call: CollectiveCall, position: int) -> list[Message]:
    """Each tree sums its share on the way up and distributes it on the way down."""
    trees, chunks = _trees(call), _tree_chunks(call)
    whole = _BARRIER_BYTES if call.collective is Collective.BARRIER else call.size_bytes
    tree_messages: list[Message] = []
    newest: dict[int, int] = {}  # last send to each peer, since chunks keep their order

    def send(peer: int, size: int, step: int, after: Sequence[int]) -> None:
        tree_messages.append(Message(True, peer, size, step, tuple(after), newest.get(peer)))
        newest[peer] = len(tree_messages) - 1

    def receive(peer: int, size: int, step: int) -> int:
        tree_messages.append(Message(False, peer, size, step))
        return len(tree_messages) - 1

    for number, parents in enumerate(trees):
        up = parents[position]
        children = [child for child, parent in enumerate(parents) if parent == position]
        for chunk in range(chunks):
            size = _share(whole, len(trees) * chunks, number * chunks + chunk)
            step = 2 * (number * chunks + chunk)
            received = [receive(child, size, step) for child in children]
            if up != ROOT:
                send(up, size, step, received)
                received = [receive(up, size, step + 1)]
            for child in children:
                send(child, size, step + 1, received)
    return tree_messages


ROOT = -1
"""Parent of the root of a tree."""


def tree(nodes: Sequence[Sequence[int]], number: int) -> list[int]:
    """Return the parent of each position, `ROOT` for the root.

    Args:
        nodes: for each node the positions of its GPUs in the group.
        number: number of the tree. Odd trees are complements; each pair starts one GPU later.
    """
    parents = [ROOT] * sum(len(node) for node in nodes)
    chains = [_rotated(node, number // 2) for node in nodes]
    node_parents = [
        _parent(len(nodes), node, complement=number % 2 == 1) for node in range(len(nodes))
    ]
    children = [0] * len(nodes)  # joined so far
    for chain, upper_node in zip(chains, node_parents, strict=True):
        for lower, upper in pairwise(reversed(chain)):
            parents[lower] = upper
        if upper_node != ROOT:
            upper_chain = chains[upper_node]
            parents[chain[0]] = upper_chain[min(children[upper_node], len(upper_chain) - 1)]
            children[upper_node] += 1
    return parents


def depth(nodes: Sequence[Sequence[int]]) -> int:
    """Return the depth of a tree as NCCL counts it: hops inside a node plus levels of nodes."""
    return max(len(node) for node in nodes) - 1 + (len(nodes).bit_length() - 1)


def _rotated(node: Sequence[int], by: int) -> list[int]:
    first = by % len(node)
    return [*node[first:], *node[:first]]


def _parent(count: int, node: int, *, complement: bool) -> int:
    """Return a node's parent in the binary tree over `count` nodes, or in its complement."""
    if not complement:
        return _binary(count, node)
    # The complement of an odd number of nodes is the tree shifted by one.
    if count % 2:
        up = _binary(count, (node - 1) % count)
        return ROOT if up == ROOT else (up + 1) % count
    up = _binary(count, count - 1 - node)  # the mirrored tree
    return ROOT if up == ROOT else count - 1 - up


def _binary(count: int, node: int) -> int:
    """Return the parent in a tree whose leaves are the odd numbers and whose root is 0."""
    if node == 0:
        return ROOT
    bit = node & -node
    up = (node ^ bit) | (bit << 1)
    return up if up < count else node ^ bit


def _pairwise_exchange(call: CollectiveCall, position: int) -> list[Message]:
    """All-to-all: in step s each member sends a part to the member at distance s."""
    count = call.ranks
    exchange: list[Message] = []
    sent: int | None = None
    for step in range(1, count):
        destination, source = (position + step) % count, (position - step) % count
        size_out, size_in = (
            _share(call.size_bytes, count, part) for part in (destination, position)
        )
        exchange.append(Message(True, destination, size_out, step, (), sent))
        sent = len(exchange) - 1
        exchange.append(Message(False, source, size_in, step))
    return exchange


def _star(call: CollectiveCall, position: int) -> list[Message]:
    """Gather or scatter: one message between the root and each other member."""
    to_root = call.collective is Collective.GATHER
    count = call.ranks

    def size(member: int) -> int:
        return max(1, call.size_bytes) if to_root else _share(call.size_bytes, count, member)

    if position != call.root:
        step = (position - call.root) % count
        return [Message(to_root, call.root, size(position), step)]
    star: list[Message] = []
    for step in range(1, count):
        member = (call.root + step) % count
        started = step - 2 if step > 1 and not to_root else None
        star.append(Message(not to_root, member, size(member), step, (), started))
    return star


_DECOMPOSERS: dict[Collective, Callable[[CollectiveCall, int], list[Message]]] = {
    Collective.ALL_GATHER: _ring_all_gather,
    Collective.REDUCE_SCATTER: _ring_reduce_scatter,
    Collective.REDUCE_SCATTER_BLOCK: _ring_reduce_scatter,
    Collective.BROADCAST: _chain,
    Collective.REDUCE: _chain,
    Collective.ALL_TO_ALL: _pairwise_exchange,
    Collective.GATHER: _star,
    Collective.SCATTER: _star,
}

SUPPORTED = (Collective.ALL_REDUCE, Collective.BARRIER, *_DECOMPOSERS)
