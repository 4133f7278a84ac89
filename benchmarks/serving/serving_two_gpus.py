"""Steps of a real tensor-parallel job on two GPUs, and of its slice: `real` of `serving.py`."""

import gc
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.serving.serving_one_gpu import SEED, configured, record

# Bytes of the largest KV cache on each of two ranks: 800,000 tokens of a Llama-8B.
MOST_CACHED_BYTES_OF_TWO = 52_428_800_000


def compositions_of_two(config: Any):
    """Return prefills and decodes whose KV cache on each of two ranks fits into 80 GB.

    Args:
        config: a model's configuration, of transformers.
    """
    from onerank.capture.serving.compositions import Composition

    # Keys and values of half of the heads; 2 bytes each.
    heads, layers = config.num_key_value_heads // 2, config.num_hidden_layers
    token_bytes = layers * 2 * heads * config.head_dim * 2

    decodes = [
        Composition(batch, context)
        for batch in (1, 4, 16, 64, 256)
        for context in (128, 1024, 3072, 12288, 32767)
    ]
    prefills = [
        Composition(0, 0, batch, tokens, context)
        for batch, tokens, context in (
            *((1, 128, 0), (1, 512, 0), (1, 2048, 0), (1, 8192, 0), (1, 32768, 0)),
            *((1, 512, 2048), (1, 2048, 8192), (1, 512, 32256), (4, 1024, 0), (16, 128, 0)),
        )
    ]
    return [
        c
        for c in (*decodes, *prefills)
        if c.cached_tokens * token_bytes <= MOST_CACHED_BYTES_OF_TWO
    ]


def real(output: Path, config: Path | None) -> None:
    """Measure the slice, the two ranks of the real job, and every third slice again."""
    import torch
    from torch import multiprocessing

    path = configured(output, config)
    if (count := torch.cuda.device_count()) < 2:
        raise SystemExit(f"needs 2 GPUs, found {count}")
    for target, ranks, name in (
        (_slice, 1, "slice"),
        (_real_rank, 2, "real"),
        (_slice, 1, "again"),
    ):
        began = time.perf_counter()
        multiprocessing.spawn(target, (path, output, name), nprocs=ranks)
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)


def _slice(_: int, path: Path, output: Path, name: str) -> None:
    from onerank.capture.options import Options
    from onerank.capture.serving.build_model import read_config
    from onerank.capture.serving.measure_grid import loaded_server

    chosen = compositions_of_two(read_config(path))[:: 3 if name == "again" else 1]
    with loaded_server(path, Options(tp=2)) as server:
        _measure_all(server.step, chosen, output / f"{name}.0.json")


def _real_rank(rank: int, path: Path, output: Path, name: str) -> None:
    import os

    import torch
    import torch.distributed as dist

    from onerank.capture.parallelize.experts.expert_parallel import apply_static_routing
    from onerank.capture.parallelize.experts.routing import BALANCED, Routing
    from onerank.capture.serving.build_model import build_model, materialise, read_config
    from onerank.capture.serving.compositions import Composition
    from onerank.capture.serving.engine_step import RepeatableStep, give_attention_scopes

    torch.cuda.set_device(rank)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29531")
    dist.init_process_group("nccl", rank=rank, world_size=2)
    config = read_config(path)
    model = build_model(config, "cuda", shapes_only=False)
    # As `capture serve` routes the tokens of the slice.
    apply_static_routing(model, Routing(BALANCED))
    shard(model, rank, 2)
    materialise(model, "cuda")

    first = RepeatableStep.of(model, Composition(1, 1), model.config.vocab_size, "cuda")
    give_attention_scopes(first)

    def step(composition: Composition) -> RepeatableStep:
        # The same tokens on both ranks.
        torch.manual_seed(SEED)
        made = RepeatableStep.of(model, composition, model.config.vocab_size, "cuda")
        made.cache.allocate(first.cache)
        return made

    _measure_all(step, compositions_of_two(config), output / f"{name}.{rank}.json")
    dist.destroy_process_group()


def shard(model: Any, rank: int, ranks: int) -> None:
    """Shard a Llama, a Qwen3 or a Qwen3 mixture on `meta`.

    Heads, features of the layers and of each expert, and the vocabulary are divided.

    Args:
        model: a `LlamaForCausalLM`, `Qwen3ForCausalLM` or `Qwen3MoeForCausalLM` of transformers.
        rank: this process.
        ranks: processes of the default group.
    """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn import functional

    def keep(module: Any, dim: int, name: str = "weight") -> None:
        whole = getattr(module, name)
        shape = [*whole.shape]
        shape[dim] //= ranks
        part = torch.empty(shape, dtype=whole.dtype, device=whole.device)
        setattr(module, name, nn.Parameter(part, requires_grad=False))

    def reduced(_module: Any, _args: Any, output: Any) -> Any:
        dist.all_reduce(output)
        return output

    def gathered(_module: Any, _args: Any, output: Any) -> Any:
        parts = [torch.empty_like(output) for _ in range(ranks)]
        dist.all_gather(parts, output)
        return torch.cat(parts, dim=-1)

    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        columns, rows = [attention.q_proj, attention.k_proj, attention.v_proj], [attention.o_proj]
        experts = getattr(mlp, "experts", None)
        if experts is None:
            columns += [mlp.gate_proj, mlp.up_proj]
            rows.append(mlp.down_proj)
        else:
            # [experts, 2 * features, hidden] and [experts, hidden, features].
            keep(experts, 1, "gate_up_proj")
            keep(experts, 2, "down_proj")
            experts.register_forward_hook(reduced)
        for linear in columns:
            keep(linear, 0)
        for linear in rows:
            keep(linear, 1)
            linear.register_forward_hook(reduced)
    keep(model.lm_head, 0)
    model.lm_head.register_forward_hook(gathered)
    embedding = model.model.embed_tokens
    keep(embedding, 0)
    first, count = rank * embedding.weight.shape[0], embedding.weight.shape[0]

    def embed(tokens: Any) -> Any:
        outside = (tokens < first) | (tokens >= first + count)
        rows = functional.embedding((tokens - first).masked_fill(outside, 0), embedding.weight)
        rows.masked_fill_(outside.unsqueeze(-1), 0)
        dist.all_reduce(rows)
        return rows

    embedding.forward = embed


def _measure_all(step: Callable[[Any], Any], chosen: Sequence[Any], file: Path) -> None:
    """Write times of compositions: by CUDA events, and by kernel of the replayed CUDA graph."""
    import torch

    from onerank.capture.serving.measure_grid import time_step

    rows = list[dict[str, Any]]()
    for composition in chosen:
        gc.collect()
        torch.cuda.empty_cache()
        engine_step = step(composition)
        timed = time_step(engine_step, 5)
        kernels = _replayed_kernels(engine_step)
        del engine_step
        rows.append({**record(composition, timed), "kernels": kernels})
        file.write_text(json.dumps(rows))


_PROFILED = 3


def _replayed_kernels(step: Callable[[], None]) -> dict[str, tuple[float, float]]:
    """Return number and time in ns of a step's kernels by name, replayed as a CUDA graph."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(_PROFILED):
            graph.replay()
        torch.cuda.synchronize()
    sums: dict[str, tuple[float, float]] = {}
    results: Any = recorded.profiler
    for event in results.kineto_results.events():
        if event.device_type() == DeviceType.CUDA:
            count, time_ns = sums.get(event.name(), (0.0, 0.0))
            sums[event.name()] = count + 1 / _PROFILED, time_ns + event.duration_ns() / _PROFILED
    return sums
