"""Descriptions of hosts: the time to dispatch an operator, by kind, with a spread over hosts.

A description is a TOML file. Some ship with this package; a user passes the path of another:

    name = "typical"
    [sources]
    captures = "steps of Llama-3-8B on hosts of H100 and H200, torch 2.11"
    [figures]
    gemm = { p10_ns = 18000, p50_ns = 22000, p90_ns = 30000, source = "captures" }

A figure is the host time from one launching operator to the next. It includes all launches of the
operator, except for an optimizer's operators on lists, and what a capture without a GPU does not
record: views, allocation, autograd nodes, calls of modules. Each kind of `PYTHON_CALLS` has a
figure, which adds to that of operators.
"""

import math
import statistics
from pathlib import Path

import msgspec

from onerank.ir.errors import TargetError
from onerank.ir.input_files import load_toml
from onerank.ir.python_calls import PYTHON_CALLS

HOST_OP_KINDS = {
    "gemm": "a GEMM or convolution",
    "attention": "fused attention",
    "recurrent": "a recurrent layer of cuDNN, for each of its launches",
    "collective": "a call of a collective, a send or a receive",
    "optimizer": "an operator of the optimizer, for each tensor of its list",
    "optimizer_launch": "such an operator, for each of its launches",
    "optimizer_step": "the rest of an optimizer's step: from the launch before it to its first "
    "operator with a list",
    "forward": "another operator of the forward pass",
    "backward": "another operator of the backward pass",
    "reducer": "an operator that moves a gradient into DDP's bucket, or back",
    "inference": "an operator, other than a collective, that autograd does not record: of a script "
    "that only infers, under `no_grad`, or of an optimizer without a list",
    "entering": "such an operator in a step of training, the first since its module was entered or "
    "left",
    "step": "the rest of a step: from its last launch to the first operator of the next step",
    **PYTHON_CALLS,
}
"""Kinds of host work and what they are; the order is that of the codes in a graph's calls."""

TYPICAL = "typical"

NONE = "none"

_SHIPPED = Path(__file__).parent


class HostTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Host time of an operator of one kind, without a profiler, in ns.

    Attributes:
        p10_ns: 10th percentile over hosts.
        p50_ns: median over hosts.
        p90_ns: 90th percentile over hosts.
        source: name of an entry in the description's sources.
    """

    p10_ns: float
    p50_ns: float
    p90_ns: float
    source: str


class FurtherHost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """80% interval of a host that is not among the measured ones.

    Attributes:
        p10: its time for a step over the sum of the `p50_ns`, 10th percentile.
        p90: 90th percentile.
        residual_p10_ns: time of a step that a replay of its host does not explain, for each
            launching operator, 10th percentile; negative if the replay is too long.
        residual_p90_ns: 90th percentile.
    """

    p10: float
    p90: float
    residual_p10_ns: float
    residual_p90_ns: float


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A host, or many hosts.

    Attributes:
        name: name of the description.
        sources: where the figures come from, with dates.
        figures: time by kind, a key of `HOST_OP_KINDS`.
        further: interval of a further host; None: the percentiles of `figures`.
        rank_spread: standard deviation of the logarithm of a rank's host time, over the ranks of a
            job and over steps; 0: all ranks have the same host. The ranks of four H100s, of ten
            jobs: benchmarks/results/2026-11-28-slowest-host-4xh100.txt.
    """

    name: str
    sources: dict[str, str]
    figures: dict[str, HostTime]
    further: FurtherHost | None = None
    rank_spread: float = 0.0

    def slowest_factor(self, ranks: int) -> float:
        """Return the host time of the slowest of some ranks in a step, over that of one.

        It is the median of the slowest, as in `Measurement.slowest_step_ns`.
        """
        quantile = statistics.NormalDist().inv_cdf(0.5 ** (1 / ranks))
        return math.exp(self.rank_spread * quantile)

    def slowest_of(self, ranks: int) -> "Host":
        """Return the host as the slowest of some ranks, for which the others wait."""
        factor = self.slowest_factor(ranks)
        figures = {
            kind: HostTime(
                time.p10_ns * factor, time.p50_ns * factor, time.p90_ns * factor, time.source
            )
            for kind, time in self.figures.items()
        }
        return msgspec.structs.replace(self, figures=figures)


def load_host(name_or_path: str | Path) -> Host | None:
    """Read a shipped description by its name, or any description by its path; None for "none".

    Raises:
        TargetError: there is no such description, or it is malformed.
    """
    if name_or_path == NONE:
        return None
    shipped = _SHIPPED / f"{name_or_path}.toml"
    # Shipped names first, so that a file of that name in the working directory does not hide one.
    if str(name_or_path) in host_names():
        return _read(shipped)
    path = Path(name_or_path)
    if path.suffix != ".toml" and not path.is_file():
        raise TargetError(
            f'unknown host "{name_or_path}"; known are {", ".join([*host_names(), NONE])}\n'
            "  or give the path of a description (a .toml file)",
            code="host-unknown",
        )
    return _read(path)


def host_names() -> list[str]:
    """Return the names of the shipped descriptions, in alphabetical order."""
    return sorted(path.stem for path in _SHIPPED.glob("*.toml"))


def _read(path: Path) -> Host:
    data = load_toml(path, error=TargetError)
    try:
        host = msgspec.convert(data, Host)
    except msgspec.ValidationError as error:
        raise TargetError(f"{path}: {error}", code="host-file-malformed") from None
    missing, unknown = (
        HOST_OP_KINDS.keys() - host.figures.keys(),
        host.figures.keys() - HOST_OP_KINDS.keys(),
    )
    if missing or unknown:
        wrong = [f"{name} is missing" for name in sorted(missing)]
        wrong += [f"{name} is not a kind" for name in sorted(unknown)]
        raise TargetError(
            f"{path}: {', '.join(wrong)}\n  kinds are {', '.join(HOST_OP_KINDS)}",
            code="host-file-malformed",
        )
    for kind, time in host.figures.items():
        # The upper bound of a second per operator catches figures in the wrong unit.
        if not 0 <= time.p10_ns <= time.p50_ns <= time.p90_ns <= 1e9:
            raise TargetError(
                f"{path}: {kind} is {time.p10_ns:g}, {time.p50_ns:g}, {time.p90_ns:g} ns; expected "
                "0 <= p10_ns <= p50_ns <= p90_ns <= 1e9",
                code="host-file-malformed",
            )
        if time.source not in host.sources:
            raise TargetError(
                f"{path}: {kind} has the source {time.source!r}, which [sources] lacks",
                code="host-file-malformed",
            )
    if not 0 <= host.rank_spread <= 1:
        raise TargetError(
            f"{path}: rank_spread is {host.rank_spread:g}; expected 0 to 1",
            code="host-file-malformed",
        )
    further = host.further
    if further is not None and not (
        0 < further.p10 <= 1 <= further.p90 <= 100
        and -1e9 <= further.residual_p10_ns <= further.residual_p90_ns <= 1e9
    ):
        raise TargetError(
            f"{path}: further has p10 {further.p10:g}, p90 {further.p90:g}, residuals "
            f"{further.residual_p10_ns:g} and {further.residual_p90_ns:g} ns; expected "
            "0 < p10 <= 1 <= p90 <= 100 and residual_p10_ns <= residual_p90_ns within 1e9",
            code="host-file-malformed",
        )
    return host
