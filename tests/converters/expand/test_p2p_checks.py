"""Detect graphs that represent different ranks by the messages between them."""

from raised import raises_code

from onerank.converters.expand.ranks import expand_ranks
from onerank.converters.targets.astra_sim.exporter import export_astra_sim
from onerank.ir import Graph, GraphBuilder, Job, Kind, Phase, ProcessGroup, RankClass, World

WORLD = World.of(dp=2, pp=2)

FIRST, LAST = Phase.FORWARD, Phase.BACKWARD  # what the first stage sends, and the last one


def stage(rank: int, peer: int, sends: Phase, receives: Phase, classes: tuple[RankClass, ...] = ()):
    """Return two micro-batches of a rank that sends its peer what it receives, in other phases."""
    builder = GraphBuilder()
    builder.add(name="gemm", kind=Kind.KERNEL, stream=7, duration_ns=1000)
    for kind, phase, ends in (
        (Kind.SEND, sends, {"comm_src": rank, "comm_dst": peer}),
        (Kind.RECV, receives, {"comm_src": peer, "comm_dst": rank}),
    ):
        for _ in range(2):
            builder.add(
                name=kind.name.lower(), kind=kind, phase=phase, comm_bytes=64, group="world", **ends
            )
    groups = (ProcessGroup("world", tuple(range(WORLD.size)), "world"),)
    return builder.build(Job(world=WORLD, rank=rank, groups=groups, classes=classes))


def stages(axis: str) -> list[Graph]:
    """Return a rank of each stage of a pipeline whose neighbours are 0 and 1, named along `axis`.

    Along dp these are ranks 0 and 1; along pp 0 and 2, both of which are first stages.
    """
    other = WORLD.at({axis: 1})
    classes = RankClass(0, {axis: (0,)}), RankClass(other, {axis: (1,)})
    if axis == "dp":
        return [stage(0, 1, FIRST, LAST, classes), stage(1, 0, LAST, FIRST, classes)]
    return [stage(0, 1, FIRST, LAST, classes), stage(2, 3, FIRST, LAST, classes)]


def test_ranks_named_along_the_scripts_pipeline_stand_for_the_others():
    assert [entry.ranks for entry in expand_ranks(stages("dp"))] == [(0, 2), (1, 3)]


def test_ranks_named_along_another_axis_are_refused():
    names = ("sends 2 of its forward to ranks 0, 1", "receives 2 of its backward")
    with raises_code("p2p-phase-mismatch", naming=names):
        expand_ranks(stages("pp"))


def test_one_stage_of_two_does_not_represent_the_other(tmp_path):
    graph = stage(0, 1, FIRST, LAST)
    with raises_code("p2p-phase-mismatch") as caught:
        export_astra_sim(graph, tmp_path / "workload")
    assert "rank 0 sends 2 of its forward to ranks 0, 1, 2, 3" in str(caught.value)
    assert not (tmp_path / "workload").exists()


def test_ranks_that_pass_on_what_they_receive_are_equivalent():
    """Ring attention: in forward, keys go to a rank that sends keys back."""
    classes = RankClass(0, {"pp": (0,)}), RankClass(2, {"pp": (1,)})
    ring = [stage(rank, rank + 1, FIRST, FIRST, classes) for rank in (0, 2)]
    assert len(expand_ranks(ring)) == 2


def test_messages_of_no_phase_tell_nothing():
    classes = RankClass(0, {"pp": (0,)}), RankClass(2, {"pp": (1,)})
    unknown = [stage(rank, rank + 1, FIRST, Phase.NONE, classes) for rank in (0, 2)]
    assert len(expand_ranks(unknown)) == 2


def test_real_ranks_stand_for_themselves_alone():
    wrong = [stage(rank, rank ^ 1, FIRST, LAST) for rank in range(4)]
    assert [entry.ranks for entry in expand_ranks(wrong)] == [(0,), (1,), (2,), (3,)]
