"""Steps of an inference engine: interpolated, for another GPU, from shapes alone, against measured.

python -m benchmarks.serving.serving measure -o DIR [--config config.json] [--tp 1]    on one GPU
python -m benchmarks.serving.serving real -o DIR [--config config.json]                on two GPUs
python -m benchmarks.serving.serving compare DIR [DIR_OF_ANOTHER_GPU] [--more BUNDLE]  anywhere
python -m benchmarks.serving.serving points DIR [--more BUNDLE] [--others JSON]        anywhere

`measure` runs 40 compositions drawn with a fixed seed, without a profiler, and the default grid of
`capture serve`; then it finds the largest KV cache that fits, and captures a decode that runs as a
CUDA graph. It continues where it was killed. `real` runs a Llama, or a model with the same modules,
such as Qwen3, on two GPUs, sharded as in Megatron-LM and vLLM, with NCCL, and the slice of rank 0
on one of them, over the same compositions.

`compare` interpolates the drawn compositions from the grid, predicts them from shapes alone (device
none), predicts the bundle for the GPU of the other directory and back, and prints the errors. With
`--more` the grid is the default one, and what DIR lacks of it is in the other bundle.

`points` interpolates the drawn compositions from the first points of the grid, in the order of
`capture serve --error`, and says where that option stops. `--others` is a JSON list of further
compositions with `graph_ns`; those that the grid has are left out.
"""

import argparse
import dataclasses
import gc
import gzip
import json
import multiprocessing
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
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

# Bytes of the largest KV cache on each of two ranks: 800,000 tokens of a Llama-8B.
MOST_CACHED_BYTES_OF_TWO = 52_428_800_000

KINDS = ("", "prefill", "decode", "mixed")


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


def _configured(output: Path, config: Path | None) -> Path:
    """Write the model's configuration and the conditions; return the configuration's file."""
    output.mkdir(exist_ok=True, parents=True)
    path = output / "config.json"
    path.write_text(config.read_text() if config else json.dumps(LLAMA_8B))
    (output / "conditions.json").write_text(json.dumps(conditions()))
    return path


# One GPU ------------------------------------------------------------------------------------------


def measure(output: Path, config: Path | None, tp: int) -> None:
    """Measure the drawn compositions, the grid, the capacity and a CUDA graph, and write them."""
    import onerank
    from onerank.capture.options import Options
    from onerank.capture.profiling.window_plan import WindowPlan

    path = _configured(output, config)
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
            rows.append(_record(composition, timed))
            file.write_text(json.dumps(rows))


def _fields(composition: Any) -> dict[str, int]:
    import msgspec

    return msgspec.structs.asdict(composition)


def _record(composition: Any, timed: Any) -> dict[str, Any]:
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


# Two GPUs -----------------------------------------------------------------------------------------


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

    path = _configured(output, config)
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

    from onerank.capture.serving.build_model import build_model, materialise, read_config
    from onerank.capture.serving.compositions import Composition
    from onerank.capture.serving.engine_step import RepeatableStep, give_attention_scopes

    torch.cuda.set_device(rank)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29531")
    dist.init_process_group("nccl", rank=rank, world_size=2)
    config = read_config(path)
    model = build_model(config, "cuda", shapes_only=False)
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
    """Shard a Llama or Qwen3 on `meta`: heads and features of the layers, and the vocabulary.

    Args:
        model: a `LlamaForCausalLM` or `Qwen3ForCausalLM` of transformers.
        rank: this process.
        ranks: processes of the default group.
    """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn import functional

    def keep(module: Any, dim: int) -> None:
        shape = [*module.weight.shape]
        shape[dim] //= ranks
        weight = torch.empty(shape, dtype=module.weight.dtype, device=module.weight.device)
        module.weight = nn.Parameter(weight, requires_grad=False)

    def reduced(_module: Any, _args: Any, output: Any) -> Any:
        dist.all_reduce(output)
        return output

    def gathered(_module: Any, _args: Any, output: Any) -> Any:
        parts = [torch.empty_like(output) for _ in range(ranks)]
        dist.all_gather(parts, output)
        return torch.cat(parts, dim=-1)

    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        columns = (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj)
        for linear in columns:
            keep(linear, 0)
        for linear in (attention.o_proj, mlp.down_proj):
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
        rows.append({**_record(composition, timed), "kernels": kernels})
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


# Comparison ---------------------------------------------------------------------------------------

Pairs = Iterable[tuple[float, float]]


def errors(pairs: Pairs) -> tuple[float, float, float]:
    """Return median and 90th percentile of the relative errors, and their mean."""
    relative = [abs(predicted / measured - 1) for predicted, measured in pairs]
    return (*np.quantile(relative, (0.5, 0.9)).tolist(), statistics.mean(relative))


