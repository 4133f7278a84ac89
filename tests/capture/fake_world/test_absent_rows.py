"""Sums of a vocabulary-parallel embedding, of which rank 1 of 4 has a quarter of the rows."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from notes import has_note
from torch import nn
from torch.autograd import DeviceType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity, profile

from onerank.capture.collective_kernels import CollectiveEmulation, uniform
from onerank.capture.fake_world.recorder import Recorder

pytestmark = pytest.mark.filterwarnings(
    # torch 2.13 renamed reduce_scatter_tensor; 2.11 knows only this.
    "ignore:.*is deprecated. Please use:FutureWarning"
)

VOCABULARY, HIDDEN, LAYERS = 64, 32, 6
OWN = range(16, 32)


def part(rows: int = 8, lacking: int = 3) -> torch.Tensor:
    values = torch.randn(rows, 2, HIDDEN, generator=torch.Generator().manual_seed(1))
    values[:lacking] = 0
    return values


def lacking_rows(values: torch.Tensor) -> int:
    return int(values.eq(0).all(dim=-1).sum())


@pytest.mark.parametrize("layout", [Replicate(), Shard(1)], ids=["all-reduce", "reduce-scatter"])
def test_a_first_token_of_another_rank_does_not_blow_gradients_up(scripts_recorder, layout):
    torch.manual_seed(0)
    embedding = nn.Embedding(VOCABULARY, HIDDEN)
    # a unique name: DTensor caches layouts of equal meshes, with their groups
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=(f"vocabulary {layout}",))
    layouts: Any = {"input_layouts": Replicate(), "output_layouts": layout}
    parallelize_module(embedding, mesh, RowwiseParallel(**layouts))
    blocks = nn.ModuleList(
        nn.Sequential(nn.RMSNorm(HIDDEN, eps=1e-6), nn.Linear(HIDDEN, HIDDEN, bias=False))
        for _ in range(LAYERS)
    )
    tokens = torch.tensor([[0, *OWN, *range(40, 47)]])
    for _ in range(4):
        hidden: Any = embedding(tokens)
        for block in blocks:
            hidden = hidden + block(hidden)
        hidden.square().sum().backward()
        norm = torch.stack([one.grad.norm() for one in blocks.parameters()]).norm().item()
        blocks.zero_grad()
        assert 10 < norm < 1e4  # 2e15 where the first row stays zero
        scripts_recorder.next_step()


def test_the_sum_is_the_same_in_each_step(scripts_recorder):
    sums = []
    for _ in range(4):
        values = part()
        dist.all_reduce(values)
        sums.append(values)
        scripts_recorder.next_step()
    assert lacking_rows(sums[0]) == 0
    assert sums[0].std() == pytest.approx(1.0, rel=0.1)
    assert all(torch.equal(sums[0], later) for later in sums)
    note = scripts_recorder.partial_sums.note()
    assert has_note([note], "partial-sums-random", 1)
    assert "except" not in note.text


def test_whole_sums_stay(scripts_recorder):
    kept = {
        "no row is zero": part(lacking=0),
        "all rows are": torch.zeros(8, HIDDEN),
        "a bucket": torch.cat([torch.zeros(16), torch.ones(16)]),
        "integers": torch.arange(32).view(4, 8) // 8 * 8,
        "nothing": torch.empty(4, 0),
        "float8": torch.tensor([[0.0] * 16, [1.0] * 16]).to(torch.float8_e4m3fn),
    }
    for _ in range(3):
        for name, values in kept.items():
            result = values.clone()
            dist.all_reduce(result)
            assert torch.equal(result.float(), values.float()), name
        highest = part()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        assert torch.equal(highest, part())
        scripts_recorder.next_step()
    assert scripts_recorder.partial_sums.note() is None


def test_one_row_alone_gives_finite_sums(scripts_recorder):
    logits = torch.tensor([[0.0], [3.0], [0.0]])
    dist.all_reduce(logits)
    assert logits.isfinite().all()
    assert lacking_rows(logits) == 0


def test_gradients_stay(scripts_recorder):
    weight = nn.Parameter(torch.ones(8, HIDDEN))
    seen = []

    def reduced(gradient: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(gradient)
        seen.append(lacking_rows(gradient))
        return gradient

    weight.register_hook(reduced)
    weight[torch.tensor([1, 2])].sum().backward()
    assert seen == [6]
    behind, shard = weight.grad.clone(), torch.empty(2, HIDDEN)
    dist.all_reduce(behind)  # by hand, as PyTorch's tutorial averages gradients
    dist.all_reduce(weight.grad)
    dist.reduce_scatter_tensor(shard, weight.grad[:8])
    assert [lacking_rows(one) for one in (behind, weight.grad, shard)] == [6, 6, 1]


def test_a_step_unlike_the_second_is_left_alone(scripts_recorder):
    for _ in range(2):
        dist.all_reduce(part())
        scripts_recorder.next_step()
    dist.all_reduce(part(rows=9))
    values = part()
    dist.all_reduce(values)
    assert lacking_rows(values) == 6
    note = scripts_recorder.partial_sums.note()
    assert has_note([note], "partial-sums-random", "except")


def test_what_the_tool_slices_makes_its_own_up(recorder):
    values = part()
    dist.all_reduce(values)
    assert torch.equal(values, part())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_cuda_a_sum_takes_one_kernel_and_no_memory_of_torchs(dtype, silent):
    recorder = Recorder(1, 4, silent, CollectiveEmulation(uniform(300.0)))
    recorder.start()
    try:
        first, whole = (part(rows, rows * 3 // 8).to("cuda", dtype) for rows in (4096, 4 * 4096))
        own = torch.empty(4096, 2, HIDDEN, dtype=dtype, device="cuda")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for step in range(3):
            summed, scattered = first.clone(), whole.clone()
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                dist.all_reduce(summed)
                dist.reduce_scatter_tensor(own, scattered)
                torch.cuda.synchronize()
            kernels = [one.name for one in seen.events() if one.device_type == DeviceType.CUDA]
            if step == 2:
                assert len(kernels) == 2, kernels
            for result in (summed, own):
                assert lacking_rows(result) == 0
                assert result.float().std().item() == pytest.approx(1.0, rel=0.02)
                assert len(result.view(-1, HIDDEN).unique(dim=0)) == result.numel() // HIDDEN
            del summed, scattered, result
            recorder.next_step()
        assert torch.cuda.memory_allocated() == before
    finally:
        recorder.stop()
