"""What if a figure of a GPU were another, of which measurements are known: its own, or rows."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import database_row
import msgspec
import numpy as np
import pytest
from notes import has_note, note_of

from onerank.annotate import Gpu, PassOptions, explain, load_gpu, recost, with_figures
from onerank.annotate.kernel_db.calls import call_key
from onerank.annotate.kernel_db.database import CALL, table_of, write_database
from onerank.annotate.models.coefficients import shipped
from onerank.converters.sources.kineto import convert_directory
from onerank.ir import UNKNOWN, Evidence, Graph

TRACES = Path(__file__).parents[3] / "traces"


@pytest.fixture(scope="module")
def h200() -> Graph:
    return convert_directory(TRACES / "h200-llama-8b-4l-tp4")[0]


@pytest.fixture(scope="module")
def cpu_llama() -> Graph:
    return convert_directory(TRACES / "cpu-llama-2l-tp4")[0]


@pytest.fixture
def rows(tmp_path: Path) -> Callable[..., Path]:
    """Return the path of a database in which an A100 took `ns` for each (call, ns)."""

    def make(*calls: tuple[dict[str, Any], int]) -> Path:
        made = []
        for call, ns in calls:
            text = [str([one[at] for one in call["inputs"]]).replace("'", '"') for at in (1, 0)]
            key = call_key(call["op"], *text, "[]")
            assert key is not None
            times = dict.fromkeys(("median_ns", "p10_ns", "p90_ns"), ns)
            row = msgspec.structs.replace(
                database_row.ROW, gpu="NVIDIA A100-SXM4-80GB", layout="{}"
            )
            about = {
                **{name: getattr(key, name) for name in CALL},
                **times,
                "kernels": ("kernel",),
                "kernel_ns": (ns,),
            }
            made.append(msgspec.structs.replace(row, **about))
        write_database(table_of(made), tmp_path / "a100.parquet")
        return tmp_path / "a100.parquet"

    return make


def times(graph: Graph) -> np.ndarray[Any, np.dtype[np.int64]]:
    return graph.nodes.duration_ns[graph.gpu_compute]


def evidence(graph: Graph) -> set[Evidence]:
    return {Evidence(one) for one in graph.nodes.evidence[graph.gpu_compute].tolist()}


def changed(gpu: Gpu | str, figure: str, factor: float) -> Gpu:
    gpu = load_gpu(gpu) if isinstance(gpu, str) else gpu
    return with_figures(gpu, {figure: factor * gpu.figures[figure].value})


class TestOfTheGpuThatWasMeasured:
    @pytest.mark.parametrize("figure", ["memory_gb", "tdp_w", "link_bandwidth_gb_per_s", "idle_w"])
    def test_a_figure_that_no_time_depends_on_leaves_the_measurement(
        self, h200: Graph, figure: str
    ):
        made = recost(h200, changed("H200", figure, 0.9))
        assert (made.nodes.duration_ns == h200.nodes.duration_ns).all()
        assert evidence(made) == {Evidence.MEASURED}
        assert (made.nodes.p90_ns == UNKNOWN).all()
        *notes, last = made.job.measurement.notes
        assert has_note([last], "what-if-figures", "850 of 850")
        shown = msgspec.structs.replace(made.job.measurement, notes=tuple(notes))
        assert shown == h200.job.measurement  # its steps with it

    def test_a_memory_too_small_is_reported_with_the_measured_step(self, h200: Graph):
        made = recost(h200, with_figures(load_gpu("H200"), {"memory_gb": 2}))
        assert has_note(made.job.measurement.notes, "target-memory-exceeded")
        assert made.job.measurement.step_ns == h200.job.measurement.step_ns

    def test_what_depends_on_it_is_extrapolated_and_all_else_stays(self, trace, mm, add):
        graph = trace(add(10**7, ns=20_000), mm(4096, 4096, 4096, ns=250_000))
        made = recost(graph, changed("H200", "bf16_tensor_tflops", 1.25))
        before = graph.nodes.evidence[graph.gpu_compute] == Evidence.MEASURED
        assert before.all()
        assert times(made)[0] == 20_000
        assert 200_000 <= times(made)[1] < 215_000
        kinds = made.nodes.evidence[made.gpu_compute].tolist()
        assert kinds == [Evidence.MEASURED, Evidence.EXTRAPOLATED]
        assert made.job.annotations[-1].details["interval"][0] > 20_000 + 180_000
        note = note_of(made.job.measurement.notes, "what-if-figures", "H200")
        assert "bf16_tensor_tflops=1236.25" in note.text
        assert note.text.count("1 of 2 nodes") == 2  # by the change, and as measured

    def test_the_interval_grows_with_what_changes(self, trace, add):
        """A change of 1% makes no more of an error than 1%; a large one that of the model."""
        graph = trace(add(10**7, ns=20_000))
        widths = []
        for factor in (1.01, 1.1, 8):
            made = recost(graph, changed("H200", "memory_bandwidth_gb_per_s", factor))
            (moved,), gpu = times(made), made.gpu_compute
            widths.append(math.log(made.nodes.p90_ns[gpu][0] / moved))
            assert widths[-1] <= abs(math.log(moved / 20_000)) + 1e-4
        assert widths[0] < 0.01 < widths[1] < widths[2]
        assert widths[2] == pytest.approx(shipped().errors["memory_same_die_short"].high, abs=2e-4)

    def test_with_other_what_ifs(self, h200: Graph):
        """A figure that does not matter changes none of them."""
        same = changed("H200", "memory_gb", 2)
        for passes in (
            PassOptions(dtype="fp8"),
            PassOptions(attention="flash2"),
            PassOptions(fuse="norm"),
        ):
            there, here = recost(h200, same, passes=passes), recost(h200, "H200", passes=passes)
            assert (there.nodes.duration_ns == here.nodes.duration_ns).all()
            assert (there.nodes.evidence == here.nodes.evidence).all()
            assert (there.nodes.p90_ns == here.nodes.p90_ns).all()


class TestOfWhatWasLookedUp:
    def test_a_row_is_taken_times_what_the_model_makes_of_it(self, trace, mm, add, rows):
        sum_, product = add(10**7, ns=20_000), mm(4096, 4096, 4096, ns=250_000)
        graph, path = trace(sum_, product), rows((sum_, 44_000))
        there = recost(graph, "A100", databases=[path])
        assert times(there)[0] == 44_000
        fast = changed("A100", "memory_bandwidth_gb_per_s", 1.5)
        made = recost(graph, fast, databases=[path])
        learned = [recost(graph, gpu, model="learned") for gpu in ("A100", fast)]
        before, after = (times(one) for one in learned)
        assert after[0] < 0.8 * before[0]
        assert times(made) == pytest.approx([44_000 * after[0] / before[0], after[1]], rel=1e-4)
        gpu = made.gpu_compute
        kinds = made.nodes.evidence[gpu].tolist()
        assert kinds == [Evidence.EXTRAPOLATED, Evidence.CALIBRATED]
        wide = [np.log(one.nodes.p90_ns[gpu] / times(one)) for one in (there, made)]
        same_die = shipped().errors["memory_same_die"].high
        more = np.minimum(same_die, abs(math.log(after[0] / before[0])))
        assert wide[1][0] == pytest.approx(math.hypot(wide[0][0], more), abs=1e-3)
        note_of(made.job.measurement.notes, "what-if-figures", "1 of 2")

    def test_a_figure_that_does_not_matter_leaves_it(self, trace, mm, rows):
        graph, path = trace(mm(512, 512, 512)), rows((mm(512, 512, 512), 20_000))
        there = recost(graph, "A100", databases=[path])
        made = recost(graph, changed("A100", "tdp_w", 1.5), databases=[path])
        assert times(made).tolist() == [20_000]
        assert evidence(made) == {Evidence.LOOKED_UP}
        assert (made.nodes.p90_ns == there.nodes.p90_ns).all()

    def test_of_a_cpu_capture(self, cpu_llama: Graph):
        there = recost(cpu_llama, "H200")
        assert {Evidence.LOOKED_UP, Evidence.INTERPOLATED} < evidence(there)
        for figure in ("memory_gb", "tdp_w"):
            made = recost(cpu_llama, changed("H200", figure, 0.9))
            assert (made.nodes.duration_ns == there.nodes.duration_ns).all()
            assert (made.nodes.evidence == there.nodes.evidence).all()
        fast = recost(cpu_llama, changed("H200", "memory_bandwidth_gb_per_s", 1.25))
        assert (times(fast) <= times(there)).all()
        # The operands of so small a model fit into the cache, whose bandwidth stays.
        assert 0.999 < times(fast).sum() / times(there).sum() < 1

    @pytest.mark.parametrize(
        "figure",
        ["memory_bandwidth_gb_per_s", "bf16_tensor_tflops", "boost_clock_mhz", "l2_mb",
         "memory_achievable_fraction", "bf16_sustained_fraction"],
    )  # fmt: skip
    def test_a_better_figure_makes_no_node_of_a_step_slower(self, h200: Graph, figure: str):
        """As if the step had been measured on an A100, so that the shipped rows tell of 604."""
        before = recost(h200, "H200", source="A100")
        assert (before.nodes.evidence == Evidence.LOOKED_UP).sum() > 500
        made = recost(h200, changed("H200", figure, 1.15), source="A100")
        assert (times(made) <= times(before)).all()
        assert times(made).sum() < times(before).sum() - 4_500


class TestMoreSms:
    def test_at_the_same_peak_a_product_of_few_tiles_takes_longer_and_explain_tells_why(
        self, trace, mm
    ):
        """64 tiles, each cut in two, take one wave of 132 SMs, and one of 198 slower ones."""
        graph = trace(mm(1024, 1024, 4096, ns=20_000))
        node = int(graph.nodes.id[graph.gpu_compute][0])
        more = changed("H200", "sm_count", 1.5)
        assert times(recost(graph, more))[0] > 20_800
        lines = dict(explain(graph, more, node).lines)
        assert lines["waves"].startswith(
            "64 tiles, if they are of 128 x 128: 0.48 on 132 SMs, 0.32 on 198 SMs"
        )
        assert "an SM does 4.99 TFLOP/s at the peak, 7.49 as described" in lines["waves"]
        assert has_note(recost(graph, more).job.measurement.notes, "what-if-peaks-stay")

    def test_with_its_peak_it_is_no_slower(self, trace, mm):
        larger = with_figures(load_gpu("H200"), {"sm_count": 264, "bf16_tensor_tflops": 1978})
        graph = trace(mm(1024, 1024, 8192, ns=60_000), mm(8192, 8192, 8192, ns=1_600_000))
        made = recost(graph, larger)
        assert times(made)[0] <= 60_000
        assert 0.49 < times(made)[1] / 1_600_000 < 0.6
        assert not has_note(made.job.measurement.notes, "what-if-peaks-stay")


def test_the_arithmetic_of_what_was_set(trace, mm, add, rows):
    sum_, product = add(10**7, ns=20_000), mm(4096, 4096, 4096, ns=250_000)
    graph, path = trace(sum_, product), rows((sum_, 44_000))
    for target, found in (("A100", [path]), ("H200", [])):
        gpu = changed(target, "memory_bandwidth_gb_per_s", 1.5)
        made = recost(graph, gpu, databases=found)
        ends = (
            graph.nodes.id[graph.gpu_compute],
            times(made),
            made.nodes.p90_ns[made.gpu_compute],
        )
        for node, ns, high in zip(*(column.tolist() for column in ends), strict=True):
            shown = explain(graph, gpu, node, databases=found)
            assert shown.duration_ns == ns
            ends = dict(shown.lines)["80% interval"].split(" ns")[0].replace(",", "").split(" to ")
            assert int(ends[1]) == pytest.approx(high, abs=1)
    lines = explain(
        graph, changed("A100", "memory_bandwidth_gb_per_s", 1.5), 1, databases=[path]
    ).lines
    assert "44,000 x " in dict(lines)["overrides"]
    assert "the model with memory_bandwidth_gb_per_s=3058.5" in dict(lines)["overrides"]
