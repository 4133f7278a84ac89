"""NCCL's launches: as profiled on H200s, and as computed by NCCL's source code."""

import csv
import gzip
from pathlib import Path

import pytest

from onerank.converters.nccl import Interconnect, Topology, choose, interconnect_of
from onerank.converters.nccl.select_algorithm import bandwidth

K, M = 1 << 10, 1 << 20
CHOICES = Path(__file__).parent / "nccl-2.28.9.csv.gz"
"""Choices of NCCL 2.28.9's topology search, cost model and scheduler, built for a host without a
GPU, for machines of one NIC per GPU; `bytes` as in `CommCall`."""

# 4 x H200, NCCL 2.28.9, NVLS off, bf16, from the profiler on 2026-11-21: `CommCall.bytes`,
# grid, block. The block shows the protocol, which the kernel's name does not: 544 is Simple, 640
# LL128 or p2p.
MEASURED = [
    ("all_reduce", K, 1, 128),
    ("all_reduce", 8 * K, 1, 256),
    ("all_reduce", 32 * K, 2, 512),
    ("all_reduce", 256 * K, 16, 512),
    ("all_reduce", 2 * M, 24, 512),
    ("all_reduce", 4 * M, 24, 640),
    ("all_reduce", 16 * M, 24, 544),
    ("all_gather", 512 * K // 4, 22, 512),
    ("all_gather", 4 * M // 4, 24, 544),
    ("reduce_scatter", 512 * K, 22, 512),
    ("reduce_scatter", 256 * M, 24, 544),
    ("broadcast", 64 * K, 4, 512),
    ("broadcast", 2 * M, 22, 544),
    ("all_to_all", K, 4, 640),
    ("all_to_all", 64 * K, 7, 640),
    ("all_to_all", 256 * K, 25, 640),
    ("all_to_all", M, 28, 640),
    ("all_to_all", 64 * M, 32, 640),
    ("send", K, 1, 640),
    ("send", 32 * K, 4, 640),
    ("send", 64 * M, 8, 640),
    ("send", 256 * M, 16, 640),
]


@pytest.mark.parametrize(("collective", "size", "channels", "threads"), MEASURED)
def test_the_launches_profiled_on_h200s(collective, size, channels, threads):
    choice = choose(collective, size, Topology(4))
    assert (choice.channels, choice.threads) == (channels, threads)


def test_both_names_of_a_reduce_scatter_are_one_collective():
    topology = Topology(16, 2)
    assert choose("reduce_scatter_block", 1 << 24, topology) == choose(
        "reduce_scatter", 1 << 24, topology
    )


def test_ring_bandwidth_is_the_links():
    """18 links of 20.6 GB/s carry 6 rings of 60: 8 ranks reduce at 360 * 8 / 14."""
    hopper = Topology(8)
    assert bandwidth("all_reduce", "ring", "simple", hopper) == pytest.approx(360 * 8 / 14)
    assert bandwidth("all_gather", "ring", "simple", hopper) == pytest.approx(360 * 8 / 7)
    ampere = Topology(8, interconnect=Interconnect(80))  # 12 links of 20: 6 rings of 40
    assert bandwidth("all_reduce", "ring", "simple", ampere) == pytest.approx(240 * 8 / 14)


@pytest.mark.parametrize(
    ("capability", "nodes", "channels"),
    [(80, 1, 24), (90, 1, 24), (100, 1, 32), (80, 4, 16), (90, 4, 16)],
)
def test_channels_of_a_communicator(capability, nodes, channels):
    assert Topology(8 * nodes, nodes, Interconnect(capability)).channels == channels


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("Tesla V100-PCIE-16GB", 70),
        ("Tesla V100S-PCIE-32GB", 70),
        ("Tesla V100-FHHL-16GB", 70),
        ("Tesla T4", 75),
        ("NVIDIA A100-PCIE-40GB", 80),
        ("NVIDIA A100 80GB PCIe", 80),
        ("NVIDIA A800 40GB Active", 80),
        ("NVIDIA A30", 80),
        ("NVIDIA A10", 86),
        ("NVIDIA RTX A6000", 86),
        ("NVIDIA L4", 89),
        ("NVIDIA GeForce RTX 4090", 89),
        ("NVIDIA H100 PCIe", 90),
        ("NVIDIA H100 NVL", 90),
        ("NVIDIA H200 NVL", 90),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 120),
    ],
)
def test_boards_on_pcie_have_few_channels(name, capability):
    """One ring of 20 GB/s, as NCCL answers for 8.9 and 12.0 (below), where NVLink gives 12."""
    on_pcie = Topology(8, interconnect=interconnect_of(capability, name))
    assert on_pcie.by_pcie
    assert on_pcie.rings == (1, 20.0)
    assert choose("all_reduce", 64 * M, on_pcie).channels == 2


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("", 90),
        ("Tesla V100-SXM2-32GB", 70),
        ("NVIDIA A100-SXM4-80GB", 80),
        ("NVIDIA A800-SXM4-80GB", 80),
        ("NVIDIA H100 80GB HBM3", 90),
        ("NVIDIA H20", 90),
        ("NVIDIA H200", 90),
        ("NVIDIA GH200 480GB", 90),
        ("NVIDIA B200", 100),
        ("GB200-NVL72", 100),
        ("NVIDIA B300 SXM6 AC", 103),
    ],
)
def test_boards_with_nvlink_keep_their_channels(name, capability):
    interconnect = interconnect_of(capability, name)
    assert interconnect == Interconnect(capability, nvlink=True)
    assert Topology(8, interconnect=interconnect).channels == (32 if capability >= 100 else 24)


def test_a_hopper_on_pcie_gets_what_its_links_give():
    """With two rings of 20 GB/s, as on an RTX 5090, 4 ranks reduce at 40 * 4 / 6; no NVLS."""
    hopper = Topology(4, interconnect=interconnect_of(90, "NVIDIA H100 PCIe"), nvls=True)
    assert hopper.heads == 0
    assert bandwidth("all_reduce", "ring", "simple", hopper) == pytest.approx(40 * 4 / 6)
    assert choose("all_reduce", 64 * M, hopper).channels == 4


def test_many_nodes_take_a_tree_while_latency_counts():
    """64 ranks on 8 nodes: a ring has 126 steps, the tree 2 * (7 + 3)."""
    wide = Topology(64, 8)
    assert choose("all_reduce", 256 * K, wide).algorithm == "tree"
    assert choose("all_reduce", 512 * M, wide).algorithm == "ring"


def test_choices_are_those_of_nccls_own_code():
    with gzip.open(CHOICES, "rt") as lines:
        rows = list(csv.DictReader(lines))
    for row in rows:
        ranks, nodes = int(row["per_node"]) * int(row["nodes"]), int(row["nodes"])
        topology = Topology(
            ranks, nodes, interconnect_of(int(row["capability"])), row["nvls"] == "1"
        )
        scaled = row["scaled"] == "1"
        choice = choose(row["collective"], int(row["bytes"]), topology, scaled=scaled)
        launch = (choice.algorithm, choice.protocol, str(choice.channels), str(choice.threads))
        assert launch == (row["algorithm"], row["protocol"], row["channels"], row["threads"]), row
    taken = {(row["algorithm"], row["protocol"]) for row in rows}
    assert len(taken) == 9  # ring and tree in three protocols, NVLS, its tree, PAT
