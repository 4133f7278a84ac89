"""Kernels of an engine's steps one by one: eager, in a CUDA graph, and predicted from shapes.

    python -m benchmarks.serving.serving_kernels measure DIR [MODEL...] [--grid TEXT]
        [--flash-mla LIBRARY]
    python -m benchmarks.serving.serving_kernels compare DIR [MODEL...] [--grid TEXT]

`measure` needs a GPU. It builds a rank of each model, and for each step writes the trace of
`capture serve` and the kernels of replays of its CUDA graph in their order: name, grid, block,
median duration. With `--flash-mla`, decodes of latent attention run FlashMLA's kernel, an operator
of that library (`flash_mla_legacy::dense_decode_fwd`, as SGLang's wheel of FlashMLA has it).

`compare` predicts the same steps without a device, and prints the kernels of a step summed by
module and operator: number, measured eager and in the graph, predicted.
"""

import json
import re
import statistics
import tempfile
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.harness import parser_of, print_conditions, version_of

DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 4,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 16160,
    "max_position_embeddings": 163840,
    "dtype": "bfloat16",
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 16032,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "dtype": "bfloat16",
}
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 16032,
    "max_position_embeddings": 40960,
    "dtype": "bfloat16",
}

DEEPSEEK_LITE: dict[str, Any] = {
    **DEEPSEEK,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
}
QWEN2: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 16032,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}
MISTRAL: dict[str, Any] = {
    "model_type": "mistral",
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 16384,
    "max_position_embeddings": 32768,
    "sliding_window": None,
    "dtype": "bfloat16",
}

# Name -> configuration and tensor-parallel size.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "deepseek-v3-tp8": (DEEPSEEK, 8),
    "llama-8b": (LLAMA, 1),
    "llama-8b-tp8": (LLAMA, 8),
    "qwen3-0.6b": (QWEN3, 1),
    "deepseek-v2-lite": (DEEPSEEK_LITE, 1),
    "qwen2.5-1.5b": (QWEN2, 1),
    "mistral-24b-tp4": (MISTRAL, 4),
}

# The new token makes the keys whole pages of FlashMLA's cache.
STEPS = "decode: batch=1,16,128 context=1023,4095; prefill: tokens=256 context=0"

_PAGE = 64
_REPLAYS = 9


def _configured(directory: Path, model: str) -> tuple[Path, int]:
    config, tp = MODELS[model]
    path = directory / model / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config))
    return path, tp


# Measured -----------------------------------------------------------------------------------------


def measure(directory: Path, models: list[str], grid: str, flash_mla: Path | None) -> None:
    """Write traces and lists of kernels of each model's steps."""
    import torch

    from benchmarks.serving.serving_one_gpu import conditions
    from onerank.capture.options import Options
    from onerank.capture.profiling.window_plan import WindowPlan
    from onerank.capture.serving.compositions import parse_grid
    from onerank.capture.serving.measure_grid import loaded_server

    for model in models:
        path, tp = _configured(directory, model)
        config = MODELS[model][0]
        (path.parent / "conditions.json").write_text(json.dumps(conditions()))
        options = Options(tp=tp, windows=WindowPlan(warm_up=2, settle=False))
        with loaded_server(path, options) as server:
            for number, composition in enumerate(parse_grid(grid), start=1):
                point = server.measure(composition, number)
                assert point.graph is not None, "the step fits"
                point.graph.write(path.parent / f"{number}.et")
                _write_replays(server, composition, path.parent / f"{number}.json")
                if flash_mla is not None and composition.decodes and "kv_lora_rank" in config:
                    _use_flash_mla(flash_mla, composition)
                    _write_replays(server, composition, path.parent / f"{number}.flash-mla.json")
                    _use_own_kernel()
        torch.cuda.empty_cache()


def _write_replays(server: Any, composition: Any, file: Path) -> None:
    replayed = {"composition": str(composition), **_replayed(server.step(composition))}
    file.write_text(json.dumps(replayed))
    print(f"{file.parent.name} {file.name} {composition}: {replayed['graph_ns'] / 1e6:.3f} ms",
          flush=True)  # fmt: skip


def _replayed(step: Any) -> dict[str, Any]:
    """Return time and kernels, in their order, of replays of a step's CUDA graph."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(5):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPLAYS + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) * 1e6 for a, b in pairwise(events)]
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(_REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "replays.json"
        recorded.export_chrome_trace(str(file))
        trace = json.loads(file.read_text())
    work = [
        event
        for event in trace["traceEvents"]
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    work.sort(key=lambda event: event["ts"])
    count, rest = divmod(len(work), _REPLAYS)
    assert not rest, "each replay has the same kernels"
    rows = []
    for position in range(count):
        same = work[position::count]
        args = same[0]["args"]
        rows.append(
            {
                "name": same[0]["name"],
                "grid": args.get("grid"),
                "block": args.get("block"),
                "shared": args.get("shared memory"),
                "ns": statistics.median(round(event["dur"] * 1000) for event in same),
            }
        )
    return {"graph_ns": statistics.median(times), "kernels": rows}


def _use_flash_mla(library: Path, composition: Any) -> None:
    """Let decodes of latent attention run FlashMLA's kernel, for steps of this composition."""
    import torch

    from onerank.capture.serving import latent_attention

    torch.ops.load_library(str(library))
    dense: Any = torch.ops.flash_mla_legacy.dense_decode_fwd
    sequences, pages = composition.decodes, (composition.decode_context + 1) // _PAGE
    table = torch.arange(sequences * pages, dtype=torch.int32, device="cuda").view(sequences, pages)
    lengths = torch.full((sequences,), pages * _PAGE, dtype=torch.int32, device="cuda")
    # The division of the keys among thread blocks, which the first layer computes, as in engines.
    schedule: tuple[Any, Any] = None, None

    def attend(query: Any, keys: Any, values: Any, scale: float) -> Any:
        nonlocal schedule
        paged = keys.view(-1, _PAGE, 1, keys.shape[-1])
        out, _, *computed = dense(
            *(query.unsqueeze(1), paged, values.shape[-1], lengths, table, scale, False, *schedule)
        )
        schedule = tuple(computed)
        return out[:, 0]

    operators = SimpleNamespace(onerank_serving=SimpleNamespace(latent_attention=attend))
    latent_attention._torch = SimpleNamespace(ops=operators)


