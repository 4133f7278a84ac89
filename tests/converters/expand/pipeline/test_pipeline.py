"""Expansion of captured stages to every rank: order, messages, groups, memory."""

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from raised import raises_code
from stages import HIDDEN_BYTES, captures, stage

from onerank.converters.expand.pipeline import PipelineSchedule, expand
from onerank.converters.expand.pipeline.split_backward import split_backward
from onerank.converters.expand.pipeline.stages import StageBlock, split_into_blocks
from onerank.converters.expand.ranks import RankGraph
from onerank.converters.sources.kineto import convert_directory
from onerank.converters.targets.astra_sim.exporter import export_astra_sim, export_astra_sim_ranks
from onerank.ir import Graph, GraphBuilder, Job, Kind, Phase, World
from onerank.ir.chakra import read_records

H200 = Path(__file__).parents[4] / "traces" / "h200-llama-8b-4l-tp4"
LETTERS = {"forward": "F", "input": "I", "weight": "W", "evaluation": "E"}


def expanded(
    schedule: str, micro_batches: int, graphs: list[Graph] | None = None
) -> list[RankGraph]:
    return expand(graphs or captures(), PipelineSchedule.parse(schedule), micro_batches)


def order(graph: Graph) -> str:
    """Return the kernels in the order they run, with their micro-batches."""
    nodes = [graph.node(index) for index in graph.topological_order().tolist()]
    return " ".join(
        f"{LETTERS[node.name]}{node.value('micro_batch')}" for node in nodes if node.name in LETTERS
    )


def test_kernels_run_in_the_schedule_s_order():
    first, *_, last = expanded("1f1b", 5)
    assert order(last.graph) == "F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3 F4 I4 W4"
    assert order(first.graph) == "F0 F1 F2 F3 I0 W0 F4 I1 W1 I2 W2 I3 W3 I4 W4"
    assert order(expanded("gpipe", 2)[1].graph) == "F0 F1 I0 W0 I1 W1"


def test_a_split_backward_runs_its_parts_apart():
    """ZB-V on two ranks: the last has both middle stages, the first the ends."""
    first, last = expanded("zbv", 3)
    assert (first.stages, last.stages) == ((0, 3), (1, 2))
    assert order(last.graph) == ("F0 F0 F1 F1 I0 W0 F2 I0 W0 F2 I1 W1 I1 I2 I2 W1 W2 W2")
    assert last.ranks == (1,)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved:2", "zbv"])
@pytest.mark.parametrize("captured", [1, 2, 3])
def test_every_send_meets_its_receive_and_nothing_stalls(
    schedule, micro_batches, captured, tmp_path
):
    """The export is checked as it is written; more and fewer micro-batches than were captured."""
    if schedule == "interleaved:2" and micro_batches == 3:
        micro_batches = 4
    ranks = expanded(schedule, micro_batches, captures(captured=captured))
    done = export_astra_sim_ranks(ranks, tmp_path / "out")
    assert done.ranks == len(ranks)
    sends: set[tuple[int, int, int]] = set()
    receives: set[tuple[int, int, int]] = set()
    for rank in range(done.ranks):
        for node in read_records(tmp_path / "out" / f"workload.{rank}.et").nodes:
            attributes = {name: attribute.value for name, attribute in node.attributes.items()}
            if node.type in (5, 6):
                message = attributes["comm_src"], attributes["comm_dst"], attributes["comm_tag"]
                (sends if node.type == 5 else receives).add(message)
                assert attributes["comm_size"] == HIDDEN_BYTES
    # every micro-batch crosses each stage boundary between two ranks both ways, with its own tag
    borders = {"zbv": 2, "interleaved:2": 3}.get(schedule, 3)
    assert sends == receives
    assert len(sends) == 2 * borders * micro_batches


def test_the_first_and_last_micro_batch_stand_for_themselves():
    cases = {
        (3, 5): [0, 1, 1, 1, 2],
        (4, 6): [0, 1, 2, 1, 2, 3],
        (3, 2): [0, 2],
        (2, 4): [0, 1, 1, 1],
        (1, 3): [0, 0, 0],
        (3, 1): [2],
    }
    for (captured, count), sources in cases.items():
        cutting = split_into_blocks(stage(1, captured=captured))
        assert [cutting.source(at, count) for at in range(count)] == sources


