"""Collectives of a bundle's steps, for simulators whose tables contain them.

The traces of a bundle have the collectives of each step, and its tables count no time for them.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from onerank.annotate.gpus.gpu import Gpu
from onerank.capture.serving.compositions import Composition
from onerank.ir import Collective, Kind
from onerank.ir.chakra import read
from onerank.ir.errors import ExportError
from onerank.plan.cluster import ClusterLink, ClusterNetwork
from onerank.serving.bundle import Bundle
from onerank.serving.simulators.operator_times import link_gb_per_s
from onerank.serving.tables import StepRow


@dataclass(frozen=True)
class StepCollectives:
    """Collectives of a step, which the bundle's traces contain and its times do not.

    Attributes:
        sizes: the collectives -> how many a step has.
        network: times of collectives.
    """

    sizes: Mapping["CollectiveSize", int]
    network: ClusterNetwork

    @classmethod
    def of(cls, bundle: Bundle, tp: int, gpu: Gpu, link: float | None) -> "StepCollectives":
        """Return the collectives of a bundle's steps, none if its times contain them.

        Raises:
            ExportError: a size does not grow with new tokens and sequences, the link between the
                GPUs is not known, or the bundle is a recording predicted for another GPU.
            TargetError: the GPU has no compute capability, which decides NCCL's latency.
        """
        gpus = tp * bundle.manifest.ep
        has_untimed = gpus > 1 and not bundle.manifest.collectives_timed
        if has_untimed and bundle.manifest.is_recording:
            raise ExportError(
                f"the bundle is a recording of {gpus} GPUs that is predicted for another GPU, and "
                "the times of its collectives there are not known\n  export the recording itself, "
                "or measure the model: capture serve config.json",
                code="export-collectives-unknown",
            )
        # Without collectives the rate is not used.
        rate = ClusterLink((link_gb_per_s(gpu, link, gpus) if has_untimed else None) or 1.0)
        network = ClusterNetwork(gpus, rate, rate, gpu.capability, gpu.name)
        sizes: Counter[CollectiveSize] = Counter()
        if has_untimed:
            network.time_ns("all_reduce", 0, tuple(range(gpus)))  # fails without a latency
            # A decode has as many sequences as new tokens, and a prefill has fewer: the two steps
            # separate growth with tokens from growth with sequences.
            steps = _traced(bundle, "decode"), _traced(bundle, "prefill")
            sizes.update(collective_sizes(bundle.manifest.model, *steps))
        return cls(sizes, network)

    def time_ns(self, composition: Composition) -> float:
        """Return the summed times of a step's collectives, which nothing overlaps."""
        return sum(
            count * self.network.time_ns(size.name, size.of(composition), tuple(range(size.ranks)))
            for size, count in self.sizes.items()
        )


@dataclass(frozen=True)
class CollectiveSize:
    """A collective and the bytes of its input.

    Attributes:
        name: the collective.
        ranks: size of its group.
        constant: bytes in each step.
        token: bytes for each new token.
        sequence: bytes for each sequence.
    """

    name: str
    ranks: int
    constant: int
    token: int
    sequence: int

    def of(self, composition: Composition) -> int:
        """Return the bytes in a step."""
        by_tokens = self.token * composition.new_tokens
        return self.constant + by_tokens + self.sequence * composition.sequences


@dataclass(frozen=True)
class TracedStep:
    """A step, and the name, group size and bytes of each of its collectives."""

    row: StepRow
    calls: tuple[tuple[str, int, int], ...]


def _traced(bundle: Bundle, kind: str) -> TracedStep:
    """Return a step of a kind; a prefill with several new tokens.

    With shared experts it is the step with the most new tokens: the all-to-alls of few tokens are
    not in proportion to them.
    """
    steps = [
        (bundle.rows[number - 1].composition, number, path)
        for number, path in bundle.traces()
        if bundle.rows[number - 1].kind == kind and bundle.rows[number - 1].is_composed
    ]
    chosen = [step for step in steps if kind == "decode" or step[0].prefill_tokens > 1]
    if not chosen:
        raise ExportError(
            f"no {kind} of the bundle has a trace with several new tokens\n  measure one",
            code="export-steps-missing",
        )
    shared = bundle.manifest.ep > 1
    _, number, path = max(chosen, key=lambda step: step[0].new_tokens) if shared else chosen[0]
    graph = read(path)
    nodes, mask = graph.nodes, graph.mask(Kind.COLLECTIVE)
    names = [Collective(int(code)).name.lower() for code in nodes.collective[mask]]
    groups = {group.name: len(group.ranks) for group in graph.job.groups}
    ranks = [groups[graph.strings[int(code)]] for code in nodes.group[mask]]
    calls = zip(names, ranks, nodes.comm_bytes[mask].tolist(), strict=True)
    return TracedStep(bundle.rows[number - 1], tuple(calls))


def collective_sizes(
    model: str | None, decode: TracedStep, prefill: TracedStep
) -> Iterator[CollectiveSize]:
    """Yield each collective with its bytes: constant, or by new tokens and sequences.

    In a decode of d sequences, each with one new token, it has d * (token + sequence) bytes; in a
    prefill of s sequences with t new tokens, t * token + s * sequence. These two equations give
    both rates.

    Raises:
        ExportError: the steps have other collectives, or of other sizes.
    """
    row, decodes = prefill.row.composition, decode.row.composition.decodes
    same = [call[:2] for call in prefill.calls] == [call[:2] for call in decode.calls]
    for (name, ranks, prefill_bytes), (*_, decode_bytes) in zip(
        prefill.calls, decode.calls, strict=False
    ):
        both, remainder = divmod(decode_bytes, decodes)
        token, rest = divmod(prefill_bytes - both * row.sequences, row.new_tokens - row.sequences)
        grows = not (remainder or rest) and 0 <= token <= both
        if same and not grows and prefill_bytes == decode_bytes:
            yield CollectiveSize(name, ranks, prefill_bytes, 0, 0)
            continue
        if not same or not grows:
            raise ExportError(
                f"the {name} of {prefill_bytes} bytes in {row}, and of {decode_bytes} "
                f"in {decode.row.composition}, does not grow with new tokens and sequences: its "
                f"size in other steps of {model} is not known",
                code="export-collectives-unknown",
            )
        yield CollectiveSize(name, ranks, 0, token, both - token)
