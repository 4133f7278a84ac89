"""Extrapolation of synthetic steps: the composed step equals that of a deeper model."""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from notes import has_note, note_of
from raised import raises_code

from onerank.analysis.step_time import replay
from onerank.converters.expand.layers import Pattern, check_depths, extrapolate
from onerank.converters.expand.layers.captured_layers import LayerPlan, Renaming
from onerank.converters.expand.layers.nonlayer_nodes import (
    DepthExtrapolation,
    align,
    extrapolate_python_calls,
    extrapolate_shapes,
    extrapolate_types,
    repeat_units,
)
from onerank.ir import (
    Blocks,
    Edges,
    Evidence,
    Graph,
    GraphBuilder,
    Job,
    Kind,
    Measurement,
    MemoryLog,
    Phase,
    Reason,
)

FORWARD_THREAD, BACKWARD_THREAD, COMPUTE, COMMUNICATION = 1, 0, 7, 20


class Step:
    """A step on a GPU: two threads, two streams, a fetch before every layer.

    Layer k takes (2 + k % turns) us forward and twice that backward; `extra` layers do more.
    """

    def __init__(self, layers: int, turns: int = 1, extra: tuple[int, ...] = ()) -> None:
        self.builder = GraphBuilder()
        self.now = 0
        self.last: dict[Any, int] = {}
        self.free_at: dict[int, int] = defaultdict(int)
        self.layers, self.turns, self.extra = layers, turns, extra
        self.walk()

    def host(self, name: str, thread: int, module: str, phase: Phase, **columns: Any) -> int:
        index = self.builder.add(
            name=name, op=name, kind=Kind.HOST_OP, thread=thread, start_ns=self.now,
            duration_ns=500, module=module, phase=phase, micro_batch=0,
            evidence=Evidence.MEASURED, **columns,
        )  # fmt: skip
        self.now += 1000
        self.after(("thread", thread), index, Reason.PROGRAM_ORDER)
        return index

    def kernel(self, launcher: int, duration_ns: int, stream: int = COMPUTE, **columns: Any) -> int:
        row = self.builder.row(launcher)
        start = max(self.now, self.free_at[stream])
        self.free_at[stream] = start + duration_ns
        kernel_columns = {"name": f"{row['name']}_kernel", "kind": Kind.KERNEL, **columns}
        index = self.builder.add(
            op=row["op"], stream=stream, start_ns=start, duration_ns=duration_ns,
            module=row["module"], phase=row["phase"], micro_batch=0,
            evidence=Evidence.MEASURED, **kernel_columns,
        )  # fmt: skip
        self.builder.edge(launcher, index, Reason.LAUNCH)
        self.after(("stream", stream), index, Reason.STREAM_ORDER)
        return index

    def after(self, lane: tuple[str, int], index: int, reason: Reason) -> None:
        if lane in self.last:
            self.builder.edge(self.last[lane], index, reason)
        self.last[lane] = index

    def walk(self) -> None:
        fetched: int | None = None
        kept: dict[int, int] = {}
        self.kernel(self.host("embed", FORWARD_THREAD, "model.embed", Phase.FORWARD), 700)
        for layer in range(self.layers):
            module = f"model.layers.{layer}"
            turn = layer % self.turns
            host = self.host("fetch", FORWARD_THREAD, module, Phase.FORWARD)
            ahead = self.kernel(
                host, 900, COMMUNICATION, kind=Kind.COLLECTIVE, collective=2, comm_bytes=4096,
                group="dp",
            )  # fmt: skip
            work = self.host(
                "mm", FORWARD_THREAD, f"{module}.mlp", Phase.FORWARD,
                input_shapes=f"[[8,{turn + 1}]]", bytes_allocated=100,
            )  # fmt: skip
            kept[layer] = self.kernel(work, 2000 + 1000 * turn + 10 * layer)
            if fetched is not None:  # what was fetched in the layer before
                self.builder.edge(fetched, kept[layer], Reason.SYNC)
            fetched = ahead
            if layer in self.extra:
                self.kernel(self.host("relu", FORWARD_THREAD, module, Phase.FORWARD), 100)
        self.kernel(self.host("loss", FORWARD_THREAD, "", Phase.FORWARD), 300)
        shared: list[int] = []
        for layer in reversed(range(self.layers)):
            module = f"model.layers.{layer}.mlp"
            turn = layer % self.turns
            work = self.host(
                "mm", BACKWARD_THREAD, module, Phase.BACKWARD, bytes_freed=100,
                bytes_allocated=30, input_shapes=f"[[{turn + 1},8]]",
            )  # fmt: skip
            gradient = self.kernel(work, 4000 + 2000 * turn + 10 * layer)
            self.builder.edge(kept[layer], gradient, Reason.DATA)
            shared.append(
                self.kernel(
                    work, 50, COMMUNICATION, kind=Kind.COLLECTIVE, collective=0, comm_bytes=64,
                    group="dp",
                )
            )  # fmt: skip
            self.host("accumulate", BACKWARD_THREAD, "", Phase.BACKWARD)
        self.kernel(self.host("embed_backward", BACKWARD_THREAD, "model.embed", Phase.BACKWARD), 70)
        shapes = ",".join(["[50]"] + ["[8,8]"] * self.layers + ["[50]"])
        types = ",".join(["Tensor(float)"] * (self.layers + 2))
        step = self.host(
            "_foreach_mul_", FORWARD_THREAD, "", Phase.OPTIMIZER, input_shapes=f"[[{shapes}],[]]",
            input_types=f'["GenericList[{types}]","Scalar"]', bytes_freed=30 * self.layers,
        )  # fmt: skip
        for number in range(self.layers + 1):
            kernel = self.kernel(step, 600, name="multi_tensor_apply")
            for call in shared if number == 0 else ():  # of every layer
                self.builder.edge(call, kernel, Reason.SYNC)
        for _ in range(self.layers):
            self.host("item", FORWARD_THREAD, "", Phase.OPTIMIZER)
            self.host("read", FORWARD_THREAD, "", Phase.OPTIMIZER)

    def graph(self) -> Graph:
        measurement = Measurement(
            step_ns=(self.now,),
            profiled_step_ns=self.now,
            start_memory_bytes=1000 * self.layers,
            peak_memory_bytes=1130 * self.layers + 7,
        )
        return self.builder.build(Job(measurement=measurement))


