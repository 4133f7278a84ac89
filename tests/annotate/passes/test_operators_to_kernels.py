"""The launches of an operator: by rule against kept captures and an H100, and as nodes."""

import json
from pathlib import Path

import numpy as np
import pytest
from kept_traces import kept_graph

from onerank.annotate import load_gpu, recost
from onerank.annotate.models.prediction_terms import TermRecord
from onerank.annotate.op_costs.op_classes import base_name
from onerank.annotate.op_costs.operands import Call, Tensor
from onerank.annotate.passes.launch_rules import launches_need_values, launches_of
from onerank.converters.sources.kineto import convert_directory
from onerank.ir import Device, Graph, Job, Kind, Phase, Reason
from onerank.ir.graph import GraphBuilder
from onerank.ir.measurement import Measurement

TRACES = Path(__file__).parents[3] / "traces"
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int64": 8}


def read(name, directory):
    """Return a kept capture: raw traces, or a compressed graph."""
    if (TRACES / name).is_dir():
        return convert_directory(TRACES / name)[0]
    return kept_graph(name, directory)


def instances(graph):
    """Return (operator, its GPU nodes in order) of every operator instance."""
    launcher = np.full(len(graph), -1)
    launches = graph.edges.reason == Reason.LAUNCH
    launcher[graph.edges.target[launches]] = graph.edges.source[launches]
    nodes = {}
    for index in np.flatnonzero(graph.gpu_compute).tolist():
        host = int(launcher[index])
        op = graph.strings[int(graph.nodes.op[index])]
        nodes.setdefault((host if host >= 0 else -2 - index, op), []).append(index)
    return [(op, members) for (_, op), members in nodes.items()]


@pytest.mark.parametrize(
    ("name", "gpu", "count", "grids"),
    [
        ("h200-llama-8b-4l-tp4", "H200", 557, 270),
        ("h100-llama-8b-4l-tp4/trace", "H100", 557, 270),
        ("h200-llama-8b-4l-tp2-graphs/1024", "H200", 556, 433),
        ("h200-llama-8b-4l-tp2-graphs/2048", "H200", 556, 462),
        ("h200-llama-8b-4l-tp2-real/real.0", "H200", 557, 470),
        ("h200-megatron-core-pp2", "H200", 588, 80),
    ],
)
def test_every_operator_of_a_kept_capture_launches_what_it_launched(
    name, gpu, count, grids, tmp_path
):
    """Kinds in order, and the blocks of each kernel whose shape a rule gives."""
    graph, target = read(name, tmp_path), load_gpu(gpu)
    nodes, seen, shaped = graph.nodes, 0, 0
    for op, members in instances(graph):
        view = graph.node(members[0])
        call = Call.parse(
            base_name(op),
            (view.text("input_shapes"), view.text("input_types")),
            (view.text("output_shapes"), view.text("output_types")),
            view.text("input_values") if launches_need_values(op) else "",
        )
        # In a device capture the kernels of an inner operator are that operator's.
        launches = [launch for launch in launches_of(op, call, target) if launch.op in ("", op)]
        kinds = [nodes.kind[member] == Kind.MEMSET for member in members]
        assert [launch.kind == Kind.MEMSET for launch in launches] == kinds, (op, call.inputs)
        for launch, member in zip(launches, members, strict=True):
            if launch.grid:
                assert str(list(launch.grid)) == graph.node(member).text("grid"), (op, call.inputs)
                shaped += 1
        seen += 1
    assert (seen, shaped) == (count, grids)


def tensor(*shape, dtype="bfloat16"):
    return Tensor(shape, dtype, BYTES[dtype])


def launched(op, *inputs, outputs=(), values=()):
    """Return the launches of a call on an H100; tensors stand for lists of one."""
    operands = [(tuple(x) if isinstance(x, list) else (x,)) if x else None for x in inputs]
    call = Call(op, tuple(operands), tuple((x,) for x in outputs), tuple(values))
    return launches_of(f"aten::{op}", call, load_gpu("H100"))


