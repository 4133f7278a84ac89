"""Measure one rank of an inference engine over a grid of compositions, with one model load."""

import contextlib
import functools
import gc
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from onerank.capture.capture_script import convert_raw
from onerank.capture.fake_world.recorder import peers_of
from onerank.capture.job_record import cpu_name, job_of, pipeline_of
from onerank.capture.no_device.emulated_process import EmulatedProcess
from onerank.capture.no_device.recorded_step import StepRecorder
from onerank.capture.options import Options
from onerank.capture.parallelize.experts.expert_parallel import (
    apply_static_routing,
    expert_layers,
    routes_itself,
)
from onerank.capture.parallelize.experts.routing import BY_MODEL, parse_routing
from onerank.capture.parallelize.fewer_layers import FewerLayers
from onerank.capture.parallelize.shard_model import ModelSlicing
from onerank.capture.parallelize.tensor.stateful_layers import has_heads_of_rank
from onerank.capture.profiling.measurement_windows import Windows
from onerank.capture.profiling.module_scopes import Modules
from onerank.capture.profiling.profiled_windows import PLAIN_EXECUTION_TRACE, compress
from onerank.capture.profiling.step_timers import StepTimer
from onerank.capture.profiling.window_observations import OtherRanks
from onerank.capture.profiling.window_plan import Progress, WindowPlan
from onerank.capture.run_as_rank import RankRun, nothing_parallel_error, slicing_to_rank
from onerank.capture.script.runner import Script
from onerank.capture.serving.attention_windows import CacheNeed, WindowedLayers, windowed_layers
from onerank.capture.serving.build_model import (
    adopt_model,
    build_model,
    materialise,
    pad_vocabulary,
    read_config,
)
from onerank.capture.serving.compositions import MOST_TOKENS, Composition
from onerank.capture.serving.engine_step import (
    RepeatableStep,
    check_layer_types,
    give_attention_scopes,
)
from onerank.capture.serving.latent_attention import latent_bytes_per_token
from onerank.capture.serving.routed_experts import route_tokens
from onerank.capture.serving.script_model import model_of_script
from onerank.capture.serving.sequence_states import stateful_layers
from onerank.capture.serving.sparse_attention import attended_tokens
from onerank.capture.serving.step_cache import StepCache
from onerank.converters.sources.kineto import EXECUTION_TRACE, JOB
from onerank.ir import Graph, Pipeline
from onerank.ir.errors import CaptureError
from onerank.ir.output_files import scratch_directory

# torch's module for CUDA has no types.
_torch: Any = torch

# Steps on shapes alone before the recorded one: the first allocates the KV cache.
_UNRECORDED = 1


@dataclass(frozen=True)
class MeasuredPoint:
    """A measured composition.

    Attributes:
        composition: the sequences of the step.
        graph: the step; None if it does not fit into the memory of the GPU that runs it.
        graph_ns: times of the step as a CUDA graph; () if it was not captured into one.
        needed_bytes: memory that the step needs, as far as known, if it does not fit.
    """

    composition: Composition
    graph: Graph | None
    graph_ns: tuple[int, ...] = ()
    needed_bytes: int = 0


@dataclass(frozen=True)
class TimedStep:
    """Times of a step without a profiler.

    Attributes:
        step_ns: eager.
        graph_ns: as a CUDA graph; () if it was not captured into one.
        peak_bytes: peak of the allocator in the eager steps.
    """

    step_ns: tuple[int, ...]
    graph_ns: tuple[int, ...]
    peak_bytes: int


