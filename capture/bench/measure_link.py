"""Measure the link of a job: collectives and messages between its ranks, by group and size.

Every rank that torchrun started calls `measure_link`, on its own GPU with NCCL or on a CPU with
gloo. All groups of a size communicate at once, as in a job, and the slowest rank's time counts.

Sizes are the input of a rank, as in Chakra: for an all-gather the shard. Bus bandwidth is defined
as in nccl-tests' doc/PERFORMANCE.md.
"""

import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import nccl

from onerank.converters.nccl import wire_bytes
from onerank.display import visible_line
from onerank.ir.errors import CaptureError, first_line

SEND_RECV = "send_recv"

CALLS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", SEND_RECV)

# Each size is four times the previous one; a capture interpolates between them.
_SMALLEST_BYTES, _FACTOR = 4 << 10, 4

_WARM_UP_CALLS = 2
# A time is the median of windows, each of the calls that fit into its time.
_WINDOWS, _WINDOW_NS, _MIN_CALLS, _MAX_CALLS = 5, 1e7, 2, 20

# Sums of an all-reduce in place grow by the number of ranks with each call. From 2**-100, those of
# a window stay finite in bfloat16 on up to 1,700 ranks; infinities would draw less power than data.
_SCALE = 2.0**-100

# About 10 ms, in which the host enqueues the calls of a window, so that the GPU never waits for it.
_AHEAD_CYCLES = 20_000_000


@dataclass(frozen=True, slots=True)
class LinkRequest:
    """A call to measure.

    Attributes:
        call: one of `CALLS`.
        ranks: size of the groups that call it.
        input_bytes: input of one rank.
    """

    call: str
    ranks: int
    input_bytes: int


@dataclass(frozen=True, slots=True)
class LinkTime:
    """A measured call.

    Attributes:
        call: name of the collective, or `send_recv`.
        ranks: size of the groups that call it at once.
        input_bytes: input of one rank.
        time_ns: time of the slowest rank.
        busbw_gb_per_s: bus bandwidth as nccl-tests defines it.
    """

    call: str
    ranks: int
    input_bytes: int
    time_ns: int
    busbw_gb_per_s: float


@dataclass(frozen=True, slots=True)
class GroupFit:
    """Bandwidth and latency that fit the all-reduces of a group size.

    Attributes:
        ranks: size of the group.
        busbw_gb_per_s: bus bandwidth of a large all-reduce.
        latency_us: time of an empty all-reduce.
    """

    ranks: int
    busbw_gb_per_s: float
    latency_us: float


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """The link between the ranks of a job, as measured.

    Attributes:
        ranks: ranks of the job.
        node_ranks: ranks of one host.
        device: name of the GPU; "cpu" without one.
        date: day of the measurement (UTC).
        versions: library -> version.
        groups: fits by group size, ascending.
        times: measured times.
    """

    ranks: int
    node_ranks: int
    device: str
    date: str
    versions: dict[str, str]
    groups: tuple[GroupFit, ...]
    times: tuple[LinkTime, ...]

    def curve(self, call: str, ranks: int) -> tuple[LinkTime, ...]:
        """Return the times of a call in groups of this size, by ascending input."""
        return tuple(time for time in self.times if (time.call, time.ranks) == (call, ranks))


def link_requests(ranks: int, largest_bytes: int) -> tuple[LinkRequest, ...]:
    """Return the calls to measure, in groups of every size that divides the ranks."""
    sizes: list[int] = []
    while (size := _SMALLEST_BYTES * _FACTOR ** len(sizes)) <= largest_bytes:
        sizes.append(size)
    return tuple(
        # Whole bfloat16 elements for each rank of the group.
        LinkRequest(call, group, size // (2 * group) * 2 * group)
        for group in _group_sizes(ranks)
        for call in CALLS
        for size in sizes
    )


def _group_sizes(ranks: int) -> tuple[int, ...]:
    return tuple(size for size in range(2, ranks + 1) if ranks % size == 0)


def measure_link(requests: Sequence[LinkRequest], advance: Callable[[], Any]) -> MeasuredLink:
    """Measure the requested calls; every rank calls it with the same requests.

    Args:
        requests: what to measure, in order.
        advance: is called after each of them.

    Raises:
        CaptureError: this host has fewer GPUs than ranks, or a call fails.
    """
    device = _device()
    try:
        # Without `device_id`, a barrier warns that it has to guess the device (torch 2.11).
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            device_id=device if device.type == "cuda" else None,
        )
        with warnings.catch_warnings():
            # torch 2.13 warns of the names of two calls; see `_call`.
            warnings.simplefilter("ignore", FutureWarning)
            times = _measured(requests, device, advance)
    except (dist.DistError, torch.OutOfMemoryError) as error:
        # The process groups are not destroyed: that waits for ranks that still communicate.
        raise CaptureError(
            f"the ranks cannot communicate: {first_line(error)}; NCCL_DEBUG=WARN shows NCCL's "
            "reason, and --most-mib takes less memory",
            code="link-failed",
        ) from error
    ranks = dist.get_world_size()
    dist.destroy_process_group()
    return MeasuredLink(
        ranks=ranks,
        node_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", ranks)),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        versions=_versions(device),
        groups=tuple(_fit_group(times, size) for size in _group_sizes(ranks)),
        times=times,
    )


