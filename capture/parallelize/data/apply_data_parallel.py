"""Apply DDP, FSDP2 or ZeRO to a script that does not distribute itself.

The outermost module whose forward records gradients is the model; its batch is this rank's batch.
The strategy determines how parameters and gradients are distributed:

- `ddp`: replicas; gradients are all-reduced in buckets during backward (`ddp`).
- `zero1`, `zero2`: replicas whose optimizer steps on a shard (`zero`).
- `fsdp`: parameters, gradients and states are sharded by FSDP2 (`fsdp`).

With micro-batches, only the last backward communicates, as in accelerate and the Hugging Face
Trainer (`grad_accumulation`). A script that saves shards through safetensors, which accepts only
plain tensors, writes this rank's shards, as `torch.save` does: the other shards do not exist.
"""

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol

import safetensors.torch
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from onerank.capture.parallelize.data.data_groups import DataGroups, DataParallelStrategy
from onerank.capture.parallelize.data.ddp import ReplicatedModel
from onerank.capture.parallelize.data.fsdp import (
    DeferredModels,
    FullyShardedModel,
    is_deferred,
    refuse_double_backward,
)
from onerank.capture.parallelize.data.grad_accumulation import AccumulationRounds
from onerank.capture.parallelize.data.optimizers import scaled_steps, with_closure_hook
from onerank.capture.parallelize.data.zero import ShardedOptimizers
from onerank.capture.parallelize.ema_copies import LateReferences, copies_of, references_of
from onerank.capture.parallelize.model_structure import uncompiled
from onerank.capture.patches import live, rebound
from onerank.capture.script.optimizer_steps import after_backward
from onerank.ir.errors import OneRankError, SliceError


@contextlib.contextmanager
def saving_local_shards() -> Generator[None]:
    """Patch safetensors everywhere to save this rank's shards."""
    save_file, save = safetensors.torch.save_file, safetensors.torch.save
    with rebound(
        "safetensors.torch", {"save_file": _saving_local(save_file), "save": _saving_local(save)}
    ):
        yield


