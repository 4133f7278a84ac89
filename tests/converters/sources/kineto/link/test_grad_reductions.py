"""Which calls after a backward reduce its gradients, by the operands of operators."""

import pytest
from small_traces import Trace

from onerank.ir import Phase


def tensor(storage, elements, item_bytes=4):
    return [storage + 100, storage, 0, elements, item_bytes, "cpu"]


class Step(Trace):
    """A backward that leaves a gradient of 8 elements in storage 3, and what follows."""

    def __init__(self):
        super().__init__()
        self.now = 0
        self.do("autograd::engine::evaluate_function: MmBackward0", [], [])
        self.do("aten::mm", [], [tensor(3, 8)], start=self.now - 9, dur=1)

    def do(self, name, inputs, outputs, *, start=None, dur=9):
        self.op(name, self.now if start is None else start, dur)
        for key, values in (("inputs", inputs), ("outputs", outputs)):
            self.nodes[-1][key] = {"values": values, "shapes": [], "types": []}
        self.now += 0 if start is not None else 10

    def reduced(self, tmp_path, storage, elements):
        call = [[tensor(storage, elements)], "<Object>", "<Object>", "<None>", False, -1]
        self.do("c10d::allreduce_", call, [[tensor(storage, elements)], "<Object>"])
        self.call(1, self.now - 9, 1)
        graph, _ = self.convert(tmp_path)
        (phase,) = (node.phase for node in graph if node.kind.is_communication)
        return phase


@pytest.mark.parametrize(
    ("operator", "reads", "phase"),
    [
        (("aten::mul_", [tensor(3, 8), 2], [tensor(3, 8)]), (3, 8), Phase.BACKWARD),
        (("aten::narrow", [tensor(3, 8), 0, 0, 4], [tensor(3, 4)]), (3, 4), Phase.BACKWARD),
        (("aten::cat", [[tensor(3, 8), tensor(7, 2)]], [tensor(5, 10)]), (5, 10), Phase.BACKWARD),
        (("aten::norm", [tensor(3, 8)], [tensor(5, 1)]), (5, 1), Phase.NONE),
        # of DTensors, which have no memory: as many norms as a small gradient has elements
        (
            ("aten::_foreach_norm", [[tensor(3, 8), tensor(3, 2)]], [[tensor(3, 1)] * 2]),
            (3, 2),
            Phase.NONE,
        ),
        (("aten::mm", [tensor(7, 8)], [tensor(5, 8)]), (5, 8), Phase.NONE),
        # another tensor where the gradient was; its six operands are no tensor of storage 3
        (
            ("aten::empty", [[8], 3, "<None>", "cpu", False, "<None>"], [tensor(3, 8)]),
            (3, 8),
            Phase.NONE,
        ),
        # a number, and a tensor of another library, where the gradient was
        (("aten::mul", [tensor(7, 1), tensor(3, 1, 8)], [tensor(5, 1)]), (5, 1), Phase.NONE),
        (("aten::lift_fresh", [tensor(3, 8)], [tensor(3, 8)]), (3, 8), Phase.NONE),
    ],
)
def test_what_operators_make_of_gradients(operator, reads, phase, tmp_path):
    step = Step()
    step.do(*operator)
    assert step.reduced(tmp_path, *reads) is phase


def test_gradients_reduced_behind_the_optimizers_step_are_of_no_phase(tmp_path):
    step = Step()
    step.do("Optimizer.step#SGD.step", [], [])
    assert step.reduced(tmp_path, 3, 8) is Phase.NONE
