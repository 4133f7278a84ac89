"""Measure a model over a grid of compositions, or re-cost a bundle, and write the tables."""

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from onerank.annotate import PassOptions, load_gpu
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.hosts.host import load_host
from onerank.annotate.passes.pass_options import NO_PASSES
from onerank.capture.options import Options
from onerank.capture.parallelize.experts.routing import BY_MODEL, parse_routing
from onerank.capture.serving.attention_windows import WindowedLayers
from onerank.capture.serving.compositions import VOCABULARY_MULTIPLE, Composition, default_grid
from onerank.ir import Pipeline
from onerank.ir.chakra import read
from onerank.ir.errors import CaptureError
from onerank.ir.notes import Note
from onerank.plan.tasks import Store, content_key
from onerank.serving.adaptive_grid import BATCH, WantedError, measurement_order
from onerank.serving.bundle import Bundle, encoded_trace
from onerank.serving.points import (
    Point,
    Target,
    measured,
    misfit,
    predicted,
    predicted_recording,
)
from onerank.serving.recordings.recorded_bundle import part_rows
from onerank.serving.tables import AdaptiveGrid, KernelRow, Manifest, RankMemory, StepRow


class Progress(Protocol):
    """Receives how much of a part of the work is complete."""

    def __call__(self, name: str, complete: int, whole: int, *, detail: str = "") -> None:
        """Receive the name of the part, how much of it is complete, the whole, and its state."""
        ...


def _ignored(name: str, complete: int, whole: int, *, detail: str = "") -> None:
    """Ignore the progress."""


_MEASURED = "compositions"


@dataclass(frozen=True)
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


def measure_bundle(
    source: Path,
    options: Options,
    grid: Sequence[Composition] | None,
    store: Store,
    *,
    args: Sequence[str] = (),
    host: str = "typical",
    wanted: WantedError | None = None,
    progress: Progress = _ignored,
) -> tuple[Bundle, dict[int, bytes]]:
    """Measure a model over a grid, and return the bundle with the trace of each row.

    Args:
        source: `config.json` of a transformers model, or its directory, or a script (.py) that
            builds a model and calls it.
        options: parallel sizes, rank, device, windows.
        grid: the compositions; None for a grid derived from the model.
        store: results of this run and of earlier ones.
        args: arguments of the script.
        host: host of a capture without a device, as for `onerank.recost`.
        wanted: error of the interpolation with which the rest of the grid is left out; None for the
            whole grid.
        progress: see `Progress`.

    Raises:
        CaptureError: the model cannot be served, or no composition fits into memory.
        ScriptError: the script raised, or called no language model.
    """
    is_script = source.suffix == ".py"
    file = source / "config.json" if source.is_dir() else source
    # A missing file is an error of `serving`, which reads it.
    content = file.read_bytes() if file.is_file() else b""
    target = None
    if options.emulated_gpu is not None:
        target = Target(load_gpu(options.like), load_host(host))
    # The routing, the host, the GPU and the plan may be names of files, whose contents can change
    # between runs: the keys of results have the contents.
    routing = parse_routing(options.moe_routing)
    described = None if target is None else (target.gpu, target.host)
    files = (routing, described, options.plan)
    inputs = (content.decode(errors="replace"), options, _device_name(options), *files)
    record = _Record(store, inputs)
    # A script may read other files, so only a run of it shows which model it builds.
    model, run = None if is_script else record.model(), None
    if model is not None:
        run = _GridRun.of(model, record, grid, wanted, progress)
        if run.complete_from_store():
            return run.bundle()
    with _server(source, tuple(args), options) as server:
        served = server.served
        if is_script:
            record = _Record(store, (*inputs, args, served.config, served.parameters))
        if run is None:
            config = served.config if is_script else msgspec.json.decode(content)
            model = _model(served, config, options)
            record.add_model(model)
            run = _GridRun.of(model, record, grid, wanted, progress)
        run.complete(lambda composition, number: _measure(server, composition, number, target))
    return run.bundle()


