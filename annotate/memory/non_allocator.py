"""GPU memory outside the caching allocator: the CUDA context and NCCL's buffers.

A trace does not record it, and a slice runs without NCCL. Each figure is the larger of the
measurement on two H200s (torch 2.11, NCCL 2.28.9; `benchmarks/slices/non_allocator_memory.py`) and
of public reports, so that a step that is predicted to fit does fit:

- The context with loaded kernels and libraries: 806 MB after a step of GEMMs, attention and
  convolutions on an H200; 0.13 (T4) to 0.74 GiB (GH200) in 14 out-of-memory messages of PyTorch.
- NCCL itself, with the first communicator: 354 MiB.
- A communicator of two ranks: 486 MiB after an all-reduce. A larger one: 144 MiB more, the
  difference between four and two A100s (NVIDIA/nccl issue 964). Split communicators may share
  buffers.
- Sends, receives and all-to-all: channel buffers for each peer of a communicator. 384 to 442 MiB on
  the H200s; 4.34 - 1.06 GB for the 7 peers in a server of 8 H100s (NVIDIA/nccl issue 1685). Peers
  in other servers share buffers, so at most 7 count.
"""

from collections import Counter
from collections.abc import Iterator

import msgspec
import numpy as np

from onerank.ir import Collective, Graph, Kind

_CONTEXT = 806_000_000

_NCCL = 354 << 20

_TWO_RANKS, _MORE_RANKS = 486 << 20, 630 << 20

_PEER = 3_280_000_000 // 7  # 4.34 - 1.06 GB for 7 peers

_PEERS = 7  # peers in other servers share buffers

_MEASURED = "two H200s with NCCL 2.28.9"


class NonAllocatorMemory(msgspec.Struct, frozen=True):
    """GPU memory outside the caching allocator: what it is, its bytes, and their source."""

    what: str
    bytes: int
    source: str


def non_allocator_memory(graph: Graph) -> tuple[NonAllocatorMemory, ...]:
    """Return the memory of a graph's rank outside the allocator."""
    return (
        NonAllocatorMemory(
            "CUDA context, kernels, libraries",
            _CONTEXT,
            "an H200 with torch 2.11, above all of 14 public out-of-memory reports",
        ),
        *_communicators(graph),
        *_peers(graph),
    )


def non_allocator_bytes(graph: Graph) -> int:
    """Return the bytes of the rank's memory outside the allocator."""
    return sum(memory.bytes for memory in non_allocator_memory(graph))


def _communicators(graph: Graph) -> list[NonAllocatorMemory]:
    codes = np.unique(graph.nodes.group[graph.mask(Kind.COLLECTIVE)])
    sizes = {name: _size_of(graph, name) for name in graph.strings.decode(codes)}
    communicators = [
        NonAllocatorMemory(
            f'NCCL, group "{name}" of {f"{size} ranks" if size else "unknown size"}',
            _TWO_RANKS if size == 2 else _MORE_RANKS,
            _MEASURED if size == 2 else f"{_MEASURED}, and NVIDIA/nccl issue 964",
        )
        for name, size in sizes.items()
        # A group of one rank needs no communicator; one of unknown size counts as a large one.
        if size != 1
    ]
    if communicators or graph.mask(Kind.SEND).any() or graph.mask(Kind.RECV).any():
        communicators.insert(0, NonAllocatorMemory("NCCL itself", _NCCL, _MEASURED))
    return communicators


def _peers(graph: Graph) -> list[NonAllocatorMemory]:
    peers_of_group = Counter(group for group, _ in {*_p2p_peers(graph), *_all_to_all_peers(graph)})
    count = sum(min(peers, _PEERS) for peers in peers_of_group.values())
    if not count:
        return []
    what = f"NCCL, {count} {'peer' if count == 1 else 'peers'} of sends, receives, all-to-all"
    return [NonAllocatorMemory(what, count * _PEER, "NVIDIA/nccl issue 1685, H100s over NVLink")]


def _p2p_peers(graph: Graph) -> Iterator[tuple[str, int]]:
    """Yield (group, peer) of sends and receives."""
    nodes = graph.nodes
    for kind, ends in ((Kind.SEND, nodes.comm_dst), (Kind.RECV, nodes.comm_src)):
        chosen = graph.mask(kind) & (ends != graph.job.rank)
        pairs = np.unique(np.stack([nodes.group[chosen], ends[chosen]]), axis=1)
        yield from zip(graph.strings.decode(pairs[0]), pairs[1].tolist(), strict=True)


def _all_to_all_peers(graph: Graph) -> Iterator[tuple[str, int]]:
    """Yield (group, peer) of all-to-alls."""
    nodes = graph.nodes
    exchanging = nodes.group[nodes.collective == Collective.ALL_TO_ALL]
    names = {*graph.strings.decode(np.unique(exchanging))}
    for group in graph.job.groups:
        if group.name in names:
            yield from ((group.name, rank) for rank in group.ranks if rank != graph.job.rank)


def _size_of(graph: Graph, name: str) -> int:
    """Return the ranks of a group; 0 if the graph does not record it."""
    return next((len(group.ranks) for group in graph.job.groups if group.name == name), 0)
