"""How much of a graph rests on which evidence."""

import numpy as np
import numpy.typing as npt

from onerank.ir import Evidence, Graph

I64 = npt.NDArray[np.int64]


def by_evidence(graph: Graph, index: I64, amounts: I64 | None = None) -> dict[str, int]:
    """Return evidence ("measured") -> sum over the nodes at `index` that have it.

    Args:
        graph: whose nodes.
        index: int64[n].
        amounts: what is summed, int64[n]; None: the nodes are counted.
    """
    codes = graph.nodes.evidence[index]
    if amounts is None:
        amounts = np.ones(len(index), dtype=np.int64)
    return {e.name.lower(): int(amounts[codes == e].sum()) for e in Evidence if (codes == e).any()}
