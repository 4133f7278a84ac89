"""ONNX models as graphs: shapes, FLOPs compared with PyTorch's counter, and errors."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from notes import codes
from onnx import TensorProto, helper, numpy_helper
from raised import raises_code
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertModel

import onerank
from onerank.annotate import characterise
from onerank.annotate.op_costs.op_classes import CLASSES, OpClass, classify
from onerank.cli import onerank as command
from onerank.converters.sources.onnx import convert_onnx
from onerank.ir import Graph, Phase
from onerank.ir.errors import OnnxError


def perceptron(*, batch: int | str = "batch") -> onnx.ModelProto:
    """Return x[batch, 8] -> 16 -> relu -> 4."""
    generator = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(generator.normal(size=shape).astype(np.float32), name)
        for name, shape in (("w1", (8, 16)), ("b1", (16,)), ("w2", (16, 4)))
    ]
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"], name="/up/Gemm"),
        helper.make_node("Relu", ["h"], ["a"], name="/act/Relu"),
        helper.make_node("MatMul", ["a", "w2"], ["y"], name="/down/MatMul"),
    ]
    graph = helper.make_graph(
        nodes,
        "perceptron",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, 4])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def saved(directory: Path, model: onnx.ModelProto) -> Path:
    path = directory / "model.onnx"
    path.write_bytes(model.SerializeToString())  # onnx.save wants the files of external weights
    return path


def gemm_flops(graph: Graph, phase: Phase | None = None) -> int:
    graph = characterise(graph)
    index = np.arange(len(graph))
    chosen = np.isin(classify(graph, index), [CLASSES.index(OpClass.GEMM)])
    if phase is not None:
        chosen &= graph.nodes.phase == phase
    return int(graph.nodes.flops[chosen].sum())


def test_forward_of_a_perceptron(tmp_path):
    graph, report = convert_onnx(saved(tmp_path, perceptron()), batch=32)
    assert graph.text("op") == ["aten::addmm", "aten::relu", "aten::mm"]
    assert graph.text("module") == ["up", "act", "down"]
    assert graph.text("input_shapes") == ["[[16],[32,8],[8,16]]", "[[32,16]]", "[[32,16],[16,4]]"]
    assert graph.edges.source.tolist() == [0, 1]
    assert graph.edges.target.tolist() == [1, 2]
    assert characterise(graph).nodes.flops.tolist() == [2 * 32 * 8 * 16, 32 * 16, 2 * 32 * 16 * 4]
    assert report.weights == 8 * 16 + 16 + 16 * 4
    assert report.sizes == {"batch": 32}
    # weights, then h and a together: the caller owns x, and y is allocated after h is freed
    assert graph.job.measurement.start_memory_bytes == 4 * report.weights
    assert graph.job.measurement.peak_memory_bytes == 4 * (report.weights + 2 * 32 * 16)


def test_backward_and_optimizer_of_a_perceptron(tmp_path):
    graph, report = convert_onnx(saved(tmp_path, perceptron(batch=32)), train=True)
    assert codes(report.notes) == ["onnx-never-run", "onnx-derived-backward"]
    phases = graph.nodes.phase.tolist()
    ops = list(zip(graph.text("op"), graph.text("module"), phases, strict=True))[3:]
    assert ops == [
        ("aten::mm", "down", Phase.BACKWARD),  # gradient of a
        ("aten::mm", "down", Phase.BACKWARD),  # gradient of w2
        ("aten::threshold_backward", "act", Phase.BACKWARD),
        ("aten::mm", "up", Phase.BACKWARD),  # of w1; x needs none
        ("aten::sum", "up", Phase.BACKWARD),  # of b1
        ("aten::_fused_adamw_", "", Phase.OPTIMIZER),
    ]
    assert gemm_flops(graph, Phase.BACKWARD) == 2 * 32 * (2 * 16 * 4 + 8 * 16)
    assert graph.job.measurement.start_memory_bytes == 3 * 4 * report.weights
    assert report.without_backward == {}
    graph.topological_order()


class Residual(nn.Module):
    """A convolution block of ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.inner = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        x = nn.functional.max_pool2d(torch.relu(self.norm(self.stem(x))), 3, 2, 1)
        x = torch.relu(x + self.inner(x))
        return self.head(x.mean((2, 3)))


