"""What users' scripts do, against figures reckoned by hand."""

import textwrap
from pathlib import Path

from onerank.annotate.work.characters import characterise
from onerank.capture import Options, Plan, capture
from onerank.ir import Graph, World


def run(directory: Path, text: str, world: World) -> Graph:
    path = directory / "train.py"
    path.write_text(textwrap.dedent(text))
    return capture(path, [], Options(world, plan=Plan(warm_up=1, pure=1))).graph


def test_products_of_dtensors_are_the_local_ones(tmp_path):
    graph = run(
        tmp_path,
        """
        import torch, torch.distributed as dist
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import (
            ColwiseParallel, RowwiseParallel, parallelize_module)
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (4,))
        model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            model(torch.randn(8, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
        World.of(tp=4),
    )
    found = characterise(graph)
    products = found.nodes.flops[found.nodes.op == found.strings.intern("aten::mm")]
    # 8 rows x 32 x 64 / 4 ranks: forward twice, backward twice for weights and once for inputs
    assert products.tolist() == [2 * 8 * 32 * 16] * 5