def step(layers: int, **options: Any) -> Graph:
    return Step(layers, **options).graph()


def by_lane(graph: Graph) -> dict[int, tuple[Any, int]]:
    """Return per node its thread or stream, and its place there."""
    count: dict[Any, int] = defaultdict(int)
    places: dict[int, tuple[Any, int]] = {}
    for index in graph.topological_order().tolist():
        node = graph.node(index)
        lane = node.value("stream"), node.value("thread")
        places[index] = lane, count[lane]
        count[lane] += 1
    return places


def structure(graph: Graph) -> tuple[dict[Any, Any], set[Any]]:
    place = by_lane(graph)
    nodes = {
        place[index]: (
            *(node.kind, node.name, node.phase, node.text("module"), node.text("input_shapes")),
            *(node.text("input_types"), node.value("bytes_allocated"), node.value("bytes_freed")),
            *(node.collective, node.value("comm_bytes"), node.text("group")),
        )
        for index, node in enumerate(graph)
    }
    edges = {
        (place[source], place[target], reason)
        for target in range(len(graph))
        for source, reason in graph.edges.of(target)
    }
    return nodes, edges


def test_only_the_layers_of_a_module_are_renumbered():
    names = Renaming("layers", LayerPlan(1, 1, 4, range(1, 3)))
    assert names.moved("layers.1.mlp", 5) == "layers.5.mlp"
    assert names.moved("vision.layers.1.mlp", 5) == "vision.layers.1.mlp"


@pytest.mark.parametrize(
    ("layers", "depth", "turns"),
    [((2, 4), 8, 1), ((1, 3), 5, 1), ((3, 4), 4, 1), ((2, 4), 8, 2), ((3, 5, 7), 11, 2),
     ((3, 6), 15, 3)],
)  # fmt: skip
def test_nodes_and_every_edge_are_those_of_the_deeper_step(layers, depth, turns):
    extrapolated = extrapolate({count: step(count, turns=turns) for count in layers}, depth)
    nodes, edges = structure(extrapolated)
    expected_nodes, expected_edges = structure(step(depth, turns=turns))
    assert nodes == expected_nodes
    assert edges == expected_edges
    for stream in (COMPUTE, COMMUNICATION):
        on = extrapolated.nodes.stream == stream
        ends = extrapolated.nodes.start_ns[on] + extrapolated.nodes.duration_ns[on]
        assert (extrapolated.nodes.start_ns[on][1:] >= ends[:-1]).all()
    assert len(set(extrapolated.nodes.id.tolist())) == len(extrapolated)


