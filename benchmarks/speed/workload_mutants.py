"""Mutants of an exported ASTRA-sim workload, each with one change.

A mutant is `legitimate` if it only makes the workload another sound one, such as a slower link:
ASTRA-sim may then report another time, and the check must have no finding.
"""

from collections.abc import Iterator

from benchmarks.speed.config_mutants import config_mutants
from benchmarks.speed.mutant_edits import Mutant
from benchmarks.speed.network_mutants import network_mutants
from benchmarks.speed.node_mutants import node_mutants


def mutants() -> Iterator[Mutant]:
    """Yield every mutant; the names are unique."""
    yield from config_mutants()
    yield from network_mutants()
    yield from node_mutants()
