"""Records of a bundle: its manifest, and the rows of its tables."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from onerank.capture.serving.attention_windows import CacheNeed, WindowedLayers
from onerank.capture.serving.compositions import Composition
from onerank.ir import Pipeline
from onerank.ir.notes import Note

if TYPE_CHECKING:
    import polars as pl

FORMAT = 1
"""Version of the bundle's format."""

Source = Literal["measured", "recorded", "predicted", "interpolated"]
"""Where times are from; recorded ones are those of an engine under a profiler."""

Part = Literal[
    "prefill_attention",
    "decode_attention",
    "prefill_index",
    "decode_index",
    "prefill_state",
    "decode_state",
    "cache_write",
    "head",
    "tokens",
]
"""What the time of a module depends on: the prefills or the decodes with their contexts (attention,
and the scores of an indexer of sparse attention), the prefills or the decodes without them (layers
with a state of constant size per sequence), the new tokens of prefills and of decodes (writes to
the KV cache, one for each of the two), the number of sequences, or the number of new tokens."""


def fits(device_bytes: int, peak_bytes: int | None, outside_bytes: int | None) -> bool:
    """Return whether a step fits into a device; True if a figure is not known.

    Args:
        device_bytes: memory of the device; 0 if not known.
        peak_bytes: peak of the allocator; None if not known.
        outside_bytes: memory outside the allocator; None if not known.
    """
    if not device_bytes or peak_bytes is None or outside_bytes is None:
        return True
    return peak_bytes + outside_bytes <= device_bytes


def p10_median_p90(times_ns: Sequence[int]) -> tuple[int, int, int]:
    """Return the 10th percentile, the median and the 90th percentile of one or more times.

    The percentiles are the ends of the 80% interval of a measured or recorded step.
    """
    low, median, high = np.percentile(times_ns, (10, 50, 90))
    return round(low), round(median), round(high)


class RankMemory(msgspec.Struct, frozen=True):
    """Memory of the rank, in bytes. Figures that are None are not known: a recording has none.

    Attributes:
        device_bytes: memory of the device; 0 if not known.
        outside_bytes: estimate of the CUDA context and NCCL, which the allocator does not see.
        weights_bytes: weights.
        kv_bytes_per_token: KV cache of one token in all layers.
        workspace_bytes: workspaces of libraries such as cuBLAS.
        activations_bytes: the most that a measured step has beyond weights, KV cache and workspace.
        activations_tokens: new tokens of that step.
        tokens_that_fit: tokens whose KV cache of all layers fits next to the rest; 0 if the memory
            of the device is not known, or if no layer has a KV cache. Of sequences longer than a
            window of `kv_windows`, more fit. States of sequences take the same room.
        gaps_bytes: what the allocator reserves beyond its peak in that step, by simulation.
        latent_bytes_per_token: KV cache of one token in engines, which keep the vectors of latent
            attention; None of a model without it.
        kv_windows: layers that hold a part of a sequence only. Empty if none does, and in bundles
            of earlier versions, whose steps held all tokens in all layers.
        state_bytes_per_sequence: states of constant size of one sequence in all layers, such as
            those of linear attention.
        whole_state_layers: layers with such states that tensor parallelism did not slice: each rank
            computes all their heads.
        cache_room_bytes: memory for KV cache and states; None if the memory of the device is not
            known, and in bundles of earlier versions.
    """

    device_bytes: int
    outside_bytes: int | None = None
    weights_bytes: int | None = None
    kv_bytes_per_token: int | None = None
    workspace_bytes: int | None = None
    activations_bytes: int | None = None
    activations_tokens: int | None = None
    tokens_that_fit: int | None = None
    gaps_bytes: int | None = None
    latent_bytes_per_token: int | None = None
    kv_windows: tuple[WindowedLayers, ...] = ()
    state_bytes_per_sequence: int = 0
    whole_state_layers: int = 0
    cache_room_bytes: int | None = None

    @property
    def cache_need(self) -> CacheNeed:
        """What the rank keeps of each sequence; nothing if not known."""
        return CacheNeed(
            self.kv_bytes_per_token or 0, self.kv_windows, self.state_bytes_per_sequence
        )

    def bytes_of(self, composition: Composition) -> int | None:
        """Return the allocator's peak of a step, with activations that grow with its new tokens."""
        known = (self.weights_bytes, self.workspace_bytes, self.kv_bytes_per_token,
                 self.activations_bytes, self.activations_tokens)  # fmt: skip
        if any(figure is None for figure in known):
            return None
        weights, workspace, _, activations, tokens = (figure or 0 for figure in known)
        growing = activations * composition.new_tokens // max(1, tokens)
        return weights + workspace + self.cache_need.of_step(composition) + growing

    def caches(self, composition: Composition) -> bool:
        """Return whether the KV cache of a step fits; True if bytes or room are not known."""
        room = self._room_bytes
        return room is None or self.cache_need.of_step(composition) <= room

    @property
    def _room_bytes(self) -> int | None:
        """Memory for KV cache and states; None if not known."""
        if self.cache_room_bytes is not None:
            return self.cache_room_bytes
        if not self.device_bytes or self.tokens_that_fit is None:
            return None
        return self.tokens_that_fit * (self.kv_bytes_per_token or 0)

    def tokens_with_states(self, sequences: int) -> int | None:
        """Return the tokens whose KV cache fits next to the states of a number of sequences.

        None if the memory of the device is not known.
        """
        room = self._room_bytes
        if room is None:
            return None
        remaining = max(0, room - sequences * self.state_bytes_per_sequence)
        return remaining // self.kv_bytes_per_token if self.kv_bytes_per_token else 0

    def sequences_that_fit(self, context: int) -> int | None:
        """Return how many sequences fit that decode with so many tokens before the step.

        None if the KV cache or the memory of the device is not known.
        """
        room = self._room_bytes
        need = self.cache_need.of_sequence(context)
        return None if room is None or not need else room // need

    def holds(self, peak_bytes: int | None) -> bool:
        """Return whether a step with this peak of the allocator fits next to the memory outside."""
        return fits(self.device_bytes, peak_bytes, self.outside_bytes)


