"""Kernels that emulate collectives, so that overlapping compute is slowed as in the real job."""

from onerank.capture.collective_kernels.launch_plan import (
    CollectiveEmulation,
    Plan,
    collective_emulation,
    plan,
)
from onerank.capture.collective_kernels.network import Link, Network, load_network, uniform

__all__ = [
    "CollectiveEmulation",
    "Link",
    "Network",
    "Plan",
    "collective_emulation",
    "load_network",
    "plan",
    "uniform",
]
