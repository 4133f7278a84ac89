"""Run a script as one rank of a job and measure it.

Importing this package imports torch, so commands import it late.
"""

from onerank.capture.capture_depths import capture_at_depths
from onerank.capture.capture_ranks import CapturedRanks, capture_ranks
from onerank.capture.options import Options
from onerank.capture.parallelize.tensor.plan_file import ShardingPlan, read_plan
from onerank.capture.profiling.window_plan import WindowPlan
from onerank.capture.run import Capture, capture

__all__ = [
    "Capture",
    "CapturedRanks",
    "Options",
    "ShardingPlan",
    "WindowPlan",
    "capture",
    "capture_at_depths",
    "capture_ranks",
    "read_plan",
]
