"""Convert public measurements to the tables that `tools.fit` reads.

    python -m tools.fit.public_sets SYSTEMS NEUSIGHT -o DATA

SYSTEMS is `systems/data` of the package aiconfigurator-core (Apache-2.0), NEUSIGHT the folder
`scripts/asplos/data/dataset/test` of sitar-lab/NeuSight. The tables are not part of the project.

Rows of aiconfigurator are times per call: replays of a CUDA graph between two events, divided by
the calls in the graph (collector/helper.py there, August 2026). They contain the gap to the next
kernel and a share of the start of the graph. A graph has six calls of linear layers with copies of
the operands (vLLM's with scales of blocks and TensorRT-LLM's one to five), five of experts and of
kernels that quantise, and one of attention. NeuSight times one eager call between two events.

What a row times:
  linears.parquet     a linear layer in 8 or 4 bits: the kernel that quantises the activations, then
                      the GEMM; "bfloat16": the GEMM alone. Rows of frameworks that time the host's
                      launches (vLLM's block-scaled kernels) are left out, and vLLM's rows in fp8 of
                      more than 256 tokens: their time grows by 6.5 ns per token whatever the GEMM
                      (214 us for 32,768 x 32 x 32 on an H100, SGLang's 19), so they are mostly of a
                      slow kernel that quantises.
  quantise.parquet    the quantisation of the activations of TensorRT-LLM's layers with one scale
                      for a tensor, without the GEMM: the kernels that find and apply the scale.
  attention.parquet   fused attention with its write of keys and values to a cache; "context" is
                      causal over the whole sequence, "generation" has one query per sequence.
  experts.parquet     the experts of an MoE layer: choosing the experts from the router's scores,
                      sorting the tokens by expert, a grouped GEMM to two times the inner size, the
                      gated activation, a grouped GEMM back, the sum. SGLang's rows also copy the
                      choice (three small kernels), and its Triton kernels have the default tiles
                      where no tuned configuration exists. Each row repeats one layer.
  latent.parquet      latent attention (MLA) of one query per sequence with its write to a cache.
  latent_prefill.parquet  latent attention over whole prompts, causal, with its write to a cache;
                      TensorRT-LLM's kernels multiply heads of 192 and 128 and also rotate the
                      positions, SGLang's FlashAttention and Triton multiply latent vectors.
  quantisation.parquet  the kernels of each framework that quantise:
                      "scale_matrix", m x k elements of 16 bits to 8 with a given scale, and
                      "compute_scale", how much longer a quantisation takes that finds its scale.
  experts_power.parquet, attention_power.parquet  the rows of both tables above that have a power:
                      vLLM 0.22.0 on an H200 and a B200, the mean of NVML's readings over a second.
  vector.parquet      fp32 operators of PyTorch 2.1 with TF32 off, one kernel each.
"""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

import polars as pl

SYSTEMS = {
    "a100_sxm": "A100-SXM-80GB",
    "h100_sxm": "H100-SXM",
    "h200_sxm": "H200",
    "l40s": "L40S",
    "b200_sxm": "B200",
}
"""Folder of aiconfigurator -> description."""

BOARDS = {
    "Tesla V100-PCIE-32GB": "V100",
    "Tesla T4": "T4",
    # The PCIe card has no description; its clock, SMs and bandwidth are those of the SXM card.
    "NVIDIA A100-PCIE-40GB": "A100-SXM-40GB",
    "NVIDIA A100 80GB PCIe": "A100-PCIe-80GB",
    "NVIDIA H100 80GB HBM3": "H100-SXM",
}
"""Device of NeuSight -> description."""

# Both time the launches of PyTorch, 55 us and more, instead of a replayed graph.
_WITH_LAUNCHES = ("DeepGemmFp8BlockScaledMMKernel", "CutlassFp8BlockScaledMMKernel",
                  "FlashInferFp8BlockScaledMMKernel", "TritonFp8BlockScaledMMKernel")  # fmt: skip

# Column of the tables that have a power -> its name in ours.
_POWER = {"power": "power_w"}

_SLOW_QUANTISED, _MOST_TOKENS = "CutlassFP8ScaledMMLinearKernel", 256