@pytest.mark.parametrize(
    ("count", "numel", "expected"),
    # of _foreach_mul_, _foreach_add_ of lists, _foreach_add of lists, _foreach_addcdiv_,
    # _foreach_div_ by a list of numbers, _fused_adamw_ and _foreach_norm
    [
        (10, 4096, (1, 1, 1, 1, 1, 1, 3)),
        (300, 4096, (3, 5, 7, 7, 4, 9, 5)),
        (40, 2**24, (32, 32, 32, 32, 32, 32, 34)),
        (1000, 1024, (10, 16, 21, 21, 11, 28, 14)),
        (3, 2**26, (10, 10, 10, 10, 10, 10, 12)),
    ],
)
def test_lists_of_tensors_as_on_an_h100(count, numel, expected):
    """Counted with torch 2.11 and CUDA 13.0, 2026-11-25."""
    x, steps = [tensor(numel)] * count, [tensor(dtype="float32")] * count
    calls = (
        launched("_foreach_mul_", x, None, values=(None, 2.0)),
        launched("_foreach_add_", x, x),
        launched("_foreach_add", x, x),
        launched("_foreach_addcdiv_", x, x, x),
        launched("_foreach_div_", x, None, values=(None, [1.0] * count)),
        launched("_fused_adamw_", x, x, x, x, None, steps),
        launched("_foreach_norm", x, None),
    )
    assert tuple(map(len, calls)) == expected
    for launches in calls:
        assert sum(launch.share for launch in launches) == pytest.approx(1)


@pytest.mark.parametrize(
    ("sizes", "dtype", "launches"),
    [
        ((64, 64, 2048), "bfloat16", 1),
        ((64, 64, 4096), "bfloat16", 2),
        ((256, 256, 4096), "bfloat16", 2),
        ((512, 512, 4096), "bfloat16", 1),
        ((512, 512, 8192), "bfloat16", 2),
        ((512, 1024, 8192), "bfloat16", 1),
        ((512, 1024, 16384), "bfloat16", 2),
        ((2048, 1024, 16384), "bfloat16", 1),
        ((2048, 1024, 65536), "bfloat16", 2),
        ((1024, 256, 4096), "float16", 2),
    ],
)
def test_split_products_as_on_an_h100(sizes, dtype, launches):
    m, n, k = sizes
    operands = tensor(m, k, dtype=dtype), tensor(k, n, dtype=dtype)
    names = [launch.name for launch in launched("mm", *operands, outputs=[tensor(m, n)])]
    assert len(names) == launches
    assert ("cublasLt::splitKreduce_kernel" in names) == (launches == 2)


def test_a_top_k_of_long_rows_is_shared_among_blocks_as_on_an_h100():
    """22 kernels for 4 to 100 rows of 102,400 logits, 2 for rows of 256 (torch 2.11)."""
    for rows, columns, kernels in ((4, 102_400, 22), (100, 102_400, 22), (600, 256, 2)):
        launches = launched("topk", tensor(rows, columns, dtype="float32"))
        assert len(launches) == kernels
        assert sum(launch.share for launch in launches) == 1
    router = tensor(1, 256, dtype="float32")
    assert len(launched("topk", router, values=(None, 8, -1, True, False))) == 1


@pytest.mark.parametrize(
    ("tokens", "expected"),
    # of embedding_dense_backward, _index_put_impl_, sort of one row and of eight, nonzero,
    # masked_select, index by a mask, _unique2, bincount and histc
    [
        (2048, (2, 12, 5, 5, 4, 5, 5, 4, 6, 2)),
        (4096, (31, 19, 5, 5, 4, 5, 5, 23, 6, 2)),
        (16384, (31, 19, 22, 17, 5, 6, 6, 23, 6, 2)),
    ],
)
def test_sorts_and_selections_as_on_an_h100(tokens, expected):
    index, rows = tensor(tokens, dtype="int64"), tensor(tokens, 512)
    weight = tensor(32000, 512)
    calls = (
        launched("embedding_dense_backward", rows, index, outputs=[weight]),
        launched("_index_put_impl_", rows, index, rows, values=(None, None, None, True)),
        launched("sort", index),
        launched("sort", tensor(8, tokens)),
        launched("nonzero", index),
        launched("masked_select", index, index),
        launched("index", rows, Tensor((tokens,), "bool", 1)),
        launched("_unique2", index),
        launched("bincount", index),
        launched("histc", rows),
    )
    assert tuple(map(len, calls)) == expected
    for launches in calls:
        assert sum(launch.share for launch in launches) == 1


