"""Captures derived from others, with more replicas or other micro-batches, against captures."""

import functools
import re
from pathlib import Path

import numpy as np
import pytest
from own_process import call

import onerank
from onerank.annotate.memory.memory_report import fragmentation_of
from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.converters.expand.layers import extrapolate
from onerank.ir import Graph, GraphBuilder, Job, Measurement, ProcessGroup, World
from onerank.ir.replay import schedule
from onerank.plan.captures import StageCapture
from onerank.plan.micro_batches import (
    MicroBatchError,
    captured_sizes,
    with_micro_batch,
)
from onerank.plan.run_captures import capture_stage
from onerank.plan.shard_memory import ShardError
from onerank.plan.shards import with_shards

# 500 rows of the vocabulary and 44 of the MLP are no multiples of 8 or 16: shards are padded.
MODEL = """{
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4,
  "hidden_size": 64, "intermediate_size": 88, "num_attention_heads": 4,
  "num_key_value_heads": 2, "vocab_size": 1000
}"""


STEPS = ("2:1:none", "2:13:none", "2:3:none", "2:3:full")
"""Steps of the capture with two replicas; that of 13 sequences is what others are derived from."""


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """Capture two layers as one of several replicas; the same capture runs once."""
    directory = tmp_path_factory.mktemp("shards")
    (directory / "llama.json").write_text(MODEL)
    # The tokens of 13 sequences fit into the embedding, so no collective fills a buffer.
    (directory / "words.json").write_text(MODEL.replace("1000", "3400"))

    @functools.cache
    def capture_steps(
        sharding: str, dp: int, layers: int, steps: tuple[str, ...]
    ) -> dict[str, Graph]:
        arguments = (str(directory / "llama.json"), "--seq", "32")
        if len(steps) > 1:
            arguments = (str(directory / "words.json"), "--seq", "256")
        elif not steps[0]:
            arguments += ("--micro-batches", "2")
        captures = [
            StageCapture(
                arguments=arguments,
                tp=2,
                sp=True,
                cp=1,
                ep=1,
                dp=dp,
                sharding=sharding,
                stages=1,
                stage=0,
                layers=layers,
                step=step,
            )
            for step in steps
        ]
        result = call(capture_stage, "", "H100", captures)
        assert not result.refused
        path = Path(directory) / "trace.et"
        graphs: dict[str, Graph] = {}
        for step, trace in result.traces.items():
            path.write_bytes(trace)
            graphs[step] = onerank.read(path)
        return graphs

    def capture(
        sharding: str,
        dp: int,
        *,
        layers: int = 2,
        steps: tuple[str, ...] = ("",),
        step: int = 0,
    ) -> Graph:
        return capture_steps(sharding, dp, layers, steps)[steps[step]]

    return capture


@pytest.mark.parametrize(("sharding", "dp"), [("fsdp", 2), ("fsdp", 8), ("zero1", 8)])
def test_shards_of_two_replicas_give_those_of_more(captured, sharding, dp):
    real = captured(sharding, dp)
    derived = with_shards(captured(sharding, 2, steps=STEPS[:1]), dp)
    for column in ("comm_bytes", "collective", "bytes_allocated", "micro_batch", "phase"):
        assert (getattr(derived.nodes, column) == getattr(real.nodes, column)).all(), column
    assert derived.text("name") == real.text("name")
    for column in ("input_shapes", "output_shapes"):
        assert compared(derived, column) == compared(real, column)
    costs = op_costs_of(derived), op_costs_of(real)
    assert np.array_equal(costs[0].flops, costs[1].flops)
    assert costs[0].flops.sum() > 0
    assert derived.job.world == real.job.world
    assert derived.job.groups == real.job.groups
    before, after = derived.job.measurement, real.job.measurement
    assert_peaks_agree(before, after)
    assert before.activation_bytes == after.activation_bytes
    assert before.memory.blocks == after.memory.blocks
    assert {name: sorted(sizes) for name, sizes in before.resident_bytes.items()} == {
        name: sorted(sizes) for name, sizes in after.resident_bytes.items()
    }


def assert_peaks_agree(derived: Measurement, real: Measurement) -> None:
    """Ends of blocks that the allocator leaves unsplit, under 1 MiB each, stay as captured."""
    assert derived.start_memory_bytes == pytest.approx(real.start_memory_bytes, abs=1 << 20)
    assert derived.peak_memory_bytes == pytest.approx(real.peak_memory_bytes, abs=1 << 20)