# Shortest time of a kernel: vLLM's time of finding the scales is a difference of two times.
_LEAST_MS = 1e-3


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("systems", type=Path)
    parser.add_argument("neusight", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for name, tables in (
        ("linears", linears(options.systems)),
        ("quantise", quantise(options.systems)),
        ("attention", attention(options.systems)),
        ("latent", latent(options.systems)),
        ("latent_prefill", latent_prefill(options.systems)),
        ("experts", experts(options.systems)),
        ("quantisation", quantisation(options.systems)),
        ("experts_power", experts(options.systems, _POWER)),
        ("attention_power", attention(options.systems, _POWER)),
        ("vector", vector(options.neusight)),
    ):
        pl.concat(tables).write_parquet(options.output / f"{name}.parquet")


def linears(systems: Path) -> Iterator[pl.DataFrame]:
    """Yield the linear layers of each GPU and framework."""
    for gpu, dataset, path in _files(systems, "gemm/*/*/gemm_perf.parquet"):
        rows = pl.read_parquet(path)
        rows = rows.filter(
            ~pl.col("kernel_source").is_in(_WITH_LAUNCHES),
            pl.col("gemm_dtype").is_in(["bfloat16", "fp8", "fp8_block", "nvfp4"]),
            (pl.col("kernel_source") != _SLOW_QUANTISED) | (pl.col("m") <= _MOST_TOKENS),
        )
        yield rows.select(
            *_named(gpu, dataset),
            pl.col("kernel_source").alias("kernel"),
            pl.col("gemm_dtype").alias("dtype"),
            *(pl.col(size).cast(pl.Int64) for size in "mnk"),
            (pl.col("latency") * 1000).cast(pl.Float64).alias("time_us"),
        )


def quantise(systems: Path) -> Iterator[pl.DataFrame]:
    """Yield the time to quantise the activations [m, k] of TensorRT-LLM's layers."""
    for gpu, dataset, path in _files(systems, "quantize/trtllm/*/computescale_perf.parquet"):
        scale, apply = (
            pl.read_parquet(path.with_name(f"{name}_perf.parquet")).filter(
                pl.col("quant_dtype") == "fp8"
            )
            for name in ("computescale", "scale_matrix")
        )
        yield scale.join(apply, on=["m", "k"]).select(
            *_named(gpu, dataset),
            *(pl.col(size).cast(pl.Int64) for size in "mk"),
            ((pl.col("latency") + pl.col("latency_right")) * 1000).alias("time_us"),
        )


def attention(systems: Path, also: Mapping[str, str] = {}) -> Iterator[pl.DataFrame]:
    """Yield the attention of each GPU and framework, in 16 bits with a cache in 16 bits.

    Args:
        systems: folder of the tables.
        also: further columns -> their names; tables without them are left out.
    """
    for gpu, dataset, path in _files(systems, "attention/*/*/*_attention_perf.parquet"):
        rows = pl.read_parquet(path)
        if not also.keys() <= {*rows.columns}:
            continue
        if "window_size" not in rows.columns:
            rows = rows.with_columns(window_size=pl.lit(0))
        rows = rows.filter(
            pl.col("attn_dtype") == "bfloat16",
            pl.col("kv_cache_dtype") == "bfloat16",
            pl.col("window_size").fill_null(0) == 0,
        )
        generation = path.name.startswith("generation")
        yield rows.select(
            *_named(gpu, dataset),
            pl.col("kernel_source").alias("kernel"),
            pl.lit("generation" if generation else "context").alias("phase"),
            pl.col("batch_size").cast(pl.Int64).alias("batch"),
            pl.col("isl").cast(pl.Int64).alias("rows"),
            (pl.col("isl") + pl.col("step")).cast(pl.Int64).alias("keys"),
            pl.col("num_heads").cast(pl.Int64).alias("heads"),
            pl.col("num_key_value_heads").cast(pl.Int64).alias("kv_heads"),
            pl.col("head_dim").cast(pl.Int64),
            (pl.col("latency") * 1000).cast(pl.Float64).alias("time_us"),
            *(pl.col(column).alias(name) for column, name in also.items()),
        ).filter(pl.col("kv_heads") > 0)


def latent(systems: Path) -> Iterator[pl.DataFrame]:
    """Yield latent attention of one query, in 16 bits with a cache in 16 bits."""
    for gpu, dataset, path in _files(systems, "mla/*/*/generation_mla_perf.parquet"):
        rows = pl.read_parquet(path)
        rows = rows.filter(
            pl.col("mla_dtype") == "bfloat16", pl.col("kv_cache_dtype") == "bfloat16"
        )
        yield rows.select(
            *_named(gpu, dataset),
            pl.col("kernel_source").alias("kernel"),
            pl.col("batch_size").cast(pl.Int64).alias("batch"),
            (pl.col("isl") + pl.col("step")).cast(pl.Int64).alias("keys"),
            pl.col("num_heads").cast(pl.Int64).alias("heads"),
            (pl.col("latency") * 1000).cast(pl.Float64).alias("time_us"),
        )


def latent_prefill(systems: Path) -> Iterator[pl.DataFrame]:
    """Yield latent attention over whole prompts, in 16 bits with a cache in 16 bits."""
    for gpu, dataset, path in _files(systems, "mla/*/*/context_mla_perf.parquet"):
        rows = pl.read_parquet(path).filter(
            pl.col("mla_dtype") == "bfloat16", pl.col("kv_cache_dtype") == "bfloat16"
        )
        if "step" in rows.columns:
            rows = rows.filter(pl.col("step").fill_null(0) == 0)  # tokens before the prompt
        yield rows.select(
            *_named(gpu, dataset),
            pl.col("kernel_source").alias("kernel"),
            pl.col("batch_size").cast(pl.Int64).alias("batch"),
            pl.col("isl").cast(pl.Int64).alias("rows"),
            pl.col("num_heads").cast(pl.Int64).alias("heads"),
            (pl.col("latency") * 1000).cast(pl.Float64).alias("time_us"),
        )


def experts(systems: Path, also: Mapping[str, str] = {}) -> Iterator[pl.DataFrame]:
    """Yield MoE layers in 16 bits with equal shares of the tokens for all experts of a model.

    Args:
        systems: folder of the tables.
        also: further columns -> their names; tables without them are left out.
    """
    for gpu, dataset, path in _files(systems, "moe/*/*/moe_perf.parquet"):
        rows = pl.read_parquet(path)
        if not also.keys() <= {*rows.columns}:
            continue
        rows = rows.filter(
            pl.col("moe_dtype") == "bfloat16",
            pl.col("distribution") == "balanced",
            pl.col("moe_ep_size") == 1,
            ~pl.col("kernel_source").str.contains("nongated"),
        )
        yield rows.select(
            *_named(gpu, dataset),
            pl.col("kernel_source").alias("kernel"),
            pl.col("num_tokens").cast(pl.Int64).alias("tokens"),
            pl.col("hidden_size").cast(pl.Int64).alias("hidden"),
            (pl.col("inter_size") // pl.col("moe_tp_size")).cast(pl.Int64).alias("inner"),
            pl.col("topk").cast(pl.Int64).alias("chosen"),
            pl.col("num_experts").cast(pl.Int64).alias("experts"),
            (pl.col("latency") * 1000).cast(pl.Float64).alias("time_us"),
            *(pl.col(column).alias(name) for column, name in also.items()),
        )


def quantisation(systems: Path) -> Iterator[pl.DataFrame]:
    """Yield kernels that quantise 16 bits to 8, of frameworks, and those that find the scales."""
    for gpu, dataset, path in _files(systems, "quantize/*/*/*.parquet"):
        rows = pl.read_parquet(path)
        # A framework that has one kernel for both has rows of 0 for the other.
        rows = rows.filter(pl.col("quant_dtype") == "fp8", pl.col("latency") > _LEAST_MS)
        yield rows.select(
            *_named(gpu, dataset),
            pl.col("op_name").alias("op"),
            *(pl.col(size).cast(pl.Int64) for size in "mk"),
            (pl.col("latency") * 1000).cast(pl.Float64).alias("time_us"),
        )


def vector(neusight: Path) -> Iterator[pl.DataFrame]:
    """Yield the fp32 operators: sizes b, m, n, k of products, rows m of n elements of others."""
    for name in ("linear", "bmm", "elem", "ln", "softmax"):
        rows = pl.read_csv(neusight / f"{name}.csv", infer_schema_length=None)
        rows = rows.filter(pl.col("Device").is_in([*BOARDS]), pl.col("Latency") > 0)
        # NeuSight's K is the number of columns and its N the inner size: the recorded grids have
        # ceil(K / 128) tiles along their first axis, also where N differs.
        sizes = (
            ("B", "M", "K", "N") if name in ("linear", "bmm") else (pl.lit(1), "B", "H", pl.lit(0))
        )
        yield rows.select(
            pl.col("Device").replace_strict(BOARDS).alias("gpu"),
            pl.col("OPName").alias("op"),
            *(
                (pl.col(size) if isinstance(size, str) else size).cast(pl.Int64).alias(column)
                for size, column in zip(sizes, "bmnk", strict=True)
            ),
            (pl.col("Latency") * 1000).cast(pl.Float64).alias("time_us"),
        )


def _files(systems: Path, pattern: str) -> Iterator[tuple[str, str, Path]]:
    """Yield (description, framework and version, file) of each table."""
    for folder, gpu in SYSTEMS.items():
        for path in sorted((systems / folder).glob(pattern)):
            framework, version = path.parts[-3:-1]
            yield gpu, f"{framework} {version}", path


def _named(gpu: str, dataset: str) -> tuple[pl.Expr, pl.Expr]:
    return pl.lit(gpu).alias("gpu"), pl.lit(dataset).alias("dataset")


if __name__ == "__main__":
    main()