@dataclass(frozen=True)
class ServedModel:
    """What the points of a grid share.

    Attributes:
        name: class of the model.
        layers: number of decoder layers.
        longest: tokens that a sequence may have.
        weights_bytes: bytes of this rank's weights.
        kv_bytes_per_token: bytes of the KV cache for each token in all layers, of this rank.
        latent_bytes_per_token: bytes that engines keep of each token instead; None if the model has
            no latent attention.
        memory_bytes: memory of the device.
        config: the model's configuration, as JSON.
        pipeline: the stage; None without pipeline parallelism.
        parameters: name, dtype and shape of each parameter of this rank.
        kv_windows: layers that hold only a part of a sequence.
        attended_tokens: most tokens that a query of sparse attention reads; None without such.
        state_bytes_per_sequence: states of constant size of a sequence, in all layers of this rank.
        whole_state_layers: layers with such states that tensor parallelism did not slice.
        moe_routing: how tokens were distributed over the experts, as in `Manifest`.
        padded_vocabulary: as in `Manifest`.
    """

    name: str
    layers: int
    longest: int
    weights_bytes: int
    kv_bytes_per_token: int
    latent_bytes_per_token: int | None
    memory_bytes: int
    config: dict[str, Any]
    pipeline: Pipeline | None
    parameters: tuple[tuple[str, str, tuple[int, ...]], ...]
    kv_windows: tuple[WindowedLayers, ...]
    state_bytes_per_sequence: int
    whole_state_layers: int
    attended_tokens: int | None
    moe_routing: str | None
    padded_vocabulary: int | None

    @property
    def cache_need(self) -> CacheNeed:
        """What the rank keeps of each sequence."""
        return CacheNeed(self.kv_bytes_per_token, self.kv_windows, self.state_bytes_per_sequence)

    @property
    def has_head(self) -> bool:
        """Whether the rank computes logits, as the last stage does."""
        return self.pipeline is None or self.pipeline.stage == len(self.pipeline.layers) - 1


class Server:
    """A rank of an engine that computes steps; see `loaded_server`."""

    def __init__(
        self,
        rank_run: RankRun,
        options: Options,
        model: Any,
        served: ServedModel,
        *,
        first: StepCache,
        make_windows: Callable[[Path, Any], Any],
        device: str,
    ) -> None:
        self.served = served
        self._first = first
        self._rank_run = rank_run
        self._options = options
        self._model = model
        self._make_windows = make_windows
        self._device = device

    def measure(self, composition: Composition, number: int) -> MeasuredPoint:
        """Return the measured step of a composition.

        Without a device a step of any size is measured: fake tensors never run out of memory.

        Args:
            composition: sequences of the step.
            number: its place in the grid, from 1.
        """
        if self._on_gpu:
            _empty_allocator()
        served = self.served
        needed = served.weights_bytes + served.cache_need.of_step(composition)
        # Without this, a composition far above the memory would fail in the allocator's retries.
        if self._on_gpu and served.memory_bytes < needed:
            return MeasuredPoint(composition, None, needed_bytes=needed)
        try:
            return self._measure(composition, number)
        except torch.cuda.OutOfMemoryError:
            return MeasuredPoint(composition, None, needed_bytes=needed)

    def time(self, composition: Composition, repetitions: int) -> TimedStep:
        """Return times of a step on a GPU without a profiler, eager and as a CUDA graph.

        Raises:
            torch.cuda.OutOfMemoryError: the step does not fit.
        """
        _empty_allocator()
        return time_step(self.step(composition), repetitions)

    @property
    def _on_gpu(self) -> bool:
        return self._device == "cuda" and self._options.emulated_gpu is None

    def _measure(self, composition: Composition, number: int) -> MeasuredPoint:
        raw = self._rank_run.raw / str(number)
        raw.mkdir()
        step = self.step(composition)
        windows = self._make_windows(raw, step.cache)
        try:
            while not windows.complete:
                step()
                windows.boundary()
        finally:
            windows.close()
        graph_ns = _graph_replays(step) if self._on_gpu else ()
        del step
        job = job_of(self._rank_run, self._options, windows.observed)
        job = msgspec.structs.replace(job, inference=composition.forward(number))
        if self._options.emulated_gpu is None:
            compress(raw / PLAIN_EXECUTION_TRACE, raw / EXECUTION_TRACE)
        (raw / JOB).write_bytes(msgspec.json.encode(job))
        graph, _ = convert_raw(raw)
        for path in raw.iterdir():
            path.unlink()
        return MeasuredPoint(composition, graph, graph_ns)

    def step(self, composition: Composition) -> RepeatableStep:
        """Return the step of a composition, which can be repeated."""
        vocabulary = self._model.config.get_text_config().vocab_size
        step = RepeatableStep.of(
            self._model, composition, vocabulary, self._device, has_head=self.served.has_head
        )
        step.cache.allocate(self._first)
        return step