class Bert(nn.Module):
    """Two layers that return hidden states only."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 100}
        config = BertConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, ids, mask):
        return self.bert(input_ids=ids, attention_mask=mask).last_hidden_state


def exported(directory: Path, model: nn.Module, inputs: tuple[torch.Tensor, ...], **how) -> Path:
    path = directory / "model.onnx"
    torch.onnx.export(model, inputs, path, dynamo=False, opset_version=17, **how)
    return path


def counted(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[int, int]:
    """Return FLOPs of forward, and of forward and backward."""
    with FlopCounterMode(display=False) as forward:
        result = model(*inputs)
    with FlopCounterMode(display=False) as backward:
        result.sum().backward()
    return forward.get_total_flops(), forward.get_total_flops() + backward.get_total_flops()


@pytest.mark.filterwarnings("ignore")
def test_flops_of_a_convolution_block_are_pytorchs(tmp_path):
    model, inputs = Residual(), (torch.randn(2, 3, 32, 32),)
    forward, step = counted(model, inputs)
    how = {"training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False}
    path = exported(tmp_path, model, inputs, **how)
    assert gemm_flops(convert_onnx(path)[0]) == forward
    graph, report = convert_onnx(path, train=True)
    assert gemm_flops(graph) == step
    assert report.unknown == report.without_backward == report.without_shapes == {}


@pytest.mark.filterwarnings("ignore")
def test_flops_of_bert_at_other_sizes_are_pytorchs(tmp_path):
    model = Bert().eval()
    sizes = {0: "batch", 1: "sequence"}
    names = ["input_ids", "attention_mask"]
    path = exported(
        tmp_path,
        model,
        (torch.randint(0, 100, (1, 8)), torch.ones(1, 8, dtype=torch.long)),
        input_names=names,
        dynamic_axes=dict.fromkeys(names, sizes),
    )
    graph, report = convert_onnx(path, batch=3, seq=24, train=True)
    assert report.sizes == {"batch": 3, "sequence": 24}
    assert report.unknown == report.without_backward == report.without_shapes == {}
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        given = (torch.randint(0, 100, (3, 24)), torch.ones(3, 24, dtype=torch.long))
        forward, step = counted(model, given)
    assert gemm_flops(graph, Phase.FORWARD) == forward
    assert gemm_flops(graph) == step
    assert "bert.encoder.layer.1.attention.self.query" in graph.text("module")


def test_external_weights_need_not_be_there(tmp_path):
    whole, _ = convert_onnx(saved(tmp_path, perceptron()), batch=2)
    path = tmp_path / "external.onnx"
    onnx.save(perceptron(), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    (tmp_path / "w.bin").unlink()
    graph, _ = convert_onnx(path, batch=2)
    assert graph.text("input_shapes") == whole.text("input_shapes")


def test_unknown_operators_and_control_flow_are_counted(tmp_path):
    body = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["z"])],
        "body",
        [],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [2, 8])],
    )
    graph = helper.make_graph(
        [
            helper.make_node("Frobnicate", ["x"], ["y"], domain="com.acme"),
            helper.make_node("If", ["c"], ["z"], then_branch=body, else_branch=body),
        ],
        "odd",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 8]),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
        ],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 8]),
            helper.make_tensor_value_info("z", TensorProto.FLOAT, [2, 8]),
        ],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.acme", 1)]
    converted_graph, report = convert_onnx(
        saved(tmp_path, helper.make_model(graph, opset_imports=opsets))
    )
    assert converted_graph.text("op") == ["onnx::Frobnicate", "onnx::If"]
    assert report.not_expanded == {"If": 1}
    assert [*report.without_shapes.values()] == [1]


def graph_of(name: str, nodes: list[Any], inputs: list[Any], outputs: list[Any]) -> Any:
    return helper.make_graph(nodes, name, inputs, outputs)


def value(name: str, shape: list[int], kind: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def scalar(name: str, data: Any) -> Any:
    return numpy_helper.from_array(np.array(data), name)


def controlled(node: Any, inputs: list[Any], outputs: list[Any], weights: list[Any]) -> Any:
    graph = helper.make_graph([node], "controlled", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def branches() -> dict[str, Any]:
    then = graph_of("then", [helper.make_node("Relu", ["x"], ["r"])], [], [value("r", [2, 8])])
    other = graph_of("else", [helper.make_node("Tanh", ["x"], ["t"])], [], [value("t", [2, 8])])
    return {"then_branch": then, "else_branch": other}


@pytest.mark.parametrize(("condition", "op"), [(True, "aten::relu"), (False, "aten::tanh")])
def test_a_constant_condition_takes_its_branch(tmp_path, condition, op):
    node = helper.make_node("If", ["c"], ["z"], **branches())
    weights = [scalar("c", condition)]
    model = controlled(node, [value("x", [2, 8])], [value("z", [2, 8])], weights)
    converted_graph, report = convert_onnx(saved(tmp_path, model))
    assert converted_graph.text("op") == [op]
    assert not report.not_expanded


def loop(*, ends: bool) -> Any:
    """Return three iterations of y = y @ w that output each y; with `ends`, while a value holds."""
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["y_in", "w"], ["y_out"]),
            helper.make_node("Identity", ["flag" if ends else "c_in"], ["c_out"]),
            helper.make_node("Identity", ["y_out"], ["each"]),
        ],
        "body",
        [value("i", [], TensorProto.INT64), value("c_in", [], TensorProto.BOOL),
         value("y_in", [2, 8])],
        [value("c_out", [], TensorProto.BOOL), value("y_out", [2, 8]), value("each", [2, 8])],
        [numpy_helper.from_array(np.ones((8, 8), np.float32), "w")],
    )  # fmt: skip
    node = helper.make_node("Loop", ["m", "", "x"], ["y", "all"], body=body)
    inputs = [value("x", [2, 8]), *([value("flag", [], TensorProto.BOOL)] if ends else [])]
    return controlled(node, inputs, [value("y", [2, 8]), value("all", [3, 2, 8])], [scalar("m", 3)])


def test_a_loop_of_constant_length_is_written_out(tmp_path):
    converted_graph, report = convert_onnx(saved(tmp_path, loop(ends=False)))
    assert converted_graph.text("op").count("aten::mm") == 3
    assert report.weights == 64  # once, not per turn
    assert characterise(converted_graph).nodes.flops.max() == 2 * 2 * 8 * 8
    products = [n for n, op in enumerate(converted_graph.text("op")) if op == "aten::mm"]
    assert [s for s, _ in converted_graph.edges.of(products[2])] == [products[1]]
    assert "aten::cat" in converted_graph.text("op")
    assert not report.not_expanded
    assert not report.without_shapes


def test_a_loop_that_its_body_may_end_stays(tmp_path):
    converted_graph, report = convert_onnx(saved(tmp_path, loop(ends=True)))
    assert report.not_expanded == {"Loop": 1}
    assert report.weights == 0
    assert len(converted_graph) == 1


def test_a_scan_over_an_input_is_inlined(tmp_path):
    body = helper.make_graph(
        [
            helper.make_node("Add", ["h_in", "x_t"], ["h_out"]),
            helper.make_node("Relu", ["h_out"], ["y_t"]),
        ],
        "body",
        [value("h_in", [8]), value("x_t", [8])],
        [value("h_out", [8]), value("y_t", [8])],
    )
    node = helper.make_node("Scan", ["h", "x"], ["last", "ys"], body=body, num_scan_inputs=1)
    inputs = [value("h", [8]), helper.make_tensor_value_info("x", TensorProto.FLOAT, ["seq", 8])]
    outputs = [value("last", [8]), helper.make_tensor_value_info("ys", TensorProto.FLOAT, None)]
    path = saved(tmp_path, controlled(node, inputs, outputs, []))
    converted_graph, report = convert_onnx(path, sizes={"seq": 5})
    assert converted_graph.text("op").count("aten::add") == 5
    assert converted_graph.text("op").count("aten::relu") == 5
    assert not report.not_expanded


MODELS = sorted(Path(onnx.__file__).parent.glob("backend/test/data/**/model.onnx"))


def test_every_model_that_ships_with_onnx():
    assert len(MODELS) > 100
    for path in MODELS:
        graph, report = convert_onnx(path, batch=2, seq=8, train=True)
        characterise(graph).topological_order()
        kept = report.launching + report.launching_nothing
        assert kept == report.nodes, path


def scrambled() -> onnx.ModelProto:
    model = perceptron(batch=2)
    nodes = list(reversed(model.graph.node))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def shapeless() -> onnx.ModelProto:
    model = perceptron(batch=2)
    model.graph.input[0].type.tensor_type.ClearField("shape")
    return model


def overlong() -> onnx.ModelProto:
    model = perceptron(batch=2)
    factor = scalar("factor", 2.0)
    factor.raw_data += bytes(8)
    model.graph.initializer.append(factor)
    return model


BAD = {
    "open size": (perceptron(), [], r"error\[onnx-open-size\].* \(inputs: x \[batch, 8\]\)"),
    "no such size": (
        perceptron(),
        ["--size", "seq=4"],
        r"error\[onnx-unknown-size\].* size seq; .* are: batch",
    ),
    "not a size": (
        perceptron(),
        ["--size", "batch=many"],
        r"error\[convert-size-malformed\].*batch=many",
    ),
    "zero": (perceptron(), ["--size", "batch=0"], r"error\[onnx-size-too-small\].* batch = 0;"),
    "out of order": (
        scrambled(),
        [],
        r"error\[onnx-undefined-value\].*node 0 \(/down/MatMul\) reads 'a'",
    ),
    "no rank": (shapeless(), [], r"error\[onnx-input-no-shape\].* input 'x'"),
    "empty": (onnx.ModelProto(), [], r"error\[onnx-no-graph\]"),
    "two numbers for one": (
        overlong(),
        [],
        r"error\[onnx-damaged-weight\].* 'factor' of shape \[\]",
    ),
}


@pytest.mark.parametrize(("model", "options", "message"), BAD.values(), ids=BAD.keys())
def test_bad_models_are_refused_and_nothing_is_written(tmp_path, model, options, message):
    path = saved(tmp_path, model)
    target = tmp_path / "out.et"
    done = CliRunner().invoke(command, ["convert", str(path), *options, "-o", str(target)])
    assert done.exit_code == 2
    assert re.search(message, " ".join(done.output.split()))
    assert not target.exists()


@pytest.mark.parametrize("data", [b"", b"not a model", b"\x08\x08\x12\xff\xff\xff\xff\x0f"])
def test_files_that_are_no_model_are_refused(tmp_path, data):
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    with pytest.raises(OnnxError) as caught:
        convert_onnx(path)
    assert caught.value.code == ("onnx-unreadable" if data else "onnx-no-graph")


def test_a_model_from_file_to_gpu(tmp_path):
    path, target = saved(tmp_path, perceptron()), tmp_path / "step.et"
    arguments = ["convert", str(path), "--batch", "64", "--train", "-o", str(target), "--json"]
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["sizes"] == {"batch": 64}
    graph = onerank.recost(onerank.read(target), "H100", host="none")
    assert (graph.nodes.duration_ns > 0).all()
    assert len(graph) == 9


# Sizes -------------------------------------------------------------------------------------------

TWO_62 = 1 << 62


def oversized(change: str) -> onnx.ModelProto:
    """Return the perceptron with one size that no machine can allocate."""
    model = perceptron()
    graph = model.graph
    if change == "weight":
        graph.initializer[0].dims[0] = TWO_62
        graph.initializer[0].data_location = TensorProto.EXTERNAL
    elif change == "folded axes":  # an axis of 0 hides the product, which MatMul folds into rows
        del graph.node[:2]
        graph.node[0].input[0] = "x"
        for axis in (TWO_62, TWO_62):
            graph.input[0].type.tensor_type.shape.dim.insert(1, onnx.TensorShapeProto.Dimension())
            graph.input[0].type.tensor_type.shape.dim[1].dim_value = axis
        graph.input[0].type.tensor_type.shape.dim[0].dim_value = 0
        graph.input[0].type.tensor_type.shape.dim[-1].dim_value = 16
    elif change == "all weights":
        for number in range(8):
            weight = graph.initializer.add(name=f"large{number}", data_type=TensorProto.FLOAT)
            weight.dims[:] = [1 << 58]
            weight.data_location = TensorProto.EXTERNAL
    return model


@pytest.mark.parametrize(
    ("change", "batch"),
    [("weight", 2), ("folded axes", 2), ("all weights", 2), ("", TWO_62), ("", 1 << 58)],
)
def test_sizes_beyond_64_bits_are_refused(tmp_path, change, batch):
    """Covers an axis, a product, a sum of bytes, and a size that the user gives."""
    with pytest.raises(OnnxError) as caught:
        convert_onnx(saved(tmp_path, oversized(change)), batch=batch, train=True)
    assert caught.value.code == "onnx-size-too-large"
    assert str(tmp_path / "model.onnx") in str(caught.value)


def test_the_largest_sizes_are_written_and_read(tmp_path):
    graph, _ = convert_onnx(saved(tmp_path, perceptron()), batch=1 << 53)
    assert json.loads(graph.text("input_shapes")[0])[1] == [1 << 53, 8]
    graph.write(tmp_path / "large.et")
    assert onerank.read(tmp_path / "large.et").nodes.bytes_allocated.max() == 1 << 59


def test_a_result_too_large_for_memory_is_not_computed(tmp_path):
    """Its shape is still known: ConstantOfShape of [2^20, 2^20] would be 4 TiB."""
    sizes = numpy_helper.from_array(np.array([1 << 20, 1 << 20]), "sizes")
    nodes = [
        helper.make_node("ConstantOfShape", ["sizes"], ["zeros"]),
        helper.make_node("Relu", ["zeros"], ["y"]),
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "fill", [], [value("y", [1 << 20, 1 << 20])], [sizes]),
        opset_imports=[helper.make_opsetid("", 17)],
    )
    graph, report = convert_onnx(saved(tmp_path, model))
    assert report.without_shapes == {}
    assert json.loads(graph.text("output_shapes")[-1]) == [[1 << 20, 1 << 20]]


def test_a_result_of_too_many_axes_is_not_inferred(tmp_path):
    """The shape inference of onnx lists the axes of a Reshape before it compares their number."""
    target = helper.make_tensor("target", TensorProto.INT64, [1], [-1])
    target.dims[0] = 1 << 32
    target.ClearField("int64_data")
    target.data_location = TensorProto.EXTERNAL
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("Reshape", ["x", "target"], ["y"])],
            "reshape", [value("x", [4])], [helper.make_tensor_value_info("y", 1, None)], [target],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
    )  # fmt: skip
    _, report = convert_onnx(saved(tmp_path, model))
    assert sum(report.without_shapes.values()) == 1


def functions(bodies: list[list[str]]) -> onnx.ModelProto:
    """Return a model whose function i calls the functions of bodies[i] in sequence."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    protos = []
    for number, names in enumerate(bodies):
        ends = [*(f"v{place}" for place in range(len(names))), "y"]
        nodes = [
            helper.make_node(name, [ends[place] if place else "x"],
                             [ends[place + 1] if place + 1 < len(names) else "y"],
                             domain="" if name == "Relu" else "f")
            for place, name in enumerate(names)
        ]  # fmt: skip
        protos.append(helper.make_function("f", f"f{number}", ["x"], ["y"], nodes, opsets))
    graph = helper.make_graph(
        [helper.make_node("f0", ["x"], ["y"], domain="f")],
        "calls", [value("x", [2])], [value("y", [2])],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=opsets, functions=protos)


