"""Convert public measurements to the tables that `tools.fit` reads.

    python -m tools.fit.public_sets SYSTEMS NEUSIGHT -o DATA

SYSTEMS is `systems/data` of the package aiconfigurator-core (Apache-2.0), NEUSIGHT the folder
`scripts/asplos/data/dataset/test` of sitar-lab/NeuSight. The tables are not part of the project.

What a row times:
  linears.parquet     a linear layer in 8 or 4 bits: the kernel that quantises the activations, then
                      the GEMM; "bfloat16": the GEMM alone. Rows of frameworks that time the host's
                      launches (vLLM's block-scaled kernels) are left out.
  attention.parquet   fused attention with its write of keys and values to a cache; "context" is
                      causal over the whole sequence, "generation" has one query per sequence.
  vector.parquet      fp32 operators of PyTorch 2.1 with TF32 off, one kernel each.
"""

import argparse
from collections.abc import Iterator
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


def main() -> None:
    """Write the three tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("systems", type=Path)
    parser.add_argument("neusight", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for name, tables in (
        ("linears", linears(options.systems)),
        ("attention", attention(options.systems)),
        ("vector", vector(options.neusight)),
    ):
        pl.concat(tables).write_parquet(options.output / f"{name}.parquet")


def linears(systems: Path) -> Iterator[pl.DataFrame]:
    """Yield the linear layers of each GPU and framework."""
    for gpu, campaign, path in _files(systems, "gemm/*/*/gemm_perf.parquet"):
        rows = pl.read_parquet(path)
        rows = rows.filter(
            ~pl.col("kernel_source").is_in(_WITH_LAUNCHES),
            pl.col("gemm_dtype").is_in(["bfloat16", "fp8", "fp8_block", "nvfp4"]),
        )
        yield rows.select(
            *_named(gpu, campaign),
            pl.col("kernel_source").alias("kernel"),
            pl.col("gemm_dtype").alias("dtype"),
            *(pl.col(size).cast(pl.Int64) for size in "mnk"),
            (pl.col("latency") * 1000).cast(pl.Float64).alias("time_us"),
        )


def attention(systems: Path) -> Iterator[pl.DataFrame]:
    """Yield the attention of each GPU and framework, in 16 bits with a cache in 16 bits."""
    for gpu, campaign, path in _files(systems, "attention/*/*/*_attention_perf.parquet"):
        rows = pl.read_parquet(path)
        if "window_size" not in rows.columns:
            rows = rows.with_columns(window_size=pl.lit(0))
        rows = rows.filter(
            pl.col("attn_dtype") == "bfloat16",
            pl.col("kv_cache_dtype") == "bfloat16",
            pl.col("window_size").fill_null(0) == 0,
        )
        generation = path.name.startswith("generation")
        yield rows.select(
            *_named(gpu, campaign),
            pl.col("kernel_source").alias("kernel"),
            pl.lit("generation" if generation else "context").alias("phase"),
            pl.col("batch_size").cast(pl.Int64).alias("batch"),
            pl.col("isl").cast(pl.Int64).alias("rows"),
            (pl.col("isl") + pl.col("step")).cast(pl.Int64).alias("keys"),
            pl.col("num_heads").cast(pl.Int64).alias("heads"),
            pl.col("num_key_value_heads").cast(pl.Int64).alias("kv_heads"),
            pl.col("head_dim").cast(pl.Int64),
            (pl.col("latency") * 1000).cast(pl.Float64).alias("time_us"),
        ).filter(pl.col("kv_heads") > 0)


def vector(neusight: Path) -> Iterator[pl.DataFrame]:
    """Yield the fp32 operators: sizes b, m, n, k of products, rows m of n elements of others."""
    for name in ("linear", "bmm", "elem", "ln", "softmax"):
        rows = pl.read_csv(neusight / f"{name}.csv", infer_schema_length=None)
        rows = rows.filter(pl.col("Device").is_in([*BOARDS]), pl.col("Latency") > 0)
        sizes = (
            ("B", "M", "N", "K") if name in ("linear", "bmm") else (pl.lit(1), "B", "H", pl.lit(0))
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


def _named(gpu: str, campaign: str) -> tuple[pl.Expr, pl.Expr]:
    return pl.lit(gpu).alias("gpu"), pl.lit(campaign).alias("campaign")


if __name__ == "__main__":
    main()