def line(label: str, pairs: Pairs) -> None:
    """Print the errors of pairs of a predicted and a measured figure, and their signed mean."""
    pairs = [*pairs]
    if pairs:
        signed = statistics.mean(predicted / measured - 1 for predicted, measured in pairs)
        figures = "".join(f" {error:8.1%}" for error in errors(pairs))
        print(f"{label:44} {len(pairs):4} {figures} {signed:+8.1%}")


def heading(title: str) -> None:
    """Print a title and the columns of `line`."""
    print(f"\n{title:44} {'':4}  {'median':>8} {'p90':>8} {'mean':>8} {'signed':>8}")


def compare(directory: Path, other: Path | None, more: Path | None) -> None:
    """Print all errors."""
    if (directory / "slice.0.json").exists():
        compare_real(directory)
        return
    for folder in filter(None, (directory, other)):
        measured_on_one_gpu(folder, more)
    if other is not None:
        transfer(directory, other)
        transfer(other, directory)


def default_points(*bundles: Any) -> Any:
    """Return a bundle with the default grid's rows, each from the first bundle that has it."""
    import msgspec

    from onerank.capture.serving.compositions import default_grid

    grid, rows, kernels = {*default_grid(bundles[0].manifest.longest)}, list[Any](), list[Any]()
    for bundle in bundles:
        for number, row in enumerate(bundle.rows, start=1):
            if row.composition not in grid:
                continue
            grid.remove(row.composition)
            rows.append(row)
            modules = [kernel for kernel in bundle.kernel_rows if kernel.row == number]
            kernels += [msgspec.structs.replace(module, row=len(rows)) for module in modules]
    if grid:
        print(f"{len(grid)} compositions of the default grid are missing")
    return dataclasses.replace(bundles[0], rows=tuple(rows), kernel_rows=tuple(kernels)).validated()


def measured_on_one_gpu(directory: Path, more: Path | None) -> None:
    """Print the errors of interpolation, of shapes alone and of memory on one GPU."""
    import onerank
    from onerank.capture.serving.compositions import Composition

    print("\n" + "\n".join(json.loads((directory / "conditions.json").read_text()).values()))
    bundle = onerank.read_bundle(directory / "bundle")
    if more is not None:
        bundle = default_points(bundle, onerank.read_bundle(more))
    print(bundle)
    rows = json.loads((directory / "drawn.json").read_text())
    compositions = [Composition(**row["composition"]) for row in rows]
    graph = [statistics.median(row["graph_ns"] or [0]) for row in rows]
    eager = [statistics.median(row["step_ns"]) for row in rows]
    table = bundle.at(compositions)
    heading(f"Interpolated from {len(bundle.rows)} compositions")
    for name, measured, column in (("CUDA graph", graph, "graph_ns"), ("eager", eager, "step_ns")):
        figures = table[column].to_list()
        for kind in KINDS:
            index = [i for i, c in enumerate(compositions) if kind in ("", c.kind)]
            line(f"{name} {kind}", ((figures[i], measured[i]) for i in index))
    peaks = table["peak_bytes"].to_list()
    line("peak memory", zip(peaks, (row["peak_bytes"] for row in rows), strict=True))
    inside = [
        row["graph_low_ns"] <= g <= row["graph_high_ns"]
        for row, g in zip(table.to_dicts(), graph, strict=True)
    ]
    print(f"inside the 80% interval: {sum(inside)} of {len(inside)}")
    for c, predicted, measured in zip(compositions, table["graph_ns"], graph, strict=True):
        print(f"  {c!s:44} {measured / 1e6:9.3f} ms {predicted / measured - 1:+8.1%}")
    if (file := directory / "capacity.json").is_file():
        tokens = json.loads(file.read_text())
        error = tokens["predicted_tokens"] / tokens["measured_tokens"] - 1
        print(f"\nKV cache that fits next to a prefill of 8,192 tokens: {tokens}, {error:+.2%}")
    if (file := directory / "cuda_graph.json").is_file():
        print(f"decode as a CUDA graph: {json.loads(file.read_text())}")
    from_shapes(directory, bundle, compositions, graph)


WANTED = (0.05, 0.03, 0.025, 0.02, 0.015)


def _timed(file: Path) -> list[tuple[Any, float]]:
    """Return the compositions of a file with their times as CUDA graphs."""
    from onerank.capture.serving.compositions import Composition

    timed: list[tuple[Any, float]] = []
    for row in json.loads(file.read_text()):
        fields = row["composition"]
        composition = Composition(*fields) if isinstance(fields, list) else Composition(**fields)
        timed.append((composition, statistics.median(row["graph_ns"])))
    return timed