@pytest.mark.parametrize(
    ("words", "width", "tokens", "sums_us"),
    [
        (32768, 1280, 16384, (148.5, 144.2)),
        (32768, 1280, 32768, (277.9, 250.7)),
        (152064, 4096, 16384, (479.2, 487.4)),
        (8192, 512, 16384, (33.0, 24.2)),
    ],
)
def test_sums_of_an_embedding_by_random_indices(words, width, tokens, sums_us):
    """Blocks without a sum take time, too (2026-11-27-embedding-backward-h100)."""
    index, gradient = tensor(tokens, dtype="int64"), tensor(tokens, width)
    launches = launched("embedding_dense_backward", gradient, index, outputs=[tensor(words, width)])
    floor_us = load_gpu("H100").launch_floor_ns / 1000
    for launch, measured_us in zip(launches[-2:], sums_us, strict=True):
        assert launch.floors * floor_us == pytest.approx(measured_us, rel=0.24)
    total_us = sum(launch.floors for launch in launches[-2:]) * floor_us
    assert total_us == pytest.approx(sum(sums_us), rel=0.12)


def test_attention_as_on_an_h100():
    heads_first = tensor(2, 8, 4096, 128), tensor(2, 2, 4096, 128)
    heads_last = tensor(2, 4096, 8, 128), tensor(2, 4096, 2, 128)
    for name, forward, backward in (("cudnn", 2, 4), ("flash", 1, 3), ("efficient", 1, 2)):
        grouped = heads_last if name == "flash" else heads_first
        for (query, key), more in (((grouped[0], grouped[0]), 0), (grouped, 2)):
            more_launches = 0 if name == "efficient" else more
            assert len(launched(f"_{name}_attention_forward", query, key, key)) == forward
            launches = launched(f"_{name}_attention_backward", query, query, key, key)
            assert len(launches) == backward + more_launches
    # The keys of a context-parallel rank are longer than its queries.
    longer = tensor(2, 16384, 2, 128)
    assert len(launched("_flash_attention_backward", *[heads_last[0]] * 2, *[longer] * 2)) == 5


@pytest.mark.parametrize(
    ("sequences", "keys", "measured_us"),
    [(1, 256, 2.6), (1, 1024, 5.2), (1, 4096, 15.8), (1, 16384, 28.8), (4, 1024, 5.6),
     (4, 4096, 7.7), (16, 256, 2.8), (128, 4096, 2.0)],
)  # fmt: skip
def test_parts_of_a_latent_decode_are_combined_as_on_an_h100(sequences, keys, measured_us):
    """FlashMLA with 16 heads: 2026-11-27-flash-mla-h100."""
    vectors, values = tensor(sequences, keys, 576), tensor(sequences, keys, 512)
    call = Call(
        "latent_attention",
        tuple((x,) for x in (tensor(sequences, 16, 576), vectors, values)),
        ((tensor(sequences, 16, 512),),),
        (),
    )
    h100 = load_gpu("H100")
    attention, combine = launches_of("onerank_serving::latent_attention", call, h100)
    assert (attention.share, combine.share) == (1, 0)
    assert combine.floors * h100.launch_floor_ns / 1000 == pytest.approx(measured_us, rel=0.2)
    assert len(launches_of("onerank_serving::latent_attention", call, load_gpu("B200"))) == 1


