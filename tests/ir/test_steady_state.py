"""The steady-state step without a profiler, by hand and from captures on an H200."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from kept_traces import unpack
from notes import has_note, note_of

import onerank
from onerank import read
from onerank.analysis.step_time import Replay, replay
from onerank.annotate import load_gpu
from onerank.annotate.passes.host_time import scale_host
from onerank.cli import onerank as command
from onerank.converters.expand.host_delays import DELAY_NAME, insert_host_delays
from onerank.converters.sources.kineto.trace_job import with_host_overhead, with_kernel_factor
from onerank.ir import (
    EmulatedCalls,
    Evidence,
    Graph,
    GraphBuilder,
    HostOverhead,
    Job,
    Kind,
    Measurement,
    Reason,
)
from onerank.ir.measurement import C10D_NS
from onerank.ir.replay import schedule
from onerank.ir.steady_state import job_step_ns, steady_state_step, with_step_time
from onerank.plan.cluster import Cluster, ClusterLink, network_of
from onerank.plan.stage_times import with_network


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    directory = tmp_path_factory.mktemp("graphs")
    name = "h200-llama-8b-4l-tp2-graphs"
    return {tokens: unpack(f"{name}/{tokens}", directory) for tokens in (1024, 2048)}


def launches(kernel_us: int, *, reads: bool = False, calls: bool = False) -> Graph:
    """Three operators of 10 us, each with a kernel; the step may end when the last was read.

    With `calls`, the kernel of each is an emulated all-reduce.
    """
    builder, before, kernel = GraphBuilder(), None, None
    for place in range(3):
        begun = place * 10_000
        op = builder.add(
            name="aten::mm", kind=Kind.HOST_OP, thread=1, start_ns=begun, duration_ns=10_000
        )
        if before is not None:
            builder.edge(before, op, Reason.PROGRAM_ORDER)
        start = max(begun + 5_000, 5_000 + place * kernel_us * 1000)
        kind = {"kind": Kind.COLLECTIVE, "evidence": Evidence.SCALED} if calls else {}
        launched = builder.add(
            name="gemm",
            stream=7,
            start_ns=start,
            duration_ns=kernel_us * 1000,
            **({"kind": Kind.KERNEL} | kind),
        )
        builder.edge(op, launched, Reason.LAUNCH)
        if kernel is not None:
            builder.edge(kernel, launched, Reason.STREAM_ORDER)
        before, kernel = op, launched
    if reads:
        end_ns = 5_000 + 3 * kernel_us * 1000
        item = builder.add(
            name="aten::item", kind=Kind.HOST_OP, thread=1, start_ns=end_ns, duration_ns=1_000
        )
        builder.edge(before, item, Reason.PROGRAM_ORDER)
        builder.edge(kernel, item, Reason.SYNC)
    overhead = HostOverhead(host_factor=1.0, inter_step_host_ns=0, residual_ns=0)
    return builder.build(Job(measurement=Measurement(host_overhead=overhead)))


def steady_state_us(graph: Graph) -> float:
    row = steady_state_step(graph)
    assert row is not None
    return row.step_ns / 1000


def steady_state_ns(done: Replay) -> int:
    assert done.steady_state is not None
    return done.steady_state.step_ns


def test_a_host_ahead_of_its_gpu_is_hidden():
    """Of one step the first launch is seen; in a row the GPU goes from step to step."""
    assert replay(launches(20)).step_time_ns == 65_000
    assert steady_state_us(launches(20)) == 60
    assert steady_state_us(launches(4)) == 30  # the host's time


def test_emulated_calls_keep_the_host_as_long_as_real_ones():
    """An all-reduce and its wait take 28.2 us, where NCCL takes 22 and 2.2."""
    graph = launches(4, calls=True)
    emulated = EmulatedCalls(synchronous=0, asynchronous=3, waits=3, host_ns=3 * (28_200 - C10D_NS))
    measurement = msgspec.structs.replace(graph.job.measurement, emulated_calls=emulated)
    graph = replace(graph, job=Job(measurement=measurement))
    # Of three operators of 10 us, two are followed by another one of the step.
    assert steady_state_us(graph) == 30 - 2 * 4
    assert steady_state_step(graph, as_captured=True).step_ns == 30_000
    # The measured step contains the emulation, what the replay lacks of it does not.
    assert steady_state_ns(replay(with_step_time(graph, 33_000))) == 25_000
    real = graph.with_columns(evidence=np.full(len(graph), Evidence.MEASURED))
    assert steady_state_us(real) == 30


def test_the_step_of_a_job_has_calls_as_long_as_real_ones():
    """Calls take 4 us more than real ones; two of three are followed by another operator."""
    graph = launches(2, calls=True)
    emulated = EmulatedCalls(synchronous=0, asynchronous=3, waits=3, host_ns=3 * (28_200 - C10D_NS))
    steps = (33_000, 33_100, 33_200, 33_300)
    measurement = msgspec.structs.replace(graph.job.measurement, step_ns=steps)
    uncorrected = replace(graph, job=msgspec.structs.replace(graph.job, measurement=measurement))
    measurement = msgspec.structs.replace(measurement, emulated_calls=emulated)
    graph = replace(graph, job=msgspec.structs.replace(graph.job, measurement=measurement))
    slowest_ns = job_step_ns(uncorrected, 1)
    assert slowest_ns == 33_150
    assert job_step_ns(graph, 1) == slowest_ns - 8_000
    # A kernel of 40 us hides the host.
    limited = graph.with_columns(
        duration_ns=np.where(graph.mask(Kind.COLLECTIVE), 40_000, graph.nodes.duration_ns)
    )
    assert job_step_ns(limited, 1) == slowest_ns


def test_a_step_that_reads_its_result_has_no_lead():
    graph = launches(20, reads=True)
    assert replay(graph).step_time_ns == 66_000
    assert steady_state_us(graph) == 66


def test_what_a_measured_step_took_longer_stays():
    assert steady_state_ns(replay(with_step_time(launches(20), 63_000))) == 63_000
    _, notes = insert_host_delays(with_step_time(launches(20), 63_000))
    note = note_of(notes, "host-delays-slower-compute", "63.000 us", "3.000 us")
    assert "median step" not in note.text  # of this graph none was measured
    slower = with_step_time(launches(20), 63_000)
    slower = slower.with_columns(
        duration_ns=np.where(slower.gpu_compute, 2, 1) * slower.nodes.duration_ns
    )
    assert steady_state_ns(replay(slower)) == 123_000


def test_a_step_is_no_shorter_than_what_the_gpu_runs():
    shorter = with_step_time(launches(4), 20_000)  # 30 us by the host
    assert steady_state_ns(replay(shorter)) == 20_000
    shorter = shorter.with_columns(
        duration_ns=np.where(shorter.gpu_compute, 7, 1) * shorter.nodes.duration_ns
    )
    assert steady_state_ns(replay(shorter)) == 84_000  # of kernels that were 4 us


def test_without_host_overhead_there_is_no_steady_state():
    graph = launches(20)
    graph = replace(graph, job=Job())
    assert steady_state_step(graph) is None
    assert replay(graph).steady_state is None


@pytest.mark.parametrize("tokens", [1024, 2048])
def test_the_hosts_factor_is_found_again(captured: dict[int, Path], tokens: int):
    """Of a host that takes 0.7 of what was recorded, 50 us of it between two steps."""
    graph = read(captured[tokens])
    measurement = graph.job.measurement
    host = graph.mask(Kind.HOST_OP)

    def span_ns(factor: float) -> int:
        times = schedule(scale_host(graph, factor))
        return int(times.end_ns[host].max() - times.start_ns[host].min())

    measurement = msgspec.structs.replace(
        measurement,
        host_step_ns=(span_ns(0.7) + 35_000,),
        profiled_host_ns=(span_ns(1.0) + 50_000,),
    )
    overhead = with_host_overhead(
        replace(graph, job=Job(measurement=measurement))
    ).job.measurement.host_overhead
    assert overhead is not None
    assert overhead.host_factor == pytest.approx(0.7, abs=0.005)
    assert overhead.inter_step_host_ns == pytest.approx(35_000, rel=0.01)


def test_a_host_that_no_factor_explains_is_reported(captured: dict[int, Path]):
    graph = read(captured[1024])
    altered = msgspec.structs.replace(graph.job.measurement, host_step_ns=(90_000_000,), notes=())
    measurement = with_host_overhead(replace(graph, job=Job(measurement=altered))).job.measurement
    assert measurement.host_overhead is not None
    assert measurement.host_overhead.host_factor == 1.2
    note_of(measurement.notes, "host-factor-out-of-range", 90_000_000, 34_913_331)


def test_the_figures_of_a_capture(captured: dict[int, Path]):
    graph = read(captured[1024])
    measurement = graph.job.measurement
    assert len(measurement.host_step_ns) == 3
    assert with_host_overhead(graph).job.measurement.host_overhead == measurement.host_overhead
    done = replay(graph)
    assert (
        steady_state_ns(done) == measurement.median_step_ns == done.steady_state_measured_ns
    )  # 32.3 ms
    assert done.step_time_ns > 1.3 * steady_state_ns(done)  # the profiler's host


def test_another_size_in_a_row(captured: dict[int, Path], tmp_path: Path):
    """1024 tokens as 2048: 0.8% off the steps of that size; with the profiler's host 24%."""
    trace = tmp_path / "2048.et"
    options = ["--target", "H200", "--seq", "1024=2048", "-o", str(trace)]
    done = CliRunner().invoke(command, ["annotate", *options, str(captured[1024])])
    assert done.exit_code == 0, done.output
    measured = read(captured[2048]).job.measurement.median_step_ns
    predicted = replay(read(trace))
    assert measured is not None
    assert steady_state_ns(predicted) == pytest.approx(measured, rel=0.02)
    assert predicted.steady_state_measured_ns is None
    assert predicted.step_time_ns > 1.2 * measured
    shown = CliRunner().invoke(command, ["replay", str(trace)]).output
    assert f"{steady_state_ns(predicted) / 1e6:.3f} ms, predicted: without the profiler" in shown