def test_kernels_of_a_stream_do_not_overlap_at_another_depth(captured):
    # Composed steps of captures without a device replayed in half their time.
    depths = {layers: captured("fsdp", 2, steps=STEPS[:1], layers=layers)
              for layers in (2, 4)}  # fmt: skip
    graph = onerank.recost(extrapolate(depths, 6), "H100")
    times = schedule(graph)
    for stream in np.unique(graph.nodes.stream[graph.compute]):
        kernels = np.flatnonzero((graph.nodes.stream == stream) & graph.compute)
        kernels = kernels[np.argsort(times.start_ns[kernels], kind="stable")]
        assert len(kernels) > 5
        assert (times.start_ns[kernels[1:]] >= times.end_ns[kernels[:-1]]).all()


def test_a_micro_batch_of_a_prime_gives_others(captured):
    smallest, prime, real = (captured("fsdp", 2, steps=STEPS, step=step) for step in range(3))
    derived = with_micro_batch(prime, smallest, 13, 3)
    for column in ("comm_bytes", "collective", "bytes_allocated", "micro_batch", "phase"):
        assert (getattr(derived.nodes, column) == getattr(real.nodes, column)).all(), column
    for column in ("name", "input_shapes", "output_shapes", "input_strides"):
        assert derived.text(column) == real.text(column)
    values = [derived.text("input_values"), real.text("input_values")]
    # Numbers of tensors differ: the steps ran one after the other.
    assert [re.sub(r"\[\d+,\d+,", "[", text) for text in values[0]] == [
        re.sub(r"\[\d+,\d+,", "[", text) for text in values[1]
    ]
    before, after = derived.job.measurement, real.job.measurement
    assert_peaks_agree(before, after)
    assert before.activation_bytes == after.activation_bytes
    assert before.memory.blocks == after.memory.blocks
    assert before.resident_bytes == after.resident_bytes


def test_steps_of_one_process_start_with_the_same_memory(captured):
    steps = [captured("fsdp", 2, steps=STEPS, step=step) for step in range(4)]
    assert len({step.job.measurement.start_memory_bytes for step in steps}) == 1
    none, full = steps[2:]
    assert len(full) > len(none)
    assert max(full.job.measurement.activation_bytes) < max(none.job.measurement.activation_bytes)


def test_memory_that_a_larger_step_reserved_is_no_fragmentation(captured):
    """The step with 3 sequences runs after that with 13, whose segments the allocator keeps."""
    larger, smaller = (captured("fsdp", 2, steps=STEPS, step=step) for step in (1, 2))
    reserved = [step.job.measurement.memory.reserved_bytes for step in (larger, smaller)]
    assert reserved[0] == reserved[1]
    own = fragmentation_of(larger, own_process=False)
    assert 1 < fragmentation_of(smaller, own_process=False) < 1.2 * own
    assert fragmentation_of(smaller) > 1.5 * own


def test_a_micro_batch_without_a_memory_log_is_not_derived():
    with pytest.raises(MicroBatchError) as error:
        with_micro_batch(*[GraphBuilder().build(Job())] * 2, 13, 2)
    assert error.value.code == "plan-unknown-micro-batch"


@pytest.mark.parametrize(
    ("sizes", "seq", "captured"),
    [
        ([1, 2, 4, 8], 8192, {1: 1, 2: 13, 4: 13, 8: 13}),
        ([4, 2, 8], 4096, {2: 2, 4: 13, 8: 13}),
        ([1, 2], 4096, {1: 1, 2: 2}),
        ([1, 2, 4], 131072, {1: 1, 2: 5, 4: 5}),
        ([1, 2, 4], 1 << 20, {1: 1, 2: 2, 4: 4}),
        ([1, 64, 128], 128, {1: 1, 64: 64, 128: 128}),
    ],
)
def test_which_micro_batches_are_captured(sizes, seq, captured):
    assert captured_sizes(sizes, seq, [64, 88, 128]) == captured


def compared(graph: Graph, column: str) -> list[str]:
    """Return a column without copies of packed addresses from the host, which stay as captured."""
    rows = zip(graph.text(column), graph.text("input_values"), strict=True)
    return [text for text, values in rows if ',8,"cpu"],true]' not in values]


def test_an_odd_number_of_replicas_is_not_derived(captured):
    with pytest.raises(ShardError) as error:
        with_shards(captured("fsdp", 2), 3)
    assert error.value.code == "plan-unknown-shards"


def test_a_group_without_counterpart_is_not_derived():
    # A plan captures such a layout with its own number of replicas; an ExportError would drop it.
    job = Job(world=World.of(tp=2, dp=2), groups=(ProcessGroup("diagonal", (0, 3)),))
    with pytest.raises(ShardError) as error:
        with_shards(GraphBuilder().build(job), 4)
    assert error.value.code == "plan-unknown-shards"
