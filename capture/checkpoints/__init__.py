"""Emulate checkpoints and FSDP1's state dicts, whose shards absent ranks hold.

Few scripts need it, and the fake world runs without it: `skip_checkpoints` is the only entry point.
"""

from onerank.capture.checkpoints.distributed_checkpoint import SkippedCheckpoints, skip_checkpoints

__all__ = ["SkippedCheckpoints", "skip_checkpoints"]
