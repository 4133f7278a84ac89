"""Emulate a CUDA device in this process: operators run on fake tensors, and a log records them."""

import contextlib
import functools
import os
import sys
import threading
import warnings
import zipfile
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.data import dataloader

from onerank.capture.fake_tensors import as_subclass, is_combined
from onerank.capture.fake_world.recorder import Recorder
from onerank.capture.no_device import cuda_stubs
from onerank.capture.no_device.attention_backends import choose_attention
from onerank.capture.no_device.cuda_api import emulated_cuda
from onerank.capture.no_device.emulated_gpu import EmulatedGpu
from onerank.capture.no_device.event_log import EventLog
from onerank.capture.no_device.extensions.install import recorded_extensions
from onerank.capture.no_device.inductor import InductorOnShapes
from onerank.capture.no_device.operators import triton_kernels
from onerank.capture.no_device.operators.fake_operators import REAL_ELEMENTS, FakeOperators
from onerank.capture.no_device.operators.functional_collectives import (
    SYMMETRIC_MEMORY,
    fused_products,
)
from onerank.capture.no_device.operators.router_choices import RouterChoices
from onerank.capture.no_device.tensor_values import Known, UnknownValues
from onerank.capture.parallelize.experts.routing import Routing
from onerank.capture.patches import after_import, patched, rebound, resolve
from onerank.capture.profiling.allocator_snapshots import ByMemoryClass, sizes_of
from onerank.capture.profiling.step_memory import resident_storages
from onerank.ir.errors import CaptureError
from onerank.ir.notes import Note