def test_copies_take_the_median_and_what_grows_follows_the_line():
    extrapolated = extrapolate({2: step(2), 4: step(4)}, 8)
    took = {
        (node.text("module"), node.phase): (node.duration_ns, node.evidence)
        for node in extrapolated
        if node.name == "mm_kernel"
    }
    forward = [took[f"model.layers.{n}.mlp", Phase.FORWARD] for n in range(8)]
    measured, copied = Evidence.MEASURED, Evidence.EXTRAPOLATED
    assert forward[:3] == [(2000, measured), (2010, measured), (2020, measured)]
    assert forward[3:7] == [(2015, copied)] * 4  # the median of layers 1 and 2
    assert forward[7] == (2030, measured)
    launches = [node for node in extrapolated if node.name == "multi_tensor_apply"]
    assert len(launches) == 9
    assert sum(node.duration_ns for node in launches) == 9 * 600
    assert {node.evidence for node in launches} == {copied}


def test_a_wait_for_the_launch_queue_is_left_out():
    """The loop's first launch waits 50 us for queue room; the replay does not."""
    free = step(4)
    index = free.text("name").index("item")
    kernel = next(i for i, name in enumerate(free.text("name")) if name == "mm_kernel")
    late, queued = free.nodes.start_ns.copy(), free.nodes.blocked_ns.copy()
    late[late >= late[index]] += 50_000
    queued[index] = 50_000
    edges = free.edges
    full = Graph(
        free.nodes,
        Edges.from_pairs(
            len(free),
            np.append(edges.source, kernel),
            np.append(edges.target, index),
            np.append(edges.reason, np.uint8(Reason.LAUNCH_QUEUE)),
        ),
        free.strings,
        free.job,
    ).with_columns(start_ns=late, blocked_ns=queued)
    extrapolated = extrapolate({2: step(2), 4: full}, 8)
    assert not (extrapolated.edges.reason == Reason.LAUNCH_QUEUE).any()
    expected = replay(extrapolate({2: step(2), 4: free}, 8)).step_time_ns
    assert replay(extrapolated).step_time_ns == expected
    assert replay(full).step_time_ns == 27_500 + 50_000  # when its last operator ends


def test_the_lines_and_the_replay_of_memory():
    extrapolated = extrapolate({count: step(count) for count in (1, 2, 4)}, 8)
    measurement = extrapolated.job.measurement
    depths = measurement.depths
    assert depths is not None
    assert (depths.module, depths.first, depths.period, depths.copied) == ("model.layers", 0, 1, 4)
    comm = depths.comm_bytes
    assert (comm.values, comm.at_depth) == ((4160, 2 * 4160, 4 * 4160), 8 * 4160)
    assert comm.slope == pytest.approx(4096 + 64)
    assert comm.residual == pytest.approx(0, abs=1e-12)
    assert measurement.start_memory_bytes == 8000
    assert depths.replayed_peak_bytes == 8000 + 8 * 100 + 30  # in the first backward operator
    assert measurement.peak_memory_bytes == 1130 * 8 + 7
    assert (measurement.step_ns, measurement.profiled_step_ns) == ((), 0)
    assert depths.composed_compute_ns == int(
        extrapolated.nodes.duration_ns[extrapolated.gpu_compute].sum()
    )
    assert depths.layer_mismatch == pytest.approx(0, abs=0.002)


def test_a_peak_that_moves_is_taken_from_the_replay():
    def loss_peaks(layers: int, peak: int) -> Graph:
        captured = step(layers)
        allocated = captured.nodes.bytes_allocated.copy()
        freed = captured.nodes.bytes_freed.copy()
        loss = captured.text("name").index("loss")
        allocated[loss] += 10_000
        freed[loss] += 10_000
        optimizer = captured.text("name").index("_foreach_mul_")
        allocated[optimizer] += 3000 * layers
        freed[optimizer] += 3000 * layers
        graph = captured.with_columns(bytes_allocated=allocated, bytes_freed=freed)
        measurement = Measurement(start_memory_bytes=1000 * layers, peak_memory_bytes=peak)
        return Graph(graph.nodes, graph.edges, graph.strings, Job(measurement=measurement))

    extrapolated = extrapolate({2: loss_peaks(2, 12_200), 3: loss_peaks(3, 13_300)}, 8)
    # the optimizer's moment: 8 layers of weights, of gradients, and of temporaries
    assert extrapolated.job.measurement.peak_memory_bytes == 8000 + 8 * 30 + 8 * 3000
    notes = extrapolated.job.measurement.notes
    assert has_note(notes, "extrapolated-peaks-differ")
    note_of(notes, "layers-extrapolated", 8, 2, 3)
    assert has_note(notes, "extrapolated-from-two-depths")


