"""Assemble a bundle from its points: rows, the memory of the rank, and notes on the tables."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from onerank.annotate.gpus.gpu import Gpu
from onerank.capture.parallelize.experts.routing import BY_MODEL
from onerank.capture.serving.attention_windows import WindowedLayers
from onerank.capture.serving.compositions import VOCABULARY_MULTIPLE
from onerank.ir import Pipeline
from onerank.ir.errors import CaptureError
from onerank.ir.notes import Note
from onerank.serving.bundle import Bundle
from onerank.serving.points import Point
from onerank.serving.tables import Manifest, RankMemory


@dataclass(frozen=True, kw_only=True)
class Model:
    """What the points of a bundle share; fields as in `Manifest`."""

    name: str
    config: dict[str, Any]
    tp: int
    layers: int
    longest: int
    weights_bytes: int
    kv_bytes_per_token: int
    memory_bytes: int
    ep: int = 1
    moe_routing: str | None = None
    rank: int = 0
    pipeline: Pipeline | None = None
    latent_bytes_per_token: int | None = None
    kv_windows: tuple[WindowedLayers, ...] = ()
    state_bytes_per_sequence: int = 0
    whole_state_layers: int = 0
    attended_tokens: int | None = None
    padded_vocabulary: int | None = None

    @classmethod
    def of(cls, manifest: Manifest, gpu: Gpu) -> "Model":
        """Return what the points of a bundle that `capture serve` wrote share, on a GPU."""
        memory = manifest.memory
        assert not manifest.is_recording, "a recording lacks some of these figures"
        return cls(
            name=manifest.model or "",
            config=manifest.config,
            tp=manifest.tp or 1,
            layers=manifest.layers or 0,
            longest=manifest.longest or 0,
            weights_bytes=memory.weights_bytes or 0,
            kv_bytes_per_token=memory.kv_bytes_per_token or 0,
            memory_bytes=gpu.memory_bytes,
            ep=manifest.ep,
            moe_routing=manifest.moe_routing,
            rank=manifest.rank or 0,
            pipeline=manifest.pipeline,
            latent_bytes_per_token=memory.latent_bytes_per_token,
            kv_windows=memory.kv_windows,
            state_bytes_per_sequence=memory.state_bytes_per_sequence,
            whole_state_layers=memory.whole_state_layers,
            attended_tokens=manifest.attended_tokens,
            padded_vocabulary=manifest.padded_vocabulary,
        )


def bundle_of_points(
    model: Model, points: Sequence[Point], device: str | None = None
) -> tuple[Bundle, dict[int, bytes]]:
    """Return the bundle of points, and the trace of each that has one.

    Args:
        model: what the points share.
        points: the figures, in the order of the rows.
        device: device of predicted times; None: that of the capture.
    """
    fitting = [point for point in points if point.memory is not None]
    if not fitting:
        least = min(point.row.peak_bytes or 0 for point in points)
        raise CaptureError(
            f"no composition fits into memory: the smallest needs {least / 1e9:.1f} GB of "
            f"{model.memory_bytes / 1e9:.1f} GB\n  use a larger --tp, or a smaller grid",
            code="serve-nothing-fits",
        )
    first = fitting[0]
    rows = tuple(point.row for point in points)
    kernels = tuple(
        msgspec.structs.replace(module, row=number)
        for number, point in enumerate(points, start=1)
        for module in point.modules
    )
    memory = _memory(model, fitting)
    manifest = Manifest(
        model=model.name,
        config=model.config,
        tp=model.tp,
        layers=model.layers,
        longest=model.longest,
        device=device or first.device,
        device_type=first.device_type,
        source=first.row.source,
        memory=memory,
        versions=first.versions,
        notes=tuple(_notes(model, memory, points, fitting)),
        ep=model.ep,
        moe_routing=model.moe_routing,
        rank=model.rank,
        pipeline=model.pipeline,
        attended_tokens=model.attended_tokens,
        padded_vocabulary=model.padded_vocabulary,
        attention_kernels=tuple(sorted({name for point in fitting for name in point.attention})),
    )
    traces = {number: point.trace for number, point in enumerate(points, start=1) if point.trace}
    return Bundle(manifest, rows, kernels).validated(), traces


def _notes(
    model: Model, memory: RankMemory, points: Sequence[Point], fitting: Sequence[Point]
) -> Iterator[Note]:
    """Yield what the tables leave out, and where the steps are not those of engines."""
    yield from _cache_notes(model, memory)
    yield from _vocabulary_notes(model)
    if model.moe_routing == BY_MODEL:
        yield Note(
            "the model's own router chose the experts: with random weights it sends the tokens of "
            "a prefill to few of them, and its steps differ from those of trained weights",
            code="serve-own-router",
        )
    yield from _state_notes(model, memory, on_cpu=any(p.device_type == "cpu" for p in fitting))
    on_gpu = [point for point in fitting if point.device_type == "cuda"]
    # Without a device, the kernel is one that engines run.
    measured = [point for point in on_gpu if point.row.source == "measured"]
    expanded = model.latent_bytes_per_token == model.kv_bytes_per_token
    if expanded and any(point.row.decodes for point in measured):
        yield Note(
            "decodes of latent attention ran in torch's memory-efficient kernel, which is slower "
            "than that of engines: --device none predicts theirs",
            code="serve-latent-kernel",
        )
    collectives = max(point.collectives for point in fitting)
    messages = max(point.messages for point in fitting)
    if collectives or messages:
        text = f"{collectives} collectives"
        if messages:
            text += f" and {messages} sends and receives between stages"
        yield Note(
            f"a step has up to {text}: the traces contain them, and the tables count no time for "
            "them",
            code="serve-collectives-untimed",
        )
    misfits = len(points) - len(fitting)
    if misfits:
        yield Note(
            f"{misfits} of {len(points)} compositions do not fit into memory",
            code="serve-misfits",
        )
    compositions = [point.row.composition for point in fitting]
    beyond = [each for each in compositions if each.longest_sequence > model.longest]
    if beyond:
        longest = max(beyond, key=lambda each: each.longest_sequence)
        yield Note(
            f"{len(beyond)} of {len(points)} compositions have longer sequences than the model's "
            f"{model.longest} tokens (max_position_embeddings), up to {longest.longest_sequence} "
            f"in {longest}: engines refuse these, unless the model is configured for them",
            code="sequences-beyond-context",
        )
    # A CPU has no CUDA graphs.
    eager = sum(point.row.graph_ns is None for point in on_gpu)
    if eager:
        yield Note(
            f"{eager} of {len(fitting)} steps could not be captured as a CUDA graph and have only "
            "an eager time",
            code="serve-no-cuda-graph",
        )


def _cache_notes(model: Model, memory: RankMemory) -> Iterator[Note]:
    """Yield where the KV cache of the steps is not that of engines."""
    longest = model.longest - 1
    if memory.kv_windows and (fit := memory.sequences_that_fit(longest)) is not None:
        held = " and ".join(
            f"{layers.window} in {layers.layers} of {model.layers} layers"
            for layers in memory.kv_windows
        )
        yield Note(
            f"layers keep only a part of a sequence in the KV cache: {held}. "
            "tokens_that_fit counts all tokens in all layers, so it is a lower bound for longer "
            f"sequences: {fit:,} sequences of {model.longest:,} tokens fit, and by that figure "
            f"{(memory.tokens_that_fit or 0) // model.longest:,}. "
            "Simulators get the lower bound, as they have one figure per token",
            code="serve-windowed-layers",
        )
    latent, cached = model.latent_bytes_per_token, model.kv_bytes_per_token
    if latent is not None and latent < cached:
        yield Note(
            f"the KV cache holds the keys and values of all heads, {cached} B per token: engines "
            f"keep the latent vectors, {latent} B, so {cached / latent:.1f} times as many tokens "
            "fit, and a decode reads less of the cache by the same factor",
            code="serve-expanded-latents",
        )


def _vocabulary_notes(model: Model) -> Iterator[Note]:
    """Yield how the rows of the embedding and the head differ from the model's tokens."""
    if model.padded_vocabulary is not None:
        yield Note(
            f"the embedding and the head have {model.padded_vocabulary:,} rows: vLLM and SGLang "
            f"pad the vocabulary to a multiple of {VOCABULARY_MULTIPLE}",
            code="serve-vocabulary-padded",
        )
        return
    tokens = model.config.get("text_config", model.config).get("vocab_size") or 0
    if tokens % VOCABULARY_MULTIPLE:
        yield Note(
            f"the head has {tokens:,} rows, as the script built it: vLLM and SGLang pad the "
            f"vocabulary to a multiple of {VOCABULARY_MULTIPLE}, and such a product is faster",
            code="serve-vocabulary-unpadded",
        )


