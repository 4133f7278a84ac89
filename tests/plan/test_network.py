"""Times of communication by the nodes that a group spans."""

import pytest

from onerank.plan.cluster import ClusterLink, ClusterNetwork

NETWORK = ClusterNetwork(8, ClusterLink(400, 10), ClusterLink(50, 20))


@pytest.mark.parametrize(
    ("ranks", "rate", "latency_us"),
    [
        (tuple(range(8)), 400, 10),  # a node
        (tuple(range(16)), 400, 20),  # two nodes: eight interfaces, as fast as the node
        ((0, 1, 8, 9), 100, 20),  # two interfaces of each node
        (tuple(range(0, 64, 8)), 50, 20),  # one
    ],
)
def test_a_group_across_nodes_uses_the_interfaces_of_its_gpus(
    ranks: tuple[int, ...], rate: float, latency_us: float
) -> None:
    size, count = 1 << 30, len(ranks)
    expected = latency_us * 1e3 + 2 * (count - 1) / count * size / rate
    assert NETWORK.time_ns("all_reduce", size, ranks) == pytest.approx(expected)


def test_a_group_of_one_rank_takes_no_time() -> None:
    assert NETWORK.time_ns("all_reduce", 1 << 30, (3,)) == 0


def test_without_a_latency_nccl_s_model_gives_one() -> None:
    network = ClusterNetwork(8, ClusterLink(400), ClusterLink(50))
    inside, across = (network.time_ns("all_reduce", 0, tuple(range(n))) for n in (8, 16))
    assert 0 < inside < across < 1e6
