"""Values of calls' arguments, without the tensors among them.

A tensor is told by its ids, which differ from call to call of the same operator; what its call does
does not depend on them. Without them, a large graph has few distinct calls.
"""

import numpy as np
import numpy.typing as npt
import polars as pl

from onerank.ir import Graph

I64 = npt.NDArray[np.int64]

_TENSOR = r'\[\d+,\d+,\d+,\d+,\d+,"[^"]*"\]'


def without_tensors(graph: Graph, codes: npt.NDArray[np.int32]) -> tuple[I64, list[str]]:
    """Return (positions in texts, texts) of input values with null for every tensor.

    Args:
        graph: whose strings the codes are of.
        codes: of input values, int32[n]. The first of the texts is "" and nobody's.
    """
    distinct, place = np.unique(codes, return_inverse=True)
    told = pl.Series("text", graph.strings.decode(distinct), dtype=pl.String)
    told = told.str.replace_all(_TENSOR, "null")
    texts = told.unique(maintain_order=True).to_frame().with_row_index("code", offset=1)
    codes_of = told.to_frame().join(texts, on="text", how="left", maintain_order="left")["code"]
    return codes_of.to_numpy().astype(np.int64)[place], ["", *texts["text"].to_list()]