def _state_notes(model: Model, memory: RankMemory, *, on_cpu: bool) -> Iterator[Note]:
    """Yield what is known of layers that keep a state of constant size for each sequence."""
    if memory.state_bytes_per_sequence:
        text = (
            "layers keep a state of constant size for each sequence, "
            f"{memory.state_bytes_per_sequence:,} B in all layers. tokens_that_fit counts the "
            "memory that states and KV cache share, without states"
        )
        if (fit := memory.sequences_that_fit(model.longest - 1)) is not None:
            text += f": with them {fit:,} sequences of {model.longest:,} tokens fit"
        yield Note(text, code="serve-sequence-states")
    if memory.whole_state_layers:
        yield Note(
            f"each of the {model.tp} tensor-parallel ranks computes all heads of "
            f"{memory.whole_state_layers} layers with states, and keeps their whole states, which "
            "engines do not. These layers are sliced if the number of ranks divides their key "
            "heads and value heads",
            code="serve-whole-states",
        )
    if memory.state_bytes_per_sequence and on_cpu:
        yield Note(
            "layers with such states ran transformers' reference on the CPU, whose operators and "
            "times are not those of engines' kernels: --device none predicts theirs",
            code="serve-reference-states",
        )


def _memory(model: Model, points: Sequence[Point]) -> RankMemory:
    memories = [point.memory for point in points if point.memory is not None]
    largest = max(points, key=lambda point: point.memory.activations_bytes if point.memory else 0)
    assert largest.memory is not None, "a point that fits has its memory"
    workspace = max(memory.workspace_bytes for memory in memories)
    outside = max(memory.outside_bytes for memory in memories)
    step = largest.memory.activations_bytes + largest.memory.gaps_bytes
    room = max(0, model.memory_bytes - model.weights_bytes - workspace - step - outside)
    return RankMemory(
        device_bytes=model.memory_bytes,
        outside_bytes=outside,
        weights_bytes=model.weights_bytes,
        kv_bytes_per_token=model.kv_bytes_per_token,
        workspace_bytes=workspace,
        activations_bytes=largest.memory.activations_bytes,
        activations_tokens=largest.row.composition.new_tokens,
        tokens_that_fit=room // model.kv_bytes_per_token if model.kv_bytes_per_token else 0,
        gaps_bytes=largest.memory.gaps_bytes,
        latent_bytes_per_token=model.latent_bytes_per_token,
        kv_windows=model.kv_windows,
        state_bytes_per_sequence=model.state_bytes_per_sequence,
        whole_state_layers=model.whole_state_layers,
        cache_room_bytes=room if model.memory_bytes else None,
    )