def by_points(directory: Path, more: Path | None, others: Path | None) -> None:
    """Print the errors by number of points, and where `capture serve --error` stops."""
    import msgspec

    import onerank
    from onerank.serving.adaptive_grid import BATCH, WantedError, measurement_order

    print("\n".join(json.loads((directory / "conditions.json").read_text()).values()))
    bundle = onerank.read_bundle(directory / "bundle")
    if more is not None:
        bundle = default_points(bundle, onerank.read_bundle(more))
    numbers = {row.composition: number for number, row in enumerate(bundle.rows, start=1)}
    sets = {
        file.name: [(c, graph_ns) for c, graph_ns in _timed(file) if c not in numbers]
        for file in filter(None, (directory / "drawn.json", others))
    }
    titles = "".join(f"   {f'{len(of)} of {name}':>16}{'p90':>8}{'mean':>8}"
                     for name, of in sets.items())  # fmt: skip
    print(f"\npoints  fit   left out  median     p90{titles}")
    order, stops = measurement_order([*numbers]), dict[float, int]()
    for count in range(2 * BATCH, len(order) + 1, BATCH):
        chosen = {numbers[c]: row for row, c in enumerate(order[:count], start=1)}
        rows = tuple(bundle.rows[number - 1] for number in chosen)
        kernels = tuple(
            msgspec.structs.replace(kernel, row=chosen[kernel.row])
            for kernel in bundle.kernel_rows
            if kernel.row in chosen
        )
        part = dataclasses.replace(bundle, rows=rows, kernel_rows=kernels).validated()
        validation = part.manifest.cross_validation
        for wanted in WANTED:
            if WantedError(wanted).shortfall(validation) is None:
                stops.setdefault(wanted, count)
        cells = f"{count:6}{sum(row.fits for row in rows):5}"
        cells += f"{validation.points:11}{validation.median:8.1%}{validation.p90:8.1%}"
        for of in sets.values():
            predicted = part.at([c for c, _ in of])["graph_ns"]
            median, *rest = errors(zip(predicted, (graph_ns for _, graph_ns in of), strict=True))
            cells += f"   {median:16.1%}" + "".join(f"{figure:8.1%}" for figure in rest)
        print(cells, flush=True)
    for wanted in WANTED:
        print(f"--error {wanted:.1%}: {stops.get(wanted, 'not reached')} points")


def from_shapes(
    directory: Path, bundle: Any, compositions: Sequence[Any], graph: Sequence[float]
) -> None:
    """Print the errors of drawn compositions that are predicted without a device."""
    from onerank.annotate import load_gpu
    from onerank.capture.options import Options
    from onerank.capture.serving.measure_grid import loaded_server
    from onerank.serving.points import Target, predicted

    like = load_gpu(bundle.manifest.device)
    # The operator names its kernel, torch's FlashAttention 2.
    target = Target(like, None)
    options = Options(tp=bundle.manifest.tp, device="none", like=like.name)
    shapes = []
    with loaded_server(directory / "config.json", options) as server:
        for number, composition in enumerate(compositions, start=1):
            point = server.measure(composition, number)
            shapes.append(predicted(composition, point.graph, target).row if point.graph else None)
    triples = [
        (row, measured, c)
        for row, measured, c in zip(shapes, graph, compositions, strict=True)
        if row and row.graph_ns and measured
    ]
    heading(f"From shapes alone, {like.name}")
    for kind in KINDS:
        chosen = [(row.graph_ns, g) for row, g, c in triples if kind in ("", c.kind)]
        line(f"CUDA graph {kind}", chosen)
    inside = [row.graph_low_ns <= g <= row.graph_high_ns for row, g, _ in triples]
    print(f"inside the 80% interval: {sum(inside)} of {len(inside)}")
    for row, measured, c in triples:
        print(f"  {c!s:44} {measured / 1e6:9.3f} ms {row.graph_ns / measured - 1:+8.1%}")


def transfer(source: Path, target: Path) -> None:
    """Print the errors of a bundle predicted for the GPU of another, which was measured."""
    import onerank
    from onerank.annotate import PassOptions, load_gpu
    from onerank.serving.build_bundle import recost_bundle

    there = onerank.read_bundle(target / "bundle")
    before = onerank.read_bundle(source / "bundle")
    gpu = load_gpu(there.manifest.device)
    passes = PassOptions(attention="same")
    after, _ = recost_bundle(before, gpu, passes=passes)
    measured = {row.composition: row for row in there.rows if row.fits}
    both = [(row, measured[row.composition]) for row in after.rows
            if row.fits and row.composition in measured]  # fmt: skip
    heading(f"{before.manifest.device} for {there.manifest.device}")
    for name in ("graph_ns", "gpu_ns", "step_ns"):
        for kind in KINDS:
            line(
                f"{name} {kind}",
                (
                    (getattr(row, name), getattr(m, name))
                    for row, m in both
                    if kind in ("", row.composition.kind) and getattr(m, name)
                ),
            )
    inside = [row.graph_low_ns <= m.graph_ns <= row.graph_high_ns for row, m in both]
    print(f"inside the 80% interval: {sum(inside)} of {len(inside)}")
    for row, m in both:
        error = row.graph_ns / m.graph_ns - 1
        print(f"  {row.composition!s:44} {m.graph_ns / 1e6:9.3f} ms {error:+8.1%}")


