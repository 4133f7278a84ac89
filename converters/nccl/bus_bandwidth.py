"""Bus bandwidth: bytes on the busiest link over time, as nccl-tests defines it."""


def wire_bytes(collective: str, count_bytes: int, ranks: int) -> float:
    """Return the bytes that the bus bandwidth of nccl-tests counts.

    Factors are from doc/PERFORMANCE.md; those of gather, scatter and all-to-all from `GetBw` in
    their sources. gather.cu counts count * nranks bytes at a factor of (nranks - 1) / nranks, where
    count is the input of one rank.

    Args:
        collective: name in lower case; for names not listed below ("broadcast", "reduce",
            messages) all bytes count.
        count_bytes: input of one rank; for a scatter, of the root.
        ranks: size of the group.
    """
    others = ranks - 1
    factor = {
        "all_reduce": 2 * others / ranks,
        "reduce_scatter": others / ranks,
        "reduce_scatter_block": others / ranks,
        "all_gather": others,  # count_bytes is one shard
        "all_to_all": others / ranks,
        "gather": others,
        "scatter": others / ranks,
        "barrier": 0,
    }
    return count_bytes * factor.get(collective, 1)
