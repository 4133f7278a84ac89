"""Kernels that emulate collectives, so that overlapping compute is slowed as in the real job."""

from onerank.capture.collective_kernels.launch_plan import Plan, StandIn, plan, standin_of
from onerank.capture.collective_kernels.network import Link, Network, load_network, uniform

__all__ = ["Link", "Network", "Plan", "StandIn", "load_network", "plan", "standin_of", "uniform"]
