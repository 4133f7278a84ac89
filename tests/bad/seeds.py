"""Small sound files for the fuzzers to change."""

import tempfile
from pathlib import Path

from onerank.ir import Collective, GraphBuilder, Job, Kind, Phase, ProcessGroup, Reason, World


def chakra(*, peer: bool = True) -> bytes:
    """Return a Chakra file with a node of every kind; `peer`: with a send, which has no receive."""
    builder = GraphBuilder()
    host = builder.add(kind=Kind.HOST_OP, name="aten::mm", thread=1, duration_ns=7000)
    gemm = builder.add(
        kind=Kind.KERNEL, name="gemm", stream=7, duration_ns=12_345, op="aten::mm",
        phase=Phase.FORWARD, input_shapes="[[2,3],[3,4]]", flops=48, grid="[1,1,1]",
    )  # fmt: skip
    call = builder.add(
        kind=Kind.COLLECTIVE, name="nccl", stream=20, collective=Collective.ALL_REDUCE,
        comm_bytes=64, group="tp",
    )  # fmt: skip
    builder.edge(host, gemm, Reason.LAUNCH)
    builder.edge(gemm, call, Reason.SYNC)
    if peer:
        sent = builder.add(kind=Kind.SEND, name="send", comm_dst=1, comm_bytes=8, comm_tag=3)
        builder.edge(call, sent, Reason.DATA)
    job = Job(world=World.of(tp=2), groups=(ProcessGroup("tp", (0, 1), "tp"),))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "small.et")
        builder.build(job).write(path)
        return path.read_bytes()


def model() -> bytes:
    """Return an ONNX model of a few operators with an open batch."""
    from onnx import TensorProto, helper

    weights = [
        helper.make_tensor("w", TensorProto.FLOAT, [4, 5], [0.5] * 20),
        helper.make_tensor("v", TensorProto.FLOAT, [5, 5], [0.5] * 25),
        helper.make_tensor("scale", TensorProto.FLOAT, [5], [0.5] * 5),
        helper.make_tensor("s", TensorProto.INT64, [1], [-1]),
    ]
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["h"]),
            helper.make_node("Gemm", ["h", "v"], ["g"], alpha=0.5, transB=1),
            helper.make_node("LayerNormalization", ["g", "scale"], ["n"], axis=-1),
            helper.make_node("Softmax", ["n"], ["p"], axis=1),
            helper.make_node("Reshape", ["p", "s"], ["y"]),
        ],
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        weights,
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    return made.SerializeToString()
