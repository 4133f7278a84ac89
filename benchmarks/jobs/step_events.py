"""Time the steps of a training script by CUDA events, and print them."""

import itertools
import json
import os
import statistics

import torch
import torch.distributed as dist


class StepEvents:
    """Record an event at the start of each step; `report` prints the time between them.

    The host does not wait for the GPU between steps, so the times are those of training.
    """

    def __init__(self):
        self._events = []

    def begin_step(self):
        """Record that a step begins."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def report(self, unmeasured=10):
        """Print the steps after the first ones, and the memory, if REAL is set."""
        self.begin_step()
        torch.cuda.synchronize()
        if not os.environ.get("REAL"):
            return
        measured = self._events[unmeasured:]
        times = [a.elapsed_time(b) for a, b in itertools.pairwise(measured)]
        low, middle, high = statistics.quantiles(times, n=4)
        record = {
            "rank": dist.get_rank(),
            "steps": len(times),
            "median_ms": middle,
            "quartiles_ms": [low, high],
            "fastest_ms": min(times),
            "slowest_ms": max(times),
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
        }
        print("REAL", json.dumps(record), flush=True)
