"""A process in which a script meets a GPU that is not there."""

import contextlib
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_flatten, tree_map_only

from onerank.capture.fake_world.recorder import Recorder
from onerank.capture.no_device import cuda_stubs
from onerank.capture.no_device.attention_backends import choose_attention
from onerank.capture.no_device.cuda_api import emulated_cuda
from onerank.capture.no_device.emulated_gpu import EmulatedGpu
from onerank.capture.no_device.event_log import EventLog
from onerank.capture.no_device.fake_operators import FakeOperators
from onerank.capture.no_device.inductor import InductorOnShapes
from onerank.capture.no_device.tensor_values import Known, UnknownValues
from onerank.capture.patches import after_import, patched, rebound, resolve
from onerank.capture.profiling.allocator_snapshots import ByMemoryClass, sizes_of
from onerank.capture.profiling.step_memory import resident_storages
from onerank.ir.errors import CaptureError
from onerank.ir.notes import Note

_torch: Any = torch
_distributed: Any = torch.distributed
_modes: Any = _python_dispatch
# torch.optim hides the name of this module.
_optimizers: Any = sys.modules[torch.optim.Optimizer.__module__]


class EmulatedProcess:
    """A process in which operators run on shapes alone, and what they do.

    Attributes:
        gpu: the GPU that the script sees.
        log: receives operators and allocations.
        values: decides what a script reads.
        operators: the dispatch mode.
        inductor: compiles what the script compiles.
    """

    def __init__(self, gpu: EmulatedGpu, script: Path) -> None:
        self.gpu = gpu
        self.log = EventLog()
        self.values = UnknownValues(script)
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._collectives: dict[str, Callable[..., Any]] = {}
        self._saves_nothing = False
        self.operators = FakeOperators(
            self.log, self.values, self._collectives, gpu.workspace_bytes
        )
        self.inductor = InductorOnShapes(self.operators, self.gpu)

    @classmethod
    def of(cls, gpu: EmulatedGpu | None, script: Path) -> "EmulatedProcess | None":
        """Return the process for a capture without a device; None without an emulated GPU."""
        return cls(gpu, script) if gpu is not None else None

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Let torch answer as on the GPU, while the context lasts.

        Raises:
            CaptureError: this machine or this torch does not run fake CUDA tensors.
        """
        cuda_stubs.install()
        new_parameter = nn.Parameter.__new__
        resize = torch.UntypedStorage.resize_
        tensor_address, storage_address = Tensor.data_ptr, torch.UntypedStorage.data_ptr
        storages = self.operators.storages

        def parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
            # Exactly a tensor: a fake one or a subclass is left as it is.
            if type(data) is Tensor:
                data = self.fake(data)
            return new_parameter(cls, data, requires_grad)

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
                patched("torch.Tensor", {"data_ptr": address_of_tensor}),
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
                patched(
                    _FAKE_TENSORS + ".FakeTensor",
                    {
                        "data": _data,
                        "numpy": self._numpy_function(),
                        "tolist": self._tolist_function(),
                        "__format__": _format,
                    },
                ),
                rebound("torch.distributed.distributed_c10d", {"is_nccl_available": _nccl}),
                *_nccl_class(),
                patched("torch", {"save": self._save_function()}),
                patched("torch._C", {"_get_accelerator": _accelerator}),
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
                after_import(_SHARDING, _shapes_inferred_apart),
                after_import(_TRITON, self._triton_launches),
                after_import(_TRITON_TUNER, _first_configuration),
                after_import(
                    _HUGGING_FACE,
                    lambda: patched(_HUGGING_FACE, {"is_fake_tensor": _no}),
                ),
            ):
                stack.enter_context(context)
            yield

    @contextlib.contextmanager
    def running(self, peers: object) -> Generator[None]:
        """Run what is called in this context on shapes alone.

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

    @contextlib.contextmanager
    def _triton_launches(self) -> Generator[None]:
        """Record the launches of Triton kernels in the place of compiling and running them."""
        original = resolve(f"{_TRITON}.JITFunction").run

        def run(kernel: Any, *args: Any, **options: Any) -> Any:
            operands = [*args, *options.values()]
            if not any(isinstance(operand, FakeTensor) for operand in operands):
                return original(kernel, *args, **options)
            self.operators.launch(f"triton::{kernel.__name__}", operands)
            return None

        with patched(f"{_TRITON}.JITFunction", {"run": run}):
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
                return None
            return original(value, *args, **kwargs)

        return save

    def notes(self) -> list[Note]:
        """Return notes on where the recorded step differs from the job's."""
        saved = Note(
            "torch.save wrote nothing, since no device computed the values",
            code="no-device-save-skipped",
        )
        return [
            *self.values.notes(),
            *self.inductor.notes(),
            *([saved] if self._saves_nothing else []),
        ]

    def fake(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor like a real one."""
        with unset_fake_temporarily():
            return self._fake.from_tensor(tensor)

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


_TRITON = "triton.runtime.jit"
_TRITON_TUNER = "triton.runtime.autotuner"


def _first_configuration() -> contextlib.AbstractContextManager[None]:
    """Let Triton's tuner take the first configuration: there are no times to compare."""

    def run(tuner: Any, *args: Any, **options: Any) -> Any:
        return tuner.fn.run(*args, **options, **tuner.configs[0].all_kwargs())

    return patched(f"{_TRITON_TUNER}.Autotuner", {"run": run})


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
def emulated(gpu: EmulatedGpu | None, script: Path, peers: object = None) -> Generator[None]:
    """Run what is called in this context on shapes alone, if there is an emulated GPU.

    Args:
        gpu: the GPU that the script sees; None runs on the device at hand.
        script: path of the script.
        peers: as for `EmulatedProcess.running`.
    """
    process = EmulatedProcess.of(gpu, script)
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
