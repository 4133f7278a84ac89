"""Emulate a CUDA device in this process: operators run on fake tensors, and a log records them."""

import contextlib
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils import _foreach_utils, _python_dispatch
from torch.utils._pytree import tree_map_only
from torch.utils.data import dataloader

from onerank.capture.fake_world.recorder import Recorder
from onerank.capture.no_device import cuda_stubs, generation_ends
from onerank.capture.no_device.attention_backends import choose_attention
from onerank.capture.no_device.cuda_api import emulated_cuda
from onerank.capture.no_device.device_memory import DeviceMemory
from onerank.capture.no_device.emulated_gpu import EmulatedGpu
from onerank.capture.no_device.event_log import EventLog
from onerank.capture.no_device.extensions.install import recorded_extensions
from onerank.capture.no_device.fake_tensor_methods import (
    TENSOR_FACTORIES,
    creates_parameter,
    fake_tensor_methods,
    makes_subclass,
    one_hot_on_gpu,
    storage_functions,
    swap,
    tensor_factory,
)
from onerank.capture.no_device.inductor import InductorOnShapes
from onerank.capture.no_device.nested_tensors import (
    NESTED,
    create_nested_int,
    keeps_ragged_size,
)
from onerank.capture.no_device.operators import recurrent_layers, triton_kernels
from onerank.capture.no_device.operators.cuda_kernels import CudaSourceKernel
from onerank.capture.no_device.operators.fake_operators import FakeOperators
from onerank.capture.no_device.operators.flash_attention_3 import flash_attention_3
from onerank.capture.no_device.operators.functional_collectives import (
    FUNCTIONAL_COLLECTIVES,
    SYMMETRIC_MEMORY,
    fused_products,
    waits_at_first_use,
)
from onerank.capture.no_device.operators.router_choices import RouterChoices
from onerank.capture.no_device.saved_files import SavedFiles
from onerank.capture.no_device.tensor_values import UnknownValues
from onerank.capture.parallelize.experts.routing import Routing
from onerank.capture.patches import after_import, patched, rebound, resolve, untraced
from onerank.capture.profiling.allocator_snapshots import ByMemoryClass, sizes_of
from onerank.capture.profiling.step_memory import resident_storages
from onerank.ir.notes import Note

_torch: Any = torch
_dataloader: Any = dataloader
_distributed: Any = torch.distributed
_modes: Any = _python_dispatch
_foreach: Any = _foreach_utils
# torch.optim hides the name of this module.
_optimizers: Any = sys.modules[torch.optim.Optimizer.__module__]


