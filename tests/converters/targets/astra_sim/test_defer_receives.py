"""Receives are deferred until the node that needs them waits for nothing else."""

from onerank.converters.targets.astra_sim.lower_for_astra_sim import defer_receives
from onerank.converters.targets.lower_step import LoweredStep


def test_a_receive_waits_for_the_other_dependencies_of_its_user() -> None:
    # receive 0 is for kernel 2 (after 1), 3 for kernel 4 (after 2), 5 for kernels 6 and 7
    step = LoweredStep([*range(8)], [[], [], [0, 1], [], [2, 3], [], [4, 5], [5]])
    defer_receives(step, [0, 3, 5])
    assert step.waits_for == [[1], [], [0], [2], [3], [], [4, 5], [5]]


def test_two_receives_of_one_kernel_and_a_receive_without_user() -> None:
    step = LoweredStep([*range(4)], [[], [], [], [0, 1, 2]])
    defer_receives(step, [0, 1])
    assert step.waits_for == [[2], [2], [], [0, 1]]
    step = LoweredStep([*range(2)], [[], []])
    defer_receives(step, [1])
    assert step.waits_for == [[], []]
