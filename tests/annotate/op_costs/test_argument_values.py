"""Argument values without the ids of tensors."""

import numpy as np

from onerank.annotate.op_costs.operands import without_tensors
from onerank.ir import GraphBuilder, Job, Kind


def test_calls_that_differ_in_tensors_alone_are_one_unless_a_tensor_is_given_twice():
    first, second, third = '[7,8,0,64,4,"cuda:0"]', '[9,8,0,64,4,"cuda:0"]', '[3,4,0,64,4,"cuda:0"]'
    given = [
        f"[{first},{second},0.5]",
        f"[{third},{first},0.5]",
        f"[{third},{first},0.25]",
        f"[{third},{third},0.5]",
        f"[[{first},{second}],null]",
    ]
    builder = GraphBuilder()
    for values in given:
        builder.add(name="aten::mul", kind=Kind.HOST_OP, input_values=values)
    graph = builder.build(Job())
    positions, texts = without_tensors(graph, graph.nodes.input_values)
    assert [texts[at] for at in positions] == [
        "[null,null,0.5]",
        "[null,null,0.5]",
        "[null,null,0.25]",
        f"[{third},{third},0.5]",
        "[[null,null],null]",
    ]
    assert len(np.unique(positions)) == 4