# A launch takes 320 blocks of 65,536 elements or, of four lists, 36 tensors: it divides the second
# tensor by its blocks, the small ones by their number.
SIZES = [(3000, 2000), (9000, 7000), (0, 5), *[(400, 30)] * 80]


def captured(op: str, shapes: list, types: list[str], values: list, **outputs) -> Graph:
    """Return a capture on a CPU of one call of an operator."""
    builder = GraphBuilder()
    builder.add(
        kind=Kind.HOST_OP, thread=1, name=op, op=op, phase=Phase.OPTIMIZER,
        input_shapes=json.dumps(shapes, separators=(",", ":")),
        input_types=json.dumps(types),
        input_values=json.dumps(values, separators=(",", ":")),
        **outputs or {"output_shapes": "[[]]", "output_types": '["None"]'},
    )  # fmt: skip
    return builder.build(Job(device=Device("cpu", "none")))


def listed(first_id: int, sizes: list, item: int = 2) -> list:
    """Return the records of a list of tensors in storages of their own."""
    sized = enumerate(map(np.prod, sizes), first_id)
    return [[i, i, 0, int(size), item, "cuda:0"] for i, size in sized]


def list_type(dtype: str, sizes: list) -> str:
    return f"GenericList[{','.join([f'Tensor({dtype})'] * len(sizes))}]"


def adamw(sizes: list) -> Graph:
    lists, steps = [sizes] * 4, [()] * len(sizes)
    return captured(
        "aten::_fused_adamw_",
        [*lists, [], steps, [], []],
        [*[list_type("c10::BFloat16", sizes)] * 4, "GenericList[]", list_type("float", steps),
         "Double", "Bool"],
        [*[listed(1000 * i, sizes) for i in range(1, 5)], [], listed(5000, steps, 4), 0.1, True],
    )  # fmt: skip


def launch_operands(graph: Graph) -> list[tuple[list, list, list]]:
    """Return (shapes, types, values) of the kernels that take operands."""
    views = [graph.node(int(index)) for index in np.flatnonzero(graph.gpu_compute)]
    names = ("input_shapes", "input_types", "input_values")
    texts = [[view.text(name) for name in names] for view in views]
    return [tuple(map(json.loads, each)) for each in texts if each[0]]


def test_a_launch_of_a_fused_optimizer_has_the_tensors_that_it_takes():
    graph = adamw(SIZES)
    made = recost(graph, load_gpu("H100"))
    whole = recost(graph, load_gpu("H100"), record=TermRecord(np.zeros(0, dtype=np.int64)))
    launches = launch_operands(made)
    # 92 blocks of the first tensor and 228 of the second; 320 and 320; 94 of it and 35 tensors.
    counts = [[len(shapes) for shapes in row[0]] for row in launches]
    assert counts == [[n, n, n, n, 0, n, 0, 0] for n in (2, 1, 1, 36, 36, 9)]
    assert [row[0][0][-1] for row in launches[:3]] == [[228 * 65536], [320 * 65536], [320 * 65536]]
    for position in range(4):
        # Every element once, in order, at its offset in the storage that the operator names.
        taken: dict[int, int] = {}
        for shapes, _, values in launches:
            for shape, (_, storage, offset, numel, item, _) in zip(
                shapes[position], values[position], strict=True
            ):
                assert offset == taken.get(storage, 0)
                assert (numel, item) == (np.prod(shape), 2)
                taken[storage] = offset + numel
        expected = {
            1000 * (position + 1) + i: np.prod(size) for i, size in enumerate(SIZES) if all(size)
        }
        assert taken == expected
    for shapes, types, values in launches:
        # A step count goes to each launch that takes a part of its tensor.
        assert [record[0] - 5000 for record in values[5]] == [
            record[0] - 1000 for record in values[0]
        ]
        assert types[5].count("Tensor(float)") == len(shapes[5])
        assert (types[4], values[6:]) == ("GenericList[]", [0.1, True])
    for column in ("flops", "bytes_read", "bytes_written", "duration_ns"):
        sums = [int(getattr(g.nodes, column)[g.gpu_compute].sum()) for g in (made, whole)]
        assert sums[0] == sums[1] > 0, column