@dataclass
class _GridRun:
    """Points of a grid, measured or read from the store, until the grid or the wanted error ends.

    Attributes:
        model: what the points share.
        record: stored points.
        grid: the compositions, in the order of the measurement.
        wanted: error with which the rest is left out; None for the whole grid.
        progress: see `Progress`.
        points: points of the first compositions of the grid.
        suffices: whether these points have the wanted error.
        detail: the error after the last batch, for the progress bar.
    """

    model: Model
    record: "_Record"
    grid: Sequence[Composition]
    wanted: WantedError | None
    progress: Progress
    points: list[Point] = field(default_factory=list[Point])
    suffices: bool = False
    detail: str = ""

    @classmethod
    def of(
        cls,
        model: Model,
        record: "_Record",
        grid: Sequence[Composition] | None,
        wanted: WantedError | None,
        progress: Progress,
    ) -> "_GridRun":
        """Return the run without points; a grid that is None is derived from the model.

        Raises:
            CaptureError: no composition of the derived grid fits into the model's context.
        """
        grid = grid or default_grid(model.longest)
        if not grid:
            raise CaptureError(
                f"sequences of the model have at most {model.longest} tokens, and all compositions "
                "of the default grid have more\n"
                "  give --grid, such as 'prefill: tokens=1 context=0'",
                code="grid-beyond-context",
            )
        return cls(model, record, measurement_order(grid) if wanted else grid, wanted, progress)

    def complete_from_store(self) -> bool:
        """Take the points that earlier runs stored; return whether no other is needed."""
        while self._needs_more:
            point = self.record.point(self.grid[len(self.points)])
            if point is None:
                return False
            self._add(point)
        return True

    def complete(self, measure: Callable[[Composition, int], Point]) -> None:
        """Take the points that are stored, and measure the others that are needed."""
        while self._needs_more:
            composition = self.grid[len(self.points)]
            point = self.record.point(composition)
            if point is None:
                point = measure(composition, len(self.points) + 1)
                self.record.add_point(composition, point)
            self._add(point)

    def bundle(self) -> tuple[Bundle, dict[int, bytes]]:
        """Return the bundle of the points, and the trace of each that has one."""
        bundle, traces = _bundle(self.model, self.points)
        if self.wanted is None:
            return bundle, traces
        shortfall = self.wanted.shortfall(bundle.manifest.cross_validation)
        extent = AdaptiveGrid(
            wanted_error=self.wanted.median,
            offered=len(self.grid),
            measured=len(self.points),
            reached=shortfall is None,
        )
        notes = bundle.manifest.notes
        if shortfall is not None:
            text = (
                f"all {extent.offered} compositions of the grid do not reach an error of "
                f"{100 * extent.wanted_error:g}%: {shortfall}; a larger --grid has more points"
            )
            notes = (*notes, Note(text, code="serve-error-not-reached"))
        manifest = msgspec.structs.replace(bundle.manifest, adaptive_grid=extent, notes=notes)
        return replace(bundle, manifest=manifest), traces

    @property
    def _needs_more(self) -> bool:
        return len(self.points) < len(self.grid) and not self.suffices

    def _add(self, point: Point) -> None:
        self.points.append(point)
        # The first steps of the order may all be too large for the memory.
        some_fit = any(point.memory is not None for point in self.points)
        if self.wanted is not None and some_fit and len(self.points) % BATCH == 0:
            bundle, _ = _bundle(self.model, self.points)
            validation = bundle.manifest.cross_validation
            self.suffices = self.wanted.shortfall(validation) is None
            if validation is not None:
                self.detail = f"median error {validation.median:.1%}"
        self.progress(_MEASURED, len(self.points), len(self.grid), detail=self.detail)


@contextlib.contextmanager
def _server(source: Path, args: tuple[str, ...], options: Options) -> Generator[Any]:
    from onerank.capture.isolated_capture import loading_capture

    with loading_capture():
        from onerank.capture.script.runner import Script
        from onerank.capture.serving.measure_grid import loaded_server
    model = Script(source, args) if source.suffix == ".py" else source
    with loaded_server(model, options) as server:
        yield server


def _device_name(options: Options) -> str:
    """Return the name of the device that is measured, which a stored result belongs to."""
    if options.emulated_gpu is not None:
        return options.emulated_gpu.name
    from onerank.capture.isolated_capture import loading_capture

    with loading_capture():
        from onerank.capture.serving.measure_grid import device_name
    return device_name()


class _Record:
    """Stored results of a model with options on a device."""

    def __init__(self, store: Store, content: Sequence[object]) -> None:
        self._store = store
        self._content = content

    def model(self) -> Model | None:
        """Return what the points share, if an earlier run stored it."""
        stored = self._store.read(content_key("model", *self._content))
        return None if stored is None else msgspec.msgpack.decode(stored, type=Model)

    def add_model(self, model: Model) -> None:
        """Store what the points share."""
        self._store.write(content_key("model", *self._content), msgspec.msgpack.encode(model))

    def point(self, composition: Composition) -> Point | None:
        """Return the figures of a composition, if an earlier run stored them."""
        stored = self._store.read(content_key(composition, *self._content))
        return None if stored is None else msgspec.msgpack.decode(stored, type=Point)

    def add_point(self, composition: Composition, point: Point) -> None:
        """Store the figures of a composition."""
        key = content_key(composition, *self._content)
        self._store.write(key, msgspec.msgpack.encode(point))