def compare_real(directory: Path) -> None:
    """Print a slice against the rank of the real job."""
    from onerank.capture.serving.compositions import Composition

    print("\n".join(json.loads((directory / "conditions.json").read_text()).values()))
    runs = {
        name: {
            Composition(**row["composition"]): row
            for row in json.loads((directory / f"{name}.json").read_text())
        }
        for name in ("slice.0", "real.0", "real.1", "again.0")
        if (directory / f"{name}.json").exists()
    }
    columns = ("compute", "NCCL", "graph", "eager")
    print(f"\n{'times in ms; real: rank 0':36}" + "".join(f"{'slice':>9}{'real':>9}{'':>8}"
          if name != "NCCL" else f"{'real':>9}" for name in columns))  # fmt: skip
    pairs: dict[str, list[tuple[Any, float, float]]] = {name: [] for name in columns}
    for c, real_row in runs["real.0"].items():
        slice_row = runs["slice.0"].get(c)
        if slice_row is None:
            continue
        ours, theirs = _sums(slice_row), _sums(real_row)
        cells = ""
        for name in columns:
            if name == "NCCL":
                cells += f"{theirs[name] / 1e6:9.3f}"
                continue
            pairs[name].append((c, ours[name], theirs[name]))
            error = ours[name] / theirs[name] - 1
            cells += f"{ours[name] / 1e6:9.3f}{theirs[name] / 1e6:9.3f}{error:+8.1%}"
        print(f"{c!s:36}{cells}")
    heading("Slice of TP 2 against rank 0 of two GPUs")
    for name, what in (
        ("compute", "kernels but those of collectives, of a replayed CUDA graph"),
        ("graph", "CUDA graph, without kernels of collectives"),
        ("eager", "eager, with NCCL and host"),
    ):
        print(f"{what}")
        for kind in KINDS[:3]:
            line(f"  {kind}", ((a, b) for c, a, b in pairs[name] if kind in ("", c.kind)))
    for label, name in (("rank 1 for rank 0", "real.1"), ("slice again for slice", "again.0")):
        base = runs["real.0" if name == "real.1" else "slice.0"]
        line(
            f"{label}: kernels",
            (
                (_sums(row)["compute"], _sums(base[c])["compute"])
                for c, row in runs.get(name, {}).items()
                if c in base
            ),
        )


# Names of the kernels of collectives: NCCL's, and those that stand for them in a slice.
_COLLECTIVES = ("nccl", "onerank_standin")


def _sums(row: dict[str, Any]) -> dict[str, float]:
    """Return times of a step in ns, those of collectives apart: kernels, CUDA graph, eager."""
    compute, collectives = 0.0, 0.0
    for name, (_, time_ns) in row["kernels"].items():
        if any(part in name for part in _COLLECTIVES):
            collectives += time_ns
        else:
            compute += time_ns
    graph = statistics.median(row["graph_ns"]) - collectives
    eager = statistics.median(row["step_ns"])
    return {"compute": compute, "NCCL": collectives, "graph": graph, "eager": eager}


def main() -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("measure", "real"):
        run = commands.add_parser(name)
        run.add_argument("-o", "--output", type=Path, required=True)
        run.add_argument("--config", type=Path)
        if name == "measure":
            run.add_argument("--tp", type=int, default=1)
    comparison = commands.add_parser("compare")
    comparison.add_argument("directory", type=Path)
    comparison.add_argument("other", type=Path, nargs="?")
    comparison.add_argument("--more", type=Path, help="a bundle of the default grid's other points")
    points = commands.add_parser("points")
    points.add_argument("directory", type=Path)
    points.add_argument("--more", type=Path, help="a bundle of the default grid's other points")
    points.add_argument("--others", type=Path, help="further compositions with their times")
    args = parser.parse_args()
    if args.command == "points":
        by_points(args.directory, args.more, args.others)
    elif args.command == "measure":
        measure(args.output, args.config, args.tp)
    elif args.command == "real":
        real(args.output, args.config)
    else:
        compare(args.directory, args.other, args.more)


if __name__ == "__main__":
    main()
