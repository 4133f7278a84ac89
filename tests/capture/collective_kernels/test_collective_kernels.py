"""Emulated collectives: traffic and duration of their kernels, network files, options."""

import pytest
from raised import raises_code

from onerank.capture.collective_kernels import (
    Link,
    Network,
    collective_emulation,
    load_network,
    plan_launch,
    uniform,
)
from onerank.converters.nccl import Interconnect

K, M = 1 << 10, 1 << 20


def test_plan_of_a_large_all_gather():
    """4 ranks with shards of 64 MiB at 300 GB/s: three shards come in, 671 us; the ring's 18.6."""
    launch = plan_launch(
        "all_gather", 64 * M, "dp", (0, 1, 2, 3), network=uniform(300), interconnect=Interconnect()
    )
    assert (launch.algorithm, launch.protocol, launch.channels, launch.threads) == (
        "ring",
        "simple",
        24,
        544,
    )
    assert launch.transfer_ns == round(3 * 64 * M / 300)
    assert launch.latency_ns == 18_600  # 8.4 + 3 * 3.4 us
    assert launch.duration_ns == launch.latency_ns + launch.transfer_ns
    assert launch.bytes_read == 256 * M  # what is passed on
    assert launch.bytes_written == 256 * M + 3 * 64 * M  # the output, and what peers send


def test_plan_of_an_all_reduce_passes_twice():
    launch = plan_launch(
        "all_reduce", 64 * M, "tp", (0, 1, 2, 3), network=uniform(320), interconnect=Interconnect()
    )
    assert launch.transfer_ns == round(64 * M * 1.5 / 320)
    peers = 2 * 3 * 16 * M  # three parts of four come in twice, and leave NCCL's buffers
    assert (launch.bytes_read, launch.bytes_written) == (64 * M + peers, 64 * M + peers)


@pytest.mark.parametrize(
    ("collective", "read", "written"),
    [
        ("all_reduce", 2, 2),  # its half is sent, the peer's comes in; the sum is sent and comes in
        ("reduce_scatter", 1.5, 1),  # half the input is sent; the half that comes in is added
        ("all_to_all", 1.5, 1.5),
        ("all_gather", 2, 3),  # as a share of the rank's own half of the output
        ("recv", 1, 2),
    ],
)
def test_plan_of_two_ranks(collective, read, written):
    launch = plan_launch(
        collective, 64 * M, "dp", (0, 1), network=uniform(300), interconnect=Interconnect()
    )
    assert (launch.bytes_read, launch.bytes_written) == (read * 64 * M, written * 64 * M)


def test_nvls_reduces_sums_and_not_averages(tmp_path):
    """An H100's all-reduce has 16 blocks then; AVG, which multiplies first, stays a ring's 24."""
    path = tmp_path / "network.toml"
    path.write_text("nvls = true\n[default]\nbusbw_gb_per_s = 470\n")
    network, ranks = load_network(path), tuple(range(8))
    summed = plan_launch(
        "all_reduce", 64 * M, "tp", ranks, network=network, interconnect=Interconnect()
    )
    averaged = plan_launch(
        "all_reduce", 64 * M, "tp", ranks, network=network, interconnect=Interconnect(), scaled=True
    )
    assert (summed.algorithm, summed.channels, summed.threads) == ("nvls", 16, 640)
    assert (averaged.algorithm, averaged.channels, averaged.threads) == ("ring", 24, 544)


def test_a_group_across_nodes_has_a_higher_latency():
    network = Network(Link(45.0), node_size=8)
    inside = plan_launch(
        "all_reduce", M, "tp", tuple(range(8)), network=network, interconnect=Interconnect()
    )
    across = plan_launch(
        "all_reduce", M, "dp", tuple(range(0, 64, 8)), network=network, interconnect=Interconnect()
    )
    assert across.latency_ns > inside.latency_ns


def test_network_file(tmp_path):
    path = tmp_path / "network.toml"
    path.write_text(
        "node_size = 4\n[default]\nbusbw_gb_per_s = 40\n[group.tp]\nbusbw_gb_per_s = 320\n"
        "[size.16]\nbusbw_gb_per_s = 45.5\nlatency_us = 60\n"
    )
    network = load_network(path)
    assert network.node_size == 4
    assert network.link("tp", 16) == Link(320.0)  # the name goes before the size
    assert network.link("dp", 16) == Link(45.5, 60.0)
    assert network.link("dp", 8) == Link(40.0)
    launch = plan_launch(
        "all_reduce", M, "dp", tuple(range(16)), network=network, interconnect=Interconnect()
    )
    assert launch.latency_ns == 60_000


