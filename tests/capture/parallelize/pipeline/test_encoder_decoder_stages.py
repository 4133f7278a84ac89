"""Stages of an encoder and its decoder: results and collectives, with peers and without."""

from collections import Counter
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from encoder_decoder_job import encoder_decoder
from job_options import axes
from raised import raises_code
from real_ranks import run_ranks

from onerank.annotate import recost
from onerank.capture import Options, WindowPlan, capture
from onerank.capture.fake_world.recorder import Recorder
from onerank.capture.parallelize.pipeline.encoder_decoder_stages import split_stacks
from onerank.capture.parallelize.pipeline.stage_boundary import PassthroughTensor
from onerank.capture.parallelize.shard_model import SlicingOptions, slice_to_rank
from onerank.capture.verify.slice_check import compare_slices
from onerank.converters.expand.pipeline import PipelineSchedule, expand
from onerank.converters.targets.astra_sim.check import check
from onerank.converters.targets.astra_sim.exporter import export_astra_sim_ranks
from onerank.ir import Kind, Pipeline, World
from onerank.ir.errors import SliceError

FORMS: list[tuple[str, World, bool]] = [
    ("T5", World.of(pp=4), False),  # the bias of the first layer on all stages
    ("MT5", World.of(pp=3), False),  # separate embeddings per stack, untied head
    ("UMT5", World.of(tp=2, pp=2), False),
    ("Bart", World.of(tp=2, pp=4), True),  # no norms after the layers
    ("Marian", World.of(pp=3), False),
    ("Whisper", World.of(tp=2, pp=4), True),  # convolutions
]


@pytest.mark.parametrize(("kind", "world", "sequence"), FORMS)
def test_encoder_decoder_stages_match_the_whole_model(kind, world, sequence):
    module, batch = encoder_decoder(kind)
    options = Options(**axes(world), sp=sequence)
    rows, reasons, _ = compare_slices(module, (), batch, options, lambda _: None)
    assert not reasons
    assert not [row for row in rows if row.breaches]
    assert {row.what for row in rows} == {"loss", "logits", "gradients", "weights"}


# Four real ranks ---------------------------------------------------------------------------------

CASES: dict[str, tuple[str, World, bool, bool]] = {
    "four stages": ("T5", World.of(pp=4), False, False),
    "shards of the sequences": ("Bart", World.of(tp=2, pp=2), True, True),
}

"""Model, world, sequence parallelism, activation recomputation."""

MICRO_BATCHES = 2

TIED_EMBEDDINGS = ("shared.weight", "model.shared.weight")  # names of the tied embedding


def train(module: Any, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Take one step of two micro-batches; return the last loss and the gradients."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    for _ in range(MICRO_BATCHES):
        loss = module(**batch).loss / MICRO_BATCHES
        loss.backward()
    optimizer.step()
    return loss.item(), {
        n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None
    }


def sliced_model(case: str, rank: int, new_group: Any, *, peers_absent: bool) -> tuple[Any, Any]:
    kind, world, sequence, recomputed = CASES[case]
    module, batch = encoder_decoder(kind)
    slice_to_rank(
        module, world, rank, new_group, SlicingOptions(sequence=sequence, peers_absent=peers_absent)
    )
    if recomputed:
        module.gradient_checkpointing_enable()
    module.train()
    return module, batch


def train_rank(rank: int, results: Any) -> None:
    def new_group(_: str, ranks: Any) -> Any:
        return dist.new_group(list(ranks), use_local_synchronization=True)

    for case in CASES:
        module, batch = sliced_model(case, rank, new_group, peers_absent=False)
        with torch.profiler.profile(record_shapes=True) as profile:
            trained = train(module, batch)
        results[case, rank] = (*trained, gloo_calls(profile.events()))


def gloo_calls(events: Any) -> Counter[tuple[str, int]]:
    """Count Gloo's calls by collective and bytes, from profiler events of fp32 tensors."""
    counts = Counter[tuple[str, int]]()
    for event in events:
        name, shapes = event.name, event.input_shapes
        if name in ("gloo:send", "gloo:recv", "gloo:all_reduce"):
            counts[name.removeprefix("gloo:"), 4 * prod(shapes[0])] += 1
        elif name == "c10d::_allgather_base_":
            counts["all_gather", 4 * prod(shapes[1])] += 1
        elif name == "c10d::_reduce_scatter_base_":  # Gloo implements it with an all-reduce
            counts["reduce_scatter", 4 * prod(shapes[1])] += 1
            counts["all_reduce", 4 * prod(shapes[1])] -= 1
    return +counts


def recorded(case: str, rank: int) -> Counter[tuple[str, int]]:
    recorder = Recorder(rank, 4)
    recorder.start()
    try:
        train(*sliced_model(case, rank, recorder.new_group, peers_absent=True))
    finally:
        recorder.stop()
    return Counter((call.collective, call.bytes) for call in recorder.calls)


@pytest.fixture(scope="module")
def rank_results() -> Any:
    return run_ranks(train_rank, 4)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("case", CASES)
def test_real_ranks_match_the_whole_model_and_the_calls_of_a_rank_without_peers(rank_results, case):
    kind, world, _, _ = CASES[case]
    whole, batch = encoder_decoder(kind)
    loss, expected = train(whole.train(), batch)
    checked: set[str] = set()
    for rank in range(4):
        stage = world.point(rank)["pp"]
        stage_loss, gradients, calls = rank_results[case, rank]
        assert stage_loss == (
            pytest.approx(loss, abs=1e-5) if stage == world.sizes["pp"] - 1 else 0
        )
        for name, gradient in gradients.items():
            biased = "relative_attention_bias" in name  # the first layer's, on all stages
            names = (name.replace("block.1", "block.0") if biased else name, *TIED_EMBEDDINGS)
            origin = next(other for other in names if other in expected)
            expected_gradient = expected[origin]
            for dim in range(expected_gradient.dim()):
                if expected_gradient.shape[dim] != gradient.shape[dim]:
                    expected_gradient = expected_gradient.chunk(world.sizes["tp"], dim)[
                        world.point(rank)["tp"]
                    ]
            torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=1e-4, msg=name)
            checked.add(origin)
        assert recorded(case, rank) == calls
    assert checked == set(expected)