def test_without_recorded_peaks_the_peak_is_unknown():
    def unmeasured(layers: int, memory: MemoryLog | None = None) -> Graph:
        captured = step(layers)
        job = Job(measurement=Measurement(memory=memory))
        return Graph(captured.nodes, captured.edges, captured.strings, job)

    measurement = extrapolate(
        {2: unmeasured(2), 3: unmeasured(3, MemoryLog(Blocks(), 0))}, 8
    ).job.measurement
    assert measurement.peak_memory_bytes == 0
    assert has_note(measurement.notes, "extrapolated-peak-unknown")
    # The shallow capture records no blocks.
    assert has_note(measurement.notes, "extrapolated-blocks-unknown")


def test_without_a_copied_layer_in_the_shallow_capture_the_peak_is_replayed():
    """The first two layers differ from all others, as the dense layers of DeepSeek-V3 do."""
    graphs = {count: step(count, extra=(0, 1)) for count in (2, 5)}
    measurement = extrapolate(graphs, 8).job.measurement
    assert has_note(measurement.notes, "extrapolated-peak-by-replay")
    assert measurement.depths is not None
    # The deepest capture's peak is above its replay: parameters, activations, and one gradient.
    error = graphs[5].job.measurement.peak_memory_bytes - (5000 + 5 * 100 + 30)
    assert measurement.peak_memory_bytes == measurement.depths.replayed_peak_bytes + error


def test_at_its_own_depth_the_capture_is_returned_with_the_lines():
    whole = step(4)
    extrapolated = extrapolate({2: step(2), 4: whole}, 4)
    assert extrapolated.nodes is whole.nodes
    assert extrapolated.job.measurement.step_ns == whole.job.measurement.step_ns
    assert extrapolated.job.measurement.depths is not None
    assert extrapolated.job.measurement.depths.copied == 0


