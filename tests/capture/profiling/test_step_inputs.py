"""Steps whose inputs differ in shape: matched, refused, stored in the trace, and repeated."""

import json
import math
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from notes import codes, has_note
from own_process import run_command
from raised import raises_code

from onerank import read
from onerank.annotate.models.intervals import HALF_WIDTH, Interval
from onerank.capture import Options, WindowPlan, capture
from onerank.capture.profiling import profiled_windows
from onerank.capture.profiling.step_variance import StepWork, argument_shapes, input_spread
from onerank.ir import Graph
from onerank.ir.errors import ScriptError
from onerank.ir.notes import Note

SCRIPT = """
import itertools, torch
class Model(torch.nn.Sequential): ...
model = Model(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for length in LENGTHS:
    model(input=torch.zeros(4, length, dtype=torch.long)).sum().backward()  # by keyword
    optimizer.step()
"""


def captured(directory: Path, lengths: str, **plan: int) -> Graph:
    script = directory / "train.py"
    script.write_text(SCRIPT.replace("LENGTHS", lengths))
    windows = WindowPlan(**{"warm_up": 2, "timed_steps": 4, **plan})
    return capture(script, [], Options(windows=windows)).graph


@pytest.mark.parametrize("cycle", ["[7, 9]", "[7, 9, 11]", "[5, 6, 7, 8, 9]"])
@pytest.mark.parametrize("repeat", [1, 2])
def test_times_shapes_and_step_time_are_of_steps_with_equal_inputs(tmp_path, cycle, repeat):
    graph = captured(tmp_path, f"itertools.cycle({cycle})", repeat=repeat)
    measured = graph.job.measurement
    assert 0 < measured.input_spread < 0.5
    assert codes(measured.notes).count("input-shapes-vary") == 1
    assert not has_note(measured.notes, "step-memory-differs")
    assert not has_note(measured.notes, "times-of-other-shapes")
    assert len(measured.step_ns) <= 4
    samples = graph.nodes.samples[graph.mask(*_compute(graph))]
    assert (samples == (repeat if repeat > 1 else 0)).all()  # 0: one step, no median


def _compute(graph: Graph) -> set:
    return {node.kind for node in graph if not node.kind.is_communication}


def test_equal_inputs_leave_no_note(tmp_path):
    measured = captured(tmp_path, "itertools.cycle([7])").job.measurement
    assert (measured.input_spread, len(measured.step_ns)) == (0.0, 4)
    assert not has_note(measured.notes, "input-shapes-vary")


def test_inputs_that_never_repeat_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(profiled_windows, "_MOST_PAIRS", 4)  # each takes half a second
    with raises_code("script-shapes-vary", ScriptError):
        captured(tmp_path, "range(1, 400)")
    assert list(tmp_path.iterdir()) == [tmp_path / "train.py"]


def test_shapes_of_all_tensors_in_the_arguments():
    x, y = torch.zeros(2, 3), torch.zeros(4)
    assert argument_shapes(((x,), {"mask": y, "batch": [{"ids": x}, None, 3]})) == (
        (2, 3),
        (4,),
        (2, 3),
    )
    ragged = [torch.nested.nested_tensor([y, y[:n]], layout=torch.jagged) for n in (1, 2)]
    assert argument_shapes(ragged[0]) == argument_shapes(ragged[1])


def test_the_spread_of_input_sizes():
    small, large = (StepWork(1, 0, (((4, n),),)) for n in (8, 16))
    assert input_spread([small, small], small) == 0.0
    assert input_spread([small, large], large) == pytest.approx(math.log(2) / math.sqrt(2))


def test_the_spread_widens_an_interval():
    assert Interval(90, 110).widened(100, 0.0) == Interval(90, 110)
    low, high = Interval(90_000, 110_000).widened(100_000, 0.3)
    assert low == round(1e5 * math.exp(-math.hypot(math.log(1 / 0.9), HALF_WIDTH * 0.3)))
    assert high == round(1e5 * math.exp(math.hypot(math.log(1.1), HALF_WIDTH * 0.3)))


def test_every_command_repeats_the_notes_and_annotate_is_less_certain(tmp_path):
    graph = captured(tmp_path, "itertools.cycle([7])")
    intervals = []
    for spread in (0.0, 0.5):
        measured = msgspec.structs.replace(
            graph.job.measurement, input_spread=spread, notes=(Note("doubtful", code="doubt"),)
        )
        job = msgspec.structs.replace(graph.job, measurement=measured)
        trace = tmp_path / f"{spread}.et"
        replace(graph, job=job).write(trace)
        assert read(trace).job.measurement.input_spread == spread
        done = run_command("annotate", "--target", "H100", "--json", trace)
        assert "note[doubt]: doubtful" in done.stderr
        intervals.append(json.loads(done.stdout)["interval"])
    widths = np.log([high / low for low, high in intervals])
    assert widths[1] > max(widths[0], 2 * HALF_WIDTH * 0.5 * 0.99)
    for command in (["replay"], ["memory"], ["export", "parquet", "-o", tmp_path / "pq"],
                    ["export", "dot", "-o", tmp_path / "t.dot"],
                    ["export", "astra-sim", "-o", tmp_path / "ws"]):  # fmt: skip
        done = run_command(*command, trace)
        assert done.stderr.count("note[doubt]: doubtful") == 1, (command, done.stderr)
    assert "doubtful [doubt]" in run_command("show", trace).stdout