def test_waits_of_another_gpu(captured: dict[int, Path], tmp_path: Path):
    """After `annotate` the GPU waits so long that the step lasts what the replay in a row tells."""
    trace = tmp_path / "h100.et"
    options = ["--target", "H100", "-o", str(trace)]
    assert CliRunner().invoke(command, ["annotate", *options, str(captured[1024])]).exit_code == 0
    graph = read(trace)
    waiting, notes = insert_host_delays(graph)
    idle = waiting.nodes.duration_ns[[node.name == DELAY_NAME for node in waiting]]
    total = waiting.nodes.duration_ns[waiting.gpu_compute].sum()
    assert idle.sum() > 0
    assert total == pytest.approx(steady_state_ns(replay(graph)), rel=0.001)
    note_of(notes, "host-delays", "steady-state step")


def test_waits_of_the_gpu_that_measured_it(captured: dict[int, Path]):
    """They lie where a replay in a row has them; with them the step lasts what was measured."""
    graph = read(captured[2048])
    waiting, notes = insert_host_delays(graph)
    note_of(notes, "host-delays", "steady-state step")
    total = waiting.nodes.duration_ns[waiting.gpu_compute].sum()
    assert total == pytest.approx(graph.job.measurement.median_step_ns, rel=0.001)


def test_the_text_has_all_of_it(captured: dict[int, Path]):
    shown = CliRunner().invoke(command, ["show", "--text", str(captured[1024])]).output
    assert "host_steps=22344620,24651192,23075863 profiled_host=34913331 " in shown
    assert "host_overhead host_factor=0.648 inter_step=143532 residual=-359284" in shown


