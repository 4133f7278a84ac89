"""When ASTRA-sim may issue a receive."""

from onerank.converters.targets.astra_sim.exporter import defer_receives
from onerank.converters.targets.lower import Step


def test_receives_are_held_back_until_only_they_are_missing() -> None:
    # receives 0 and 3 for kernels 2 (after 1) and 4 (after 2); receive 5 for two kernels
    step = Step([*range(8)], [[], [], [0, 1], [], [2, 3], [], [4, 5], [5]])
    defer_receives(step, [0, 3, 5])
    assert step.waits_for == [[1], [], [0], [2], [3], [], [4, 5], [5]]


def test_two_receives_of_one_kernel_and_one_of_none() -> None:
    step = Step([*range(4)], [[], [], [], [0, 1, 2]])
    defer_receives(step, [0, 1])
    assert step.waits_for == [[2], [2], [], [0, 1]]
    step = Step([*range(2)], [[], []])
    defer_receives(step, [1])
    assert step.waits_for == [[], []]
