"""What a GPU holds beside the caching allocator's memory: the CUDA context, and NCCL's buffers.

Nothing in a trace tells it, and a slice of a job runs without NCCL. The figures are the largest of
what was reported in public, so that a step told to fit does:

- The context, with loaded kernels and libraries: what a process held beside the allocator's memory
  by PyTorch's own messages of exhausted memory, 0.13 (T4) to 0.74 GiB (GH200) in 14 of them.
- A communicator: 688 MiB for four ranks, 544 MiB for two, on A100s over NVLink after an all-reduce
  (NVIDIA/nccl issue 964). Communicators that are split off another may share its buffers.
- Sends, receives and all-to-all take a channel's buffers for each peer: 4.34 - 1.06 GB for the 7
  peers of a server of 8 H100s (NVIDIA/nccl issue 1685). Peers in other servers share buffers, so
  that no more than 7 count.
"""

import msgspec
import numpy as np

from onerank.ir import Collective, Graph, Kind

_CONTEXT = 800_000_000
_OF_TWO, _OF_MORE = 544 << 20, 688 << 20
_PEER = 3_280_000_000 // 7
_PEERS = 7


class Beside(msgspec.Struct, frozen=True):
    """Memory that the allocator does not see: what it is, bytes, and how they are known."""

    what: str
    bytes: int
    source: str


def beside(graph: Graph) -> tuple[Beside, ...]:
    """Return what the rank of a graph holds beside the allocator's memory."""
    return (
        Beside(
            "CUDA context, kernels, libraries",
            _CONTEXT,
            "the most of 14 public reports of exhausted memory",
        ),
        *_communicators(graph),
        *_peers(graph),
    )


def bytes_beside(graph: Graph) -> int:
    """Return the bytes of all that."""
    return sum(one.bytes for one in beside(graph))


def _communicators(graph: Graph) -> list[Beside]:
    codes = np.unique(graph.nodes.group[graph.mask(Kind.COLLECTIVE)])
    found: list[Beside] = []
    for name in graph.strings.decode(codes):
        size = _size_of(graph, name)
        if size == 1:
            continue
        of = f"of {size} ranks" if size else "of unknown size"
        found.append(
            Beside(
                f'NCCL, group "{name}" {of}',
                _OF_TWO if size == 2 else _OF_MORE,
                "NVIDIA/nccl issue 964, A100s over NVLink",
            )
        )
    return found


def _peers(graph: Graph) -> list[Beside]:
    peers = _spoken_to(graph) | _exchanged_with(graph)
    count = min(len(peers), _PEERS)
    if not count:
        return []
    what = f"NCCL, {count} {'peer' if count == 1 else 'peers'} of sends, receives, all-to-all"
    return [Beside(what, count * _PEER, "NVIDIA/nccl issue 1685, H100s over NVLink")]


def _spoken_to(graph: Graph) -> set[int]:
    nodes = graph.nodes
    ends = nodes.comm_dst[graph.mask(Kind.SEND)], nodes.comm_src[graph.mask(Kind.RECV)]
    return {rank for rank in np.concatenate(ends).tolist() if rank != graph.job.rank}


def _exchanged_with(graph: Graph) -> set[int]:
    nodes = graph.nodes
    exchanging = nodes.group[nodes.collective == Collective.ALL_TO_ALL]
    names = {*graph.strings.decode(np.unique(exchanging))}
    groups = [one.ranks for one in graph.job.groups if one.name in names]
    return {rank for ranks in groups for rank in ranks if rank != graph.job.rank}


def _size_of(graph: Graph, name: str) -> int:
    """Return the ranks of a group; 0 where the graph does not tell."""
    return next((len(one.ranks) for one in graph.job.groups if one.name == name), 0)
