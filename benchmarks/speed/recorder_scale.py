"""Time of one recorded call, as the world grows.

    python -m benchmarks.speed.recorder_scale [CALLS]

One process emulates a rank of worlds of 8 to 131,072 ranks and all-reduces 1 KiB over the world,
over a line of a mesh and to a neighbour. Prints microseconds per call, median of five rounds, and
the seconds to create groups.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.harness import parser_of, print_conditions, version_of
from onerank.capture.fake_world.recorder import Recorder


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("calls", type=int, nargs="?", default=2000)
    calls = parser.parse_args().calls
    print_conditions(version_of("torch"))
    print(f"{calls} calls")
    print("ranks   groups s   world us   line us   send us")
    for ranks in (8, 1024, 16384, 131072):
        recorder = Recorder(ranks // 2, ranks)
        began = time.perf_counter()
        recorder.start()
        line = recorder.new_group("dp", range(ranks // 2 % 8, ranks, 8))
        created = time.perf_counter() - began
        world, dp = (per_call(recorder, dist.all_reduce, group, calls) for group in (None, line))
        send = per_call(recorder, dist.send, 0, calls)
        recorder.stop()
        print(f"{ranks:<7} {created:8.2f} {world:10.1f} {dp:9.1f} {send:9.1f}")


def per_call(
    recorder: Recorder, call: Callable[..., object], argument: object, calls: int
) -> float:
    """Return the median time of a call in microseconds."""
    tensor = torch.ones(256)
    rounds: list[float] = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(calls):
            call(tensor, argument) if call is dist.send else call(tensor, group=argument)
        rounds.append((time.perf_counter() - began) / calls * 1e6)
        recorder.calls.clear()
    return statistics.median(rounds)


if __name__ == "__main__":
    main()
