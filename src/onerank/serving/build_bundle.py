"""Measure a model over a grid of compositions, or re-cost a bundle, and write the tables."""

import contextlib
import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from onerank.annotate import PassOptions, load_gpu
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.hosts.host import load_host
from onerank.annotate.passes.pass_options import NO_PASSES
from onerank.capture.options import Options
from onerank.capture.parallelize.experts.routing import parse_routing
from onerank.capture.serving.compositions import Composition, default_grid
from onerank.ir.chakra import read
from onerank.ir.errors import CaptureError
from onerank.ir.notes import Note
from onerank.plan.tasks import Store, content_key
from onerank.serving.adaptive_grid import BATCH, WantedError, measurement_order
from onerank.serving.assemble_bundle import Model, bundle_of_points
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
from onerank.serving.tables import AdaptiveGrid, KernelRow, RankMemory, StepRow


class Progress(Protocol):
    """Receives how much of a part of the work is complete."""

    def __call__(self, name: str, complete: int, whole: int, *, detail: str = "") -> None:
        """Receive the name of the part, how much of it is complete, the whole, and its state."""
        ...


def _ignored(name: str, complete: int, whole: int, *, detail: str = "") -> None:
    """Ignore the progress."""


_MEASURED = "compositions"


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
            config = served.config if is_script else json.loads(content)
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
        bundle, traces = bundle_of_points(self.model, self.points)
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
            bundle, _ = bundle_of_points(self.model, self.points)
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
        name=served.name,
        config=config,
        tp=options.tp,
        layers=served.layers,
        longest=served.longest,
        weights_bytes=served.weights_bytes,
        kv_bytes_per_token=served.kv_bytes_per_token,
        memory_bytes=served.memory_bytes,
        ep=options.ep,
        moe_routing=served.moe_routing,
        rank=options.rank,
        pipeline=served.pipeline,
        latent_bytes_per_token=served.latent_bytes_per_token,
        kv_windows=served.kv_windows,
        state_bytes_per_sequence=served.state_bytes_per_sequence,
        whole_state_layers=served.whole_state_layers,
        attended_tokens=served.attended_tokens,
        padded_vocabulary=served.padded_vocabulary,
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
    recosted, _ = bundle_of_points(Model.of(bundle.manifest, target), points, device=target.name)
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