def _model(served: Any, config: dict[str, Any], options: Options) -> Model:
    return Model(
        served.name,
        config,
        options.tp,
        served.layers,
        served.longest,
        served.weights_bytes,
        served.kv_bytes_per_token,
        served.memory_bytes,
        options.ep,
        served.moe_routing,
        options.rank,
        served.pipeline,
        served.latent_bytes_per_token,
        served.kv_windows,
        served.state_bytes_per_sequence,
        served.whole_state_layers,
        served.attended_tokens,
        served.padded_vocabulary,
    )


def _measure(server: Any, composition: Composition, number: int, target: Target | None) -> Point:
    result = server.measure(composition, number)
    if result.graph is None:
        source = "measured" if target is None else "predicted"
        return misfit(composition, result.needed_bytes, source)
    if target is None:
        point = measured(composition, result.graph, result.graph_ns)
    else:
        point = predicted(composition, result.graph, target)
    if point.memory is None:
        return point
    return msgspec.structs.replace(point, trace=encoded_trace(result.graph))


def recost_bundle(
    bundle: Bundle,
    target: Gpu,
    *,
    host: str = "typical",
    model: str = "auto",
    databases: Sequence[Path] = (),
    passes: PassOptions = NO_PASSES,
    progress: Progress = _ignored,
) -> tuple[Bundle, dict[int, Path]]:
    """Predict all steps of a bundle for another GPU; return the bundle and the trace of each row.

    The traces are those of the capture, so that a later re-costing starts from measurements.

    Args:
        bundle: a bundle that was read.
        target: the GPU.
        host: as for `onerank.recost`.
        model: as for `onerank.recost`.
        databases: as for `onerank.recost`.
        passes: what if, as for `onerank.annotate.recost`.
        progress: see `Progress`.

    Raises:
        AnnotateError: the graphs cannot be re-costed.
        CaptureError: no step fits into the memory of the GPU.
    """
    described = Target(target, load_host(host), model, tuple(databases), passes)
    if bundle.manifest.is_recording:
        return _recost_recording(bundle, described, progress)
    traces, points = dict(bundle.traces()), list[Point]()
    for number, row in enumerate(bundle.rows, start=1):
        if number in traces:
            measured_row = row if row.source == "measured" else None
            point = predicted(row.composition, read(traces[number]), described, measured_row)
        else:
            # It did not fit into the memory of the captured GPU.
            point = misfit(row.composition, row.peak_bytes or 0, "predicted")
        if point.memory is None:
            traces.pop(number, None)
        points.append(point)
        progress(_MEASURED, number, len(bundle.rows))
    recosted, _ = _bundle(Model.of(bundle.manifest, target), points, device=target.name)
    return recosted, traces


def _recost_recording(
    bundle: Bundle, target: Target, progress: Progress
) -> tuple[Bundle, dict[int, Path]]:
    """Predict the steps of a recording, whose memory is not known, for another GPU."""
    traces, rows, kernels = dict(bundle.traces()), list[StepRow](), list[KernelRow]()
    for number, row in enumerate(bundle.rows, start=1):
        predicted_row, graph = predicted_recording(row, read(traces[number]), target)
        rows.append(predicted_row)
        kernels += [
            msgspec.structs.replace(part, row=number) for part in part_rows(graph, row.kind)
        ]
        progress(_MEASURED, number, len(bundle.rows))
    # The note on recorded times names the host's alone, which are kept.
    host = Note(
        "times of the host are those of the recorded engine under a profiler, which makes it "
        "slower",
        code="recording-profiled",
    )
    notes = [host if note.code == host.code else note for note in bundle.manifest.notes]
    manifest = msgspec.structs.replace(
        bundle.manifest,
        device=target.gpu.name,
        device_type="cuda",
        source="predicted",
        memory=RankMemory(device_bytes=target.gpu.memory_bytes),
        notes=tuple(notes),
        # A re-costed trace has no times of collectives.
        collectives_timed=False,
    )
    return Bundle(manifest, tuple(rows), tuple(kernels)).validated(), traces


def _bundle(
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
