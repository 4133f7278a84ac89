"""Run a script as one rank of a job and measure it.

`run` captures in a separate process. `capture`, `capture_at_depths` and `capture_ranks` run the
script in this process, or in forks of it.

The names below are imported on first use. The command line imports `onerank.capture.options` and
`onerank.capture.validate_options` to check its options, and must not import torch for that.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onerank.capture.capture_script import (
        Capture,
        CapturedRanks,
        capture,
        capture_at_depths,
        capture_ranks,
    )
    from onerank.capture.isolated_capture import run
    from onerank.capture.options import Options
    from onerank.capture.parallelize.tensor.plan_file import ShardingPlan, read_plan
    from onerank.capture.profiling.window_plan import WindowPlan

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
    "run",
]

_MODULES = {
    "Capture": "capture_script",
    "CapturedRanks": "capture_script",
    "Options": "options",
    "ShardingPlan": "parallelize.tensor.plan_file",
    "WindowPlan": "profiling.window_plan",
    "capture": "capture_script",
    "capture_at_depths": "capture_script",
    "capture_ranks": "capture_script",
    "read_plan": "parallelize.tensor.plan_file",
    "run": "isolated_capture",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'onerank.capture' has no attribute {name!r}")
    return getattr(importlib.import_module(f"onerank.capture.{_MODULES[name]}"), name)
