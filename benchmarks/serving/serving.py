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
from pathlib import Path

from benchmarks.serving.serving_comparison import by_points, compare
from benchmarks.serving.serving_one_gpu import measure
from benchmarks.serving.serving_two_gpus import real


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
