"""Kernels that emulate collectives, so that overlapping compute is slowed as in the real job."""

from onerank.capture.collective_kernels.launch_plan import (
    CollectiveEmulation,
    LaunchPlan,
    collective_emulation,
    plan_launch,
)
from onerank.capture.collective_kernels.network import Link, Network, load_network, uniform

__all__ = [
    "CollectiveEmulation",
    "LaunchPlan",
    "Link",
    "Network",
    "collective_emulation",
    "load_network",
    "plan_launch",
    "uniform",
]