REFUSED = {
    "one depth": ({4: step(4)}, 8, None, "depth-too-few-captures", "from 1 to 8"),
    "deeper than the model": (
        {2: step(2), 9: step(9)}, 8, None, "depth-too-few-captures", "from 1 to 8",
    ),
    "half a period": (
        {3: step(3, turns=2), 4: step(4, turns=2)}, 8, None,
        "depth-capture-layers", "every 2, and 3",
    ),
    "no period": (
        {2: step(2, turns=9), 6: step(6, turns=9)}, 8, None,
        "depth-no-period", "layers 1 and 2 differ, mm versus mm",
    ),
    "another period": (
        {2: step(2, turns=2), 4: step(4, turns=2)}, 8, Pattern(0, 1),
        "depth-layers-differ", "every 1",
    ),
    "a different layer in the middle": (
        {4: step(4), 8: step(8, extra=(4,))}, 12, Pattern(0, 1),
        "depth-layers-differ", "layers 3 and 4 differ, 4 versus 6 nodes",
    ),
    "no layers": (
        {2: step(1), 4: step(1)}, 8, None, "depth-no-layer-list", "modules model.layers.0-0;",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_captures_that_do_not_suffice(case):
    graphs, depth, pattern, code, detail = REFUSED[case]
    with raises_code(code) as caught:
        extrapolate(graphs, depth, pattern)
    assert detail in str(caught.value)


def test_first_and_last_layers_may_differ():
    extrapolated = extrapolate({4: step(4), 6: step(6, extra=(1, 5))}, 8)
    notes = extrapolated.job.measurement.notes
    note_of(notes, "extrapolated-layers-differ", 1, 6)
    names = [node.text("module") for node in extrapolated if node.name == "relu"]
    assert names == ["model.layers.1", "model.layers.7"]


def test_calls_that_span_layers_are_refused():
    """A bucket that holds the gradients of two layers is in no layer that repeats."""
    graphs = {2: step(2), 4: step(4)}
    sizes = graphs[4].nodes.comm_bytes.copy()
    sizes[np.flatnonzero(graphs[4].communication)[0]] += 4096  # in the first layer only
    graphs[4] = graphs[4].with_columns(comm_bytes=sizes)
    sums = ("8320 and 20736 bytes", "45568 at 8 layers", "37376")
    with raises_code("depth-calls-span-layers", naming=sums):
        extrapolate(graphs, 8, Pattern(0, 1))


def test_operators_of_only_one_capture_are_noted():
    short, long = Step(2), Step(4)
    long.host("print", FORWARD_THREAD, "", Phase.OPTIMIZER)
    short.host("save", FORWARD_THREAD, "", Phase.OPTIMIZER)
    short.host("save", FORWARD_THREAD, "", Phase.OPTIMIZER)
    extrapolated = extrapolate({2: short.graph(), 4: long.graph()}, 8)
    note_of(extrapolated.job.measurement.notes, "extrapolated-operators-unmatched", "1 print")
    names = extrapolated.text("name")
    assert (names.count("print"), names.count("item"), names.count("read")) == (1, 8, 8)


def test_operators_that_run_once_per_process_are_ignored():
    """DTensor infers the operands of a new shape, which the later capture has in its cache."""

    def loop(layers: int, cached: bool) -> Graph:
        builder, known = Step(layers), set[str]()
        for shape in ("[[50]]", *("[[8,8]]", "[[8]]") * layers, "[[9]]"):
            builder.host("sqrt", FORWARD_THREAD, "", Phase.OPTIMIZER, input_shapes=shape)
            if not cached and shape not in known:
                builder.host("empty_permuted", FORWARD_THREAD, "", Phase.OPTIMIZER)
            known.add(shape)
            builder.host("div", FORWARD_THREAD, "", Phase.OPTIMIZER, input_shapes=shape)
        return builder.graph()

    for first, later in ((False, True), (True, False)):
        extrapolated = extrapolate({2: loop(2, first), 4: loop(4, later)}, 8)
        assert structure(extrapolated) == structure(loop(8, later))
        notes = extrapolated.job.measurement.notes
        note_of(notes, "extrapolated-operators-unmatched", "4 empty_permuted")
    extrapolated = extrapolate({2: loop(2, False), 4: loop(4, False)}, 8)
    assert structure(extrapolated) == structure(loop(8, False))


@pytest.mark.parametrize(
    ("shallow", "deep", "between", "expected"),
    [
        ("x ab y", "x abab y", 1, "x abababab y"),
        ("x ab y pp z", "x ababab y pppppp z", 2, "x ababababab y pppppppppp z"),
        ("xabcy", "xabcabcabcy", 2, "xabcabcabcabcabcy"),
    ],
)
def test_a_surplus_is_a_unit_repeated(shallow, deep, between, expected):
    alignment = align(shallow, deep, between)
    assert alignment is not None
    assert "".join(repeat_units(deep, alignment.units, beyond=2)) == expected


def test_a_surplus_that_is_no_repetition():
    assert align("xay", "xabcy", 1) is None
    assert align("xay", "xaay", 2) is None


def test_operands_stretch():
    extrapolation = DepthExtrapolation(periods_between=1, periods_beyond=2)
    assert extrapolate_shapes(
        "[[[5],[1,2],[9]],[3]]", "[[[5],[1,2],[1,2],[9]],[4]]", extrapolation
    ) == ("[[[5],[1,2],[1,2],[1,2],[1,2],[9]],[6]]")
    assert extrapolate_types('["GenericList[A,B]"]', '["GenericList[A,B,B]"]', extrapolation) == (
        '["GenericList[A,B,B,B,B]"]'
    )
    assert extrapolate_shapes("[[5]]", '[[5],"other"]', extrapolation) is None


def test_calls_of_python_follow_the_line():
    extrapolation = DepthExtrapolation(periods_between=1, periods_beyond=2)
    shallow, deep = '{"dtensor":1,"function":1}', '{"dtensor":1,"dtensor_listed":20}'
    assert extrapolate_python_calls(shallow, deep, extrapolation) == (
        '{"dtensor":1,"dtensor_listed":60}'
    )
    assert extrapolate_python_calls("", "", extrapolation) == ""


def test_a_model_too_shallow_to_leave_layers_out_is_refused():
    with raises_code("depth-capture-layers") as caught:
        check_depths([1, 2], 2, Pattern(1, 1))
    assert str(caught.value).endswith("at least 4\n  leave --capture-layers out")
    with raises_code("depth-capture-layers") as caught:
        check_depths([2, 3], 8, Pattern(1, 1))
    assert str(caught.value).endswith("at least 4\n  try --capture-layers 3,4")
