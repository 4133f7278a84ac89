"""`capture run --device none`: DeepEP and HybridEP, whose packages are not built."""

import csv
from pathlib import Path

import pytest
from without_device import run, write_packages

import onerank
from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.ir import Collective, Graph

SETUP = """
import os, torch
import torch.distributed as dist
dist.init_process_group("nccl")
group = dist.new_group(range(4))
import deep_ep
from deep_ep.utils import EventHandle, EventOverlap
weight = torch.nn.Parameter(torch.ones(24, 16, device="cuda", dtype=torch.bfloat16))
optimizer = torch.optim.SGD([weight], lr=0.1)
scores = torch.nn.Linear(16, 8, device="cuda", dtype=torch.bfloat16)
for step in range(5):
    x = weight * 2
    chosen = torch.topk(scores(x), 2).indices
"""

DEEPEP = (
    SETUP
    + """
    buffer = deep_ep.Buffer(group, 0, 0)
    deep_ep.Buffer.set_num_sms(20)
    before = EventOverlap(EventHandle())
    to_rank, to_node, to_expert, in_rank, event = buffer.get_dispatch_layout(
        chosen, 8, previous_event=before, async_finish=True, allocate_on_comm_stream=True
    )
    assert to_node is None
    rows, local, weights, per_expert, handle, event = buffer.dispatch(
        x.detach(), topk_idx=chosen, topk_weights=torch.ones(24, 2, device="cuda"),
        num_tokens_per_rank=to_rank, is_token_in_rank=in_rank, num_tokens_per_expert=to_expert,
        previous_event=event, async_finish=True,
    )
    event.current_stream_wait()
    combined, _, event = buffer.combine(rows, handle)
    assert combined.shape == x.shape
    again = buffer.dispatch(x.detach(), handle=handle)[0]
    assert again.shape == rows.shape
    (x * combined).sum().backward()
    optimizer.step()
    print("RESULT", to_rank.tolist(), len(rows), per_expert, local[:2].tolist())
"""
)

HYBRID = (
    SETUP
    + """
    buffer = deep_ep.HybridEPBuffer(
        group=group, hidden_dim=16, max_num_of_tokens_per_rank=24, num_local_experts=2
    )
    routed = torch.zeros(24, 8, device="cuda", dtype=torch.bool).scatter(1, chosen, True)
    rows, weights, _, per_expert, handle = buffer.dispatch_with_permute(
        hidden=x.detach(), routing_map=routed, probs=torch.ones(24, 8, device="cuda"),
        num_of_experts_per_rank=2, pad_multiple=32,
    )
    combined, weights = buffer.combine_with_unpermute(hidden=rows, handle=handle, probs=weights)
    again = buffer.dispatch_with_permute(hidden=combined, handle=handle, pad_multiple=32)[0]
    assert again.shape == rows.shape
    assert combined.shape == x.shape and weights.shape == (24, 8)
    (x * combined).sum().backward()
    optimizer.step()
    print("RESULT", len(rows), per_expert.tolist(), int(handle[-1]))
"""
)


def exchanges(graph: Graph) -> list[int]:
    """Return the bytes of all-to-alls, in order."""
    chosen = graph.nodes.collective == Collective.ALL_TO_ALL
    return graph.nodes.comm_bytes[chosen].tolist()


def dispatched(directory: Path, text: str, shares: list[int], rank: int) -> tuple[str, list[int]]:
    """Capture a rank of four; return what the script printed and the bytes of all-to-alls."""
    with (directory / "lines.csv").open("w") as file:
        csv.writer(file).writerow(shares)
    write_packages(directory, "deep_ep")
    options = ("--torchrun", "--dp", 4, "--rank", rank, "--moe-routing", directory / "lines.csv")
    done = run(directory, text, *options)
    assert done.returncode == 0, done.stderr
    printed = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    return printed, exchanges(onerank.read(directory / "trace.et"))


