"""Bus bandwidth: bytes on the busiest link over time, as nccl-tests defines it."""


def wire_bytes(collective: str, count_bytes: int, ranks: int) -> float:
    """Return the bytes that a bus bandwidth counts, as nccl-tests counts them.

    That is doc/PERFORMANCE.md, and for gather, scatter and all-to-all the `GetBw` of their
    sources: gather.cu takes count * nranks bytes at a factor of (nranks - 1) / nranks, its count
    being what one rank puts in.

    Args:
        collective: name in lower case; of others ("broadcast", "reduce", a message) all bytes
            count.
        count_bytes: what a rank puts in; of a scatter, what the root does.
        ranks: of the group.
    """
    others = ranks - 1
    factor = {
        "all_reduce": 2 * others / ranks,
        "reduce_scatter": others / ranks,
        "reduce_scatter_block": others / ranks,
        "all_gather": others,  # of the own shard
        "all_to_all": others / ranks,
        "gather": others,
        "scatter": others / ranks,
        "barrier": 0,
    }
    return count_bytes * factor.get(collective, 1)
