"""Chains of small kernels as one: what a compiler makes of operators that only stream memory."""

from collections import Counter
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.what_ifs.alter import SHORTEST_NS
from onerank.annotate.what_ifs.chains import Chain, chains_of
from onerank.annotate.what_ifs.contract import one_per_pair
from onerank.annotate.what_ifs.texts import TEXTS, as_text
from onerank.annotate.work.characters import characterise
from onerank.annotate.work.classes import OpClass, base_name
from onerank.ir import UNKNOWN, Edges, Evidence, Graph, Kind
from onerank.ir.errors import AnnotateError

I64 = npt.NDArray[np.int64]

_POINTWISE = (OpClass.ELEMENTWISE, OpClass.COPY, OpClass.MEMSET)
CHOICES: dict[str, tuple[OpClass, ...]] = {
    "elementwise": _POINTWISE,
    "norm": (*_POINTWISE, OpClass.REDUCTION, OpClass.NORM, OpClass.SOFTMAX),
}
"""Which classes of work become one kernel; with "norm" those that reduce along a row as well."""

_FUSED = {"elementwise": "onerank::fused_elementwise", "norm": "onerank::fused_reduction"}


@dataclass(frozen=True, slots=True)
class Fuse:
    """What if neighbouring kernels that only stream memory were one.

    Neighbours on a stream become one kernel where each reads or writes what another of them does
    over as many elements, nothing else waits for one of them but the last, and none but the first
    waits for anything else. It reads what they read from elsewhere, once, and writes what others
    read later; what they alone pass among themselves stays in registers.

    Attributes:
        what: one of `CHOICES`.
    """

    what: str

    def apply(self, graph: Graph, target: Gpu | None = None) -> Graph:
        """Return the graph with the fused kernels in the place of the first of each chain.

        A fused kernel streams its bytes at the rate of those that it is made of. Host operators
        stay, as long as they were: a compiled step has fewer.

        Args:
            graph: captured or re-costed, with GPU kernels.
            target: not looked at, for the times are those of the graph.

        Raises:
            AnnotateError: `what` is unknown, or nothing can be fused.
        """
        del target
        if self.what not in CHOICES:
            raise AnnotateError(f'unknown fusion "{self.what}"; known are {", ".join(CHOICES)}')
        graph = characterise(graph)
        chains = chains_of(graph, CHOICES[self.what])
        if not chains:
            raise AnnotateError(
                f"no two neighbouring kernels can be fused by {self.what}: that takes kernels of "
                "one stream that pass data on, with operands that the trace tells apart (an "
                "execution trace, or a CPU capture re-costed for a GPU)"
            )
        made = _with_columns(graph, chains, _FUSED[self.what])
        made = _without(made, chains)
        gone = sum(len(chain.nodes) - 1 for chain in chains)
        before = sum(int(graph.nodes.duration_ns[list(chain.nodes)].sum()) for chain in chains)
        heads = np.isin(made.nodes.id, graph.nodes.id[[chain.nodes[0] for chain in chains]])
        after = int(made.nodes.duration_ns[heads].sum())
        saved = sum(chain.bytes_before - chain.bytes_after for chain in chains)
        note = (
            f"What if fused ({self.what}): {gone + len(chains)} kernels become {len(chains)}, "
            f"{saved} bytes less are moved, {before} ns become {after} ns. What forward keeps for "
            "backward is still written; host operators and memory are as captured."
        )
        told = made.job.measurement.untimed(note)
        return replace(made, job=msgspec.structs.replace(made.job, measurement=told))


def _with_columns(graph: Graph, chains: list[Chain], op: str) -> Graph:
    """Return the graph with the first of each chain turned into the fused kernel."""
    nodes = graph.nodes
    names = ("duration_ns", "spread_ns", "low_ns", "high_ns", "alone_ns", "evidence", "flops",
             "bytes_read", "bytes_written", "kind")  # fmt: skip
    columns = {name: getattr(nodes, name).copy() for name in names}
    texts = {name: graph.text(name) for name in TEXTS}
    for chain in chains:
        members, head = list(chain.nodes), chain.nodes[0]
        streamed = chain.bytes_after / chain.bytes_before
        for name in ("duration_ns", "low_ns", "high_ns"):
            values = getattr(nodes, name)[members]
            if name != "duration_ns" and (values == UNKNOWN).any():
                columns[name][head] = UNKNOWN
                continue
            rest = np.minimum(values, SHORTEST_NS)
            columns[name][head] = round(float(rest.max() + (values - rest).sum() * streamed))
        flops = nodes.flops[members]
        columns["flops"][head] = UNKNOWN if (flops == UNKNOWN).any() else flops.sum()
        columns["bytes_read"][head] = chain.bytes_read
        columns["bytes_written"][head] = chain.bytes_written
        columns["spread_ns"][head], columns["alone_ns"][head] = 0, UNKNOWN
        columns["kind"][head] = Kind.KERNEL
        least = int(nodes.evidence[members].min())
        columns["evidence"][head] = min(least, int(Evidence.EXTRAPOLATED))
        parts = Counter(base_name(graph.strings[int(code)]) for code in nodes.op[members])
        texts["name"][head] = "fused: " + " ".join(
            f"{part} x{count}" if count > 1 else part for part, count in parts.items()
        )
        texts["op"][head] = op
        for name in ("grid", "block"):
            texts[name][head] = ""
        for side, tensors in (("input", chain.reads), ("output", chain.writes)):
            texts[f"{side}_shapes"][head] = as_text([list(t.shape) for t in tensors])
            texts[f"{side}_types"][head] = as_text([t.type for t in tensors])
            texts[f"{side}_values"][head] = as_text([list(t.value) for t in tensors])
    return graph.with_columns(**columns, **texts)


def _without(graph: Graph, chains: list[Chain]) -> Graph:
    """Take out all but the first of each chain; who waited for one of them waits for it."""
    head = np.arange(len(graph), dtype=np.int64)
    for chain in chains:
        head[list(chain.nodes)] = chain.nodes[0]
    edges = graph.edges
    gone = head != np.arange(len(graph))
    source, waiter, reason = head[edges.source], head[edges.target], edges.reason
    stays = (source != waiter) & ~(gone[edges.target] & _from_host(graph, edges))
    source, waiter, reason = one_per_pair(source[stays], waiter[stays], reason[stays])
    kept = np.flatnonzero(~gone)
    place = np.cumsum(~gone) - 1
    joined = Edges.from_pairs(len(kept), place[source], place[waiter], reason)
    return replace(graph, nodes=graph.nodes.take(kept), edges=joined)


def _from_host(graph: Graph, edges: Edges) -> npt.NDArray[np.bool_]:
    """Return which edges come from a host operator: the launches of kernels that are no more."""
    return graph.nodes.kind[edges.source] == Kind.HOST_OP
