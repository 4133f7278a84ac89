"""Slice the models of a script for one rank: when, along which axes, and classes of equal ranks.

Every model is sliced before it is moved or used. Classes of ranks that do equivalent work follow
from what the slicer places on each rank.
"""

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from onerank.capture.parallelize.context.context_model import apply_context_parallel
from onerank.capture.parallelize.context.sequence_attention import ContextComm
from onerank.capture.parallelize.ema_copies import copies_of
from onerank.capture.parallelize.experts.expert_parallel import (
    apply_static_routing,
    expert_loads,
    shard_experts,
)
from onerank.capture.parallelize.experts.routing import GroupRank, Routing
from onerank.capture.parallelize.hugging_face import (
    GENERATION,
    MODELING,
    PAGED_CACHE,
    PreTrainedModel,
)
from onerank.capture.parallelize.model_structure import is_encoder_decoder
from onerank.capture.parallelize.pipeline.encoder_decoder_stages import stage_encoder_decoder
from onerank.capture.parallelize.pipeline.stage import NewGroup, PipelineStage, stage_model
from onerank.capture.parallelize.tensor.apply_tensor_parallel import Sliced, slice_model
from onerank.capture.parallelize.tensor.module_styles import TensorParallelStyle
from onerank.capture.parallelize.tensor.plan_file import ShardingPlan
from onerank.capture.patches import after_import, live, patched, resolve
from onerank.ir import RankClass, World
from onerank.ir.errors import SliceError

_Key = TypeVar("_Key", bound=Hashable)

Loads = Mapping[str, Sequence[Hashable]]
"""Name of each module of experts -> for each rank of the expert-parallel group, a key. Ranks with
equal keys receive equally many tokens."""


def rank_classes(world: World, stage: PipelineStage | None, loads: Loads) -> tuple[RankClass, ...]:
    """Return the classes of equivalent ranks: one per kind of stage and load of experts.

    Ranks that differ only along other axes are equivalent, because those axes split work evenly.

    Args:
        world: the job's world.
        stage: a stage of its pipeline; None without pipeline parallelism.
        loads: expert loads of the whole model.
    """
    stages = len(stage.work_keys) if stage else 1
    work_by_stage = [_stage_work(world, stage, at, loads) for at in range(stages)]
    classes: list[RankClass] = []
    for work_of_ranks, equal_stages in _grouped(work_by_stage):
        loads_of_stage = _grouped(work_of_ranks)
        for _, expert_ranks in loads_of_stage:
            coordinates: dict[str, tuple[int, ...]] = {"pp": equal_stages} if stage else {}
            if len(loads_of_stage) > 1:
                coordinates["ep"] = expert_ranks
            first = world.first({axis: values[0] for axis, values in coordinates.items()})
            classes.append(RankClass(first, coordinates))
    return tuple(sorted(classes, key=lambda rank_class: rank_class.representative))


def classes_along(world: World, ranks: Sequence[int]) -> tuple[RankClass, ...]:
    """Return a class for each of `ranks`: the ranks with its coordinate on every differing axis.

    Args:
        world: the job's world.
        ranks: distinct ranks of the world.
    """
    points = {rank: world.point(rank) for rank in ranks}
    axes = [axis for axis in world.sizes if len({point[axis] for point in points.values()}) > 1]
    return tuple(
        RankClass(rank, {axis: (point[axis],) for axis in axes}) for rank, point in points.items()
    )


def _stage_work(
    world: World, stage: PipelineStage | None, at: int, loads: Loads
) -> tuple[Hashable, ...]:
    """Return a key of the work of each rank in a stage's expert-parallel groups."""
    stage_loads = [keys for name, keys in loads.items() if stage is None or stage.of(name) == at]
    key = stage.work_keys[at] if stage else None
    return tuple((key, *(keys[place] for keys in stage_loads)) for place in range(world.ep))


def _grouped(keys: Iterable[_Key]) -> list[tuple[_Key, tuple[int, ...]]]:
    """Return each distinct key with the positions that have it."""
    positions: dict[_Key, list[int]] = {}
    for place, key in enumerate(keys):
        positions.setdefault(key, []).append(place)
    return [(key, tuple(places)) for key, places in positions.items()]