_torch: Any = torch
_dataloader: Any = dataloader
_distributed: Any = torch.distributed
_modes: Any = _python_dispatch
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
        self.log = EventLog()
        self.values = UnknownValues(script)
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._collectives: dict[str, Callable[..., Any]] = {}
        self._saves_nothing = False
        self._routers = RouterChoices(routing)
        self.operators = FakeOperators(
            self.log, self.values, self._collectives, gpu.workspace_bytes, self._routers
        )
        self.inductor = InductorOnShapes(self.operators, self.gpu)

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

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Patch torch inside the context so that it reports the emulated GPU.

        Raises:
            CaptureError: this machine or this torch does not run fake CUDA tensors.
        """
        cuda_stubs.install()
        new_parameter = nn.Parameter.__new__
        subclass_of = _torch.Tensor._make_subclass
        resize = torch.UntypedStorage.resize_
        tensor_address, storage_address = Tensor.data_ptr, torch.UntypedStorage.data_ptr
        storages = self.operators.storages

        def parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
            # Exactly a tensor: a fake one or a subclass is left as it is.
            if type(data) is Tensor:
                data = self.fake(data)
            elif is_combined(data):
                # A module that moves makes one of a parameter of a subclass, whose `detach` has
                # not its class (bitsandbytes' `Params4bit`). On a GPU it sets the data instead.
                data = as_subclass(data.detach(), Tensor)
            return new_parameter(cls, data, requires_grad)

        def make_subclass(cls: Any, data: Any, requires_grad: bool = False, **options: Any) -> Any:
            # bitsandbytes makes its weights so. A parameter is fake, whatever its class.
            if issubclass(cls, nn.Parameter) and type(data) is Tensor and not data.is_meta:
                data = self.fake(data)
            if not isinstance(data, FakeTensor):
                return subclass_of(cls, data, requires_grad, **options)
            return as_subclass(data.detach(), cls).requires_grad_(requires_grad)

        def resize_storage(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            storages.resize(storage, size)
            return result

        def address_of_tensor(tensor: Tensor) -> int:
            if not isinstance(tensor, FakeTensor):
                return tensor_address(tensor)
            # Views of one storage differ by their offset, as real addresses do.
            return storages.address(tensor) + int(tensor.storage_offset()) * tensor.element_size()

        def address_of_storage(storage: Any) -> int:
            return storages.address_of_storage(storage) or storage_address(storage)

        with contextlib.ExitStack() as stack:
            # torch warns when Dynamo asks for the address of a fake storage that has none.
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            for context in (
                emulated_cuda(self.gpu, self.log),
                choose_attention(self.gpu),
                self._ranges(),
                self._functions(),
                patched("torch.nn.Parameter", {"__new__": staticmethod(parameter)}),
                patched(
                    "torch.Tensor",
                    {"data_ptr": address_of_tensor, "_make_subclass": staticmethod(make_subclass)},
                ),
                patched(
                    "torch.UntypedStorage",
                    {"resize_": resize_storage, "data_ptr": address_of_storage},
                ),
                # torch decides this by `torch.cuda.is_available`, which answers as on the GPU.
                patched(
                    _FAKE_TENSORS + ".FakeTensorMode",
                    {
                        "avoid_device_init": property(_yes),
                        "create_symbolic_nested_int": _refuse_nested,
                    },
                ),
                patched("torch.nn.DataParallel", {"scatter": _moved}),
                patched("torch.utils.data.DataLoader", {"_get_iterator": _load_in_this_process}),
                patched(
                    _FAKE_TENSORS + ".FakeTensor",
                    {
                        "__new__": staticmethod(_new_fake),
                        "data": _data,
                        "numpy": self._numpy_function(),
                        "tolist": self._tolist_function(),
                        "__format__": _format,
                        "__repr__": _repr,
                    },
                ),
                rebound("torch.distributed.distributed_c10d", {"is_nccl_available": _nccl}),
                *_nccl_class(),
                patched("torch", {"save": self._save_function(), "load": self._load_function()}),
                patched("torch", {name: _tensor_factory(name) for name in _TENSOR_FACTORIES}),
                patched("torch._C", {"_get_accelerator": _accelerator}),
                patched("torch._C", {"_cuda_getCurrentRawStream": _default_stream}),
                # The checks of its arguments compare numbers.
                patched("torch.distributions.Distribution", {"_validate_args": False}),
                self.inductor.installed(),
                patched("torch.utils", {"swap_tensors": _swap}),
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
                recorded_extensions(self.operators.launch, self.values),
                after_import(
                    _HUGGING_FACE,
                    lambda: patched(_HUGGING_FACE, {"is_fake_tensor": _no}),
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

    def _numpy_function(self) -> Callable[..., Any]:
        def numpy(tensor: Any, **_: Any) -> Any:
            numbers = self.operators.known.get(tensor)
            if numbers is None:
                numbers = self.values.numbers(tensor)
            with unset_fake_temporarily():
                return numbers.detach().numpy()

        return numpy

    def _tolist_function(self) -> Callable[..., Any]:
        def tolist(tensor: Any) -> Any:
            numbers = self.operators.known.get(tensor)
            # torch copies the whole tensor to the host; of a subclass it reads every element.
            tensor.cpu()
            with unset_fake_temporarily():
                if numbers is None:
                    numbers = torch.full(tensor.shape, self.values.scalar(tensor))
                return numbers.tolist()

        return tolist

    def _save_function(self) -> Callable[..., Any]:
        original = torch.save

        def save(value: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = tree_flatten(value)[0]
            if any(isinstance(getattr(t, "_local_tensor", t), FakeTensor) for t in tensors):
                self._saves_nothing = True
                # Scripts rename a checkpoint that they have written, or link to it.
                if args and isinstance(args[0], str | os.PathLike):
                    Path(args[0]).touch()
                return None
            return original(value, *args, **kwargs)

        return save

    def _load_function(self) -> Callable[..., Any]:
        original = torch.load

        def load(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            # Under a FakeTensorMode torch.load skips all numbers, also those of a data set, which
            # decide about shapes.
            try:
                return self._load_numbers(original, file, map_location, *args, **kwargs)
            except _OnlyShapesError:
                return original(file, map_location, *args, **kwargs)

        return load

    def _load_numbers(
        self, load: Callable[..., Any], file: Any, map_location: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Load a file; large tensors of floating-point numbers, such as weights, become fake.

        Raises:
            _OnlyShapesError: the file holds tensors of the GPU, or is large and cannot be mapped.
        """
        opened: Any = None if isinstance(file, str | os.PathLike) else file
        if opened is None and zipfile.is_zipfile(file):
            kwargs.setdefault("mmap", True)
        elif _size_of(file) > _READ_BYTES:
            raise _OnlyShapesError
        start = opened.tell() if opened is not None else 0

        def place(storage: Any, tag: str) -> Any:
            if not _is_on_cpu(storage, tag, map_location):
                raise _OnlyShapesError
            return storage

        try:
            with _modes._disable_current_modes():
                value = load(file, place, *args, **kwargs)
        except _OnlyShapesError:
            if opened is not None:
                opened.seek(start)
            raise

        def shaped(tensor: Any) -> Any:
            large = type(tensor) is Tensor and tensor.numel() > REAL_ELEMENTS
            return self.fake(tensor) if large and tensor.is_floating_point() else tensor

        return tree_map_only(Tensor, shaped, value)

    def notes(self) -> list[Note]:
        """Return notes on where the recorded step differs from the job's."""
        saved = Note(
            "torch.save wrote nothing, since no device computed the values",
            code="no-device-save-skipped",
        )
        return [
            *self.values.notes(),
            *self._routers.notes(),
            *self.operators.block_masks.notes(),
            *self.inductor.notes(),
            *([saved] if self._saves_nothing else []),
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

    @contextlib.contextmanager
    def _functions(self) -> Generator[None]:
        """Record the forward of each autograd function, whose node has no operator of its own."""
        original = torch.autograd.Function.__dict__["apply"]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            event = self.operators.begin_function(cls.__name__)
            try:
                return original.__func__(cls, *args, **kwargs)
            finally:
                self.log.end(event)

        with patched("torch.autograd.Function", {"apply": classmethod(apply)}):
            yield

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

_READ_BYTES = 1 << 28
"""Largest file that is read whole; a larger one is mapped into memory if its format allows it."""


class _OnlyShapesError(Exception):
    """A file of which only the shapes are loaded."""


def _size_of(file: Any) -> int:
    """Return the bytes of a path, or those after the position of an open file."""
    if isinstance(file, str | os.PathLike):
        return os.stat(file).st_size if os.path.isfile(file) else 0  # type: ignore[arg-type]
    position = file.tell()
    try:
        return file.seek(0, os.SEEK_END) - position
    finally:
        file.seek(position)


def _is_on_cpu(storage: Any, tag: str, map_location: Any) -> bool:
    """Whether `torch.load` leaves a storage on the CPU.

    Args:
        storage: the storage, on the CPU.
        tag: device on which it was saved.
        map_location: argument of `torch.load`.
    """
    if isinstance(map_location, dict):
        places: dict[str, Any] = dict(map_location)  # pyright: ignore[reportUnknownArgumentType]
        map_location = places.get(tag, tag)
    if callable(map_location):
        return map_location(storage, tag) is storage
    return torch.device(tag if map_location is None else map_location).type == "cpu"


_new_fake_of_torch: Any = FakeTensor.__new__


def _new_fake(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Create a fake tensor, or a parameter for a call with the arguments of `nn.Parameter`."""
    # The class of a fake parameter is FakeTensor. accelerate and diffusers load weights by
    # `type(parameter)(tensor, requires_grad=...)`, and empty them by
    # `type(parameter)(tensor, **parameter.__dict__)`, which holds attributes of the fake tensor.
    if args and isinstance(args[0], Tensor):
        kept = {name: kwargs[name] for name in ("requires_grad",) if name in kwargs}
        return nn.Parameter(*args, **kept)
    return _new_fake_of_torch(cls, *args, **kwargs)


_TENSOR_FACTORIES = ("tensor", "as_tensor")


def _tensor_factory(name: str) -> Callable[..., Any]:
    """Return a replacement of a function of torch that creates tensors from Python's numbers.

    Args:
        name: `tensor` or `as_tensor`.
    """
    create: Any = getattr(torch, name)

    @functools.wraps(create)
    def create_on_thread(*args: Any, **kwargs: Any) -> Any:
        # Without this flag of the thread, C++ copies the new tensor to its device, and no mode sees
        # the copy. FakeTensorMode sets it in the thread that enters the mode; the threads of a
        # backward do not enter it.
        lifts = _torch._C._only_lift_cpu_tensors()
        _torch._C._set_only_lift_cpu_tensors(True)
        try:
            return create(*args, **kwargs)
        finally:
            _torch._C._set_only_lift_cpu_tensors(lifts)

    return create_on_thread


def _refuse_nested(*_: Any, **__: Any) -> Any:
    raise CaptureError(
        "nested tensors have lengths that only a device holds, so their operators have no shapes "
        "without one\n  pad the sequences, or capture on a GPU",
        code="no-device-nested",
    )


def _moved(_: Any, inputs: Any, kwargs: Any, device_ids: Sequence[Any]) -> Any:
    """Move the inputs of `DataParallel` to the one GPU of a rank, as its C++ code does."""
    device = torch.device("cuda", device_ids[0])
    moved = tree_map_only(Tensor, lambda tensor: tensor.to(device), (inputs, kwargs or {}))
    return (moved[0],), (moved[1],)


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


_tensor_data: Any = _torch._C.TensorBase.data


def _set_data(tensor: Any, value: Any) -> None:
    _tensor_data.__set__(tensor, value)
    # The device and the numbers of a fake tensor are attributes, which torch does not replace.
    if isinstance(value, FakeTensor):
        tensor.fake_device = value.fake_device
        vars(tensor).pop(Known.ATTRIBUTE, None)
        if hasattr(value, Known.ATTRIBUTE):
            setattr(tensor, Known.ATTRIBUTE, getattr(value, Known.ATTRIBUTE))


_data = property(_tensor_data.__get__, _set_data)


def _yes(_: object) -> bool:
    return True


def _nccl() -> bool:
    return True


class _ProcessGroupNCCL:
    """The class of no backend: emulated groups have none of NCCL's."""


def _nccl_class() -> list[contextlib.AbstractContextManager[None]]:
    """Return the patch that gives a CPU build the class; none for a CUDA build."""
    owner = "torch.distributed.distributed_c10d"
    if hasattr(resolve(owner), "ProcessGroupNCCL"):
        return []
    return [patched(owner, {"ProcessGroupNCCL": _ProcessGroupNCCL})]


def _format(tensor: Any, specification: str) -> str:
    """Format the number of a 0-d tensor, as torch does for tensors of no subclass."""
    return format(tensor.item() if tensor.dim() == 0 else repr(tensor), specification)


def _repr(tensor: Any, **_: Any) -> str:
    """Describe a tensor without its values, as torch does on the meta device."""
    size = tuple(tensor.shape)
    return f"tensor(..., device='{tensor.device}', size={size}, dtype={tensor.dtype})"


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
    for name in private._dispatch_get_all_op_names():
        if not name.startswith("aten::"):
            continue
        has_kernel = functools.partial(private._dispatch_has_kernel_for_dispatch_key, name)
        if has_kernel("CPU") and has_kernel("CompositeImplicitAutograd") and not has_kernel("CUDA"):
            library.impl(name.removeprefix("aten::"), _not_here, "CUDA")
    try:
        yield
    finally:
        library._destroy()


def _has_foreach(tensors: Sequence[Tensor | None], device: torch.device) -> bool:
    """Whether torch has foreach kernels for tensors; its own check asks for their exact class."""
    plain = (Tensor, FakeTensor)
    return device.type == "cuda" and all(t is None or type(t) in plain for t in tensors)


def _no(_: object) -> bool:
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


_swap_real = torch.utils.swap_tensors


def _swap(first: Any, second: Any) -> None:
    """Exchange two tensors, as `torch.utils.swap_tensors` does, weak references or not."""
    if not isinstance(first, FakeTensor):
        _swap_real(first, second)
        return
    # torch moves a fake parameter by a swap, and refuses one with weak references. Those of this
    # process (of modules, optimizers) mean the object, which stays the parameter. It keeps its
    # attributes too, as a real parameter does, whose data torch replaces.
    fresh, replaced = dict(vars(second)), dict(vars(first))
    vars(first).pop(Known.ATTRIBUTE, None)
    vars(first).update(fresh)
    vars(second).clear()
    vars(second).update(replaced)
    _torch._C._swap_tensor_impl(first, second)


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
