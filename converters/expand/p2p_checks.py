"""Check that ranks represented by one graph send what their peers receive."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from onerank.converters.expand.pipeline import RankGraph
from onerank.ir import Kind, Phase
from onerank.ir.errors import ExportError

_TOLD = 8
_Way = tuple[int, int]
"""(place of the sender's graph, place of the receiver's)."""


def check_messages(made: Sequence[RankGraph]) -> None:
    """Check that activations are sent to who receives activations, and gradients likewise.

    Two neighbouring stages of a pipeline send each other as many bytes, one forward, the other
    backward: where one graph stands for both, each send meets a receive, of the wrong phase.

    Args:
        made: graphs that together hold for every rank of one world.

    Raises:
        ExportError: as many are not, of ranks whose sends and receives all have a phase.
    """
    holder = {rank: place for place, one in enumerate(made) for rank in one.ranks}
    sent: dict[_Way, Counter[Phase]] = {}
    received: dict[_Way, Counter[Phase]] = {}
    for place, one in enumerate(made):
        graph, nodes = one.graph, one.graph.nodes
        rows = graph.mask(Kind.SEND, Kind.RECV).nonzero()[0]
        sends = nodes.kind[rows] == Kind.SEND
        ends = np.where(sends, nodes.comm_dst[rows], nodes.comm_src[rows])
        alike, counts = np.unique(
            np.stack([sends, ends, nodes.phase[rows]]), axis=1, return_counts=True
        )
        for (is_send, end, phase), count in zip(alike.T.tolist(), counts.tolist(), strict=True):
            other = holder.get(end, -1)
            way, found = ((place, other), sent) if is_send else ((other, place), received)
            found.setdefault(way, Counter())[Phase(phase)] += count * len(one.ranks)
    for way in sorted(sent.keys() & received.keys()):
        if -1 in way or all(len(made[place].ranks) == 1 for place in way):
            continue  # a rank that stands for itself alone is none that another was taken for
        there, here = sent[way], received[way]
        if Phase.NONE in there or Phase.NONE in here or there == here:
            continue
        raise ExportError(_told(made, way, there, here))


def _told(
    made: Sequence[RankGraph], way: _Way, sent: Counter[Phase], received: Counter[Phase]
) -> str:
    sender, receiver = (made[place] for place in way)
    one, other = sender.graph.job.rank, receiver.graph.job.rank
    ranks = ", ".join(map(str, receiver.ranks[:_TOLD]))
    ranks += ", ..." if len(receiver.ranks) > _TOLD else ""
    return (
        f"rank {one} sends {_counts(sent, sender)} to ranks {ranks}, for which the trace of rank "
        f"{other} stands, and that receives {_counts(received, receiver)} from such as rank {one}: "
        "these ranks are not alike. They may be stages of a pipeline, which the script lays along "
        f"another axis than {receiver.graph.job.world} has it: capture a rank of each stage, as "
        "the script counts them (capture run --ranks 0,1,... -o ranks/trace.et), and export the "
        "directory"
    )


def _counts(found: Counter[Phase], one: RankGraph) -> str:
    """Return the messages of one rank, by phase."""
    return " and ".join(
        f"{count // len(one.ranks)} of its {phase.name.lower()}"
        for phase, count in sorted(found.items())
    )