class CrossValidation(msgspec.Struct, frozen=True):
    """Errors of steps, each interpolated from the points with another number of new tokens.

    Attributes:
        points: steps that were left out in turn.
        median: median relative error.
        p90: its 90th percentile.
    """

    points: int
    median: float
    p90: float


class AdaptiveGrid(msgspec.Struct, frozen=True):
    """A grid whose points were measured until the wanted error of interpolation was reached.

    Attributes:
        wanted_error: median error of the cross-validation that was wanted.
        offered: compositions of the grid.
        measured: those that were measured.
        reached: whether the cross-validation of the measured ones has the wanted error.
    """

    wanted_error: float
    offered: int
    measured: int
    reached: bool


class Manifest(msgspec.Struct, frozen=True):
    """What a bundle describes.

    Attributes:
        model: class of the model; None, like `layers` and `longest`, of a recording without
            --config.
        config: its configuration, as transformers reads it; empty if not known.
        tp: tensor-parallel size; None for a recording of several ranks without --tp.
        layers: decoder layers.
        longest: tokens that a sequence may have.
        device: name of the device that the times are valid for.
        device_type: "cuda", "cpu", or "model" without a device.
        source: whether the times are measured, recorded or predicted.
        memory: memory of the rank.
        versions: software that measured or predicted.
        cross_validation: errors of the interpolation of `graph_ns`, or of `step_ns` on a CPU; None
            with too few points.
        notes: statements on the quality of the figures.
        ep: expert-parallel size; each rank of the group computes the composition of a row.
        moe_routing: how tokens are distributed over experts, as for `capture serve`; "model" is the
            model's own router. None if the rank has no routed experts. Earlier versions
            wrote "balanced" for all models, also where an unsliced model's router decided.
        rank: the rank, of tp times ep times pp; None for a recording without ranks.
        collectives_timed: whether the times of steps contain those of collectives.
        pipeline: the pipeline stage that the steps, weights and KV cache belong to; None without
            pipeline parallelism. `layers` counts those of all stages.
        attention_kernels: families of the kernels of attention, such as "flash2"; "" stands for any
            other kernel. None of a recording, or of a bundle of an earlier version.
        adaptive_grid: how far the grid was measured with `--error`; None if all of it was. The rows
            are in the order of the measurement.
        attended_tokens: most tokens that a query of sparse attention reads; None of other models.
        padded_vocabulary: rows of the embedding and the head of all ranks, padded as engines do;
            None if they have the model's own number.
        format: version of the format.
    """

    model: str | None
    config: dict[str, Any]
    tp: int | None
    layers: int | None
    longest: int | None
    device: str
    device_type: str
    source: Source
    memory: RankMemory
    versions: dict[str, str]
    cross_validation: CrossValidation | None = None
    notes: tuple[Note, ...] = ()
    ep: int = 1
    moe_routing: str | None = None
    rank: int | None = 0
    collectives_timed: bool = False
    pipeline: Pipeline | None = None
    attention_kernels: tuple[str, ...] | None = None
    adaptive_grid: AdaptiveGrid | None = None
    attended_tokens: int | None = None
    padded_vocabulary: int | None = None
    format: int = FORMAT

    @property
    def pp(self) -> int:
        """Pipeline-parallel size."""
        return len(self.pipeline.layers) if self.pipeline else 1

    @property
    def kv_heads(self) -> int | None:
        """Key-value heads of the rank; None if the configuration does not show them."""
        config = self.config.get("text_config", self.config)
        names = ("num_key_value_heads", "num_attention_heads", "n_head")
        heads = next((config[name] for name in names if config.get(name)), None)
        # Ranks beyond the number of heads share them.
        return None if heads is None else max(1, heads // (self.tp or 1))

    @property
    def is_recording(self) -> bool:
        """Whether the steps are those of a recorded engine, whose memory is not known."""
        return self.memory.weights_bytes is None


class StepRow(msgspec.Struct, frozen=True):
    """A row of `steps.parquet`: one composition.

    A row of a recording has None for what the recording does not have. Its contexts and chunks are
    means of sequences that may differ in length, rounded; `new_tokens` and `context_tokens` are
    their sums.

    Attributes:
        kind: "prefill", "decode" or "mixed".
        decodes: as in `Composition`, like the four columns after it.
        batch: sequences of the step.
        new_tokens: tokens that the step computes.
        context_tokens: tokens in the KV cache before the step.
        step_ns: the step, eager, with its host; None if it does not fit into memory. Recorded: from
            the start of the step to that of the next.
        p10_ns: 10th percentile of the step.
        p90_ns: 90th percentile of the step.
        graph_ns: the step replayed as a CUDA graph; None on a CPU. Predicted: its kernels plus the
            gaps between them. Gaps are those of the measured CUDA graph, adjusted for the launch
            times of another GPU of the same die; without one, that of the
            cost model after each kernel, such as 0.25 us on an H100.
            Recorded: of a step that replayed CUDA graphs, the spans of the replays plus its other
            kernels.
        graph_low_ns: 10th percentile of the replay.
        graph_high_ns: 90th percentile of the replay.
        gpu_ns: summed kernels; on a CPU, operators.
        host_ns: host time of the step; None if not known.
        peak_bytes: peak of the allocator; on a device, what does not fit needs at least this.
        fits: whether the step fits into the memory of the device.
        source: whether the times are measured, recorded, predicted or interpolated.
    """

    kind: str | None
    decodes: int | None
    decode_context: int | None
    prefills: int | None
    prefill_tokens: int | None
    prefill_context: int | None
    batch: int | None
    new_tokens: int | None
    context_tokens: int | None
    step_ns: int | None
    p10_ns: int | None
    p90_ns: int | None
    graph_ns: int | None
    graph_low_ns: int | None
    graph_high_ns: int | None
    gpu_ns: int | None
    host_ns: int | None
    peak_bytes: int | None
    fits: bool
    source: Source

    @classmethod
    def of(cls, composition: Composition, **figures: Any) -> "StepRow":
        """Return the row of a composition."""
        return cls(
            kind=composition.kind,
            **msgspec.structs.asdict(composition),
            batch=composition.sequences,
            new_tokens=composition.new_tokens,
            context_tokens=composition.cached_tokens - composition.new_tokens,
            **figures,
        )

    @property
    def is_composed(self) -> bool:
        """Whether the sequences of the step are known, and decode one token each."""
        counts = [getattr(self, name) for name in Composition.__struct_fields__]
        if self.new_tokens is None or None in counts:
            return False
        # The chunk of a prefill is rounded, so the sum is off by half a token for each.
        return abs(self.new_tokens - Composition(*counts).new_tokens) <= (self.prefills or 0) / 2

    @property
    def composition(self) -> Composition:
        """The sequences of a step that `is_composed`."""
        assert self.is_composed, "the sequences of the step are not known"
        return Composition(**{name: getattr(self, name) for name in Composition.__struct_fields__})


class KernelRow(msgspec.Struct, frozen=True):
    """A row of `kernels.parquet`: a module in one composition, its numbered siblings summed.

    Recordings have no modules: a row is a part of a step.

    Attributes:
        row: row of the composition in `steps.parquet`, from 1.
        module: path of the module; "" outside of all, None if not known.
        part: what its time depends on; None for attention that may be of prefills and of decodes.
        kernels: number of kernels; on a CPU, operators.
        time_ns: their summed durations.
        flops: their FLOPs; None if those of a kernel are not known.
        bytes: bytes that they read and write; None if those of a kernel are not known.
    """

    row: int
    module: str | None
    part: Part | None
    kernels: int
    time_ns: int
    flops: int | None
    bytes: int | None


def data_frame(rows: Sequence[Any], kind: Any) -> "pl.DataFrame":
    """Return records as a table, with the types of their class."""
    import polars as pl

    types = {"int": pl.Int64, "bool": pl.Boolean}
    schema: dict[str, Any] = {}
    for name, annotation in kind.__annotations__.items():
        text = getattr(annotation, "__name__", str(annotation)).removesuffix(" | None")
        schema[name] = types.get(text, pl.String)
    return pl.DataFrame([msgspec.structs.asdict(row) for row in rows], schema=schema)