class EmulatedProcess:
    """A process in which operators run on fake tensors.

    Attributes:
        gpu: the GPU that the script sees.
        log: receives operators and allocations.
        values: decides what a script reads.
        operators: the dispatch mode.
        inductor: compiles what the script compiles.
    """

    def __init__(self, gpu: EmulatedGpu, script: Path, routing: Routing | None) -> None:
        self.gpu = gpu
        self.log = EventLog(memory=DeviceMemory(gpu.memory_bytes))
        self.values = UnknownValues(script)
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._collectives: dict[str, Callable[..., Any]] = {}
        self._routers = RouterChoices(routing)
        self.operators = FakeOperators(self.log, self.values, self._collectives, gpu, self._routers)
        self.inductor = InductorOnShapes(self.operators, self.gpu)
        self._files = SavedFiles(self._fake, self.operators.known)

    @classmethod
    def of(
        cls, gpu: EmulatedGpu | None, script: Path, routing: Routing | None
    ) -> "EmulatedProcess | None":
        """Return the process for a capture without a device; None without an emulated GPU.

        Args:
            gpu: the GPU that the script sees.
            script: path of the script.
            routing: experts that the script's own routers choose; None: unknown ones.
        """
        return cls(gpu, script, routing) if gpu is not None else None

    @property
    def routed(self) -> bool:
        """Whether a router of the script chose experts as `--moe-routing` says."""
        return self._routers.calls > 0

    def check(self) -> None:
        """Check what only a whole step shows.

        Raises:
            SliceError: a routing file has another number of lines than the script has routers.
        """
        self._routers.check()

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Patch torch inside the context so that it reports the emulated GPU.

        Raises:
            CaptureError: this machine or this torch does not run fake CUDA tensors.
        """
        cuda_stubs.install()
        tensor_address, of_storage = storage_functions(self.operators.storages)
        with contextlib.ExitStack() as stack:
            # torch warns when Dynamo asks for the address of a fake storage that has none.
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            for context in (
                emulated_cuda(self.gpu, self.log),
                choose_attention(self.gpu),
                flash_attention_3(),
                self._ranges(),
                self._functions(),
                after_import(_REDISTRIBUTE, self._redistributions),
                after_import(_FSDP_GROUPS, self._fsdp_groups),
                after_import(_FSDP1_HANDLES, self._fsdp1_gathers),
                after_import(_FSDP1_REDUCTIONS, self._fsdp1_reductions),
                after_import(FUNCTIONAL_COLLECTIVES, waits_at_first_use),
                patched(
                    "torch.nn.Parameter", {"__new__": staticmethod(creates_parameter(self.fake))}
                ),
                patched(
                    "torch.Tensor",
                    {
                        "data_ptr": tensor_address,
                        "_make_subclass": staticmethod(makes_subclass(self.fake)),
                    },
                ),
                patched("torch.UntypedStorage", of_storage),
                # torch decides this by `torch.cuda.is_available`, which answers as on the GPU.
                patched(
                    _FAKE_TENSORS + ".FakeTensorMode",
                    {
                        "avoid_device_init": property(_yes),
                        "create_symbolic_nested_int": create_nested_int,
                        "in_kernel_invocation": property(_is_in_kernel, _set_by_thread),
                    },
                ),
                patched(NESTED, {"get_tensor_symint": keeps_ragged_size()}),
                patched("torch.nn.DataParallel", {"scatter": _moved}),
                patched(_TRACED_STAGE, {"_move_submod_to_device": _stage_moved}),
                patched("torch.utils.data.DataLoader", {"_get_iterator": _load_in_this_process}),
                patched(
                    _FAKE_TENSORS + ".FakeTensor", fake_tensor_methods(self.operators, self.values)
                ),
                rebound("torch.distributed.distributed_c10d", {"is_nccl_available": _nccl}),
                *_nccl_class(),
                self._files.installed(),
                rebound("torch.nn.functional", {"one_hot": one_hot_on_gpu()}),
                patched("torch", {name: tensor_factory(name) for name in TENSOR_FACTORIES}),
                patched("torch._C", {"_get_accelerator": _accelerator}),
                patched("torch._C", {"_cuda_getCurrentRawStream": _default_stream}),
                # The checks of its arguments compare numbers.
                patched("torch.distributions.Distribution", {"_validate_args": False}),
                self.inductor.installed(),
                patched(recurrent_layers.OWNER, recurrent_layers.recurrent_functions()),
                # It moves the weights into one buffer for cuDNN, by addresses.
                patched("torch", {"_use_cudnn_rnn_flatten_weight": _never}),
                patched("torch.utils", {"swap_tensors": swap}),
                patched("torch.distributed", {"Logger": _Logger}),
                rebound(
                    "torch.distributed.utils", {"_verify_param_shape_across_processes": _agreed}
                ),
                rebound("torch.utils._foreach_utils", {"_has_foreach_support": _has_foreach}),
                _multi_tensor_optimizers(),
                _gpu_kernels(),
                self._scalar_reads(),
                after_import(_SHARDING, _shapes_inferred_apart),
                after_import(SYMMETRIC_MEMORY, lambda: patched(SYMMETRIC_MEMORY, fused_products())),
                after_import(
                    triton_kernels.MODULE,
                    lambda: triton_kernels.recorded_launches(self.operators.launch),
                ),
                after_import(triton_kernels.TUNER, triton_kernels.first_configuration),
                patched("torch.cuda", {"_compile_kernel": self._compile_kernel}),
                recorded_extensions(self.operators.launch, self.values, self.operators.known),
                after_import(
                    _HUGGING_FACE,
                    lambda: patched(_HUGGING_FACE, {"is_fake_tensor": _no}),
                ),
                after_import(
                    generation_ends.CRITERIA,
                    lambda: generation_ends.ends_at_length(self.operators.known.get),
                ),
                after_import(
                    generation_ends.LOOPS,
                    lambda: generation_ends.beams_end_at_length(self.operators.known.get),
                ),
            ):
                stack.enter_context(context)
            yield

    @contextlib.contextmanager
    def running(self, peers: object) -> Generator[None]:
        """Dispatch operators to fake tensors inside the context.

        Args:
            peers: a started `Recorder` emulates the collectives.
        """
        if isinstance(peers, Recorder):
            self._collectives.update(peers.operators.functions)
        start = threading.Thread.start

        def start_thread(thread: threading.Thread) -> None:
            run = thread.run

            def run_on_shapes() -> None:
                with _mode(self._fake), _mode(self.operators):
                    # As FakeTensorMode's `with` does: otherwise C++ copies a list to a GPU.
                    _torch._C._set_only_lift_cpu_tensors(True)
                    run()

            thread.run = run_on_shapes
            start(thread)

        # Modes are those of a thread; transformers loads weights in others.
        with (
            self._fake,
            self.operators,
            patched("threading.Thread", {"start": start_thread}),
        ):
            yield

    def notes(self) -> list[Note]:
        """Return notes on where the recorded step differs from the job's."""
        return [
            *self.values.notes(),
            *self._routers.notes(),
            *self.operators.zero_patterns.notes(),
            *self.operators.block_masks.notes(),
            *self.inductor.notes(),
            *self._files.notes(),
            *self.log.memory.notes(),
            *self.log.notes(),
        ]

    def fake(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor like a real one."""
        with unset_fake_temporarily():
            return self._fake.from_tensor(tensor)

    @contextlib.contextmanager
    def _scalar_reads(self) -> Generator[None]:
        """Let C++ read the scalar tensors in a list that becomes a tensor.

        `torch.tensor([x, 1])`, `x.new_tensor([x])` and `torch.LongTensor([x])` read each element by
        this operator while all modes are off (`recursive_store` of tensor_new.cpp), so the kernel
        of the element's device runs.
        """
        read_real = _torch._C.TensorBase.tolist

        def read(tensor: Tensor) -> Any:
            if isinstance(tensor, FakeTensor):
                return self.operators.read_scalar(tensor)
            # `tolist` of a scalar reads memory. `item` would call this operator again.
            return read_real(tensor.reshape(()))

        library: Any = _torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            # torch warns although `allow_override=True` states the intent.
            warnings.filterwarnings("ignore", r"(?s).*Overriding a previously registered kernel")
            for device in ("CPU", "CUDA"):
                library.impl("_local_scalar_dense", read, device, allow_override=True)
        try:
            yield
        finally:
            library._destroy()

    def _compile_kernel(self, kernel_source: str, kernel_name: str, *_: Any, **__: Any) -> Any:
        """Return a kernel of CUDA source, as `torch.cuda._compile_kernel` does."""
        return CudaSourceKernel(kernel_source, kernel_name, self.operators.launch)

    @contextlib.contextmanager
    def _functions(self) -> Generator[None]:
        """Record the forward of each autograd function, whose node has no operator."""
        original = torch.autograd.Function.__dict__["apply"]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            event = self.operators.begin_function(cls.__name__)
            try:
                return original.__func__(cls, *args, **kwargs)
            finally:
                self.log.end(event)

        # Dynamo traces autograd functions itself. After a graph break it would compile `apply`.
        untraced(apply)
        with patched("torch.autograd.Function", {"apply": classmethod(apply)}):
            yield

    def _redistributions(self) -> contextlib.AbstractContextManager[None]:
        """Count DTensors that change their placement."""
        redistribute = resolve(_REDISTRIBUTE).redistribute_local_tensor

        def counted(local: Tensor, current: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            if current.placements != target.placements:
                self.log.call_python("redistribute")
            return redistribute(local, current, target, *args, **kwargs)

        return rebound(_REDISTRIBUTE, {"redistribute_local_tensor": counted})

    def _fsdp_groups(self) -> contextlib.AbstractContextManager[None]:
        """Count gathers and reductions of FSDP2, and their parameters."""

        def counting(name: str) -> Callable[..., Any]:
            original = getattr(resolve(_FSDP_GROUPS), name)

            def counted(parameters: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
                self.log.call_python("fsdp_group")
                self.log.call_python("fsdp_parameter", len(parameters))
                return original(parameters, *args, **kwargs)

            return counted

        return patched(_FSDP_GROUPS, {name: counting(name) for name in _FSDP_COLLECTIVES})

    def _fsdp1_gathers(self) -> contextlib.AbstractContextManager[None]:
        """Count gathers of FSDP1, whose groups are the handles of flat parameters."""
        owner, name = f"{_FSDP1_HANDLES}.FlatParamHandle", "_all_gather_flat_param"
        gather = getattr(resolve(owner), name)

        def counted(handle: Any, *args: Any) -> Any:
            self._count_flat_parameter(handle)
            return gather(handle, *args)

        return patched(owner, {name: counted})

    def _fsdp1_reductions(self) -> contextlib.AbstractContextManager[None]:
        """Count reductions of FSDP1's gradients."""

        def counting(name: str) -> Callable[..., Any]:
            reduce = getattr(resolve(_FSDP1_REDUCTIONS), name)

            def counted(state: Any, handle: Any) -> None:
                self._count_flat_parameter(handle)
                reduce(state, handle)

            return counted

        names = ("_reduce_grad", "_reduce_grad_no_shard")
        return patched(_FSDP1_REDUCTIONS, {name: counting(name) for name in names})

    def _count_flat_parameter(self, handle: Any) -> None:
        self.log.call_python("fsdp_group")
        self.log.call_python("fsdp_parameter", handle.flat_param._num_params)

    @contextlib.contextmanager
    def _ranges(self) -> Generator[None]:
        """Record the ranges that hold a communication call or a wait."""
        log, operators = self.log, self.operators

        def enter(name: str, *operands: Any) -> Any:
            return log.begin(
                name,
                "user_annotation",
                inputs=operators.describe(operands) if log.recording else None,
            )

        def leave(event: Any) -> None:
            log.end(event)

        names = {
            "_record_function_with_args_enter": enter,
            "_record_function_with_args_exit": leave,
            "_profiler_enabled": lambda: True,
        }
        with patched("torch.autograd", names):
            yield

    def resident_bytes(self, caches: Sequence[Tensor] = ()) -> ByMemoryClass:
        """Return the bytes of storages on the device between two steps, by class.

        `caches` are the tensors of a KV cache.
        """
        sizes = sizes_of(resident_storages("cuda", fake=True, caches=caches))
        return sizes | {"workspace": self.operators.workspaces.sizes}


_FAKE_TENSORS = "torch._subclasses.fake_tensor"


def _moved(_: Any, inputs: Any, kwargs: Any, device_ids: Sequence[Any]) -> Any:
    """Move the inputs of `DataParallel` to the one GPU of a rank, as its C++ code does."""
    device = torch.device("cuda", device_ids[0])
    moved = tree_map_only(Tensor, lambda tensor: tensor.to(device), (inputs, kwargs or {}))
    return (moved[0],), (moved[1],)


_TRACED_STAGE = "torch.distributed.pipelining.stage._PipelineStage"


def _stage_moved(stage: Any) -> None:
    """Move a stage that `torch.distributed.pipelining.pipeline` cut to the GPU."""
    # torch leaves a stage with fake parameters where it is, as one on the meta device.
    if not any(parameter.is_meta for parameter in stage.submod.parameters()):
        stage.submod.to(stage.device)


def _load_in_this_process(loader: Any) -> Any:
    """Return the iterator of a `DataLoader`, without worker processes."""
    # Workers inherit the modes by a fork. A batch that is large there is fake, and a fake tensor
    # cannot be sent to the captured process: the script would wait for it without end.
    kept = loader.num_workers, loader.timeout
    loader.num_workers = loader.timeout = 0
    try:
        return _dataloader._SingleProcessDataLoaderIter(loader)
    finally:
        loader.num_workers, loader.timeout = kept


def _is_in_kernel(_: object) -> bool:
    """Whether this thread runs a meta kernel, during which fake tensors are on the meta device."""
    return _torch._C._meta_in_tls_dispatch_include()


def _set_by_thread(_: object, __: bool) -> None:
    """Ignore the flag of the mode: torch sets one of the thread along with it."""


def _yes(_: object) -> bool:
    return True


def _nccl() -> bool:
    return True


_BackendOptions: Any = _torch._C._distributed_c10d.Backend.Options


class _OptionsOfNCCL(_BackendOptions):
    """What a script requests of NCCL; an emulated group uses the priority of its stream alone."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        _BackendOptions.__init__(self, "nccl")
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace()
        """Fields of NCCL's own configuration, such as `max_ctas`, that the script sets."""


class _ProcessGroupNCCL:
    """The class of no backend: emulated groups have none of NCCL's."""

    Options = _OptionsOfNCCL


def _nccl_class() -> list[contextlib.AbstractContextManager[None]]:
    """Return the patches that give a CPU build the class; none for a CUDA build."""
    owner = "torch.distributed.distributed_c10d"
    if hasattr(resolve(owner), "ProcessGroupNCCL"):
        return []
    return [
        patched(owner, {"ProcessGroupNCCL": _ProcessGroupNCCL}),
        patched("torch.distributed", {"ProcessGroupNCCL": _ProcessGroupNCCL}),
    ]


def _default_stream(_: int) -> int:
    return 0


def _accelerator(*_: object) -> torch.device:
    return torch.device("cuda")


@contextlib.contextmanager
def _mode(mode: Any) -> Generator[None]:
    """Run what is called in this context under a mode that other threads are in too."""
    # A mode's own `with` keeps what it restores in the mode, for one thread.
    _modes._push_mode(mode)
    try:
        yield
    finally:
        _modes._pop_mode(mode._mode_key if getattr(mode, "_mode_key", None) else None)


# It builds masks for fake tensors that it leaves out on a device, as it cannot read them.
_HUGGING_FACE = "transformers.utils.import_utils"


@contextlib.contextmanager
def _gpu_kernels() -> Generator[None]:
    """Let operators count as kernels of a GPU that only a CUDA build has.

    Without a CUDA kernel the dispatcher takes the operator's formula instead (for `silu_backward`
    five operators), before it asks the mode.
    """
    private = _torch._C
    library: Any = _torch.library.Library("aten", "IMPL")
    names: set[str] = {*private._dispatch_get_all_op_names()}
    for name in names:
        if not name.startswith("aten::"):
            continue
        has_kernel = functools.partial(private._dispatch_has_kernel_for_dispatch_key, name)
        # The only operator (torch 2.11) that a CUDA build has a kernel for and a CPU build has not.
        # torch 2.9 added its backward; before that, a GPU ran the formula.
        on_gpu_only = name == "aten::_fused_rms_norm" and f"{name}_backward" in names
        runs_on_gpu = has_kernel("CPU") or on_gpu_only
        if runs_on_gpu and has_kernel("CompositeImplicitAutograd") and not has_kernel("CUDA"):
            library.impl(name.removeprefix("aten::"), _not_here, "CUDA")
    try:
        yield
    finally:
        library._destroy()


def _has_foreach(tensors: Sequence[Tensor | None], device: torch.device) -> bool:
    """Whether torch has foreach kernels for tensors; its own check asks for their exact class."""
    # DTensor adds itself to torch's list.
    supported = (FakeTensor, *_foreach._foreach_supported_types)
    return device.type == "cuda" and all(t is None or type(t) in supported for t in tensors)


def _no(_: object) -> bool:
    return False


def _never() -> bool:
    return False


def _agreed(*_: object) -> None:
    """DDP compares the shapes of parameters with those of other ranks, in numbers."""


class _Logger(_distributed.Logger):
    """DDP's log, without the times of steps: only a CUDA build can take them."""

    def set_runtime_stats_and_log(self) -> None:
        """Do nothing."""


def _not_here(*_: object, **__: object) -> None:
    raise NotImplementedError("an operator ran on a GPU that is not there")


_SHARDING = "torch.distributed.tensor._sharding_prop"

_REDISTRIBUTE = "torch.distributed.tensor._redistribute"

_FSDP_GROUPS = "torch.distributed.fsdp._fully_shard._fsdp_param_group"

_FSDP_COLLECTIVES = ("foreach_all_gather", "foreach_reduce")

_FSDP1_HANDLES = "torch.distributed.fsdp._flat_param"

_FSDP1_REDUCTIONS = "torch.distributed.fsdp._runtime_utils"


@contextlib.contextmanager
def _shapes_inferred_apart() -> Generator[None]:
    """Let DTensor infer the shapes of results without the modes of the capture.

    It runs the operator on fake tensors of the global shape, which is no work of this rank.
    """
    propagator = resolve(f"{_SHARDING}.ShardingPropagator")
    infer = propagator._propagate_tensor_meta_non_cached

    def infer_apart(*args: Any, **kwargs: Any) -> Any:
        with _modes._disable_current_modes():
            return infer(*args, **kwargs)

    names = {"_propagate_tensor_meta_non_cached": infer_apart}
    with patched(f"{_SHARDING}.ShardingPropagator", names):
        yield


@contextlib.contextmanager
def emulated(
    gpu: EmulatedGpu | None, script: Path, routing: Routing | None, peers: object = None
) -> Generator[None]:
    """Dispatch operators to fake tensors inside the context, if there is an emulated GPU.

    Args:
        gpu: the GPU that the script sees; None runs on the device at hand.
        script: path of the script.
        routing: as for `EmulatedProcess.of`.
        peers: as for `EmulatedProcess.running`.
    """
    process = EmulatedProcess.of(gpu, script, routing)
    if process is None:
        yield
        return
    with process.installed(), process.running(peers):
        yield


@contextlib.contextmanager
def _multi_tensor_optimizers() -> Generator[None]:
    """Let torch choose foreach implementations of optimizers for fake parameters too."""
    supported: list[Any] = _optimizers._foreach_supported_types
    supported.append(FakeTensor)
    try:
        yield
    finally:
        supported.remove(FakeTensor)
