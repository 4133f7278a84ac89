"""Steps of an inference engine on one GPU: `measure` of `serving.py`."""

import dataclasses
import gc
import gzip
import json
import multiprocessing
import platform
import random
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "dtype": "bfloat16",
}

COMPOSITIONS = 40
SEED = 28

# Tokens in the KV cache of a drawn composition: of a Llama-8B 52 GB, which fit into 80 GB next to
# 16 GB of weights.
MOST_CACHED = 400_000


def drawn(longest: int):
    """Return compositions that are not in the default grid: a third of each kind."""
    from onerank.capture.serving.compositions import Composition, default_grid

    draw, grid = random.Random(SEED), {*default_grid(longest)}
    chosen = []
    while len(chosen) < COMPOSITIONS:
        kind = ("decode", "prefill", "mixed")[len(chosen) % 3]
        decodes, prefills = int(kind != "prefill"), int(kind != "decode")
        c = Composition(
            decodes=round(2 ** draw.uniform(0, 8)) * decodes,
            decode_context=round(2 ** draw.uniform(7, 15)) * decodes,
            prefills=prefills,
            prefill_tokens=round(2 ** draw.uniform(6, 13)) * prefills,
            prefill_context=draw.choice((0, round(2 ** draw.uniform(8, 13)))) * prefills,
        )
        if c.cached_tokens <= MOST_CACHED and c not in grid:
            chosen.append(c)
    return chosen


def conditions() -> dict[str, str]:
    """Return date, machine and versions."""
    import torch
    import transformers

    query = "--query-gpu=name,driver_version,clocks.max.sm,power.limit"
    gpus = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "gpus": "; ".join(gpus),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def configured(output: Path, config: Path | None) -> Path:
    """Write the model's configuration and the conditions; return the configuration's file."""
    output.mkdir(exist_ok=True, parents=True)
    path = output / "config.json"
    path.write_text(config.read_text() if config else json.dumps(LLAMA_8B))
    (output / "conditions.json").write_text(json.dumps(conditions()))
    return path


def measure(output: Path, config: Path | None, tp: int) -> None:
    """Measure the drawn compositions, the grid, the capacity and a CUDA graph, and write them."""
    import onerank
    from onerank.capture.options import Options
    from onerank.capture.profiling.window_plan import WindowPlan

    path = configured(output, config)
    options = Options(tp=tp, windows=WindowPlan(warm_up=2, settle=False))
    began = time.perf_counter()

    def report(what: str) -> None:
        print(f"{what}: {time.perf_counter() - began:.0f} s", flush=True)

    if not (output / "cuda_graph.json").exists():
        alone(cuda_graph_decode, output / "decode", output / "cuda_graph.json")
        report("a decode as a CUDA graph")
    alone(measure_drawn, path, options, output / "drawn.json")
    report("drawn compositions")

    alone(measure_default_grid, path, options, output)
    report("grid")
    memory = onerank.read_bundle(output / "bundle").manifest.memory
    alone(capacity, path, options, memory, output / "capacity.json")
    report("complete")


def alone(function: Callable[..., None], *args: Any) -> None:
    """Call a function in a new process, whose GPU memory contains nothing of earlier steps.

    Its failure is printed, and the other measurements go on.
    """
    process = multiprocessing.get_context("spawn").Process(target=function, args=args)
    process.start()
    process.join()
    if process.exitcode:
        print(f"{function.__name__}: exit {process.exitcode}", flush=True)


def measure_default_grid(path: Path, options: Any, output: Path) -> None:
    """Write the bundle of the default grid."""
    from onerank.plan.tasks import Store
    from onerank.serving.build_bundle import measure_bundle

    def progress(name: str, complete: int, whole: int, *, detail: str = "") -> None:
        if complete % 10 == 0 or complete == whole:
            print(f"{complete} of {whole}", flush=True)

    bundle, traces = measure_bundle(path, options, None, Store(output / "store"), progress=progress)
    if not (output / "bundle").exists():
        bundle.write(output / "bundle", traces)