@dataclass(frozen=True)
class SlicingOptions:
    """How a model is divided along the axes of a world.

    Attributes:
        tp_style: where the tensor-parallel collectives stand.
        plan: tensor-parallel plan; None selects the model's default plan.
        sequence: whether norms and residuals are sharded along the sequence.
        routing: how tokens are routed to experts; None leaves it to the model's router.
        peers_absent: whether the other ranks do not exist, so that collectives return no data.
        pp_layers: layers of each pipeline stage; () splits them evenly.
        stage_depth: layers of its stage to keep (`--capture-layers`); None keeps all.
        cp_comm: how keys and values travel between context-parallel ranks.
        replicate_heads: as for `slice_model`.
    """

    tp_style: TensorParallelStyle = "megatron"
    plan: ShardingPlan | None = None
    sequence: bool = False
    routing: Routing | None = None
    peers_absent: bool = True
    pp_layers: Sequence[int] = ()
    stage_depth: int | None = None
    cp_comm: ContextComm = "all_gather"
    replicate_heads: bool = False


def slice_to_rank(
    model: nn.Module, world: World, rank: int, new_group: NewGroup, options: SlicingOptions
) -> Sliced:
    """Reduce a model to the slice of one rank and insert its communication.

    Experts are sharded first, because tensor parallelism then cuts the remaining experts.

    Args:
        model: a model whose parameters are whole, on any device.
        world: sizes of the parallel axes.
        rank: the rank whose slice to keep.
        new_group: creates the process group of an axis from its name and ranks.
        options: how to divide the model.

    Raises:
        SliceError: the model does not support this slicing.
    """
    before = _elements(model)
    modules: dict[str, int] = {}
    duplicates: frozenset[str] = frozenset()
    loads: Loads | None = {}
    routing = options.routing
    if routing is not None:
        sender = None
        if options.peers_absent and world.ep > 1:
            sender = GroupRank(world.line("ep", rank).index(rank), world.ep)
        apply_static_routing(model, routing, sender)
    tensor = None
    if "tp" in world.sizes or (world.ep == 1 and not {"pp", "cp"} & world.sizes.keys()):
        tensor = new_group("tp", world.line("tp", rank))
    if world.ep > 1:
        loads = expert_loads(model, routing, world.ep) if routing else None
        group = new_group("ep", world.line("ep", rank))
        modules |= shard_experts(model, group, tensor if options.sequence else None)
    if tensor is not None:
        # Before the model is reduced to a stage: the plan is checked against the whole model, whose
        # embedding, last norm and head other stages hold.
        sliced = slice_model(
            model,
            tensor,
            options.tp_style,
            peers_absent=options.peers_absent,
            plan=options.plan,
            sequence=options.sequence,
            replicate_heads=options.replicate_heads,
        )
        modules |= sliced.modules
        duplicates = sliced.duplicates
    stage = None
    if "pp" in world.sizes:
        shards = tensor.size() if tensor is not None and options.sequence else 1
        stage = _reduce_to_stage(model, world.line("pp", rank), new_group, options, shards)
        modules["layer"] = options.stage_depth or stage.pipeline.layers[stage.pipeline.stage]
        duplicates |= _tied_copies(model, stage)
    if "cp" in world.sizes:
        # After the stage, which decides whether this rank computes a loss. Its hook goes before
        # those of the other axes (`prepend`), which see this rank's part of the batch.
        _divide_sequence(model, new_group("cp", world.line("cp", rank)), stage, options)
    # With the model's own router (`loads` is None) a rank's work depends on data: no classes.
    classes = () if loads is None else rank_classes(world, stage, loads)
    return Sliced(modules, before, _elements(model), stage, classes, duplicates)


