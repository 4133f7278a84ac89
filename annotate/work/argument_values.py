"""Values of calls' arguments, without the tensors among them.

A tensor is told by its ids, which differ from call to call of the same operator, while what a call
does depends only on whether it was given one twice. Without ids a large graph has few distinct
calls.
"""

import numpy as np
import numpy.typing as npt
import polars as pl

from onerank.ir import Graph

I64 = npt.NDArray[np.int64]

_TENSOR = r'\[\d+,\d+,\d+,\d+,\d+,"[^"]*"\]'


def without_tensors(graph: Graph, codes: npt.NDArray[np.int32]) -> tuple[I64, list[str]]:
    """Return (positions in texts, texts) of input values with null for every tensor.

    Values that hold a tensor twice stay as they are.

    Args:
        graph: whose strings the codes are of.
        codes: of input values, int32[n]. The first of the texts is "" and nobody's.
    """
    distinct, place = np.unique(codes, return_inverse=True)
    told = pl.DataFrame({"told": graph.strings.decode(distinct)}, schema={"told": pl.String})
    tensors = pl.col("told").str.extract_all(_TENSOR)
    once = tensors.list.n_unique() == tensors.list.len()
    told = told.select(
        text=pl.when(once).then(pl.col("told").str.replace_all(_TENSOR, "null")).otherwise("told")
    )
    texts = told.unique(maintain_order=True).with_row_index("code", offset=1)
    codes_of = told.join(texts, on="text", how="left", maintain_order="left")["code"]
    return codes_of.to_numpy().astype(np.int64)[place], ["", *texts["text"].to_list()]
