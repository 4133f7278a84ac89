"""The host of a capture without a GPU, and the host's share of a step's interval."""

import json
import math
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from kept_traces import kept_graph
from notes import has_note

import onerank
from onerank.analysis.step_time import step_change
from onerank.annotate.hosts.host import HOST_OP_KINDS, load_host
from onerank.cli import onerank as command
from onerank.ir import Device, Edges, Evidence, Graph, Job, Kind, Phase, Reason
from onerank.ir.errors import TargetError
from onerank.ir.graph import GraphBuilder
from onerank.ir.job import InferenceStep

TRACES = Path(__file__).parents[3] / "traces"


@pytest.fixture(scope="module")
def cpu() -> Graph:
    return onerank.convert(TRACES / "cpu-llama-2l-tp4")


@pytest.fixture
def described(tmp_path: Path):
    """Return a function that writes a description in which each kind takes so many ns."""

    def write(p50_ns: float, p10_ns: float | None = None, p90_ns: float | None = None, **kinds):
        low, high = p10_ns if p10_ns is not None else p50_ns, p90_ns or p50_ns
        lines = ['name = "test"', '[sources]\nby_hand = "a test"', "[figures]"]
        for kind in HOST_OP_KINDS:
            ns = (kinds[kind],) * 3 if kind in kinds else (low, p50_ns, high)
            lines.append(
                f"{kind} = {{ p10_ns = {ns[0]}, p50_ns = {ns[1]}, p90_ns = {ns[2]}, "
                'source = "by_hand" }'
            )
        path = tmp_path / "host.toml"
        path.write_text("\n".join(lines))
        return path

    return write


def test_a_small_step_takes_as_long_as_its_host(cpu: Graph, described):
    graph = onerank.recost(cpu, "H100", host=described(10_000, step=0, optimizer_step=0))
    # Each of 480 calls, 17 of them collectives, counts once: no list of tensors on a CPU.
    host = graph.mask(Kind.HOST_OP)
    assert host.sum() == 480
    assert graph.nodes.duration_ns[host].sum() == 4_800_000
    assert (graph.nodes.evidence[host] == Evidence.SCALED).all()
    step = step_change(cpu, graph, ())
    assert step.source == "steady_state"
    assert step.after is not None
    assert step.after.step_ns == pytest.approx(4_800_000, rel=0.01)
    assert step.after.host_bound_ns == pytest.approx(4_800_000 - 1_010_862, rel=0.01)


@pytest.mark.parametrize("operand", [[], [9, 9, 0, 1, 4, "cuda:0"]])
def test_an_optimizer_counts_each_tensor_however_its_launches_divide_them(operand, described):
    """By a number, in two launches that share a tensor; by a tensor of float32, one by one."""
    sizes = [(6000, 4000), (6000, 4000), (30, 20)]
    listed = [[i, i, 0, math.prod(size), 2, "cuda:0"] for i, size in enumerate(sizes)]
    kind = "Tensor(float)" if operand else "Double"
    builder = GraphBuilder()
    builder.add(
        kind=Kind.HOST_OP,
        thread=1,
        op="aten::_foreach_mul_",
        name="aten::_foreach_mul_",
        phase=Phase.OPTIMIZER,
        input_shapes=json.dumps([sizes, []]),
        input_types=json.dumps([f"GenericList[{','.join(['Tensor(c10::BFloat16)'] * 3)}]", kind]),
        input_values=json.dumps([listed, operand or 0.9], separators=(",", ":")),
    )
    graph = builder.build(Job(device=Device("cpu", "none")))
    host = described(10_000, step=0, optimizer_launch=1_000, optimizer_step=5_000)
    made = onerank.recost(graph, "H100", host=host)
    assert made.gpu_compute.sum() == 3
    assert made.nodes.duration_ns[made.mask(Kind.HOST_OP)].tolist() == [30_000 + 3 * 1_000 + 5_000]