@pytest.mark.parametrize("evaluated", [0, 1, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved:2", "zbv"])
def test_an_evaluation_is_laid_once(schedule, evaluated, tmp_path):
    """Before the first micro-batch or after the last; once per stage."""
    ranks = expanded(schedule, 8, captures(evaluated=evaluated))
    plain = expanded(schedule, 8)
    for rank_graph, without in zip(ranks, plain, strict=True):
        evaluation = "E-1 " * len(rank_graph.stages)
        expected = order(without.graph)
        expected = evaluation + expected if evaluated == 0 else f"{expected} {evaluation}"
        assert order(rank_graph.graph) == expected.strip()
    export_astra_sim_ranks(ranks, tmp_path / "out")  # checks that messages meet


def test_sends_do_not_hold_up_what_follows():
    graph = expanded("1f1b", 4)[1].graph
    for index in range(len(graph)):
        kinds = {graph.node(source).kind for source, _ in graph.edges.of(index)}
        assert Kind.SEND not in kinds


def test_optimizer_and_gradient_sums_come_after_the_last_backward():
    graph = expanded("1f1b", 8, captures(world=World.of(dp=2, pp=4)))[0].graph
    nodes = [graph.node(index) for index in graph.topological_order().tolist()]
    tail = [node.name for node in nodes if node.phase is Phase.OPTIMIZER]
    assert tail == [node.name for node in nodes[-3:]] == ["dp", "embedding", "optimizer"]


def test_groups_of_all_ranks_of_tp_dp_and_pp(tmp_path):
    world = World.of(tp=2, dp=2, pp=4)
    done = export_astra_sim_ranks(expanded("1f1b", 4, captures(world=world)), tmp_path / "out")
    assert done.ranks == 16
    groups = {*done.groups.values()}
    assert {(0, 1), (2, 3), (14, 15)} <= groups  # tp
    assert {(0, 2), (1, 3), (13, 15)} <= groups  # dp
    assert {(0, 12), (1, 13), (2, 14), (3, 15)} <= groups  # embeddings of first and last stage
    assert len(groups) == 1 + 8 + 8 + 4


def test_groups_over_two_axes_and_two_chunks(tmp_path):
    """dp+cp; eight stages on four ranks, the embedding's group between their ends."""
    world = World.of(cp=2, dp=2, pp=8)
    ranks = expanded("interleaved:2", 4, captures(8, world=world))
    assert ranks[1].graph.job.world == World.of(cp=2, dp=2, pp=4)
    done = export_astra_sim_ranks(ranks, tmp_path / "out")
    groups = {*done.groups.values()}
    assert groups == {
        tuple(range(16)),
        *((4 * p, 4 * p + 1, 4 * p + 2, 4 * p + 3) for p in range(4)),
        *((at, at + 12) for at in range(4)),
    }


def test_an_embedding_whose_stages_share_a_rank_needs_no_sum(tmp_path):
    done = export_astra_sim_ranks(expanded("zbv", 4), tmp_path / "out")
    assert done.dropped == {"collectives of one-rank groups": 2}


def test_peak_memory_counts_the_micro_batches_in_flight():
    """1000 at the start, 500 per micro-batch, 100 more in passing."""

    def peaks(schedule: str, micro_batches: int) -> list[int]:
        return [rank_graph.peak_memory_bytes for rank_graph in expanded(schedule, micro_batches)]

    assert peaks("1f1b", 8) == [1100 + n * 500 for n in (4, 3, 2, 1)]
    assert peaks("gpipe", 8) == [1100 + 8 * 500] * 4
    assert peaks("1f1b", 2) == [1100 + n * 500 for n in (2, 2, 2, 1)]
    assert peaks("zbv", 8) == [2100 + 4 * 500] * 2  # two stages' states, 2 x 2 halves in flight


def test_a_real_backward_splits_into_input_and_weight_gradients():
    """29 linear layers (7 in each of 4, and the head) have one product of each sort."""
    graph, _ = convert_directory(H200)
    parts = split_backward(graph, split_into_blocks(graph).blocks[StageBlock("B", 0)])

    def kernels(op: str) -> list[int]:
        nodes = [[graph.node(index) for index in part] for part in parts]
        return [
            sum(node.kind is Kind.KERNEL and node.text("op") == op for node in part)
            for part in nodes
        ]

    assert kernels("aten::mm") == [29, 29]
    assert kernels("aten::_cudnn_attention_backward") == [20, 0]
    assert kernels("aten::embedding_dense_backward") == [0, 19]


def test_memory_that_held_a_larger_tensor_before_is_another_s():
    """Of 16 kB: a gradient of weights in bf16, summed and freed; then what is sent, in fp32."""

    def tensor(number: int, storage: int, elements: int, size: int) -> list[object]:
        return [number, storage, 0, elements, size, "cuda:0"]

    read, gradient = tensor(3, 8, 4096, 2), tensor(4, 9, 8192, 2)
    weights, converted = tensor(1, 7, 8192, 2), tensor(5, 7, 4096, 4)
    calls = (
        (Kind.KERNEL, "aten::mm", [read], [weights]),
        (Kind.KERNEL, "aten::add_", [gradient, weights], [gradient]),
        (Kind.HOST_OP, "aten::empty_strided", [], [converted]),
        (Kind.KERNEL, "aten::copy_", [converted, read], [converted]),
        (Kind.SEND, "send", [converted], []),
    )
    builder = GraphBuilder()
    for at, (kind, name, reads, writes) in enumerate(calls):
        stream = {} if kind is Kind.HOST_OP else {"stream": 7}
        builder.add(
            kind=kind, name=name, op=name, phase=Phase.BACKWARD, start_ns=at, duration_ns=1,
            input_values=json.dumps(reads), output_values=json.dumps(writes), **stream,
        )  # fmt: skip
    inputs, others = split_backward(builder.build(Job()), list(range(len(calls))))
    assert (inputs, others) == ([2, 3, 4], [0, 1])


def test_a_real_step_s_kernels_go_where_the_host_launched_them():
    graph, _ = convert_directory(H200)
    blocks = split_into_blocks(graph).blocks
    assert {*blocks} == {StageBlock("F", 0), StageBlock("B", 0), StageBlock("after")}
    launched = sum(graph.gpu_compute[index] for index in blocks[StageBlock("after")])
    assert launched == 184
    assert sum(int(graph.gpu_compute[blocks[block]].sum()) for block in blocks) == 850


def without(**changes: object) -> Graph:
    graph = stage(0)
    return replace(graph, job=msgspec.structs.replace(graph.job, **changes))


def two_steps() -> Graph:
    """The optimizer steps between the micro-batches."""
    graph = stage(0)
    phases = graph.nodes.phase.copy()
    phases[len(phases) // 2] = Phase.OPTIMIZER
    return graph.with_columns(phase=phases)


REFUSED = {
    "no pipeline": ([without(pipeline=None)], "1f1b", "pipeline-no-stage", "--pp P"),
    "a stage is missing": (
        captures()[:2],
        "1f1b",
        "pipeline-missing-stage",
        "stages [3] of the pipeline's 4",
    ),
    "another world": (
        [stage(0), stage(1), stage(3, world=World.of(dp=2, pp=4))],
        "1f1b",
        "pipeline-different-worlds",
        "ranks 0 and 6",
    ),
    "another pipeline": (
        [stage(0), stage(1, 5)],
        "1f1b",
        "pipeline-different-layers",
        "ranks 0 and 1",
    ),
    "one stage twice": (
        [*captures(), stage(0)],
        "1f1b",
        "pipeline-duplicate-rank",
        "rank 0",
    ),
    "stages that do not divide": (
        captures(5),
        "zbv",
        "pipeline-indivisible-stages",
        "(5 = 2 x 2 + 1)",
    ),
    "rounds that do not divide": (
        captures(),
        "interleaved:2",
        "schedule-unequal-rounds",
        "(5 = 2 x 2 + 1)",
    ),
    "operands not recorded": (
        captures(operands=False),
        "zbv",
        "backward-not-splittable",
        "rank ",
    ),
    "two steps": ([two_steps()], "1f1b", "pipeline-two-steps", "optimizer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_graphs_that_cannot_be_scheduled_are_refused(case):
    graphs, schedule, code, detail = REFUSED[case]
    with raises_code(code) as caught:
        expanded(schedule, 5, graphs)
    assert detail in str(caught.value)


def test_one_stage_does_not_represent_all(tmp_path):
    with raises_code("ranks-single-stage") as caught:
        export_astra_sim(stage(1), tmp_path / "out")
    assert "stage 1 of 4" in str(caught.value)