def test_the_operands_of_all_launches_grow_with_the_tensors():
    """They were the operator's in each launch, so they grew with the square."""
    length = [
        sum(len(json.dumps(row)) for row in launch_operands(recost(adamw([(400, 30)] * n), gpu)))
        for gpu in [load_gpu("H100")]
        for n in (360, 1440)
    ]
    assert length[1] == pytest.approx(4 * length[0], rel=0.02)


def test_operands_of_unequal_dtypes_are_launched_one_by_one_with_their_tensors():
    sizes = [(64, 8), (32,), (5, 5)]
    graph = captured(
        "aten::_foreach_mul_",
        [sizes, []],
        [list_type("c10::BFloat16", sizes), "Tensor(float)"],
        [listed(1, sizes), [9, 9, 0, 1, 4, "cuda:0"]],
    )
    launches = launch_operands(recost(graph, load_gpu("H100")))
    assert [row[0] for row in launches] == [[list(size), []] for size in sizes]
    assert [row[1] for row in launches] == [["Tensor(c10::BFloat16)", "Tensor(float)"]] * 3
    assert [row[2][0][0] for row in launches] == [1, 2, 3]


def test_results_numbers_and_strides_are_divided_as_their_lists():
    sizes = [(6000, 4000), (3000, 2000)]
    names = {"out_type": list_type("float", sizes), "out": listed(7, sizes, 4)}
    graph = captured(
        "aten::_foreach_div",
        [sizes, [[], []]],
        [list_type("float", sizes), "GenericList[Double,Double]"],
        [listed(1, sizes, 4), [0.5, 0.25]],
        input_strides="[[[1,6000],[2000,1]],[[],[]]]",
        output_shapes=json.dumps([sizes]),
        output_types=json.dumps([names["out_type"]]),
        output_values=json.dumps([names["out"]], separators=(",", ":")),
    )
    made = recost(graph, load_gpu("H100"))
    views = [made.node(int(index)) for index in np.flatnonzero(made.gpu_compute)]
    columns = ("input_shapes", "input_strides", "input_values", "output_shapes", "output_values")
    first, second = ([json.loads(view.text(name)) for name in columns] for view in views)
    cut, rest = 320 * 65536, 6000 * 4000 - 320 * 65536
    assert first == [
        [[[cut]], [[]]], [[[1]], [[]]], [[[1, 1, 0, cut, 4, "cuda:0"]], [0.5]],
        [[[cut]]], [[[7, 7, 0, cut, 4, "cuda:0"]]],
    ]  # fmt: skip
    last = [2, 2, 0, 6_000_000, 4, "cuda:0"]
    assert second == [
        [[[rest], [3000, 2000]], [[], []]], [[[1], [2000, 1]], [[], []]],
        [[[1, 1, cut, rest, 4, "cuda:0"], last], [0.5, 0.25]],
        [[[rest], [3000, 2000]]],
        [[[7, 7, cut, rest, 4, "cuda:0"], [8, 8, *last[2:]]]],
    ]  # fmt: skip


@pytest.mark.parametrize("target", ["H200", "A100", "MI300X"])
def test_launches_share_work_and_time_of_their_operator(target):
    graph = convert_directory(TRACES / "cpu-llama-2l-tp4")[0]
    whole = recost(graph, target, record=TermRecord(np.zeros(0, dtype=np.int64)))
    made = recost(graph, target)
    assert (len(made) > len(whole)) == load_gpu(target).is_nvidia
    for column in ("duration_ns", "flops", "bytes_read", "bytes_written"):
        sums = [int(getattr(g.nodes, column)[g.gpu_compute].clip(0).sum()) for g in (made, whole)]
        assert sums[0] == sums[1], column
    assert made.nodes.bytes_allocated.sum() == whole.nodes.bytes_allocated.sum()
    assert made.nodes.bytes_freed.sum() == whole.nodes.bytes_freed.sum()
    ids = made.nodes.id.tolist()
    assert set(whole.nodes.id.tolist()) <= set(ids)
    assert len(set(ids)) == len(ids)
    kernels = np.flatnonzero(made.gpu_compute)
    ends = made.nodes.start_ns[kernels] + made.nodes.duration_ns[kernels]
    assert (made.nodes.start_ns[kernels][1:] >= ends[:-1]).all()
    # A chain on one stream: each kernel waits for the one before.
    pairs = set(zip(made.edges.source.tolist(), made.edges.target.tolist(), strict=True))
    assert all(
        pair in pairs for pair in zip(kernels[:-1].tolist(), kernels[1:].tolist(), strict=True)
    )