@pytest.mark.parametrize(
    ("shares", "rank", "printed", "rows"),
    [
        # Both experts of a token lie on rank 0, to which it travels once.
        ([1, 1, 0, 0, 0, 0, 0, 0], 0, "[24, 0, 0, 0] 96 [96, 96]", 24),
        ([1, 1, 0, 0, 0, 0, 0, 0], 1, "[24, 0, 0, 0] 0 [0, 0] []", 24),
        # Two ranks have an expert each.
        ([1, 0, 0, 1, 0, 0, 0, 0], 1, "[24, 24, 0, 0] 96 [0, 96]", 48),
    ],
)
def test_deepep_sends_a_token_once_to_each_rank(shares, rank, printed, rows, tmp_path):
    result, sizes = dispatched(tmp_path, DEEPEP, shares, rank)
    assert printed in result
    received = int(printed.split("] ")[1].split()[0])
    there, back = rows * 16 * 2, received * 16 * 2
    assert sizes == [there, back, there]


def test_deepep_with_a_worst_case_allocates_its_rows(tmp_path):
    text = DEEPEP.replace("previous_event=event,", "previous_event=event, num_worst_tokens=100,")
    text = text.replace("local[:2]", "local[95:97]")
    result, sizes = dispatched(tmp_path, text, [1, 1, 0, 0, 0, 0, 0, 0], 0)
    # 24 tokens of each of 4 ranks travel; the host learns no counts.
    assert "RESULT [24, 0, 0, 0] 100 [] [[" in result
    assert result.endswith(", [-1, -1]]")
    assert sizes == [24 * 16 * 2, 96 * 16 * 2, 24 * 16 * 2]


@pytest.mark.parametrize(
    ("waits", "rows"), [("", 96), ("non_blocking=True, num_permuted_tokens=128,", 128)]
)
def test_hybridep_orders_rows_by_padded_experts(waits, rows, tmp_path):
    text = HYBRID.replace("pad_multiple=32,", f"pad_multiple=32, {waits}")
    result, sizes = dispatched(tmp_path, text, [1, 0, 0, 1, 0, 0, 0, 0], 1)
    # 24 tokens of each of 4 ranks for its second expert, in multiples of 32.
    assert f"RESULT {rows} [0, 96] 0" in result
    assert sizes == [48 * 16 * 2, 96 * 16 * 2, 48 * 16 * 2]
    graph = onerank.read(tmp_path / "trace.et")
    work = op_costs_of(graph)
    names = [graph.strings[int(op)] for op in graph.nodes.op[work.index]]
    kernels = {
        name: (int(work.flops[at]), int(work.bytes_read[at]), int(work.bytes_written[at]))
        for at, name in enumerate(names)
        if name.startswith("deep_ep::")
    }
    row = 16 * 2
    assert kernels == {
        "deep_ep::permute_rows": (0, 96 * row, 96 * row),
        "deep_ep::unpermute_rows": (0, 96 * row, 96 * row),
    }


def test_a_function_of_deepep_without_a_counterpart_is_refused(tmp_path):
    write_packages(tmp_path, "deep_ep")
    text = DEEPEP.replace("deep_ep.Buffer.set_num_sms(20)", "buffer.low_latency_dispatch(x)")
    done = run(tmp_path, text, "--torchrun", "--dp", 4)
    assert done.returncode == 2
    assert "error[no-device-extension]: train.py:" in done.stderr
    assert "Buffer.low_latency_dispatch" in done.stderr


def test_deepep_needs_chosen_experts(tmp_path):
    write_packages(tmp_path, "deep_ep")
    text = DEEPEP.replace("torch.topk(scores(x), 2).indices", "scores(x)[:, :2].long()")
    done = run(tmp_path, text, "--torchrun", "--dp", 4)
    assert done.returncode == 2
    assert "error[no-device-value]: train.py:" in done.stderr
    assert "deep_ep::Buffer.get_dispatch_layout" in done.stderr
