"""Whether DistributedDataParallel ordered its buckets anew in a step."""

import contextlib
from collections.abc import Generator
from typing import Any

import torch.distributed as dist

from onerank.capture.patches import patched

_REDUCER = "torch._C._distributed_c10d.Reducer"


class BucketRebuilds:
    """Counts how often reducers rebuild their buckets, which each does once.

    The buckets follow the order of the gradients in an earlier backward: the first, or with
    `static_graph` the second, as the first learns which parameters take part.

    Attributes:
        count: rebuilds so far.
    """

    def __init__(self) -> None:
        self.count = 0

    @contextlib.contextmanager
    def counted(self) -> Generator[None]:
        """Count inside the context."""
        if not dist.is_available():
            yield
            return
        from torch._C._distributed_c10d import Reducer

        rebuild: Any = Reducer._rebuild_buckets

        def rebuild_buckets(reducer: Any) -> bool:
            rebuilt: bool = rebuild(reducer)
            self.count += rebuilt
            return rebuilt

        with patched(_REDUCER, {"_rebuild_buckets": rebuild_buckets}):
            yield