def measure_drawn(path: Path, options: Any, file: Path) -> None:
    """Write times of the drawn compositions to a file, one by one."""
    import torch

    from onerank.capture.serving.measure_grid import loaded_server

    rows = json.loads(file.read_text()) if file.exists() else []
    known = [row["composition"] for row in rows]
    with loaded_server(path, options) as server:
        for composition in drawn(server.served.longest):
            if _fields(composition) in known:
                continue
            try:
                timed = server.time(composition, 7)
            except torch.cuda.OutOfMemoryError:
                print(f"{composition} does not fit", flush=True)
                continue
            rows.append(record(composition, timed))
            file.write_text(json.dumps(rows))


def _fields(composition: Any) -> dict[str, int]:
    import msgspec

    return msgspec.structs.asdict(composition)


def record(composition: Any, timed: Any) -> dict[str, Any]:
    return {"composition": _fields(composition), **dataclasses.asdict(timed)}


def capacity(path: Path, options: Any, memory: Any, file: Path) -> None:
    """Write the largest KV cache that fits next to a prefill of 8,192 tokens, by bisection."""
    import torch

    from onerank.capture.serving.compositions import Composition
    from onerank.capture.serving.measure_grid import loaded_server

    def tokens(context: int) -> Composition:
        return Composition(64, context, 1, 8192, 0)

    def fits(context: int) -> bool:
        gc.collect()
        torch.cuda.empty_cache()
        try:
            server.step(tokens(context))()
            torch.cuda.synchronize()
        except torch.cuda.OutOfMemoryError:
            return False
        return True

    low, high = 0, 4 * memory.tokens_that_fit // 64
    predicted = (memory.tokens_that_fit - 8192 - 64) // 64
    # Two probes bracket a prediction that is right within 1%.
    probes = iter([predicted * 99 // 100, predicted * 101 // 100])
    with loaded_server(path, options) as server:
        before = torch.cuda.memory_allocated()
        while high - low > max(1, predicted // 400):
            context = next(probes, (low + high) // 2)
            if low < context < high:
                low, high = (context, high) if fits(context) else (low, context)
        free, total = torch.cuda.mem_get_info()
        figures = {
            "measured_tokens": tokens(low).cached_tokens,
            "too_many_tokens": tokens(high).cached_tokens,
            "predicted_tokens": memory.tokens_that_fit,
            "allocated_before_bytes": before,
            "outside_bytes": total - free - torch.cuda.memory_reserved(),
        }
        file.write_text(json.dumps(figures))


GENERATE = ("--cache", "static", "--layers", "8", "--batch", "8", "--prompt", "512", "--new", "64")


def cuda_graph_decode(raw: Path, file: Path) -> None:
    """Write how many kernels of a decode that runs as a CUDA graph are linked, and their time.

    The decode is that of transformers' `generate` with a static cache, whose forward transformers
    compiles with `torch.compile(mode="reduce-overhead")`.

    Args:
        raw: where the profiler's recordings are kept.
        file: where to write the figures.
    """
    from onerank.capture.capture_script import capture
    from onerank.capture.options import Options
    from onerank.capture.profiling.window_plan import WindowPlan

    script = Path(__file__).parents[2] / "examples" / "generate_llama.py"
    options = Options(
        steps=("decode",), raw_dir=raw, windows=WindowPlan(warm_up=5, timed_steps=20, settle=False)
    )
    graph = capture(script, GENERATE, options).graph
    graph.write(raw.with_suffix(".et"))
    nodes = np.flatnonzero(graph.gpu_compute)
    linked = [bool(graph.strings[code]) for code in graph.nodes.op[nodes].tolist()]
    # The profiled step alone: the recordings of structure and of the graph's capture have no times.
    profile = json.loads(_text(next(raw.glob("**/profile.json*"))))
    work = [
        round(event["dur"] * 1000)
        for event in profile["traceEvents"]
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    figures = {
        "recorded": len(work),
        "recorded_ns": sum(work),
        "nodes": len(nodes),
        "nodes_ns": int(graph.nodes.duration_ns[nodes].sum()),
        "linked": sum(linked),
        "step_ns": graph.job.measurement.median_step_ns,
    }
    file.write_text(json.dumps(figures))


def _text(file: Path) -> bytes:
    content = file.read_bytes()
    return gzip.decompress(content) if file.suffix == ".gz" else content