ENCODED, DECODED = 2 * 16 * 32 * 4, 2 * 8 * 32 * 4


def test_a_decoder_stage_forwards_the_encoders_output():
    recorder = Recorder(2, 4)  # the decoder's first stage of two
    recorder.start()
    module, batch = encoder_decoder("T5")
    slice_to_rank(module, World.of(pp=4), 2, recorder.new_group, SlicingOptions())
    output = module(**batch)
    output.loss.backward()
    recorder.stop()
    assert [(call.collective, call.bytes, call.peer) for call in recorder.calls] == [
        ("recv", ENCODED, 1),
        ("send", DECODED, 3),
        ("send", ENCODED, 3),
        ("recv", DECODED, 3),
        ("recv", ENCODED, 3),
        ("send", ENCODED, 1),
    ]
    assert {name.split(".")[0] for name, _ in module.named_parameters()} == {"decoder", "shared"}


def test_stages_hold_layers_of_one_stack():
    assert split_stacks(24, 24, 4) == ((12, 12, 12, 12), 2)
    assert split_stacks(32, 4, 4) == ((11, 11, 10, 4), 3)
    assert split_stacks(2, 12, 4) == ((2, 4, 4, 4), 1)
    assert split_stacks(4, 4, 3, (1, 3, 4)) == ((1, 3, 4), 2)
    with raises_code("pp-mixed-stage"):
        split_stacks(4, 4, 2, (3, 5))
    with raises_code("pp-too-many-stages"):
        split_stacks(2, 2, 5)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"labels": None}, "pp-no-labels"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(2, 16, 32)}, "pp-other-inputs"),
    ],
)
def test_calls_that_a_stage_cannot_run_are_refused(recorder, changes, code):
    module, batch = encoder_decoder("T5")
    slice_to_rank(module, World.of(pp=4), 1, recorder.new_group, SlicingOptions())
    with raises_code(code, SliceError):
        module(**{**batch, **changes})


def test_outputs_that_an_encoder_stage_lacks_are_refused(recorder):
    module, batch = encoder_decoder("T5")
    slice_to_rank(module, World.of(pp=4), 1, recorder.new_group, SlicingOptions())
    output = module(**batch)
    for name in ("logits", "encoder_last_hidden_state"):
        with raises_code("output-not-available", SliceError) as refused:
            getattr(output, name).mean()
        assert "stage 3 computes, on stage 1" in str(refused.value)


def test_a_loss_in_place_of_logits_passes_through_the_models_loss():
    loss = PassthroughTensor.of(torch.tensor(2.0))
    assert type(loss.view(-1, 64)) is PassthroughTensor
    assert loss.reshape(-1).shape == (1,)  # as `capture verify` reads outputs
    lost = torch.nn.functional.cross_entropy(loss.view(-1, loss.size(-1)), torch.zeros(4).long())
    assert type(lost) is torch.Tensor
    assert lost == 2


SCRIPT = """
import torch
from transformers import T5Config, T5ForConditionalGeneration

model = T5ForConditionalGeneration(T5Config(
    vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
    decoder_start_token_id=0))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(60):
    optimizer.zero_grad()
    for micro_batch in range(2):
        ids = torch.randint(3, 64, (2, 16))
        (model(input_ids=ids, labels=ids[:, :8].contiguous()).loss / 2).backward()
    optimizer.step()
"""


def test_captured_stages_run_as_a_pipeline(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    world, layers = World.of(pp=3), (2, 1, 1)
    graphs = [
        capture(
            path, [], Options(**axes(world), rank=rank, pp_layers=layers, windows=WindowPlan(1, 1))
        ).graph
        for rank in range(3)
    ]
    assert [graph.job.pipeline for graph in graphs] == [
        Pipeline(stage, layers) for stage in range(3)
    ]
    sent = [node.value("comm_bytes") for node in graphs[1] if node.kind is Kind.SEND]
    assert sent == [DECODED, ENCODED, ENCODED] * 2  # the last are gradients
    for name, ranks in {"embedding": (0, 1, 2), "decoder_positions": (1, 2)}.items():
        assert graphs[1].job.group(name).ranks == ranks
    with raises_code("pipeline-shared-weights"):
        expand(graphs, PipelineSchedule.parse("interleaved:3"), 3)
    expanded = expand(
        [recost(graph, "H100") for graph in graphs], PipelineSchedule.parse("1f1b"), 4
    )
    assert export_astra_sim_ranks(expanded, tmp_path / "workload").ranks == 3
    assert check(tmp_path / "workload") == []