def _device() -> torch.device:
    """Return this rank's device, and make it the current one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= count:
        raise CaptureError(
            f"local rank {index} has no GPU: this host has {count}; start one process for each "
            f"GPU: torchrun --nproc-per-node {count}",
            code="link-too-few-gpus",
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _versions(device: torch.device) -> dict[str, str]:
    versions = {"torch": str(torch.__version__)}
    if device.type == "cuda":
        versions["cuda"] = str(torch.version.cuda or torch.version.hip or "")
        versions["nccl"] = ".".join(map(str, nccl.version()))
    return versions


def _measured(
    requests: Sequence[LinkRequest], device: torch.device, advance: Callable[[], Any]
) -> tuple[LinkTime, ...]:
    groups = _groups()
    largest = max(request.input_bytes for request in requests)
    # Random, because data of equal bits draws less power, and a GPU at its limit clocks lower.
    values = torch.randn(largest // 2, dtype=torch.bfloat16, device=device) * _SCALE
    times: list[LinkTime] = []
    for request in requests:
        ns = _slowest_ns(request, groups[request.ranks], values)
        busbw = wire_bytes(request.call, request.input_bytes, request.ranks) / ns
        times.append(
            LinkTime(request.call, request.ranks, request.input_bytes, round(ns), round(busbw, 6))
        )
        advance()
    return tuple(times)


def _groups() -> dict[int, Any]:
    """Return this rank's group of each size: neighbours, as the inner groups of a job."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups: dict[int, Any] = {}
    for size in _group_sizes(ranks):
        for first in range(0, ranks, size):
            # Every rank takes part in the creation of every group.
            members = range(first, first + size)
            group = dist.group.WORLD if size == ranks else dist.new_group([*members])
            if rank in members:
                groups[size] = group
    return groups


