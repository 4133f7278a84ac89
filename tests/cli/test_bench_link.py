"""`onerank bench link` between processes on the CPU."""

from pathlib import Path

import msgspec
import pytest
from invoke_cli import refused
from own_process import run_code

from onerank.capture.bench.measure_link import (
    CALLS,
    MeasuredLink,
    fit_latency_and_bytes,
    link_requests,
)
from onerank.capture.collective_kernels.network import Network, load_network
from onerank.cli import onerank

KIB, MIB = 1 << 10, 1 << 20

SIZES = [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB]


# Starts the ranks as torchrun does, as forks of one process: six imports of torch take 20 s. Their
# windows last a tenth of the command's, because these tests check no rate.
FORK = """
import os, socket, sys
from onerank.capture.bench import measure_link
from onerank.cli import onerank

measure_link._WINDOW_NS = 1e6

ranks, *arguments = sys.argv[1:]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": ranks}
for rank in range(int(ranks)):
    if os.fork() == 0:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": ranks}
        onerank(["bench", "link", *arguments])
sys.exit(any([os.wait()[1] for _ in range(int(ranks))]))
"""


@pytest.fixture(scope="module")
def links(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[MeasuredLink, Network]]:
    """Return the printed record and the network file of two and of four ranks."""
    directory = tmp_path_factory.mktemp("links")
    links: dict[int, tuple[MeasuredLink, Network]] = {}
    for ranks in (2, 4):
        output = directory / f"{ranks}.toml"
        done = run_code(FORK, ranks, "--most-mib", 1, "--json", "-o", output)
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr
        links[ranks] = msgspec.json.decode(done.stdout, type=MeasuredLink), load_network(output)
    assert sorted(path.name for path in directory.iterdir()) == ["2.toml", "4.toml"]
    return links


def test_the_file_has_the_measured_times_of_each_group_size(
    links: dict[int, tuple[MeasuredLink, Network]],
) -> None:
    for ranks, (measured, network) in links.items():
        assert (measured.ranks, measured.node_ranks, measured.device) == (ranks, ranks, "cpu")
        assert sorted(network.sizes) == [size for size in (2, 4) if size <= ranks]
        for size, link in network.sizes.items():
            assert sorted(link.measured) == sorted([*CALLS[:-1], "send", "recv"])
            for call, curve in link.measured.items():
                name = "send_recv" if call in ("send", "recv") else call
                times = measured.curve(name, size)
                assert curve.points == tuple((t.input_bytes, t.time_ns / 1e3) for t in times)
                assert [count for count, _ in curve.points] == SIZES
                assert all(us > 0 for _, us in curve.points)
            assert link.measured["send"] == link.measured["recv"]


def test_bandwidth_and_latency_are_fitted_to_each_size(
    links: dict[int, tuple[MeasuredLink, Network]],
) -> None:
    for measured, network in links.values():
        for fit in measured.groups:
            link = network.sizes[fit.ranks]
            assert link.busbw_gb_per_s == pytest.approx(fit.busbw_gb_per_s, rel=1e-5)
            assert link.latency_us == pytest.approx(fit.latency_us, rel=1e-5)
        assert network.default is not None
        assert network.default.busbw_gb_per_s == network.sizes[measured.ranks].busbw_gb_per_s
        assert not network.default.measured


def test_bus_bandwidth_counts_the_bytes_of_nccl_tests(
    links: dict[int, tuple[MeasuredLink, Network]],
) -> None:
    measured, _ = links[4]
    factors = {"all_reduce": 1.5, "all_gather": 3, "reduce_scatter": 0.75, "all_to_all": 0.75}
    for call, factor in factors.items():
        for time in measured.curve(call, 4):
            expected = factor * time.input_bytes / time.time_ns
            assert time.busbw_gb_per_s == pytest.approx(expected, rel=1e-2, abs=1e-6)


def test_groups_are_of_every_size_that_divides_the_ranks() -> None:
    requests = link_requests(6, 64 * KIB)
    assert {request.ranks for request in requests} == {2, 3, 6}
    # Reduce-scatter and all-to-all need whole bfloat16 elements for each rank.
    assert all(request.input_bytes % (2 * request.ranks) == 0 for request in requests)
    assert len(requests) == 3 * len(CALLS) * 3


def test_a_fit_returns_the_figures_of_exact_times() -> None:
    sizes = [4096.0 * 4**n for n in range(6)]
    times = [7_000 + size / 50 for size in sizes]
    latency, per_byte = fit_latency_and_bytes(
        [(1, size) for size in sizes], times, [1 / time for time in times]
    )
    assert (latency, per_byte) == (pytest.approx(7_000), pytest.approx(1 / 50))
    # Times that shrink with the size have no bytes in them, not a negative number.
    latency, per_byte = fit_latency_and_bytes([(1, 1), (1, 2)], [20, 10], [1, 1])
    assert (latency, per_byte) == (pytest.approx(15), 0)


@pytest.mark.parametrize(
    ("variables", "options", "error"),
    [
        ({}, (), "link-no-torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "four"}, (), "link-no-torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, (), "link-one-rank"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ("--most-mib", "0"), "usage-invalid-value"),
    ],
    ids=str,
)
def test_what_cannot_be_measured_is_refused(
    variables: dict[str, str],
    options: tuple[str, ...],
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    refused(onerank, "bench", "link", *options, "-o", tmp_path / "network.toml", error=error)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_without_a_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for name, value in {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    output = tmp_path / "network.toml"
    refused(onerank, "bench", "link", "-o", output, error="link-too-few-gpus", naming=("2",))
    assert list(tmp_path.iterdir()) == []