def test_operators_of_ddps_reducer_and_tensors_one_by_one_have_figures(described):
    builder = GraphBuilder()
    for op, phase, calls, module in (
        ("aten::mul", Phase.FORWARD, "", "layer"),
        ("aten::mul", Phase.FORWARD, '{"untracked":1}', "layer"),
        ("aten::mul", Phase.FORWARD, '{"untracked":1}', "layer.norm"),
        ("aten::copy_", Phase.BACKWARD, '{"reducer":1}', ""),
        ("aten::copy_", Phase.BACKWARD, "", ""),
        ("aten::addcdiv_", Phase.OPTIMIZER, "", ""),
    ):
        builder.add(
            kind=Kind.HOST_OP,
            thread=1,
            op=op,
            name=op,
            module=module,
            phase=phase,
            python_calls=calls,
            start_ns=len(builder),
            input_shapes="[[64, 64], [64, 64]]",
            input_types='["Tensor(float)", "Tensor(float)"]',
        )
    graph = builder.build(Job(device=Device("model", "H100")))
    host = described(10_000, step=0, reducer=3_000, inference=4_000, entering=6_000)
    made = onerank.recost(graph, "H100", host=host)
    times = made.nodes.duration_ns[made.mask(Kind.HOST_OP)]
    assert times.tolist() == [10_000, 4_000, 6_000, 3_000, 10_000, 4_000]


def test_operators_of_inference_have_a_figure_but_collectives_keep_theirs(cpu: Graph, described):
    decode = InferenceStep("decode", 2, batch=1, new_tokens=1, context_lengths=(64,))
    job = msgspec.structs.replace(cpu.job, inference=decode)
    host = described(10_000, inference=1_000, step=0)
    graph = onerank.recost(replace(cpu, job=job), "H100", host=host)
    times = graph.nodes.duration_ns[graph.mask(Kind.HOST_OP)]
    assert (times == 10_000).sum() == 17
    assert (times == 1_000).sum() == 480 - 17


def with_python_calls(graph: Graph, calls: dict[int, str]) -> Graph:
    """Return the graph with the text of calls of Python of some nodes."""
    codes = graph.nodes.python_calls.copy()
    codes[list(calls)] = graph.strings.encode(calls.values())
    return graph.with_columns(python_calls=codes)


def test_calls_of_python_add_to_the_host(cpu: Graph, described):
    calls = {0: '{"dtensor":3}', 9: '{"dtensor":2,"function":1}', len(cpu) - 1: '{"function":4}'}
    host = described(10_000, step=0, dtensor=50_000, function=7_000)
    plain = onerank.recost(cpu, "H100", host=host)
    graph = onerank.recost(with_python_calls(cpu, calls), "H100", host=host)
    times, before = (each.nodes.duration_ns[each.mask(Kind.HOST_OP)] for each in (graph, plain))
    assert (times - before).sum() == 5 * 50_000 + 5 * 7_000
    # The first and the last call of the step have those of the first and the last node.
    assert (times - before)[[0, -1]].tolist() == [150_000, 28_000]
    assert has_note(graph.job.measurement.notes, "host-described", "dtensor 5, function 5")
    assert not has_note(plain.job.measurement.notes, "host-described", "Python")


def test_autograd_functions_of_a_profile_count_by_name(cpu: Graph, described):
    names = cpu.text("name")
    # torch names the ranges of a Python function so. Those of C++ end in a number.
    names[10], names[200], names[300] = "Exchange", "ExchangeBackward", "MulBackward0"
    host = described(10_000, step=0, function=7_000)
    graphs = (cpu, cpu.with_columns(name=names))
    plain, graph = (onerank.recost(each, "H100", host=host) for each in graphs)
    times, before = (each.nodes.duration_ns[each.mask(Kind.HOST_OP)] for each in (graph, plain))
    assert (times - before).sum() == 2 * 7_000
    assert has_note(graph.job.measurement.notes, "host-described", "function 2")


@pytest.mark.parametrize("text", ["{", '{"views":1}', '{"dtensor":-1}', '{"dtensor":"1"}'])
def test_malformed_calls_of_python_are_refused(cpu: Graph, tmp_path: Path, text: str):
    trace, output = tmp_path / "cpu.et", tmp_path / "out.et"
    with_python_calls(cpu, {0: text}).write(trace)
    result = CliRunner().invoke(
        command, ["annotate", str(trace), "--target", "H100", "-o", str(output)]
    )
    assert result.exit_code == 2
    assert "error[python-calls-malformed]" in result.stderr
    assert not output.exists()