def _use_own_kernel() -> None:
    """Undo `_use_flash_mla`."""
    import torch

    from onerank.capture.serving import latent_attention

    latent_attention._torch = torch


# Compared -----------------------------------------------------------------------------------------


def compare(directory: Path, models: list[str], grid: str) -> None:
    """Predict the steps of each model without a device, and print their kernels by operator."""
    import onerank
    from onerank.annotate import load_gpu
    from onerank.capture.options import Options
    from onerank.capture.serving.compositions import parse_grid
    from onerank.capture.serving.measure_grid import loaded_server
    from onerank.serving.points import Target, predicted

    conditions = json.loads((directory / models[0] / "conditions.json").read_text())
    print("\n".join(conditions.values()))
    print("predicted:")
    print_conditions(version_of("torch"))
    like = load_gpu(conditions["gpus"].split(",")[0])
    for model in models:
        path, tp = _configured(directory, model)
        options = Options(tp=tp, device="none", like=like.name)
        with loaded_server(path, options) as server:
            for number, composition in enumerate(parse_grid(grid), start=1):
                point = server.measure(composition, number)
                assert point.graph is not None, "without a device every step is measured"
                expected = predicted(composition, point.graph, Target(like, None))
                replayed = json.loads((path.parent / f"{number}.json").read_text())
                heading = f"{model}, {composition}"
                print(f"\n{heading}: graph {replayed['graph_ns'] / 1e6:.3f} ms measured, "
                      f"{(expected.row.graph_ns or 0) / 1e6:.3f} predicted")  # fmt: skip
                after = onerank.recost(point.graph, like.name)
                _print_kernels(path.parent / f"{number}.et", replayed, after)


def _sums(graph: Any, times: Sequence[float] | None = None) -> dict[tuple[str, str], list[float]]:
    """Return number and time of a graph's kernels by module and operator, layers summed."""
    nodes, index = graph.nodes, np.flatnonzero(graph.compute)
    sums: dict[tuple[str, str], list[float]] = {}
    for place, i in enumerate(index.tolist()):
        module = re.sub(r"\.\d+(?=\.|$)", ".*", graph.strings[int(nodes.module[i])])
        entry = sums.setdefault((module, graph.strings[int(nodes.op[i])]), [0, 0])
        entry[0] += 1
        entry[1] += nodes.duration_ns[i] if times is None else times[place]
    return sums


def _print_kernels(trace: Path, replayed: dict[str, Any], expected: Any) -> None:
    import onerank

    captured = onerank.read(trace)
    nodes, index = captured.nodes, np.flatnonzero(captured.compute)
    names = [captured.strings[code] for code in nodes.name[index].tolist()]
    in_graph_ns = [0.0] * len(names)
    # Kernels that stand for collectives are in the graph only.
    ours = [kernel["name"] for kernel in replayed["kernels"]]
    for a, b, length in SequenceMatcher(None, names, ours, autojunk=False).get_matching_blocks():
        for offset in range(length):
            in_graph_ns[a + offset] = replayed["kernels"][b + offset]["ns"]
    if missing := in_graph_ns.count(0.0):
        print(f"  {missing} of {len(names)} kernels are not in the CUDA graph")
    eager, graph, after = _sums(captured), _sums(captured, in_graph_ns), _sums(expected)
    print(f"{'us of all layers':70}{'':>6}{'eager':>9}{'graph':>9}{'':>6}{'predicted':>10}")
    totals = np.zeros(3)
    for key in dict.fromkeys([*eager, *after]):
        count, eager_ns = eager.get(key, (0, 0))
        graph_ns = graph.get(key, (0, 0))[1]
        predicted_count, predicted_ns = after.get(key, (0, 0))
        totals += np.array([eager_ns, graph_ns, predicted_ns])
        label = f"{key[0]} {key[1]}"
        print(f"{label[-70:]:70}{count:6.0f}{eager_ns / 1e3:9.1f}{graph_ns / 1e3:9.1f}"
              f"{predicted_count:6.0f}{predicted_ns / 1e3:10.1f}")  # fmt: skip
    eager_us, graph_us, predicted_us = totals / 1e3
    print(f"{'sum':70}{'':6}{eager_us:9.1f}{graph_us:9.1f}{'':6}{predicted_us:10.1f}")


def main() -> None:
    """Measure or compare."""
    parser = parser_of(__doc__)
    parser.add_argument("action", choices=("measure", "compare"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--grid", default=STEPS, help=f"the steps, as for capture serve [{STEPS}]")
    parser.add_argument("--flash-mla", type=Path, help="shared library of FlashMLA")
    args = parser.parse_args()
    models = args.models or [*MODELS]
    if unknown := {*models} - {*MODELS}:
        parser.error(f"unknown models: {', '.join(sorted(unknown))}")
    if args.action == "measure":
        measure(args.directory, models, args.grid, args.flash_mla)
    else:
        compare(args.directory, models, args.grid)


if __name__ == "__main__":
    main()
