"""Emulate a CUDA device in this process: operators run on fake tensors, and a log records them."""

import contextlib
import threading
import warnings
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils import _python_dispatch

from onerank.capture.fake_world.recorder import Recorder
from onerank.capture.no_device import cuda_stubs, generation_ends
from onerank.capture.no_device.attention_backends import choose_attention
from onerank.capture.no_device.cuda_api import emulated_cuda
from onerank.capture.no_device.device_memory import DeviceMemory
from onerank.capture.no_device.emulated_gpu import EmulatedGpu
from onerank.capture.no_device.event_log import EventLog
from onerank.capture.no_device.extensions.install import recorded_extensions
from onerank.capture.no_device.fake_tensor_methods import (
    DATA_OF_PLAIN,
    TENSOR_FACTORIES,
    creates_parameter,
    ctc_loss_with_lengths,
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
from onerank.capture.no_device.operators.router_choices import RouterChoices
from onerank.capture.no_device.python_calls import logged_python_calls
from onerank.capture.no_device.saved_files import SavedFiles
from onerank.capture.no_device.tensor_values import UnknownValues
from onerank.capture.no_device.torch_without_gpu import torch_without_gpu
from onerank.capture.parallelize.experts.routing import Routing
from onerank.capture.patches import after_import, overridden_kernels, patched, rebound, resolve
from onerank.capture.profiling.allocator_snapshots import ByMemoryClass, sizes_of
from onerank.capture.profiling.step_memory import resident_storages
from onerank.ir.errors import ScriptError
from onerank.ir.notes import Note

_torch: Any = torch
_modes: Any = _python_dispatch

_FAKE_TENSOR = "torch._subclasses.fake_tensor.FakeTensor"

_COMPILED_OPTIMIZER = "torch._dynamo.variables.optimizer"

_FAKE_TENSOR_MODE = "torch._subclasses.fake_tensor.FakeTensorMode"


_REDUCER = "torch._C._distributed_c10d.Reducer"


class BucketRebuilds:
    """Counts how often reducers rebuild their buckets, which each does once.

    The buckets follow the order of the gradients in an earlier backward: the first, or with
    `static_graph` the second, as the first learns which parameters take part.

    Attributes:
        count: rebuilds so far.
    """

    def __init__(self) -> None:
        self.count = 0

    @contextlib.contextmanager
    def counted(self) -> Generator[None]:
        """Count inside the context."""
        if not torch.distributed.is_available():
            yield
            return
        from torch._C._distributed_c10d import Reducer

        rebuild: Any = Reducer._rebuild_buckets

        def rebuild_buckets(reducer: Any) -> bool:
            rebuilt: bool = rebuild(reducer)
            self.count += rebuilt
            return rebuilt

        with patched(_REDUCER, {"_rebuild_buckets": rebuild_buckets}):
            yield


class EmulatedProcess:
    """A process in which operators run on fake tensors.

    Attributes:
        gpu: the GPU that the script sees.
        log: receives operators and allocations.
        values: decides what a script reads.
        operators: the dispatch mode.
        inductor: compiles what the script compiles.
        rebuilds: counts how often DDP ordered its buckets anew.
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
        self.rebuilds = BucketRebuilds()

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
        with contextlib.ExitStack() as stack:
            # torch warns when Dynamo asks for the address of a fake storage that has none.
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            for context in (
                emulated_cuda(self.gpu, self.log),
                torch_without_gpu(),
                choose_attention(self.gpu),
                flash_attention_3(),
                logged_python_calls(self.operators, self.log),
                self.inductor.installed(),
                self._files.installed(),
                self.rebuilds.counted(),
                self._fake_tensors(),
                self._kernels_of_scripts(),
                self._lengths_of_generation(),
                after_import(_COMPILED_OPTIMIZER, self._states_of_compiled_optimizers),
            ):
                stack.enter_context(context)
            yield

    @contextlib.contextmanager
    def _fake_tensors(self) -> Generator[None]:
        """Give fake tensors what a tensor on a GPU has: an address, sizes, factories."""
        tensor_address, of_storage = storage_functions(self.operators.storages)
        subclass = staticmethod(makes_subclass(self.fake))
        with (
            patched("torch.nn.Parameter", {"__new__": staticmethod(creates_parameter(self.fake))}),
            patched("torch.Tensor", {"data_ptr": tensor_address, "_make_subclass": subclass}),
            patched("torch.Tensor", {"data": DATA_OF_PLAIN}),
            patched("torch.UntypedStorage", of_storage),
            patched(_FAKE_TENSOR, fake_tensor_methods(self.operators, self.values)),
            patched(_FAKE_TENSOR_MODE, {"create_symbolic_nested_int": create_nested_int}),
            patched(NESTED, {"get_tensor_symint": keeps_ragged_size()}),
            patched("torch", {name: tensor_factory(name) for name in TENSOR_FACTORIES}),
            patched("torch", {"ctc_loss": ctc_loss_with_lengths(self.operators.known)}),
            patched("torch.utils", {"swap_tensors": swap}),
            rebound("torch.nn.functional", {"one_hot": one_hot_on_gpu()}),
            patched(recurrent_layers.OWNER, recurrent_layers.recurrent_functions()),
            self._scalar_reads(),
        ):
            yield

    @contextlib.contextmanager
    def _kernels_of_scripts(self) -> Generator[None]:
        """Record the kernels that a script launches itself: Triton's, CUDA's, an extension's."""
        launch = self.operators.launch
        with (
            after_import(triton_kernels.MODULE, lambda: triton_kernels.recorded_launches(launch)),
            after_import(triton_kernels.TUNER, triton_kernels.first_configuration),
            patched("torch.cuda", {"_compile_kernel": self._compile_kernel}),
            recorded_extensions(launch, self.values, self.operators.known),
        ):
            yield

    @contextlib.contextmanager
    def _lengths_of_generation(self) -> Generator[None]:
        """End each generation at its length, as no token has a value."""
        known = self.operators.known.get
        with (
            after_import(generation_ends.CRITERIA, lambda: generation_ends.ends_at_length(known)),
            after_import(generation_ends.LOOPS, lambda: generation_ends.beams_end_at_length(known)),
        ):
            yield

    @contextlib.contextmanager
    def _states_of_compiled_optimizers(self) -> Generator[None]:
        """Create the states of an optimizer on shapes while Dynamo, without modes, traces it."""
        owner = f"{_COMPILED_OPTIMIZER}.OptimizerVariable"
        call: Callable[..., Any] = resolve(owner).call_method

        def call_method(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            if name != "_init_group":
                return call(variable, tx, name, args, kwargs)
            optimizer = variable.value
            create = optimizer._init_group

            def create_on_shapes(*args: Any, **kwargs: Any) -> Any:
                with _mode(self._fake), _mode(self.operators):
                    return create(*args, **kwargs)

            vars(optimizer)["_init_group"] = create_on_shapes
            try:
                return call(variable, tx, name, args, kwargs)
            finally:
                del vars(optimizer)["_init_group"]

        with patched(owner, {"call_method": call_method}):
            yield

    @contextlib.contextmanager
    def running(self, peers: object) -> Generator[None]:
        """Dispatch operators to fake tensors inside the context.

        Args:
            peers: a started `Recorder` emulates the collectives.

        Raises:
            ScriptError: the script failed; it names the last placeholder, which may be the cause.
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
            try:
                yield
            except ScriptError as error:
                hint = self.values.hint()
                if error.code != "script-raised" or not hint:
                    raise
                text, traceback = f"{error}\n  {hint}", error.script_traceback
                raise ScriptError(text, traceback, code=error.code) from error

    def notes(self) -> list[Note]:
        """Return notes on where the recorded step differs from the job's."""
        return [
            *self.values.notes(),
            *self._routers.notes(),
            *self.operators.zero_patterns.notes(),
            *self.operators.detections.notes(),
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

    def _scalar_reads(self) -> contextlib.AbstractContextManager[None]:
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

        return overridden_kernels(
            "aten", [("_local_scalar_dense", device, read) for device in ("CPU", "CUDA")]
        )

    def _compile_kernel(self, kernel_source: str, kernel_name: str, *_: Any, **__: Any) -> Any:
        """Return a kernel of CUDA source, as `torch.cuda._compile_kernel` does."""
        return CudaSourceKernel(kernel_source, kernel_name, self.operators.launch)

    def resident_bytes(self, caches: Sequence[Tensor] = ()) -> ByMemoryClass:
        """Return the bytes of storages on the device between two steps, by class.

        `caches` are the tensors of a KV cache.
        """
        sizes = sizes_of(resident_storages("cuda", fake=True, caches=caches))
        return sizes | {"workspace": self.operators.workspaces.sizes}


@contextlib.contextmanager
def _mode(mode: Any) -> Generator[None]:
    """Run what is called in this context under a mode that other threads are in too."""
    # A mode's own `with` keeps what it restores in the mode, for one thread.
    _modes._push_mode(mode)
    try:
        yield
    finally:
        _modes._pop_mode(mode._mode_key if getattr(mode, "_mode_key", None) else None)


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