def test_unreadable_shapes_are_refused(cpu: Graph, tmp_path: Path):
    """Of a collective: no formula reads its shapes, only the host's count of tensors."""
    shapes = cpu.nodes.input_shapes.copy()
    shapes[np.flatnonzero(cpu.communication)[0]] = cpu.strings.intern("[[,")
    trace, output = tmp_path / "cpu.et", tmp_path / "out.et"
    cpu.with_columns(input_shapes=shapes).write(trace)
    result = CliRunner().invoke(
        command, ["annotate", str(trace), "--target", "H100", "-o", str(output)]
    )
    assert result.exit_code == 2
    assert "error[operands-unreadable]" in result.stderr
    assert not output.exists()


def test_a_fast_host_leaves_the_step_of_the_kernels(cpu: Graph, described):
    without = onerank.recost(cpu, "H100", host="none")
    graph = onerank.recost(cpu, "H100", host=described(100))
    assert not without.mask(Kind.HOST_OP).any()
    steps = [step_change(cpu, changed, ()).after for changed in (without, graph)]
    assert steps[0] is not None
    assert steps[1] is not None
    # Kernels that a host launches have gaps, which a sum of kernels lacks.
    in_order = graph.edges.reason == Reason.STREAM_ORDER
    between = graph.compute[graph.edges.source] & graph.compute[graph.edges.target]
    gaps_ns = 1300 * int((in_order & between).sum())
    assert steps[1].step_ns == pytest.approx(steps[0].step_ns + gaps_ns, rel=0.005)


def test_the_typical_host_and_its_interval(cpu: Graph):
    graph = onerank.recost(cpu, "H100")
    assert has_note(graph.job.measurement.notes, "host-described", "typical")
    assert has_note(graph.job.measurement.notes, "launches-by-rules")
    assert onerank.recost(cpu, "B200").job.annotations[-1].details["host"] == "typical"
    low, high = graph.job.annotations[-1].details["host_interval"]
    step = step_change(cpu, graph, ())
    assert step.after is not None
    # Four ranks: 11.901 ms times the 1.0886 of the slowest.
    assert step.after.step_ns == pytest.approx(12_955_296, rel=0.002)
    assert step.p10_ns == pytest.approx(low * step.after.step_ns, rel=0.002)
    assert step.p90_ns == pytest.approx(high * step.after.step_ns, rel=0.002)
    assert (round(low, 3), round(high, 3)) == (0.715, 1.43)


def test_ranks_wait_for_the_slowest_host(cpu: Graph, described, tmp_path: Path):
    spread = tmp_path / "spread.toml"
    spread.write_text(f"rank_spread = 0.1\n{described(20_000).read_text()}")
    host = load_host(spread)
    assert host is not None
    # The median of the slowest of 2 and 8 is the quantile 0.7071 and 0.9170: 0.545 and 1.385
    # standard deviations.
    factors = [host.slowest_factor(ranks) for ranks in (1, 2, 8)]
    assert factors == pytest.approx([1, np.exp(0.0545), np.exp(0.1385)], rel=1e-3)
    assert cpu.job.world.size == 4
    alone, slowest = (
        onerank.recost(cpu, "H100", host=path) for path in (described(20_000), spread)
    )
    durations = [graph.nodes.duration_ns[graph.mask(Kind.HOST_OP)] for graph in (alone, slowest)]
    assert durations[1] == pytest.approx(durations[0] * host.slowest_factor(4), abs=1)
    compute = [graph.nodes.duration_ns[graph.compute].sum() for graph in (alone, slowest)]
    assert compute[0] == compute[1]


def test_two_causes_of_an_interval_add_in_squares(cpu: Graph, described):
    graph = onerank.recost(cpu, "H100", host=described(10_000, 5_000, 20_000, step=0))
    compute = int(graph.nodes.duration_ns[graph.compute].sum())
    step = step_change(cpu, graph, (compute, 13 * compute))
    assert step.after is not None
    assert step.p10_ns == pytest.approx(step.after.step_ns / 2, rel=0.01)
    # Compute alone gives 13.5 ms with its gaps, the host 9.6 ms: ln 2.79 and ln 2 are 1.24 in
    # squares.
    assert step.p90_ns == pytest.approx(step.after.step_ns * np.exp(1.24), rel=0.02)


