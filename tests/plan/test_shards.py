"""Shards derived from a capture with two replicas, against captures with more of them."""

import functools
from pathlib import Path

import numpy as np
import pytest

import onerank
from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.ir import Graph, GraphBuilder, Job, ProcessGroup, World
from onerank.plan.captures import StageCapture, capture_stage
from onerank.plan.shard_memory import ShardError
from onerank.plan.shards import with_shards

# 500 rows of the vocabulary and 44 of the MLP are no multiples of 8 or 16: shards are padded.
MODEL = """{
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4,
  "hidden_size": 64, "intermediate_size": 88, "num_attention_heads": 4,
  "num_key_value_heads": 2, "vocab_size": 1000
}"""


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """Capture two layers as one of several replicas; the same capture runs once."""
    directory = tmp_path_factory.mktemp("shards")
    (directory / "llama.json").write_text(MODEL)

    @functools.cache
    def capture(sharding: str, dp: int, *, known_micro_batches: bool = False) -> Graph:
        arguments = (str(directory / "llama.json"), "--seq", "32", "--micro-batches", "2")
        stage = StageCapture(
            arguments=arguments,
            tp=2,
            sp=True,
            cp=1,
            ep=1,
            dp=dp,
            sharding=sharding,
            stages=1,
            stage=0,
            layers=2,
            micro_batches=2 if known_micro_batches else 0,
        )
        result = capture_stage("", "H100", stage)
        assert not result["code"], result["message"]
        path = Path(directory) / f"{sharding}-{dp}-{known_micro_batches}.et"
        path.write_bytes(result["trace"])
        return onerank.read(path)

    return capture


@pytest.mark.parametrize(
    ("sharding", "dp"), [("fsdp", 2), ("fsdp", 4), ("fsdp", 8), ("fsdp", 16), ("zero1", 8)]
)
def test_shards_of_two_replicas_give_those_of_more(captured, sharding, dp):
    real = captured(sharding, dp)
    derived = with_shards(captured(sharding, 2, known_micro_batches=True), dp)
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
    assert before.peak_memory_bytes == after.peak_memory_bytes
    assert before.start_memory_bytes == after.start_memory_bytes
    assert before.activation_bytes == after.activation_bytes
    assert before.memory.blocks == after.memory.blocks
    assert {name: sorted(sizes) for name, sizes in before.resident_bytes.items()} == {
        name: sorted(sizes) for name, sizes in after.resident_bytes.items()
    }


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
