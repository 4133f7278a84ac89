"""Nodes of a job: ranks per node."""

import contextlib
from collections.abc import Generator
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp import _init_utils

from onerank.capture.patches import replaced
from onerank.ir.errors import CaptureError

MOST_RANKS = 8

_fsdp: Any = _init_utils  # it has no public names and no types


def ranks_per_node(size: int, asked: int | None) -> int:
    """Return how many ranks of a world of `size` share a node.

    Without `asked` as many as can be, up to 8, so that all nodes have as many.

    Raises:
        CaptureError: nodes of so many do not make up the world.
    """
    if asked is None:
        return max(n for n in range(1, min(size, MOST_RANKS) + 1) if size % n == 0)
    if size % asked:
        raise CaptureError(
            f"--nproc-per-node {asked}: the world has {size} ranks, which are no whole number of "
            "such nodes"
        )
    return asked


@contextlib.contextmanager
def nodes_of(ranks: int) -> Generator[None]:
    """Let groups that torch makes of the ranks of a node have so many."""
    groups, hybrid = dist.new_subgroups, _fsdp._init_intra_and_inter_node_groups

    def new_subgroups(group_size: int | None = None, *args: Any, **named: Any) -> Any:
        return groups(ranks if group_size is None else group_size, *args, **named)

    def of_nodes(group: dist.ProcessGroup, _: int) -> Any:
        return hybrid(group, ranks)

    with (
        replaced(dist, "new_subgroups", new_subgroups),
        replaced(_fsdp, "_init_intra_and_inter_node_groups", of_nodes),
    ):
        yield