def test_a_call_comes_before_its_launches_in_program_order(cpu: Graph):
    graph = onerank.recost(cpu, "H100")
    edges, host = graph.edges, graph.mask(Kind.HOST_OP)
    launch = edges.reason == Reason.LAUNCH
    assert host[edges.source[launch]].all()
    assert sorted(edges.target[launch]) == np.flatnonzero(~host).tolist()
    called = graph.nodes.start_ns[host]
    assert (np.diff(called) > 0).all()
    # A GEMM and its kernel have the same operator and module.
    source, target = edges.source[launch], edges.target[launch]
    gemm = graph.nodes.op[source] == graph.strings.encode(["aten::mm"])[0]
    assert gemm.sum() >= 45
    assert (graph.nodes.module[source] == graph.nodes.module[target]).all()


def test_a_wait_that_no_launch_follows_is_counted(cpu: Graph, described):
    order = np.argsort(cpu.nodes.start_ns, kind="stable")
    first, last = int(order[0]), int(order[-1])
    kind, blocked = cpu.nodes.kind.copy(), np.zeros(len(cpu), dtype=np.int64)
    kind[last], blocked[last] = Kind.METADATA, 1
    edges = cpu.edges
    edges = Edges.from_pairs(
        len(cpu),
        np.append(edges.source, first),
        np.append(edges.target, last),
        np.append(edges.reason, np.uint8(Reason.SYNC)),
    )
    waiting = replace(cpu, edges=edges).with_columns(kind=kind, blocked_ns=blocked)
    graph = onerank.recost(waiting, "H100", host=described(10_000))
    assert has_note(graph.job.measurement.notes, "host-waits-at-end", "1 waits")
    assert not has_note(
        onerank.recost(cpu, "H100", host=described(10_000)).job.measurement.notes,
        "host-waits-at-end",
    )


def test_a_scaled_host_multiplies_the_described_one(cpu: Graph, described):
    graph = onerank.recost(
        cpu, "H100", host=described(20_000, step=0, optimizer_step=0), host_scale=0.5
    )
    after = step_change(cpu, graph, ()).after
    assert after is not None
    assert after.step_ns == pytest.approx(4_800_000, rel=0.01)


def test_another_gpu_than_the_captured_one_has_another_host(tmp_path: Path):
    h200 = kept_graph("h200-llama-8b-4l-tp2-graphs/1024", tmp_path)
    h100, kernels = (onerank.recost(h200, "H100", host=host) for host in ("typical", "none"))
    assert (h100.nodes.duration_ns == kernels.nodes.duration_ns).all()
    low, high = h100.job.annotations[-1].details["host_interval"]
    # Its host takes 0.953 of the p50 host; 80% of further hosts take 0.715 to 1.43 of it.
    assert low == pytest.approx(0.715 / 0.9525, abs=0.001)
    assert high == pytest.approx(1.43 / 0.9525, abs=0.001)
    assert h100.job.annotations[-1].details["host_residual_ns"] == [-577 * 1265, 577 * 5384]
    interval = kernels.job.annotations[-1].details["interval"]
    narrow, wide = (step_change(h200, graph, interval) for graph in (kernels, h100))
    assert wide.after == narrow.after
    assert wide.p10_ns == pytest.approx(31_050_348, rel=0.002)
    assert wide.p90_ns == pytest.approx(48_764_790, rel=0.002)
    assert narrow.p90_ns == pytest.approx(36_854_988, rel=0.002)
    # On the captured GPU the host is measured.
    assert "host_interval" not in onerank.recost(h200, "H200").job.annotations[-1].details


def test_an_interval_of_unexplained_time_is_that_of_further_hosts(tmp_path: Path):
    """A step of an H100 at another H200's: its host has 2.4 ms that no operator explains."""
    h100 = kept_graph("h100-llama-8b-4l-tp4/trace", tmp_path)
    h200 = onerank.recost(h100, "H200")
    step = step_change(h100, h200, h200.job.annotations[-1].details["interval"])
    assert step.p10_ns is not None
    assert step.p90_ns is not None
    # The same step took 36.15 ms on an H200 of another host (2026-11-23-paired-steps.txt).
    assert step.p10_ns < 36_150_000 < step.p90_ns
    assert step.p10_ns == pytest.approx(31_252_625, rel=0.002)
    overhead = h100.job.measurement.host_overhead
    assert overhead is not None
    details = h200.job.annotations[-1].details
    assert details["host_residual_ns"][0] < overhead.residual_ns < details["host_residual_ns"][1]
    unexplained = {**details, "host_residual_ns": [overhead.residual_ns] * 2}
    annotation = msgspec.structs.replace(h200.job.annotations[-1], details=unexplained)
    job = msgspec.structs.replace(h200.job, annotations=(annotation,))
    narrow = step_change(h100, replace(h200, job=job), details["interval"])
    assert narrow.p10_ns is not None
    assert narrow.p10_ns > step.p10_ns + 2_000_000


