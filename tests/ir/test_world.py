"""Where the ranks of a job are on the grid of its parallel axes."""

import pytest
from raised import raises_code

from onerank.ir import RankClass, World, axis_of

WORLD = World.of(tp=2, cp=2, dp=4, pp=3, ep=4)


def test_ranks_are_numbered_as_megatron_numbers_them():
    assert WORLD.size == 48
    assert WORLD.point(37) == {"tp": 1, "cp": 0, "dp": 1, "pp": 2}
    assert WORLD.at({"tp": 1, "dp": 1, "pp": 2}) == 37
    assert [WORLD.at(WORLD.point(rank)) for rank in range(48)] == [*range(48)]


@pytest.mark.parametrize(
    ("axis", "ranks"),
    [
        ("tp", (36, 37)),
        ("cp", (37, 39)),
        ("dp", (33, 37, 41, 45)),
        ("pp", (5, 21, 37)),
        ("cp+dp", (33, 35, 37, 39, 41, 43, 45, 47)),
        ("tp+cp", (36, 37, 38, 39)),
        ("ep", (33, 35, 37, 39)),
        ("edp", (37, 45)),
    ],
)
def test_lines_through_a_rank(axis, ranks):
    assert WORLD.line(axis, 37) == ranks


@pytest.mark.parametrize("axis", ["tp", "cp", "dp", "pp", "cp+dp", "tp+cp", "ep", "edp"])
def test_a_place_is_where_in_its_line_a_rank_is(axis):
    for rank in range(WORLD.size):
        assert WORLD.line(axis, rank)[WORLD.place(axis, rank)] == rank


def test_the_first_rank_at_some_places_is_the_lowest_there():
    for where in ({}, {"pp": 2}, {"ep": 3}, {"ep": 1, "pp": 1}, {"tp": 1, "ep": 2}):
        there = RankClass(0, {axis: (place,) for axis, place in where.items()})
        assert WORLD.first(where) == there.members(WORLD)[0]


def test_every_rank_of_a_line_has_the_same_line():
    for axis in ("tp", "cp", "dp", "pp", "cp+dp", "ep", "edp"):
        for rank in range(WORLD.size):
            assert all(WORLD.line(axis, other) == WORLD.line(axis, rank)
                       for other in WORLD.line(axis, rank))  # fmt: skip


def test_an_axis_of_size_one_is_left_out_and_its_line_is_the_rank():
    world = World.of(tp=4, pp=2)
    assert world.sizes == {"tp": 4, "pp": 2}
    assert world.line("dp", 5) == world.line("ep", 5) == world.line("cp+dp", 5) == (5,)
    assert str(world) == "tp 4 * pp 2 = 8 ranks"
    assert str(World.of()) == "1 rank"


def test_sizes_that_make_no_world():
    with raises_code("world-ep-indivisible", naming=("--ep 3", "(2 * 4 = 3 x 2 + 2)")):
        World.of(cp=2, dp=4, ep=3)
    with raises_code("world-size-below-one", naming="--pp 0"):
        World.of(pp=0)


@pytest.mark.parametrize(
    ("ranks", "name", "axis"),
    [
        ((36, 37), "anything", "tp"),
        ((45, 33, 41, 37), "mesh_shard", "dp"),
        ((33, 35, 37, 39, 41, 43, 45, 47), "", "cp+dp"),
        ((36, 37, 38, 39), "", "tp+cp"),
        ((37, 45), "edp", "edp"),
        (tuple(range(48)), "default_pg", "world"),
        ((37,), "tp", ""),
        ((33, 37), "half of dp", ""),
    ],
)
def test_a_group_finds_its_axis(ranks, name, axis):
    assert axis_of(ranks, WORLD, 37, name) == axis


def test_of_two_axes_with_the_same_ranks_the_name_decides():
    world = World.of(dp=4, ep=4)
    assert axis_of(range(4), world, 0, "ep") == "ep"
    assert axis_of(range(4), world, 0, "world") == "dp"
    assert axis_of(range(4), World.of(tp=4), 0, "default_pg") == "tp"