def test_functions_are_inlined(tmp_path):
    model = functions([["f1", "f1"], ["Relu", "Relu", "Relu"]])
    assert convert_onnx(saved(tmp_path, model))[1].nodes == 6


@pytest.mark.parametrize(
    ("bodies", "code"),
    [
        ([[f"f{i + 1}"] * 2 for i in range(40)] + [["Relu"]], "onnx-too-many-nodes"),
        ([["f0"]], "onnx-recursive-function"),
        ([["f1"], ["Relu", "f0"]], "onnx-recursive-function"),
    ],
)
def test_functions_without_a_small_end_are_refused(tmp_path, bodies, code):
    with pytest.raises(OnnxError) as caught:
        convert_onnx(saved(tmp_path, functions(bodies)))
    assert caught.value.code == code


def test_a_recurrent_network_over_too_many_steps_is_one_node(tmp_path):
    weights = [
        helper.make_tensor(name, TensorProto.FLOAT, [1, 16, width], [0.0] * 16 * width)
        for name, width in (("w", 3), ("r", 4))
    ]
    node = helper.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=4)
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    for steps, nodes in ((10, 31), (1_000_000, 1)):
        graph = helper.make_graph([node], "lstm", [value("x", [steps, 2, 3])], [output], weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
        converted, report = convert_onnx(saved(tmp_path, model))
        assert len(converted) == nodes
        assert report.not_expanded == ({} if steps == 10 else {"LSTM": 1})


def without_opset(model: onnx.ModelProto) -> None:
    del model.opset_import[:]


def unknown_type(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = 99


def negative_size(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -3


@pytest.mark.parametrize(
    ("change", "code", "name"),
    [
        (without_opset, "onnx-no-opset", "model.onnx"),
        (unknown_type, "onnx-unknown-type", "99"),
        (negative_size, "onnx-negative-size", "-3"),
    ],
)
def test_a_model_that_onnx_does_not_define_is_refused(change, code, name, tmp_path):
    model = perceptron(batch=4)
    change(model)
    with raises_code(code, OnnxError, naming=("model.onnx", name)):
        convert_onnx(saved(tmp_path, model))
