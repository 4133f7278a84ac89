"""Attention windows of a recording: work of layers whose queries see a part of their sequence.

An engine's attention operator shows neither its layer nor its window. The configuration names the
layers with a window, and the operators of a step run in the order of the layers. Annotations have
sums over sequences, so a sequence has the mean context and the mean number of new tokens: exact
where all sequences of a step are shorter than the window, or all are longer.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from onerank.annotate.op_costs.engine_operators import computes_paged_attention
from onerank.capture.serving.attention_windows import AttentionWindow
from onerank.ir import UNKNOWN, Graph
from onerank.ir.arrays import I64
from onerank.ir.notes import Note
from onerank.serving.recordings.recording import RecordedStep

# Models whose layers all have the window of a configuration that names no layers: vLLM passes
# `sliding_window` to each of their layers.
_ALL_LAYERS = ("mistral", "mixtral", "phi3", "starcoder2")


def layer_windows(config: Mapping[str, Any]) -> tuple[AttentionWindow | None, ...] | None:
    """Return the window of each layer; () if no layer has one, None if the layers are not known.

    Args:
        config: configuration of the model; empty if not known.
    """
    text: Mapping[str, Any] = config.get("text_config") or config
    sliding, chunk = text.get("sliding_window"), text.get("attention_chunk_size")
    if text.get("use_sliding_window") is False:
        sliding = None
    layers = text.get("num_hidden_layers") or 0
    by_type: dict[str, AttentionWindow | None] = {}
    if isinstance(sliding, int):
        by_type["sliding_attention"] = AttentionWindow(sliding)
    if isinstance(chunk, int):
        by_type["chunked_attention"] = AttentionWindow(chunk, chunked=True)
    if not by_type:
        return ()
    types = text.get("layer_types")
    pattern = text.get("sliding_window_pattern")
    if types is None and isinstance(pattern, int) and pattern > 0:
        # Gemma 3 and Cohere 2: the last layer of each group sees all tokens.
        kinds = ("full_attention", "sliding_attention")
        types = [kinds[(layer + 1) % pattern > 0] for layer in range(layers)]
    if types is None and text.get("model_type") in _ALL_LAYERS:
        types = ["sliding_attention"] * layers
    if types is None:
        return None
    windows = tuple(by_type.get(kind) for kind in types)
    return windows if any(windows) else ()


@dataclass(frozen=True)
class _Attended:
    """What the queries of a step attend to in one layer, of all sequences.

    Attributes:
        keys: tokens of the KV cache that the layer reads.
        pairs: pairs of a new token and a token that it attends to.
    """

    keys: int
    pairs: int


def _attended(step: RecordedStep, window: AttentionWindow) -> _Attended | None:
    """Return what a step attends to in a layer with a window; None if it was not recorded."""
    groups = (
        (step.prefills, step.prefill_new_tokens, step.prefill_context_tokens),
        (step.decodes, step.decode_new_tokens, step.decode_context_tokens),
    )
    keys = pairs = 0.0
    for count, new_tokens, context_tokens in groups:
        if count is None or new_tokens is None or context_tokens is None:
            return None
        if not count:
            continue
        context, new = context_tokens / count, new_tokens / count
        # Where a chunk begins follows from each sequence's own context, not from the mean.
        if window.chunked and count > 1 and context + new > window.tokens:
            return None
        cached, computed = round(context), round(new)
        keys += count * (window.seen_before(cached) + new)
        # A pair of a query and its own key counts as one, and as a half in `products`.
        pairs += count * (window.products(cached, computed) + computed / 2)
    return _Attended(round(keys), round(pairs))


@dataclass
class WindowedLayers:
    """Applies the windows of a model's layers to steps, and counts where it cannot.

    Attributes:
        windows: window of each layer, () if no layer has one; None if the layers are not known.
        applied: steps whose attention has the work of the windows.
        unmatched: steps whose calls of attention are not those of the layers.
        uneven: steps with a layer whose work does not follow from sums over sequences.
    """

    windows: tuple[AttentionWindow | None, ...] | None
    applied: int = 0
    unmatched: int = 0
    uneven: int = 0

    def with_work(self, graph: Graph, step: RecordedStep) -> Graph:
        """Return the graph with the work of attention in layers that have a window.

        Args:
            graph: a step of an engine with its operators, and with the work of attention to all
                keys.
            step: the sequences of the step.
        """
        calls, label = _attention_calls(graph), graph.job.inference
        if self.windows == () or not calls or label is None or not label.attention_keys:
            return graph
        if self.windows is None or len(calls) != len(self.windows):
            self.unmatched += 1
            return graph
        by_window = {w: _attended(step, w) for w in self.windows if w is not None}
        self.applied += 1
        self.uneven += None in by_window.values()
        whole = _Attended(label.attention_keys, label.attention_pairs or 0)
        columns = {name: getattr(graph.nodes, name).copy() for name in ("flops", "bytes_read")}
        for rows, window in zip(calls, self.windows, strict=True):
            part = None if window is None else by_window[window]
            if part is None:
                continue
            flops, read = (column[rows] for column in columns.values())
            if whole.pairs and (flops != UNKNOWN).all():
                columns["flops"][rows] = _scaled(flops, min(part.pairs, whole.pairs), whole.pairs)
            written = graph.nodes.bytes_written[rows]
            if (read != UNKNOWN).all() and (written != UNKNOWN).all():
                # Queries have as many bytes as results; the rest is read from the cache.
                cached = _scaled(read - written, min(part.keys, whole.keys), whole.keys)
                columns["bytes_read"][rows] = written + cached
        return graph.with_columns(**columns)

    def notes(self) -> Iterator[Note]:
        """Yield what the work of attention leaves out."""
        if self.windows is None and self.unmatched:
            yield Note(
                "the configuration has a window of attention and names no layer_types: FLOPs and "
                "bytes of attention are those of all keys",
                code="recording-windows-unknown",
            )
        elif self.unmatched:
            yield Note(
                f"in {self.unmatched} of {self.applied + self.unmatched} rows the calls of "
                f"attention are not those of the {len(self.windows or ())} layers of the "
                "configuration: their FLOPs and bytes are those of all keys",
                code="recording-windows-unmatched",
            )
        if not self.applied or self.windows is None:
            return
        windowed = sum(window is not None for window in self.windows)
        text = (
            f"{windowed} of {len(self.windows)} layers see a part of a sequence: FLOPs and bytes "
            "of their attention are those of sequences of the mean length"
        )
        if self.uneven:
            text += f"; in {self.uneven} rows those of all keys, since chunks begin unevenly"
        yield Note(text, code="recording-windows-mean")


def _scaled(values: I64, part: int, whole: int) -> I64:
    """Return the values x part / whole, rounded down."""
    # In Python, since a product of FLOPs and pairs can exceed 64 bits.
    return np.array([value * part // whole for value in values.tolist()], dtype=np.int64)


def _attention_calls(graph: Graph) -> list[I64]:
    """Return the kernels of each call of attention on a paged KV cache, in the order of calls."""
    nodes = graph.nodes
    ops = np.unique(nodes.op).tolist()
    codes = [code for code in ops if computes_paged_attention(graph.strings[code])]
    rows = np.flatnonzero(np.isin(nodes.op, codes) & graph.compute)
    launcher = graph.launchers()[rows]
    # Without a launch edge, as in a recording of a CPU, an operator is its own call.
    call_of = np.where(launcher >= 0, launcher, rows)
    calls = [rows[call_of == call] for call in np.unique(call_of)]
    return sorted(calls, key=lambda call: int(nodes.start_ns[call].min()))