def kernel_factor(graph: Graph, *steps_us: float, emulation_us: float = 0) -> float:
    timed = with_step_time(graph, round(np.median(steps_us) * 1000))
    busy_ns = int(graph.nodes.duration_ns[graph.compute].sum() + emulation_us * 1000)
    measurement = msgspec.structs.replace(
        timed.job.measurement,
        step_ns=tuple(round(step * 1000) for step in steps_us),
        gpu_busy_ns=busy_ns,
    )
    timed = with_kernel_factor(replace(timed, job=Job(measurement=measurement)))
    overhead = timed.job.measurement.host_overhead
    assert overhead is not None
    cluster = Cluster("H100", 1, 2, ClusterLink(338.0), ClusterLink(37.6), 80 * 10**9)
    clocked = with_network(timed, network_of(cluster, load_gpu("H100")), timed.job.world).graph
    lengths = clocked.nodes.duration_ns[clocked.compute] / graph.nodes.duration_ns[graph.compute]
    assert lengths == pytest.approx(overhead.kernel_factor)
    return overhead.kernel_factor


def test_kernels_of_a_busy_gpu_take_the_time_of_the_timed_steps():
    """Its clock is lower there; what emulates communication lengthens these steps too."""
    assert kernel_factor(launches(20), 63, 63.5, 62.5) == pytest.approx(1.05)
    assert kernel_factor(launches(20), 63, 63.5, 62.5, emulation_us=1.2) == pytest.approx(1.03)
    assert kernel_factor(launches(20), 58, 58, 58) == 1


def test_a_host_that_may_lengthen_the_step_changes_no_kernel():
    assert kernel_factor(launches(4), 33, 33, 33) == 1  # launches take longer than kernels
    assert kernel_factor(launches(20), 61, 63, 65) == 1  # the host varies, kernels do not
    real = launches(20, calls=True)
    assert kernel_factor(real, 63, 63, 63) == 1


def test_every_export_has_the_kernels_of_the_timed_steps(tmp_path: Path):
    graph = launches(20)
    overhead = HostOverhead(1.0, inter_step_host_ns=0, residual_ns=3_000, kernel_factor=1.05)
    graph = replace(graph, job=Job(measurement=Measurement(host_overhead=overhead)))
    kernels_ns = int(np.rint(graph.nodes.duration_ns[graph.compute] * 1.05).sum())
    astra_sim = onerank.export.astra_sim(graph, tmp_path / "astra-sim", ranks=2)
    goal = onerank.export.goal(graph, tmp_path / "job.goal", ranks=2)
    simai = onerank.export.simai(graph, tmp_path / "simai.txt")
    row_ns = simai.forward_ns + simai.input_gradient_ns + simai.weight_gradient_ns
    assert [astra_sim.gpu_time_ns, goal.gpu_time_ns, row_ns] == [kernels_ns] * 3
    for exported in (astra_sim, goal, simai):
        assert has_note(exported.notes, "steady-state-kernels")