def image(*shape, dtype="bfloat16", channels_last=False):
    _, channels, height, width = shape
    strides = (channels * height * width, 1, width * channels, channels) if channels_last else ()
    return Tensor(shape, dtype, 2 if dtype == "bfloat16" else 4, strides)


@pytest.mark.parametrize(
    ("channels", "size", "window", "stride", "expected"),
    [  # per layout: forward without and with a bias, backward with one
        (128, 28, 3, 1, ((4, 5, 10), (1, 2, 5))),
        (256, 64, 3, 1, ((5, 6, 11), (2, 3, 6))),
        (512, 7, 3, 1, ((4, 5, 10), (1, 2, 5))),
        (320, 64, 1, 1, ((1, 2, 4), (1, 2, 5))),
    ],
)
def test_convolutions_as_on_an_h100(channels, size, window, stride, expected):
    """Numbers of kernels of bf16 convolutions, measured on an H100 (torch 2.11)."""
    batch = {28: 32, 7: 32, 64: 8}[size] if window == 3 else 2
    weight = Tensor((channels, channels, window, window), "bfloat16", 2)
    bias = Tensor((channels,), "bfloat16", 2)
    numbers = [stride] * 2, [window // 2] * 2, [1, 1], False, [0, 0], 1
    for channels_last, counts in zip((False, True), expected, strict=True):
        x = image(batch, channels, size, size, channels_last=channels_last)
        forward = [
            launched("convolution", x, weight, given, outputs=[x], values=(*[None] * 3, *numbers))
            for given in (None, bias)
        ]
        backward = launched(
            "convolution_backward",
            *(x, x, weight),
            outputs=[x, weight, bias],
            values=(*[None] * 3, [channels], *numbers, [True] * 3),
        )
        launches = (*forward, backward)
        assert tuple(map(len, launches)) == counts
        for one in launches:
            assert sum(launch.share for launch in one) == pytest.approx(1)


@pytest.mark.parametrize(
    ("image", "weight", "measured_us"),
    [
        ([32, 64, 56, 56], [64, 64, 3, 3], 252.7),
        ([32, 256, 14, 14], [256, 256, 3, 3], 251.0),
        ([32, 512, 7, 7], [2048, 512, 1, 1], 108.7),
    ],
)
def test_convolutions_without_tf32(image, weight, measured_us):
    """One kernel each on an H200, without copies of its operands (torch 2.11, 2026-11-28)."""
    tensors = [[at, 1, 0, 1, 4, "cuda:0"] for at in (1, 2)]
    numbers = [[1, 1], [weight[2] // 2] * 2, [1, 1], False, [0, 0], 1]
    builder = GraphBuilder()
    builder.add(
        kind=Kind.HOST_OP,
        thread=1,
        name="aten::convolution",
        op="aten::convolution",
        input_shapes=json.dumps([image, weight, [], *([[], []],) * 3, [], [[], []], []]),
        input_types=json.dumps(
            [*("Tensor(float)",) * 2, "None", *("GenericList[Int,Int]",) * 3, "Bool",
             "GenericList[Int,Int]", "Int"]
        ),
        input_values=json.dumps([*tensors, "", *numbers]),
        output_shapes=json.dumps([[image[0], weight[0], *image[2:]]]),
        output_types=json.dumps(["Tensor(float)"]),
    )  # fmt: skip
    measurement = Measurement(tf32_convolutions=False)
    graph = builder.build(Job(device=Device("cpu", "none"), measurement=measurement))
    predicted = recost(graph, "H200")
    assert predicted.gpu_compute.sum() == 1
    assert predicted.nodes.duration_ns[predicted.gpu_compute][0] / 1000 == pytest.approx(
        measured_us, rel=0.15
    )


@pytest.mark.parametrize(
    ("keys", "kernel", "measured_us"),
    [
        (24, "bitonicSortKVInPlace", 4.03),
        (96, "radixSortKVInPlace", 8.67),
        (600, "radixSortKVInPlace", 25.66),
        (1600, "radixSortKVInPlace", 27.3),
        (3000, "radixSortKVInPlace", 31.07),
    ],
)
def test_a_block_sorts_a_short_row(keys, kernel, measured_us):
    """Rows of 64-bit keys on an H100, torch 2.11 (2026-11-27)."""
    h100 = load_gpu("H100")
    operand = Tensor((keys,), "int64", 8)
    last = launches_of("aten::sort", Call("sort", ((operand,),), ((operand,),), ()), h100)[-1]
    assert last.name == kernel
    assert last.floors * h100.launch_floor_ns / 1e3 == pytest.approx(measured_us, rel=0.12)


def test_one_sample_of_each_row_checks_its_weights():
    """The kernels of `multinomial` of 8 rows of 128,256 words on an H100: 80 us."""
    weights = Tensor((8, 128256), "float32", 4)
    sampled = Tensor((8, 1), "int64", 8)
    call = Call("multinomial", ((weights,), (), (), ()), ((sampled,),), (None, 1, False, None))
    launches = launches_of("aten::multinomial", call, load_gpu("H100"))
    assert len(launches) == 16
    assert [base_name(launch.op) for launch in launches if launch.internal_bytes] == [
        *("min", "max", "sum", "exponential_", "div"),
    ]


@pytest.mark.parametrize(
    ("op", "shape", "layers", "dtype", "measured"),
    [
        ("_cudnn_rnn", (150, 32, 768), 6, "float32", 1813),
        ("_cudnn_rnn_backward", (150, 32, 768), 6, "float32", 2743),
        ("_cudnn_rnn_backward", (400, 16, 800), 10, "float16", 8063),
        ("_cudnn_rnn_backward", (160, 16, 1024), 6, "float16", 2923),
        ("_cudnn_rnn", (100, 64, 1024), 1, "float16", 6),
    ],
)
def test_recurrent_layers_launch_each_step_as_on_an_h200(op, shape, layers, dtype, measured):
    """Helpers between the layers are left out."""
    _, batch, size = shape
    weights = tuple(tensor(3 * size, size, dtype=dtype) for _ in range(2 * layers))
    state = (tensor(layers, batch, size, dtype=dtype),)
    given = ((tensor(*shape, dtype=dtype),), weights, None, None, state)
    call = Call(op, given, ((tensor(*shape, dtype=dtype),),), ())
    launches = launches_of(f"aten::{op}", call, load_gpu("H200"))
    assert len(launches) == pytest.approx(measured, rel=0.02, abs=5)
    assert sum(launch.share for launch in launches) == pytest.approx(1)


@pytest.mark.parametrize(
    ("added", "beta", "kinds"),
    [
        ((768, 768), 1, [Kind.MEMCPY, Kind.KERNEL]),
        ((768, 768), 0, [Kind.KERNEL]),
        ((768,), 1, [Kind.KERNEL]),
    ],
)
def test_a_product_is_added_to_a_copy_of_a_matrix(added, beta, kinds):
    """As in Muon's iterations on an H200; a bias is added by the product's own kernel."""
    square = tensor(768, 768)
    call = Call(
        "addmm", ((tensor(*added),), (square,), (square,)), ((square,),), ("", "", "", beta)
    )
    launches = launches_of("aten::addmm", call, load_gpu("H200"))
    assert [launch.kind for launch in launches] == kinds
