"""Kernels in the place of collectives: what runs beside one is as slow as in the real job."""

from onerank.capture.standin.network import Link, Network, load_network, uniform
from onerank.capture.standin.plan import Plan, StandIn, plan, standin_of

__all__ = ["Link", "Network", "Plan", "StandIn", "load_network", "plan", "standin_of", "uniform"]