FURTHER = "p10 = 0.8\np90 = 1.2\nresidual_p10_ns = -1\nresidual_p90_ns = 2\n"


def test_a_wrong_host_is_refused(described, tmp_path: Path):
    with pytest.raises(TargetError) as unknown:
        load_host("fast")
    assert unknown.value.code == "host-unknown"
    text = described(10.0).read_text()
    wrong = {
        "missing": text.replace("gemm =", "#"),
        "no-kind": text + "\nviews = { p10_ns = 1, p50_ns = 1, p90_ns = 1, source = 'by_hand' }",
        "order": text.replace("p10_ns = 10.0", "p10_ns = 11.0"),
        "negative": text.replace("10.0", "-1.0"),
        "source": text.replace('source = "by_hand"', 'source = "unknown"'),
        "type": text.replace("p50_ns = 10.0", 'p50_ns = "10"'),
        "nan": text.replace("p90_ns = 10.0", "p90_ns = nan"),
        "further": f"{text}\n[further]\n{FURTHER.replace('p10 = 0.8', 'p10 = 1.1')}",
        "further-order": f"{text}\n[further]\n{FURTHER.replace('= 2', '= -9')}",
        "further-part": f"{text}\n[further]\np10 = 0.8",
        "rank-spread": f"rank_spread = -0.1\n{text}",
    }
    right = tmp_path / "right.toml"
    right.write_text(f"{text}\n[further]\n{FURTHER}")
    host = load_host(right)
    assert host is not None
    assert host.further is not None
    for name, content in wrong.items():
        path = tmp_path / f"{name}.toml"
        path.write_text(content)
        with pytest.raises(TargetError) as malformed:
            load_host(path)
        assert malformed.value.code == "host-file-malformed", name


def test_an_unknown_host_and_one_without_time_write_nothing(cpu: Graph, described, tmp_path: Path):
    trace, output = tmp_path / "cpu.et", tmp_path / "out.et"
    cpu.write(trace)
    for host, code in (("fast", "host-unknown"), (str(described(0)), "host-file-malformed")):
        options = ["--target", "H100", "--host", host, "-o", str(output)]
        result = CliRunner().invoke(command, ["annotate", str(trace), *options])
        assert result.exit_code == 2
        assert f"error[{code}]" in result.stderr
        assert not output.exists()


def test_a_graph_without_calls_stays_as_it_is(cpu: Graph):
    host = load_host("none")
    assert host is None
    measurement = msgspec.structs.replace(cpu.job.measurement, notes=())
    job = msgspec.structs.replace(cpu.job, measurement=measurement)
    graph = onerank.recost(replace(cpu, job=job), "H100", host="none")
    assert graph.job.measurement.host_overhead is None


def test_a_recurrent_layer_takes_the_host_for_each_of_its_launches(described):
    """Two layers of 8 steps, each with a product and gates."""
    weights = [[512, 128]] * 4
    builder = GraphBuilder()
    builder.add(
        kind=Kind.HOST_OP,
        thread=1,
        op="aten::_cudnn_rnn",
        name="aten::_cudnn_rnn",
        phase=Phase.FORWARD,
        input_shapes=json.dumps([[8, 4, 128], weights, [], [], [2, 4, 128]]),
        input_types=json.dumps(
            [
                "Tensor(float)",
                f"GenericList[{','.join(['Tensor(float)'] * 4)}]",
                "Int",
                "None",
                "Tensor(float)",
            ]
        ),
        output_shapes="[[8, 4, 128]]",
        output_types='["Tensor(float)"]',
    )
    graph = builder.build(Job(device=Device("model", "H200")))
    host = described(10_000, step=0, recurrent=1_000)
    made = onerank.recost(graph, "H200", host=host)
    assert made.gpu_compute.sum() == 32
    assert made.nodes.duration_ns[made.mask(Kind.HOST_OP)].tolist() == [32_000]