def _elements(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _reduce_to_stage(
    model: nn.Module,
    ranks: Sequence[int],
    new_group: NewGroup,
    options: SlicingOptions,
    shards: int,
) -> PipelineStage:
    """Reduce a model to this rank's pipeline stage; `ranks` and `shards` as for `stage_model`."""
    reduce_model = (
        stage_encoder_decoder
        if is_encoder_decoder(model)
        else functools.partial(stage_model, depth=options.stage_depth)
    )
    group = new_group("pp", ranks)
    return reduce_model(model, group, ranks, new_group, options.pp_layers, shards=shards)


def _divide_sequence(
    model: nn.Module,
    group: dist.ProcessGroup,
    stage: PipelineStage | None,
    options: SlicingOptions,
) -> None:
    """Give a model this rank's part of each sequence, over a context-parallel group."""
    has_loss = stage is None or stage.pipeline.stage == len(stage.pipeline.layers) - 1
    apply_context_parallel(
        model, group, comm=options.cp_comm, has_loss=has_loss, peers_absent=options.peers_absent
    )


def _tied_copies(model: nn.Module, stage: PipelineStage) -> set[str]:
    """Return the names of parameters that are copies of a weight that an earlier stage holds."""
    copies = {id(tied.weight) for tied in stage.tied if tied.is_copy}
    return {name for name, p in model.named_parameters() if id(p) in copies}


_SLICED = "_onerank_sliced"


class ModelSlicing:
    """Slices a model when it is first moved, cast or called, whichever comes first.

    At that moment the model is complete, and a model too large for the GPU is sliced before it
    moves there. Parameters keep their identity, so an optimizer created earlier sees the slices.
    Live copies of the model (EMA) are sliced with it, because the script may never call them.

    Args:
        slice_one: slices a model in place.
        kinds: names of the classes to slice; None selects every Hugging Face model.

    Attributes:
        sliced: class name and slice summary of each sliced model.
        slices_of: sliced model -> slice summary, for live models.
        passed_over: the first called model that is not of a class to slice.
    """

    def __init__(
        self, slice_one: Callable[[nn.Module], Sliced], kinds: tuple[str, ...] | None = None
    ) -> None:
        self.sliced: list[tuple[str, Sliced]] = []
        self.slices_of: weakref.WeakKeyDictionary[nn.Module, Sliced] = weakref.WeakKeyDictionary()
        self.passed_over: nn.Module | None = None
        self.slice_one = slice_one
        self._kinds = kinds
        self._done: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._inside: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # sliced models
        self._loading = 0
        self._failure: SliceError | None = None

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Patch module calls and moves for the duration of the context."""
        apply, call = nn.Module._apply, nn.Module.__call__

        def apply_sliced(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._visit_all(module)
            return apply(module, *args, **kwargs)

        # A patch, not a global forward pre-hook: slicing registers hooks on the model, and torch
        # would not run hooks in this call that are registered while its pre-hooks run.
        def call_sliced(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                self._before_forward(module)
            return call(module, *args, **kwargs)

        try:
            with (
                patched("torch.nn.Module", {"_apply": apply_sliced, "__call__": call_sliced}),
                after_import(MODELING, self._loads_whole),
                after_import(GENERATION, self._generates_sliced),
                after_import(PAGED_CACHE, self._caches_sliced_heads),
            ):
                yield
        finally:
            # The script may have caught the error that was raised earlier.
            if self._failure is not None:
                raise self._failure

    @contextlib.contextmanager
    def _loads_whole(self) -> Generator[None]:
        """Slice no model while transformers loads its weights."""
        from transformers.modeling_utils import PreTrainedModel

        load = PreTrainedModel.from_pretrained.__func__

        def load_whole(kind: Any, *args: Any, **kwargs: Any) -> Any:
            self._loading += 1
            try:
                return load(kind, *args, **kwargs)
            finally:
                self._loading -= 1

        replacement = {"from_pretrained": classmethod(load_whole)}
        with patched(f"{MODELING}.PreTrainedModel", replacement):
            yield

    @contextlib.contextmanager
    def _generates_sliced(self) -> Generator[None]:
        """Slice a model before its generation creates a KV cache.

        The cache has a layer for each type in the configuration, whose order a pipeline stage
        changes.
        """
        from transformers.generation.utils import GenerationMixin

        mixin: Any = GenerationMixin  # its own type requires the attributes of a model

        def sliced_first(name: str) -> Callable[..., Any]:
            method: Callable[..., Any] = getattr(mixin, name)

            @functools.wraps(method)
            def called(model: Any, *args: Any, **kwargs: Any) -> Any:
                self._visit_all(model)
                return method(model, *args, **kwargs)

            return called

        entries = ("generate", "init_continuous_batching")
        replacements = {name: sliced_first(name) for name in entries if hasattr(mixin, name)}
        with patched(f"{GENERATION}.GenerationMixin", replacements):
            yield

    @contextlib.contextmanager
    def _caches_sliced_heads(self) -> Generator[None]:
        """Size the paged cache of continuous batching by the key-value heads of this rank.

        transformers divides those of the configuration by a tensor-parallel size that it knows only
        if it sliced the model itself.
        """
        owner = f"{PAGED_CACHE}.PagedAttentionCache"
        create = resolve(owner).__init__

        # The constructor, because its `find_num_key_value_heads` is not in transformers 5.0, which
        # also imports the cache with every model.
        @functools.wraps(create)
        def create_of_rank(cache: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            models = (model for model in self.slices_of if getattr(model, "config", None) is config)
            if (sliced := next(models, None)) is not None:
                config = copy.copy(config)
                config.num_key_value_heads = key_value_heads(sliced)
            create(cache, config, *args, **kwargs)

        with patched(owner, {"__init__": create_of_rank}):
            yield

    def _fail(self, error: SliceError) -> NoReturn:
        """Raise an error that also ends the capture, since the script may catch it."""
        self._failure = error
        raise error

    def _slice(self, model: nn.Module) -> None:
        parts = [part for part in model.modules() if self.slices(part)]
        try:
            self.slices_of[model] = self.slice_one(model)
        except SliceError as error:
            self._fail(error)
        self.sliced.append((type(model).__name__, self.slices_of[model]))
        for part in parts:
            # An attribute, so that a deep copy has it too.
            setattr(part, _SLICED, True)

    def _before_forward(self, module: nn.Module) -> None:
        if self._loading or module in self._done:
            return
        if not self._visit_all(module):
            if any(inner in self._inside for inner in module.modules()):
                self._check_unchanged(module)
            self.passed_over = self.passed_over or module
        self._done.update(module.modules())

    def _visit_all(self, module: nn.Module) -> bool:
        """Slice the models inside a module or wrapper; return whether it contains any."""
        inside: list[nn.Module] = [module]
        has_models = False
        # Not into a model: what it contains is sliced as its parts.
        for child in inside:  # grows: a model may sit in a wrapper, torch.compile's for one
            if self.slices(child):
                self._visit(child)
                has_models = True
            else:
                inside += child.children()
        return has_models

    def _whole(self, part: nn.Module) -> nn.Module:
        """Return the largest sliceable model that contains `part`.

        A script may call a model's trunk, and then its head on parts of the trunk's output.
        """
        holders = [
            module
            for module in live(nn.Module)
            if self.slices(module) and any(inner is part for inner in module.modules())
        ]
        return max(holders, key=lambda module: sum(1 for _ in module.modules()))

    def slices(self, module: nn.Module) -> bool:
        """Return whether a module is of a class to slice."""
        if self._kinds is None:
            return isinstance(module, PreTrainedModel)
        return any(kind.__name__ in self._kinds for kind in type(module).__mro__)

    def _check_unchanged(self, part: nn.Module) -> None:
        """Refuse parameters that the script added to a model after it was sliced."""
        for name, module in part.named_modules():
            if module not in self._inside and any(True for _ in module.parameters(recurse=False)):
                self._fail(
                    SliceError(
                        f"{name or type(module).__name__} ({type(module).__name__}) was added "
                        f"to {type(part).__name__} after the model was sliced (at its first .to(), "
                        "cast or call)\n  add adapters and replace layers before that",
                        code="slice-replaced-module",
                    )
                )

    def _visit(self, part: nn.Module) -> None:
        if self._loading:
            return
        if part in self._done:
            if part in self._inside:
                self._check_unchanged(part)
            return
        model = self._whole(part)
        if self._failure is not None:
            raise self._failure
        parts = (module for module in model.modules() if self.slices(module))
        if not any(hasattr(part, _SLICED) for part in parts):
            copies = [each for each in copies_of(model) if not hasattr(each, _SLICED)]
            for whole in (model, *copies):
                self._slice(whole)
        elif not hasattr(model, _SLICED):
            self._fail(
                SliceError(
                    f"{type(model).__name__} contains a model that was used and sliced earlier\n"
                    f"  call the whole {type(model).__name__} first, or move it with .to()",
                    code="slice-model-used",
                )
            )
        self._done.update(model.modules())
        self._inside.update(model.modules())


def key_value_heads(model: nn.Module) -> int:
    """Return the key-value heads of each attention layer of a sliced model.

    Raises:
        SliceError: its attention has no projection `k_proj` whose rows are heads.
    """
    for module in model.modules():
        projection: Any = getattr(module, "k_proj", None)
        if isinstance(projection, nn.Module) and (size := getattr(module, "head_dim", None)):
            weight: Any = projection.weight
            return weight.shape[0] // size
    raise SliceError(
        f"continuous batching of a sliced {type(model).__name__} needs its key-value heads, and "
        "its attention has no k_proj and head_dim to count them by\n"
        "  capture it whole, or let the script call generate",
        code="slice-paged-heads",
    )
