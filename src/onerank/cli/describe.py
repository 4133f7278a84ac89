"""`onerank bench describe`: the description of the GPU at hand, measured."""

from pathlib import Path

import click

from onerank.cli.bars import advancing
from onerank.cli.frame import OUTPUT, as_json, print_json, reports_errors

GPU = click.option("--gpu", type=click.IntRange(0), default=0, show_default=True,
                   help="CUDA device to measure on.")  # fmt: skip


@click.command()
@click.option("-o", "--output", type=OUTPUT, required=True, help="Description to write (TOML).")
@click.option("--like", metavar="GPU|FILE",
              help="Gives what is not measured.  [default: this GPU's description]")  # fmt: skip
@GPU
@as_json
@reports_errors
def describe(output: Path, like: str | None, gpu: int, as_json: bool) -> None:
    """Measure what the GPU at hand sustains and draws, and write its description.

    Products in each data type, a copy, the cache, the launch floor, idle power and the power
    model's coefficients; some two minutes. `annotate --target FILE` takes the description.
    """
    from datetime import UTC, datetime

    from onerank.annotate.describe_gpu import described, to_toml
    from onerank.annotate.gpus.registry import find_gpu, load_gpu
    from onerank.capture.bench.board import versions
    from onerank.capture.bench.device import on_device
    from onerank.capture.bench.micro import COUNT, microbenchmarks
    from onerank.capture.bench.runner import Bench
    from onerank.cli.render_bench import render_described
    from onerank.ir.atomic_write import replace_file
    from onerank.ir.errors import TargetError

    with on_device(gpu) as device:
        known = load_gpu(like) if like else find_gpu(device.name)
        if known is None:
            raise TargetError(
                f"no description ships for {device.name}; its datasheet's figures are needed: "
                "give one with --like FILE (`onerank gpus --schema` tells its form)"
            )
        at_hand = Bench(device.torch)
        with advancing(COUNT, "measuring") as advance:
            found = microbenchmarks(at_hand, advance)
        board = at_hand.board
        software = versions(board.driver() if board else "")
    told = ", ".join(f"{name} {one}" for name, one in software.items() if one)
    date = f"{datetime.now(UTC):%Y-%m-%d}"
    made = described(
        known,
        found.sustained,
        {
            "measured_gemm_tflops": found.gemm_tflops,
            "measured_skinny_gbps": found.skinny_gbps,
            "measured_copy_gbps": found.copy_gbps,
            "l2_bandwidth_gbps": found.cache_gbps,
            "launch_floor_ns": found.floor_ns,
            "idle_w": found.idle_w,
            "tdp_w": found.limit_w,
        },
        f"onerank bench describe on {device.name}, {date}; {told}; CUDA graph replays of random "
        "operands: products of the mean rates, and short ones, as they come, others held for two "
        "seconds",
        date,
    )
    replace_file(output, to_toml(made).encode())
    if as_json:
        print_json({"output": output, "gpu": made, "measured": found})
    else:
        render_described(made, known, found, str(output))