def _empty_allocator() -> None:
    """Free what earlier steps left in the caching allocator, and reset its peaks.

    Otherwise the reserved memory of a step would contain the peak of the step before.
    """
    # Reference cycles keep the KV cache of a finished step alive.
    gc.collect()
    # torch keeps a workspace for each stream that called cuBLAS, 32 MiB on an H100. That of the
    # stream on which the CUDA graphs of the step before were captured is not part of this step.
    _torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def time_step(step: RepeatableStep, repetitions: int) -> TimedStep:
    """Return times of a step on a GPU without a profiler, eager and as a CUDA graph.

    Raises:
        torch.cuda.OutOfMemoryError: the step does not fit.
    """
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    timer = StepTimer(on_gpu=True)
    timer.mark()
    for _ in range(repetitions):
        step()
        timer.mark()
    eager = timer.durations_ns()
    peak = torch.cuda.max_memory_allocated()
    return TimedStep(eager, _graph_replays(step), peak)


# Replays of a CUDA graph that are timed, after as many that are not.
_REPLAYS = 5

# Graphs of a step that are alive while one of them is timed. Engines keep dozens, and all of them
# replay at the same pace. Alone, half of a process's graphs replay up to 10% faster on an H100
# (driver 580), whatever the step. Next to five others, 52 of 54 replays were at that pace; other
# numbers were not measured (benchmarks/results/2026-11-28-serving-blind-3-h100.txt).
_GRAPHS = 6


def _graph_replays(step: RepeatableStep) -> tuple[int, ...]:
    """Return the times of a step that engines would replay as a CUDA graph, in ns.

    () if the step cannot be captured into one, such as a step that reads a value on the host, or if
    the graph's pool of memory does not fit. A note of the bundle counts these steps
    (`serve-no-cuda-graph`).
    """
    graphs: list[torch.cuda.CUDAGraph] = []
    try:
        for _ in range(_GRAPHS):
            graph = torch.cuda.CUDAGraph()
            # One pool, as in engines: the graphs use the same memory.
            with torch.cuda.graph(graph, pool=graphs[0].pool() if graphs else None):
                step()
            graphs.append(graph)
    except torch.cuda.OutOfMemoryError:
        return ()
    except RuntimeError:
        # The same step has run eagerly before, so this is a refusal of the stream capture. CUDA has
        # many codes for it, and torch raises all of them as RuntimeError. The error stays in the
        # stream until the host has waited for it.
        torch.cuda.synchronize()
        return ()
    graph = graphs[0]
    for _ in range(_REPLAYS):
        graph.replay()
    timer = StepTimer(on_gpu=True)
    timer.mark()
    for _ in range(_REPLAYS):
        graph.replay()
        timer.mark()
    return timer.durations_ns()