def test_measured_times_replace_the_bandwidth(tmp_path):
    """2 x H200: an all-gather of 64 MiB shards takes 291.6 us, at 300 GB/s it would take 234."""
    path = tmp_path / "network.toml"
    path.write_text(
        "[default]\nbusbw_gb_per_s = 300\n"
        "all_gather = [[1048576, 16.9], [16777216, 90.5], [67108864, 291.6]]\n"
    )
    network = load_network(path)

    def time_ns(collective, size):
        return plan_launch(
            collective, size, "dp", (0, 1), network=network, interconnect=Interconnect()
        ).duration_ns

    assert time_ns("all_gather", 64 * M) == 291_600
    assert time_ns("all_gather", 256 * M) == 4 * 291_600  # the rate of the largest
    assert time_ns("all_gather", 4 * M) == pytest.approx(1000 * (16.9 * 90.5) ** 0.5, abs=1)
    assert time_ns("all_gather", 100) == 16_900
    assert time_ns("all_reduce", 64 * M) == pytest.approx(64 * M / 300 + 14_600, rel=0.02)


ENTRY = "[default]\nbusbw_gb_per_s = 3\n"
BAD_FILES = {
    "[default\n": ("toml-malformed", "line 1"),
    "": ("network-empty", "[default], [group.NAME] or [size.N]"),
    "[default]\nlatency_us = 1\n": ("network-no-bandwidth", "[default] has no busbw_gb_per_s"),
    "[default]\nbusbw_gb_per_s = 0\n": ("network-not-positive", "busbw_gb_per_s is 0;"),
    "[default]\nbusbw_gb_per_s = -3.5\n": ("network-not-positive", "busbw_gb_per_s is -3.5"),
    "[default]\nbusbw_gb_per_s = nan\n": ("network-not-positive", "busbw_gb_per_s is nan"),
    "[default]\nbusbw_gb_per_s = true\n": ("network-not-positive", "busbw_gb_per_s is True"),
    "[default]\nbusbw_gb_per_s = '300'\n": ("network-not-positive", "busbw_gb_per_s is '300'"),
    f"{ENTRY}latency_us = 'low'\n": ("network-not-positive", "latency_us is 'low'"),
    "[default]\nbusbw = 300\n": ("network-unknown-key", "[default] has unknown busbw"),
    "default = 3\n": ("network-not-a-table", "[default] is 3"),
    "[group]\ntp = 300\n": ("network-not-a-table", "[group.tp] is 300"),
    "group = 1\n": ("network-not-a-table", "[group] is 1"),
    "[size.one]\nbusbw_gb_per_s = 3\n": ("network-bad-size", "[size.one]"),
    "[size.1]\nbusbw_gb_per_s = 3\n": ("network-bad-size", "[size.1]"),
    f"{ENTRY}all_gather = 5\n": ("network-bad-times", "all_gather is 5"),
    f"{ENTRY}all_gather = []\n": ("network-bad-times", "all_gather is []"),
    f"{ENTRY}send = [[8]]\n": ("network-bad-times", "send has [8]"),
    f"{ENTRY}send = [[8, -1]]\n": ("network-not-positive", "send [8, -1] is -1"),
    f"{ENTRY}send = [[8, 1], [8, 2]]\n": ("network-times-not-ascending", "send: 8 bytes after 8"),
    "[default]\nall_gather = [[8, 1]]\n": ("network-no-bandwidth", "[default]"),
    f"[links]\n{ENTRY}": ("network-unknown-key", "unknown links"),
    f"node_size = 0\n{ENTRY}": ("network-node-size", "node_size is 0"),
    f"nvls = 1\n{ENTRY}": ("network-nvls", "nvls is 1"),
    f"node_size = 2.5\n{ENTRY}": ("network-node-size", "node_size is 2.5"),
}


@pytest.mark.parametrize(("text", "code", "name"), [(t, *e) for t, e in BAD_FILES.items()])
def test_bad_network_files_are_refused(tmp_path, text, code, name):
    path = tmp_path / "network.toml"
    path.write_text(text)
    with raises_code(code, naming=(str(path), name)):
        load_network(path)


def test_unreadable_network_files_are_refused(tmp_path):
    with raises_code("file-unreadable"):
        load_network(tmp_path / "missing.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with raises_code("file-not-utf8"):
        load_network(tmp_path / "binary.toml")


def test_a_group_without_an_entry_is_refused():
    with raises_code("network-unknown-group"):
        Network(groups={"tp": Link(300.0)}).link("dp", 8)


def test_emulation_of_the_options(tmp_path):
    path = tmp_path / "network.toml"
    path.write_text("[default]\nbusbw_gb_per_s = 40\n")
    assert collective_emulation(None, None, None).network is None
    assert collective_emulation("off", path, None).network is None
    assert collective_emulation(None, path, None).network == Network(Link(40.0))
    assert collective_emulation("on", None, 300.0).network == uniform(300.0)
    with raises_code("network-missing"):
        collective_emulation("on", None, None)
    with raises_code("network-given-twice"):
        collective_emulation(None, path, 300.0)
    with raises_code("network-not-positive"):
        collective_emulation(None, None, -1.0)