def _slowest_ns(request: LinkRequest, group: Any, values: Tensor) -> float:
    """Return the time of a call on the slowest rank."""
    source = values[: request.input_bytes // 2]
    tensor = source.clone()
    call = _call(request, group, tensor)
    for _ in range(_WARM_UP_CALLS):
        call()
    estimate_ns = _max_of_ranks(_window_ns(call, 1, tensor.device), tensor.device)
    calls = max(_MIN_CALLS, min(_MAX_CALLS, int(_WINDOW_NS / estimate_ns)))
    windows: list[float] = []
    for _ in range(_WINDOWS):
        tensor.copy_(source)  # an all-reduce overwrites its input
        windows.append(_window_ns(call, calls, tensor.device))
    return _max_of_ranks(statistics.median(windows), tensor.device)


def _max_of_ranks(value: float, device: torch.device) -> float:
    greatest = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(greatest, dist.ReduceOp.MAX)
    return greatest.item()


def _call(request: LinkRequest, group: Any, tensor: Tensor) -> Callable[[], Any]:
    """Return a function that makes the call once."""
    # torch 2.13 renames two of these and types them as deprecated; torch 2.11 has no other names.
    calls: Any = dist
    if request.call == SEND_RECV:
        return _message(group, tensor)
    if request.call == "all_reduce":
        return lambda: calls.all_reduce(tensor, group=group)
    if request.call == "all_gather":
        gathered = tensor.new_empty(request.ranks * tensor.numel())
        return lambda: calls.all_gather_into_tensor(gathered, tensor, group=group)
    if request.call == "reduce_scatter":
        shard = tensor.new_empty(tensor.numel() // request.ranks)
        return lambda: calls.reduce_scatter_tensor(shard, tensor, group=group)
    received = torch.empty_like(tensor)
    return lambda: calls.all_to_all_single(received, tensor, group=group)


def _message(group: Any, tensor: Tensor) -> Callable[[], Any]:
    """Return a function that sends from every even rank of the group to the next one."""
    rank, place = dist.get_rank(), dist.get_rank(group)
    if place % 2:
        return lambda: dist.recv(tensor, rank - 1, group)
    if place + 1 < dist.get_world_size(group):
        return lambda: dist.send(tensor, rank + 1, group)
    return lambda: None  # the last of an odd number of ranks


def _window_ns(call: Callable[[], Any], calls: int, device: torch.device) -> float:
    """Return the mean time of calls that follow each other."""
    dist.barrier()
    if device.type != "cuda":
        call()
        start_ns = time.perf_counter_ns()
        for _ in range(calls):
            call()
        return (time.perf_counter_ns() - start_ns) / calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(_AHEAD_CYCLES)
    call()  # untimed: the ranks of a group leave it together
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e6 / calls


def _fit_group(times: Sequence[LinkTime], ranks: int) -> GroupFit:
    measured = [t for t in times if (t.call, t.ranks) == ("all_reduce", ranks)]
    latency_ns, ns_per_byte = fit_latency_and_bytes(
        [(1, wire_bytes(t.call, t.input_bytes, ranks)) for t in measured],
        [t.time_ns for t in measured],
        [1 / t.time_ns for t in measured],
    )
    # On a noisy host the times may not grow with the size: the bandwidth is then at least this.
    busbw = 1 / ns_per_byte if ns_per_byte else max(t.busbw_gb_per_s for t in measured)
    # A network file takes positive figures only.
    return GroupFit(ranks, busbw, max(latency_ns / 1e3, 1e-3))


def fit_latency_and_bytes(
    terms: Sequence[tuple[float, float]], times_ns: Sequence[float], weights: Sequence[float]
) -> tuple[float, float]:
    """Return the latency in ns and the ns per byte that fit measured times best.

    Weighted least squares of time = messages * latency + bytes * ns per byte, neither negative.

    Args:
        terms: messages that follow each other in a call, and its bytes.
        times_ns: its measured time.
        weights: weight of its squared error.
    """
    weight = np.array(weights) ** 0.5
    model = np.array(terms, dtype=float) * weight[:, None]
    times = np.array(times_ns) * weight
    latency, per_byte = np.linalg.lstsq(model, times, rcond=None)[0].tolist()
    if latency < 0 or per_byte < 0:
        # The optimum under both bounds has the negative coefficient at 0.
        column = model[:, int(latency < 0)]
        coefficient = float(column @ times / (column @ column))
        latency, per_byte = (0.0, coefficient) if latency < 0 else (coefficient, 0.0)
    return latency, per_byte


def to_network_file(link: MeasuredLink) -> str:
    """Return the link as a network file, which `capture run --network` reads."""
    software = ", ".join(f"{name} {version}" for name, version in link.versions.items())
    lines = [
        f"# {link.ranks} x {visible_line(link.device)}, {link.date}; {software}",
        "# Measured by `onerank bench link`: time of the slowest rank; all groups of a size",
        "# communicate at once. busbw_gb_per_s and latency_us fit the all-reduces.",
    ]
    if link.ranks > link.node_ranks:
        lines.append(f"node_size = {link.node_ranks}")
    lines += ["", "[default]  # groups of other sizes: the bus bandwidth of all ranks"]
    lines.append(f"busbw_gb_per_s = {link.groups[-1].busbw_gb_per_s:.6g}")
    for fit in link.groups:
        lines += [
            *("", f"[size.{fit.ranks}]"),
            f"busbw_gb_per_s = {fit.busbw_gb_per_s:.6g}",
            f"latency_us = {fit.latency_us:.6g}",
        ]
        for call in CALLS:
            points = [[t.input_bytes, t.time_ns / 1e3] for t in link.curve(call, fit.ranks)]
            names = call.split("_") if call == SEND_RECV else [call]
            lines += [f"{name} = {points}" for name in names]
    return "\n".join(lines) + "\n"
