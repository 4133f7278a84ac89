"""`python -m tools.fit.fit_python_calls JSON -o FILE`: figures of a host for what Python does.

JSON is the result of `benchmarks.predictions.python_dispatch --json`. FILE is a description of the
host in which the figures of `PYTHON_CALLS` are replaced, but `split_group`, which the benchmark
does not measure.

The time of a kind is the mean over the benchmark's cases of the time of a call with it minus that
of the same call on plain tensors, for each time that the kind counts. Operators that DTensor
dispatches in a forward and a backward have the time of layers that `parallelize_module` divides:
calls on the same tensors again take a quarter of it or less. Of a redistribution the time
of the collective is subtracted, and of a group of FSDP2 that of three launching calls, since the
description has figures for those. FSDP2's two kinds are a least-squares solution of cases with
other numbers of groups and parameters.

One host is measured. The percentiles over hosts are those of `further` in the description.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from onerank.annotate.hosts.host import TYPICAL, Host, HostTime, load_host
from tools.fit.fit_host import host_toml

# The benchmark's case of layers that `parallelize_module` divides.
_LAYERS = "32 tensor-parallel layers"


class Measured(msgspec.Struct):
    """The benchmark's result.

    Attributes:
        times_us: "sort/case" -> host time of a call in us, of each sample.
        counts: "sort/case" -> what a call does.
    """

    times_us: dict[str, list[float]]
    counts: dict[str, dict[str, int]]

    def extra_us(self, sort: str) -> dict[str, float]:
        """Return by case the time of a call of a sort minus that on plain tensors, in us."""
        prefix = f"{sort}/"
        cases = [name.removeprefix(prefix) for name in self.times_us if name.startswith(prefix)]
        return {
            case: self.median_us(prefix + case) - self.median_us(f"plain/{case}")
            for case in cases
            if f"plain/{case}" in self.times_us
        }

    def mean_us(self, sort: str, kind: str) -> float:
        """Return the mean over a sort's cases that count a kind, and no lists, in us."""
        counts = {case: self.counts[f"{sort}/{case}"] for case in self.extra_us(sort)}
        return statistics.mean(
            extra / counts[case][kind]
            for case, extra in self.extra_us(sort).items()
            if counts[case].get(kind) and not counts[case].get("dtensor_listed")
        )

    def median_us(self, name: str) -> float:
        """Return the median of a call's samples."""
        return statistics.median(self.times_us[name])


def python_call_times_us(measured: Measured, host: Host) -> dict[str, float]:
    """Return the time of each measured kind of `PYTHON_CALLS` in us; noise can make it negative.

    Args:
        measured: the benchmark's result.
        host: description with the times of collectives and other operators.
    """
    times: dict[str, float] = {"subclass": measured.mean_us("subclass", "subclass")}
    functions = [
        extra / (2 if "backward" in case else 1)
        for case, extra in measured.extra_us("function").items()
    ]
    functions += [measured.median_us(name) for name in ("from_local", "to_local")]
    times["function"] = statistics.mean(functions)
    collectives = {
        "replicated to shard": 0.0,
        "partial to replicated": measured.median_us("plain/all_reduce"),
        "shard to replicated": measured.median_us("plain/all_gather"),
        "partial to shard": measured.median_us("plain/all_gather"),
    }
    # `redistribute` calls an autograd function too.
    redistributed = [
        measured.median_us(f"redistribute, {case}") - collective_us - times["function"]
        for case, collective_us in collectives.items()
    ]
    times["redistribute"] = statistics.mean(redistributed)
    layers = measured.extra_us("dtensor")[_LAYERS]
    counts = measured.counts[f"dtensor/{_LAYERS}"]
    layers -= sum(times[kind] * counts[kind] for kind in ("function", "redistribute"))
    times["dtensor"] = layers / counts["dtensor"]
    times["dtensor_untracked"] = measured.mean_us("dtensor", "dtensor_untracked")
    listed = [
        (extra - counts["dtensor_untracked"] * times["dtensor_untracked"])
        / counts["dtensor_listed"]
        for case, extra in measured.extra_us("dtensor").items()
        if (counts := measured.counts[f"dtensor/{case}"]).get("dtensor_listed")
    ]
    times["dtensor_listed"] = statistics.mean(listed)
    kinds = ("fsdp_group", "fsdp_parameter")
    cases = measured.extra_us("fsdp")
    rows = [[measured.counts[f"fsdp/{case}"][kind] for kind in kinds] for case in cases]
    solution: Any = np.linalg.lstsq(np.array(rows), np.array(list(cases.values())))[0]
    group_us, parameter_us = map(float, solution)
    figures = host.figures
    # The copy into the buffer and the copy out of it, and the collective between them.
    launching_us = (figures["collective"].p50_ns + 2 * figures["backward"].p50_ns) / 1e3
    times["fsdp_group"] = group_us - launching_us
    times["fsdp_parameter"] = parameter_us
    return times


def main() -> None:
    """Write the description."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("measured", type=Path)
    parser.add_argument("--host", default=TYPICAL, help="description whose other figures stay")
    parser.add_argument("--source", required=True, help="machine, versions and date")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    host = load_host(options.host)
    if host is None:
        parser.error("--host needs a description, whose other figures stay")
    measured = msgspec.json.decode(options.measured.read_bytes(), type=Measured)
    times = python_call_times_us(measured, host)
    negative = ", ".join(f"{kind} {us:.1f} us" for kind, us in times.items() if us < 0)
    if negative:
        parser.error(
            f"{options.measured} gives negative times: {negative}; its samples vary too much, "
            "measure with more --samples"
        )
    low, high = (host.further.p10, host.further.p90) if host.further else (1.0, 1.0)
    figures = dict(host.figures)
    for kind, us in times.items():
        ns = us * 1e3
        figures[kind] = HostTime(round(ns * low), round(ns), round(ns * high), "python")
        sys.stdout.write(f"{kind}: {us:.1f} us\n")
    sources = {**host.sources, "python": options.source}
    host = msgspec.structs.replace(host, figures=figures, sources=sources)
    written_by = (
        "Written by `python -m tools.fit.fit_host GRAPH... -o FILE`, calls of Python by",
        "`python -m tools.fit.fit_python_calls JSON -o FILE`; see hosts/host.py.",
    )
    options.output.write_text(host_toml(host, *written_by), encoding="utf-8")


if __name__ == "__main__":
    main()
