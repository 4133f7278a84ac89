"""Times of communication by the nodes that a group spans."""

import pytest
from raised import raises_code

from onerank.annotate import load_gpu
from onerank.plan.cluster import Cluster, ClusterLink, ClusterNetwork, network_of

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
    network = ClusterNetwork(8, ClusterLink(400), ClusterLink(50), 90)
    inside, across = (network.time_ns("all_reduce", 0, tuple(range(n))) for n in (8, 16))
    assert 0 < inside < across < 1e6


def test_a_gpu_without_a_compute_capability_needs_latencies() -> None:
    """NCCL's latency follows from the capability; a Hopper's was assumed for an MI300X."""
    gpu, known, unknown = load_gpu("MI300X"), ClusterLink(300, 12), ClusterLink(300)
    for nodes, intra, inter in ((1, unknown, known), (2, known, unknown)):
        with raises_code("cluster-latency-unknown", naming=("MI300X", "latency_us")):
            network_of(Cluster("MI300X", nodes, 8, intra, inter, 192 * 10**9), gpu)
    # Of one node, no group uses the link to others.
    network = network_of(Cluster("MI300X", 1, 8, known, unknown, 192 * 10**9), gpu)
    assert network.time_ns("all_reduce", 0, tuple(range(8))) == 12_000