@contextlib.contextmanager
def loaded_server(
    source: Path | Script, options: Options, progress: Progress = lambda _: None
) -> Generator[Server]:
    """Load a model as one rank of an engine; yield what measures its steps.

    Args:
        source: `config.json` of a transformers model, or its directory, or a script that builds and
            calls a model.
        options: the parallel sizes, the rank, the device and the windows.
        progress: receives a short description of each phase.

    Raises:
        CaptureError: the configuration is not that of a causal language model, the model cannot
            compute an engine's steps, or it does not support the sizes.
        ScriptError: the script raised, or called no language model.
    """
    path = source.path if isinstance(source, Script) else source
    config = None if isinstance(source, Script) else read_config(source)
    padded = None if config is None else pad_vocabulary(config)
    emulated = EmulatedProcess.of(options.emulated_gpu, path, parse_routing(options.moe_routing))
    with contextlib.ExitStack() as stack:
        raw = stack.enter_context(scratch_directory())
        stack.enter_context(emulated.installed() if emulated else contextlib.nullcontext())
        rank, ranks, emulation = options.rank, options.world.size, options.emulation
        peers = peers_of(rank, ranks, real=False, messages=None, emulation=emulation)
        peers.start()
        stack.callback(peers.stop)
        models = slicing_to_rank(peers, options, infers=True)
        modules = Modules()
        stack.enter_context(emulated.running(peers) if emulated else contextlib.nullcontext())
        progress("building the model")
        device = "cuda" if emulated is not None or torch.cuda.is_available() else "cpu"
        windows = _WindowMaker(options.windows, modules, progress, peers, emulated)
        if isinstance(source, Script):
            observed = windows.make(raw, None, on_gpu=device == "cuda")
            model = adopt_model(_model_of_script(source, options, observed, models))
            if options.world.size == 1:
                # A slice has the routing and the exchange of the experts that it was sliced with.
                route_tokens(model)
            if emulated is not None:
                # Fake weights may be on the CPU, where the script left them.
                model.to(device)
            device = next(model.parameters()).device.type
        else:
            model = build_model(config, device, shapes_only=emulated is not None)
            _slice(model, models, options, path)
            if emulated is None:
                materialise(model, device)
        pipeline = pipeline_of(models)
        moe_routing = _routing_of(model, options, pipeline)
        served, first = _served(model, options, device, pipeline, moe_routing)
        served = replace(served, padded_vocabulary=padded)
        # After `_served`, whose step adds the scopes of attention: `Modules` reads the modules of a
        # model at the first call that it sees.
        stack.enter_context(modules.installed())
        make_windows = functools.partial(windows.make, on_gpu=device == "cuda")
        rank_run = RankRun(
            raw=raw,
            peers=peers,
            models=models,
            modules=modules,
            windows=make_windows(raw, None),
            forwards=(),
            fewer_layers=FewerLayers(None, None),
            script_distributed=False,
        )
        yield Server(
            rank_run, options, model, served, first=first, make_windows=make_windows, device=device
        )


def _slice(model: Any, models: ModelSlicing, options: Options, path: Path) -> None:
    """Slice a model to the rank, if the world has several.

    Raises:
        CaptureError: the model does not support the sizes.
    """
    if options.world.size == 1:
        return
    if not models.slices(model):
        raise nothing_parallel_error(path, options, "no model was sliced", model)
    models.sliced.append((type(model).__name__, models.slice_one(model)))


@dataclass(frozen=True)
class _WindowMaker:
    """Makes what measures a step: windows, or the recorder of a step without a device.

    Attributes:
        plan: steps of the windows.
        modules: modules of the model.
        progress: receives a short description of each step.
        peers: the other ranks.
        emulated: the process without a device; None on a device.
    """

    plan: WindowPlan
    modules: Modules
    progress: Progress
    peers: OtherRanks
    emulated: EmulatedProcess | None

    def make(self, directory: Path, forward: Any, *, on_gpu: bool) -> Any:
        """Return the windows of a step, whose traces are written to `directory`.

        Args:
            directory: an existing directory.
            forward: as for `Windows`.
            on_gpu: whether the step runs on a GPU, emulated or not.
        """
        make: Callable[..., Any] = Windows
        if self.emulated is not None:
            make = functools.partial(StepRecorder, self.emulated, unrecorded=_UNRECORDED)
        return make(
            self.plan,
            directory,
            self.modules,
            self.progress,
            self.peers,
            forward=forward,
            on_gpu=on_gpu,
        )


