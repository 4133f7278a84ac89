"""Run a script as one rank of a job and measure it. Imports torch: import it late."""

from onerank.capture.depths import capture_at_depths
from onerank.capture.options import Options
from onerank.capture.ranks import CapturedRanks, capture_ranks
from onerank.capture.run import Capture, capture
from onerank.capture.tensor.planfile import SlicingPlan, read_plan
from onerank.capture.windows.plan import Plan

__all__ = [
    "Capture",
    "CapturedRanks",
    "Options",
    "Plan",
    "SlicingPlan",
    "capture",
    "capture_at_depths",
    "capture_ranks",
    "read_plan",
]
