"""One real rank of a torchrun launch, captured with the windows of `capture run`.

    torchrun --nproc-per-node N benchmarks/real_rank.py OUTPUT FLAVOUR SCRIPT [ARGS...]

Writes OUTPUT/real.RANK.et; run by `slice_vs_real.py`.
"""

import os
import sys
from pathlib import Path

from onerank.capture import Options, Plan, capture
from onerank.ir import World

WARM_UP, PURE = 10, 20


def main() -> None:
    """Capture this rank among its real peers."""
    output, flavour, script, *args = sys.argv[1:]
    rank = int(os.environ["RANK"])
    options = Options(
        world=World.of(tp=int(os.environ["WORLD_SIZE"])),
        rank=rank,
        flavour="hf" if flavour == "hf" else "megatron",
        plan=Plan(WARM_UP, PURE, settle=False),
        real=True,
    )
    captured = capture(Path(script), args, options)
    captured.graph.write(Path(output) / f"real.{rank}.et")


if __name__ == "__main__":
    main()