def _model_of_script(script: Script, options: Options, windows: Any, models: ModelSlicing) -> Any:
    """Return the model that a script calls, sliced if the job has several ranks.

    Raises:
        CaptureError: the job has several ranks, and the model does not support slicing.
        ScriptError: the script raised, or called no language model.
    """
    if options.world.size == 1:
        return model_of_script(script, options, windows, None)
    model = model_of_script(script, options, windows, models)
    if not models.sliced:
        raise nothing_parallel_error(script.path, options, "no model was sliced", model)
    return model


def _routing_of(model: Any, options: Options, pipeline: Pipeline | None) -> str | None:
    """Route the tokens of an unsliced model; return `moe_routing` of the bundle.

    Slicing has routed the tokens of a slice. With random weights, the model's own router would send
    the tokens of a prefill to few experts, and those of decodes to many, so steps with as many new
    tokens would have different products.

    Raises:
        CaptureError: a router chooses the experts, and no device computes its scores.
        SliceError: the routing does not fit the model.
    """
    routing = parse_routing(options.moe_routing)
    if routing is not None and options.world.size == 1:
        apply_static_routing(model, routing)
    # The model's other stages may have its experts.
    own = routes_itself(model) and pipeline is None
    if not own and not expert_layers(model):
        return None
    if options.emulated_gpu is not None and routing is None:
        raise CaptureError(
            f"--device none with --moe-routing {BY_MODEL}: the router's choice depends on numbers "
            "that no device computes\n  route by balanced, zipf:S or a FILE",
            code="no-device-routing",
        )
    # Without a device, every router chooses by the option.
    return BY_MODEL if own and options.emulated_gpu is None else options.moe_routing


def _served(
    model: Any,
    options: Options,
    device: str,
    pipeline: Pipeline | None,
    moe_routing: str | None,
) -> tuple[ServedModel, StepCache]:
    """Return what the points share, and the cache of a step; gives attention its scopes."""
    config = model.config.get_text_config()
    composition = Composition(decodes=1, decode_context=1)
    # A step of decodes alone computes the logits of all tokens, on every stage.
    step = RepeatableStep.of(model, composition, config.vocab_size, device, has_head=False)
    give_attention_scopes(step)
    if pipeline is None:
        check_layer_types(step)
    cached = step.cache.bytes_per_token()
    itemsize = next((keys.itemsize for keys in step.cache.tensors.values()), 0)
    gpu = options.emulated_gpu
    memory = gpu.memory_bytes if gpu is not None else 0
    if gpu is None and device == "cuda":
        memory = torch.cuda.get_device_properties(0).total_memory
    # Tied weights are one parameter.
    weights = {id(parameter): _stored_bytes(parameter) for parameter in model.parameters()}
    served = ServedModel(
        name=type(model).__name__,
        layers=config.num_hidden_layers,
        longest=int(getattr(config, "max_position_embeddings", 0) or MOST_TOKENS),
        weights_bytes=sum(weights.values()),
        kv_bytes_per_token=sum(cached.values()),
        latent_bytes_per_token=latent_bytes_per_token(model, cached, itemsize),
        memory_bytes=memory,
        config=msgspec.json.decode(config.to_json_string(use_diff=False)),
        pipeline=pipeline,
        parameters=tuple(
            (name, str(parameter.dtype), tuple(parameter.shape))
            for name, parameter in model.named_parameters()
        ),
        kv_windows=windowed_layers(cached, step.cache.windows),
        state_bytes_per_sequence=step.cache.states.bytes_per_sequence(),
        whole_state_layers=sum(
            not has_heads_of_rank(layer) for layer in stateful_layers(model) if options.tp > 1
        ),
        attended_tokens=attended_tokens(model),
        moe_routing=moe_routing,
        padded_vocabulary=None,
    )
    return served, step.cache


def _stored_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor, of a quantised one those of its parts."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return sum(_stored_bytes(getattr(tensor, name)) for name in names)
    return tensor.nbytes


def device_name() -> str:
    """Return the name of the GPU or the CPU that is measured."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).name
    return cpu_name()