def _saving_local(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def save_local(tensors: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        return save({name: _local(tensor) for name, tensor in tensors.items()}, *args, **kwargs)

    return save_local


def _local(tensor: Tensor) -> Tensor:
    # safetensors refuses tensors that are not contiguous.
    return tensor.to_local().contiguous() if isinstance(tensor, DTensor) else tensor


_RUN_AS_IT_IS = (
    "run the script as it is with --torchrun and leave --ddp, --fsdp and --zero out; "
    "--dp then only sets the shape of the world"
)


def refuse_transforms(module: nn.Module) -> None:
    """Refuse a call under torch.func, which sets no `.grad`."""
    if any(is_functorch_wrapped_tensor(tensor) for tensor in module.parameters()):
        raise SliceError(
            f"{type(module).__name__} is called under torch.func (grad, vmap), which returns "
            "gradients to the script without setting .grad, where --ddp and --fsdp communicate\n"
            "  use --zero 1, which works on the optimizer",
            code="dp-functional-grad",
        )


def refuse_scalars(module: nn.Module) -> None:
    """Refuse scalar parameters: FSDP2 shards rows, and a scalar has none."""
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0:
            raise SliceError(
                f"{name} of {type(module).__name__} is a scalar, which torch's fully_shard cannot "
                "shard: make it a tensor of one element, or use --ddp, --zero 1 or --zero 2",
                code="fsdp-scalar-parameter",
            )


def refuse_model(module: nn.Module) -> None:
    """Refuse a model that is already distributed or has sparse gradients."""
    for name, part in module.named_modules():
        if isinstance(part, DistributedDataParallel):
            raise SliceError(
                f"{name or type(module).__name__} is already wrapped in DistributedDataParallel by "
                f"the script or a library\n  {_RUN_AS_IT_IS}",
                code="dp-already-ddp",
            )
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise SliceError(
                f"{name or type(module).__name__} has sparse gradients, whose size depends on "
                "the data: create it with sparse=False",
                code="dp-sparse-gradient",
            )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise SliceError(
                f"{name} is a DTensor, so the script or a library already distributes the model\n"
                f"  {_RUN_AS_IT_IS}",
                code="dp-already-dtensor",
            )


class DistributedModel(Protocol):
    """A model under a data-parallel strategy."""

    def before_forward(self, args: tuple[Any, ...], *, communicates: bool) -> None:
        """Begin a forward; `communicates` is whether its backward reduces gradients."""
        ...

    def prepare_repeated_reduction(self) -> None:
        """Scale gradients that were reduced already, so that another reduction keeps their sum."""
        ...

    def after_forward(self, output: Any) -> None:
        """End a forward."""
        ...


class _ModelState:
    """A trained model: its strategy, parameter ids and accumulation rounds."""

    def __init__(
        self,
        distributed: DistributedModel | None,
        parameters: set[int],
        micro_batches: Sequence[int],
    ) -> None:
        self.distributed = distributed
        self.parameters = parameters
        self.rounds = AccumulationRounds(micro_batches)
        self.communicates = True  # whether the newest forward's backward does


class DataParallelism:
    """Applies a data-parallel strategy to every model that the script trains.

    Args:
        strategy: the strategy.
        groups: the data-parallel groups.
        deferred: whether the weights of Hugging Face models are created during sharding.
        micro_batches: as for `AccumulationRounds`.

    Attributes:
        shards: optimizers that step on shards; None for strategies with whole optimizers.
    """

    def __init__(
        self,
        strategy: DataParallelStrategy,
        groups: DataGroups,
        *,
        deferred: bool = False,
        micro_batches: Sequence[int] = (),
    ) -> None:
        assert strategy == "fsdp" or not deferred
        self._strategy = strategy
        self._micro_batches = micro_batches
        self._deferred = DeferredModels(self._distribute_early) if deferred else None
        self._groups = groups
        self._models: dict[nn.Module, _ModelState] = {}
        self._managed: set[nn.Module] = set()
        self._call_stack: list[nn.Module] = []
        self._checked: set[Optimizer] = set()
        self._references = LateReferences()
        self.shards: ShardedOptimizers | None = None
        if strategy in ("zero1", "zero2"):
            self.shards = ShardedOptimizers(groups, reduces_early=strategy == "zero2")
        self._failure: OneRankError | None = None

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Hook models and optimizers for the duration of the context."""
        with contextlib.ExitStack() as undo:
            for handle in (
                register_module_forward_pre_hook(self._before_forward),
                register_module_forward_hook(self._after_forward, always_call=True),
                register_optimizer_step_pre_hook(self._before_step),
            ):
                undo.callback(handle.remove)
            undo.enter_context(scaled_steps(self._end_step, self._free_gradients))
            undo.enter_context(after_backward(self._end_backward))
            if self.shards is not None:
                handle = register_optimizer_step_post_hook(self.shards.after_step)
                undo.callback(handle.remove)
                undo.enter_context(self.shards.installed())
            elif self._strategy == "fsdp":
                # `grad_clipping.Clipping`, which clips over slices, wraps this clipping by shards:
                # a run installs it later (`patches.PATCHES`).
                undo.enter_context(FullyShardedModel.clipping())
                undo.enter_context(refuse_double_backward())
                undo.enter_context(saving_local_shards())
            if self._deferred is not None:
                undo.enter_context(self._deferred.installed())
            try:
                yield
            finally:
                # The script may have caught the error that was raised earlier.
                if self._failure is not None:
                    raise self._failure

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        self._call_stack.append(module)
        outermost = len(self._call_stack) == 1
        if self._failure is not None:
            raise self._failure
        # Reading a parametrized weight (spectral norm) outside a forward calls its
        # ParametrizationList, which is no model.
        is_parametrization = isinstance(module, ParametrizationList)
        if outermost and not is_parametrization and module not in self._managed:
            has_deferred_weights = self._deferred is not None and is_deferred(module)
            with self._recording_failure():
                if self._strategy == "fsdp" and self._references.is_called(module):
                    self._managed |= set(module.modules())
                    reference = FullyShardedModel(module, self._groups)
                    reference.before_forward(args, communicates=True)
                elif torch.is_grad_enabled() or has_deferred_weights:
                    self._distribute(module)
        if self.shards is not None and outermost and torch.is_grad_enabled():
            with self._recording_failure():
                self.shards.before_forward()
        trained = self._models.get(module)
        if trained is None or trained.distributed is None:
            return
        if torch.is_grad_enabled():
            reduced_before = trained.communicates and trained.rounds.within_step
            trained.communicates = trained.rounds.begin_micro_batch()
            # Until the last backward of a step is known, each one communicates, and DDP reduces the
            # accumulated gradients again.
            if reduced_before and trained.communicates:
                trained.distributed.prepare_repeated_reduction()
        with self._recording_failure():
            trained.distributed.before_forward(args, communicates=trained.communicates)

    def _after_forward(self, module: nn.Module, _: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self._call_stack:
            return
        self._call_stack.pop()
        trained = self._models.get(module)
        if trained is not None and trained.distributed is not None:
            trained.distributed.after_forward(output)

    def _end_backward(self) -> None:
        if self.shards is not None:
            self.shards.after_backward()
        for module, trained in self._models.items():
            if trained.distributed is not None:
                trained.rounds.end_backward(module.parameters())

    def _distribute_early(self, module: nn.Module) -> None:
        """Apply the strategy to a model before its first call."""
        with self._recording_failure():
            self._distribute(module, called=False)

    def _distribute(self, module: nn.Module, *, called: bool = True) -> None:
        """Apply the strategy to a module with trained parameters that are not managed."""
        submodules = set(module.modules())
        self._managed |= submodules
        trained_ids = {id(p) for p in module.parameters() if p.requires_grad}
        managed_ids: set[int] = set()
        managed_ids = managed_ids.union(*(trained.parameters for trained in self._models.values()))
        # no parameters, or a separately called part of a managed model
        if trained_ids <= managed_ids:
            inner = uncompiled(module)
            if inner in self._models:
                self._models[module] = self._models[inner]
            return
        overlaps = bool(trained_ids & managed_ids) or not submodules.isdisjoint(self._models)
        # ZeRO's optimizers own the parameters, so models may share them; DDP's and FSDP's hooks are
        # set on one model.
        if overlaps and self.shards is None:
            raise SliceError(
                f"{type(module).__name__} contains a model that was trained separately before\n"
                f"  call the whole {type(module).__name__} first, so that its parameters are "
                "sharded together",
                code="dp-part-used-first",
            )
        refuse_model(module)
        if self._strategy == "fsdp":
            refuse_scalars(module)
        if self.shards is None:
            refuse_transforms(module)
        optimizers = _optimizers_of(trained_ids)
        distributed: DistributedModel | None = None
        if self.shards is not None:
            self.shards.broadcast_weights(module)
            for optimizer in optimizers:
                self.shards.shard_optimizer(optimizer)
        elif self._strategy == "ddp":
            distributed = ReplicatedModel(module, self._groups)
        else:
            copies = [replica for replica in copies_of(module) if replica not in self._managed]
            references = references_of(uncompiled(module))
            copies += [replica for replica in references if replica not in copies]
            self._references.follow(module)
            sharded = FullyShardedModel(module, self._groups, called=called)
            sharded.replace_in(optimizers)
            # Scripts average parameters shard by shard.
            for replica in copies:
                FullyShardedModel(replica, self._groups, called=False)
                self._managed |= set(replica.modules())
            distributed = sharded
            trained_ids = {id(p) for p in module.parameters() if p.requires_grad}
        self._models[module] = _ModelState(distributed, trained_ids, self._micro_batches)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Reduce the gradients before a step, or after its closure has computed them."""

        def reduce() -> None:
            with self._recording_failure():
                self._end_step(optimizer)

        new_args, new_kwargs, has_closure = with_closure_hook(reduce, args, kwargs)
        with self._recording_failure():
            if not has_closure:
                self._end_step(optimizer)
            if self.shards is not None:
                self.shards.before_step(optimizer)
        return new_args, new_kwargs

    @contextlib.contextmanager
    def _recording_failure(self) -> Generator[None]:
        """Record an error, so that `installed` raises it again if the script catches it."""
        try:
            yield
        except OneRankError as error:
            self._failure = error
            raise

    def _end_step(self, optimizer: Optimizer) -> None:
        if self.shards is not None:
            self.shards.finish(optimizer)
            return
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        ids = {id(parameter) for parameter in stepped}
        for trained in self._models.values():
            if not trained.parameters.isdisjoint(ids):
                trained.rounds.refuse_fewer()
                trained.rounds.end_step()
                # Left are parameters of no trained model, for the check below.
                ids -= trained.parameters
        # Once per optimizer: the check reads every parameter.
        if optimizer in self._checked:
            return
        self._checked.add(optimizer)
        if unmanaged := [p for p in stepped if id(p) in ids and p.grad is not None]:
            raise SliceError(
                f"{type(optimizer).__name__} steps {len(unmanaged)} parameters (the first of shape "
                f"{tuple(unmanaged[0].shape)}) outside every module that was called in training, "
                "so their gradients would not be reduced\n  call the module that contains them, or "
                "use --zero 1, which works on the optimizer",
                code="dp-foreign-parameters",
            )

    def _free_gradients(self, optimizer: Optimizer) -> None:
        """Free the gradients after a GradScaler ran or skipped a step."""
        if self.shards is not None:
            self.shards.free_gradients(optimizer)


def _optimizers_of(parameters: set[int]) -> list[Optimizer]:
    """Return the live optimizers that hold any of the parameters."""
    return [
        candidate
        for candidate in live(Optimizer)
        if "param_groups" in vars(candidate)  # a wrapper forwards another optimizer's
        and any(id(p) in parameters for group in candidate.param_groups for p in group["params"])
    ]
