"""Run operators on fake tensors, and record them.

Tensors on the GPU, parameters, and tensors on the CPU that are computed from either are fake: they
have a shape, strides, a dtype and a device, but no numbers. Everything else on the CPU is real and
computed: data loaders, masks, schedules, counters.

If the numbers of all inputs of a small tensor on the GPU are known, its numbers are computed on the
CPU too (`Known`). Token counts and loss scales that a script reads back are therefore right, as
long as they do not depend on parameters.
"""

import itertools
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.out_dtype import out_dtype, out_dtype_dense
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from onerank.capture.fake_tensors import is_integral, mark_written
from onerank.capture.no_device.emulated_gpu import EmulatedGpu
from onerank.capture.no_device.event_log import (
    Describer,
    EventLog,
    Operands,
    RecordedEvent,
    Shaped,
)
from onerank.capture.no_device.operators.autograd_ranges import AutogradRanges, is_of_reducer
from onerank.capture.no_device.operators.block_masks import FLEX_ATTENTION, BlockMasks
from onerank.capture.no_device.operators.chosen_indices import ChosenIndices
from onerank.capture.no_device.operators.detections import Detections
from onerank.capture.no_device.operators.encoder_layers import parts_of_encoder
from onerank.capture.no_device.operators.fake_results import FakeResults
from onerank.capture.no_device.operators.flash_attention_3 import python_kernel
from onerank.capture.no_device.operators.functional_collectives import FunctionalCollectives
from onerank.capture.no_device.operators.gpu_operators import (
    inner_of,
    run_before,
)
from onerank.capture.no_device.operators.known_results import KnownResults
from onerank.capture.no_device.operators.operator_calls import (
    FUNCTIONAL,
    OperatorCall,
    OperatorSchema,
    blocks_host,
    is_cuda_device,
    is_on_gpu,
    is_same_data,
    tensors_in,
)
from onerank.capture.no_device.operators.router_choices import RouterChoices
from onerank.capture.no_device.operators.sequence_boundaries import with_lengths
from onerank.capture.no_device.operators.sparse_tensors import SparseTensors
from onerank.capture.no_device.operators.torch_factories import TorchFactories
from onerank.capture.no_device.operators.triton_kernels import WRAPPED, KernelLaunch, wrapped_launch
from onerank.capture.no_device.operators.workspaces import Workspaces
from onerank.capture.no_device.operators.zero_patterns import ZeroPatterns
from onerank.capture.no_device.tensor_values import (
    Known,
    Storages,
    UnknownValues,
)
from onerank.ir import GeneratedWork
from onerank.ir.python_calls import REDUCER

# torch's dispatcher and autograd's nodes have no public names and no types.
_modes: Any = _python_dispatch
_torch: Any = torch

REAL_ELEMENTS = 1 << 20
"""Largest tensor of floats that is created on the CPU with its numbers: 4 MB in 32 bits. Larger
ones are weights of a model that is built on the CPU, and are fake."""

# Largest tensor of integers or bools that is created on the CPU with its numbers: 1 GB. A script
# reads the tokens of a data set into one, up to 200 MB in fineweb's files.
_REAL_INTEGER_BYTES = 1 << 30

# Operators between two calls of the listener. They take less than a second.
_LISTENED = 512

_COMPOSITE = _torch._C.DispatchKey.CompositeExplicitAutograd

_CUDA = _torch._C.DispatchKey.CUDA

_DEVICE = _torch.ops.prim.device.default

_UNRECORDED = ("prim", "inductor")

_DTENSORS = "torch.distributed.tensor"

# Operators of asynchronous tensor parallelism: Python calls products and copies on two streams.
_FUSED_WITH_COLLECTIVES = "symm_mem"

# They read a flag of the tensor on the host.
_QUERIES = ("is_coalesced",)

_WITHOUT_EFFECT = ("record_stream", "_assert_async", "_assert_scalar")

# It creates a tensor on the numbers of a file, which are known.
_MAPPED_FILE = "from_file"

# A loss scaler's check of gradients: as all are finite, the flag that it sets stays 0.
_CHECKS = ("_amp_foreach_non_finite_check_and_unscale_",)

_ZEROS = ("zero_", "_foreach_zero_")

# Composite operators that copy a tensor into a new one.
_COPIES = ("clone", "_to_copy")

_PLAIN = (Tensor, nn.Parameter, FakeTensor)


class FakeOperators(TorchDispatchMode):
    """The dispatch mode of a capture without a device.

    Attributes:
        storages: storages of all fake tensors.
        known: numbers of the small fake tensors that have known ones.
        workspaces: memory that cuBLAS would keep.
        describe: describes operands for the log.
        block_masks: counts what flex attention computes.
        zero_patterns: which elements of tensors with unknown numbers are zero.
        routers: gives the choices of routers.
        detections: gives the sizes of a detector's selections.
        count: operators so far.
        listener: called every few hundred operators, for progress within a step.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: Dynamo traces with this mode off, and compiled code runs with it on."""
        return True

    def __init__(
        self,
        log: EventLog,
        unknown: UnknownValues,
        collectives: Mapping[str, Callable[..., Any]],
        gpu: EmulatedGpu,
        routers: RouterChoices,
    ) -> None:
        """Create the mode; `FakeTensorMode` has to be on below it.

        Args:
            log: receives the operators.
            unknown: decides what a script reads from an unknown tensor.
            collectives: c10d operator without namespace -> its emulation.
            gpu: the emulated GPU, which decides the sizes of workspaces.
            routers: gives the choices of routers.
        """
        super().__init__()
        self._log = log
        self._autograd = AutogradRanges(log)
        self._unknown = unknown
        self._collectives = collectives
        self.storages = Storages(log)
        self.known = Known(self.storages)
        self.zero_patterns = ZeroPatterns(self.known, self.storages, unknown)
        self.routers = routers
        self._chosen = ChosenIndices()
        self.detections = Detections()
        self._known_results = KnownResults(self.known, unknown, routers)
        self._results = FakeResults(unknown, self._known_results, self.detections)
        self.workspaces = Workspaces(log, gpu.workspace_bytes, gpu.sm_count)
        self.describe = Describer(self.storages.number)
        self._functional = FunctionalCollectives(self.storages.number)
        self._sparse = SparseTensors(self, self.launch, self.known, unknown)
        self._schemas: dict[Any, OperatorSchema] = {}
        self._factories = TorchFactories()
        self.block_masks = BlockMasks(self.known.get)
        self.count = 0
        self.listener: Callable[[], None] | None = None
        # Reentrant, since an operator's parts come back to this mode on the same thread.
        self._lock = threading.RLock()
        self._emulating = 0  # communication calls that run: their operators are no work of the job
        self._composites = 0  # operators that run whose parts belong to fake tensors

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        # C++ asks for the device, several times in each operator. torch's own answer would be the
        # meta device, on which fake tensors are.
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        # FakeTensorMode keeps the state of a call in the mode, for one thread at a time.
        with self._lock, self._factories.of_torch():
            self.count += 1
            if self.count % _LISTENED == 0 and self.listener is not None:
                self.listener()
            return self._dispatch(func, types, args, kwargs)

    def _dispatch(  # noqa: PLR0911  one line per kind of operator
        self, func: Any, types: Sequence[type], args: Any, kwargs: Any
    ) -> Any:
        subclasses = [
            each for each in types if each not in _PLAIN and not issubclass(each, FakeTensor)
        ]
        if subclasses:
            # A subclass such as DTensor runs operators on what it wraps.
            if self._log.recording and not self._emulating:
                self._count_dispatch(func, subclasses, args)
            return NotImplemented
        if isinstance(func, HigherOrderOperator):
            return self._run_higher_order(func, args, kwargs or {})
        schema = self._schemas.get(func)
        if schema is None:
            schema = self._schemas[func] = OperatorSchema.of(func)
        kwargs = dict(kwargs or {})
        if schema.is_decomposed:
            # Autograd's dispatch keys decompose `linear`, `to` or `matmul` before they arrive here,
            # and a profile has their parts. In inference mode, and within other operators, nothing
            # does.
            with self:
                return func.decompose(*args, **kwargs)
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False  # pinned memory needs a driver
        if schema.namespace == "profiler":
            return self._autograd.annotate(schema.base, args)
        # DDP's reducer insists on True for a tensor that it pinned.
        if schema.base == "is_pinned":
            return True
        run_parts = self._sparse.parts_of(schema.base, args)
        if run_parts is not None:
            return run_parts(*args, **kwargs)
        if schema.namespace in _UNRECORDED or schema.base in _QUERIES:
            return func(*args, **kwargs)
        tensors = tuple(tensors_in((*args, *kwargs.values())))
        call = OperatorCall(func, schema, args, kwargs, tensors)
        names_gpu = self._names_gpu(args, kwargs)
        fakes = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if not fakes and not schema.communicates and not names_gpu:
            return self._run_on_cpu(call)
        return self._record(call)

    def _names_gpu(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether an operator creates its result on the GPU.

        Raises:
            CaptureError: the arguments name a GPU that the rank does not have.
        """
        # Nested tensors name it by position.
        given = [each for each in args if isinstance(each, torch.device)]
        named = (*given, kwargs.get("device"))
        gpus = [torch.device(each) for each in named if each is not None and is_cuda_device(each)]
        for gpu in gpus:
            # Without this check, the autograd engine would fail on an assertion of torch.
            if gpu.index:
                self._unknown.refuse_gpu(gpu)
        return bool(gpus)

    def _count_dispatch(self, func: Any, subclasses: Sequence[type], args: Any) -> None:
        """Count an operator that a subclass of Tensor dispatches in Python."""
        if getattr(func, "namespace", "") in _UNRECORDED:
            return
        dtensor: Any = getattr(sys.modules.get(_DTENSORS), "DTensor", None)
        if dtensor is None or not any(issubclass(each, dtensor) for each in subclasses):
            self._log.call_python("subclass")
            return
        tracked = torch.is_grad_enabled() or _torch._C._current_graph_task_id() != -1
        self._log.call_python("dtensor" if tracked else "dtensor_untracked")
        lists = [each for each in args if isinstance(each, list | tuple)]
        listed = sum(isinstance(each, dtensor) for each in itertools.chain.from_iterable(lists))
        self._log.call_python("dtensor_listed", listed)

    def read_scalar(self, tensor: Tensor) -> Any:
        """Return the number of a fake tensor of one element, and record that the host reads it.

        For reads that bypass the dispatch modes.
        """
        with self._lock:
            return self._dispatch(_torch.ops.aten._local_scalar_dense.default, (), (tensor,), None)

    def _run_higher_order(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator that takes functions: DTensor's random numbers, flex attention."""
        # Around the operator only the generator's state changes.
        if func.name() == "run_dtensor_rng_op":
            _, _, drawing, *rest = args
            with self:
                return drawing(*rest, **kwargs)
        if func is out_dtype:
            # A matrix product of integers on a GPU runs as `_int_mm`, and a profile shows that.
            with self:
                return out_dtype_dense(*args, **kwargs)
        if func is WRAPPED:
            names = ("kernel_idx", "constant_args_idx", "kwargs")
            return self.launch(wrapped_launch(*(kwargs[name] for name in names)))
        event = self._begin(f"aten::{func.name()}")
        if event is not None:
            operands = [*args, *kwargs.values()]
            if func.name() in FLEX_ATTENTION:
                operands.append(self.block_masks.pairs_of(func.name(), operands))
            event.inputs = self.describe(operands)
        try:
            result = func(*args, **kwargs)
            if event is not None:
                event.outputs = self.describe(result if isinstance(result, tuple) else (result,))
                event.on_device = any(tensor.is_cuda for tensor in tensors_in((result,)))
            return result
        finally:
            self._log.end(event)

    def _run_on_cpu(self, call: OperatorCall) -> Any:
        """Run an operator on real tensors; a large result of a factory is fake."""
        if not call.tensors and call.schema.base != _MAPPED_FILE:
            result = self._results.of_factory(call)
            results = [*tensors_in((result,))]
            large = any(map(_is_large, results))
            if large or self._composites or any(tensor.is_meta for tensor in results):
                return result
        with unset_fake_temporarily():
            return call.func(*call.args, **call.kwargs)

    def _record(self, call: OperatorCall) -> Any:
        """Run an operator with fake operands, and record it."""
        schema = call.schema
        in_place = self._autograd.writes_in_place(call)
        kernel = parts_of_encoder(call) or python_kernel(call)
        prepared = self._prepare(call) if kernel is None else None
        event = self._begin(f"{schema.name}_" if in_place else schema.name)
        if event is not None and not schema.is_view:
            event.inputs = self._describe_inputs(schema.name, call.operands)
        try:
            if kernel is not None:
                # A profile shows the operators that it calls inside this one.
                with self:
                    result = kernel(*call.args, **call.kwargs)
            else:
                result = self._write_in_place(call) if in_place else self._run(call)
            del prepared
            outputs = [*tensors_in((result,))]
            # An operator on empty tensors launches nothing.
            on_device = any(
                is_on_gpu(tensor) and tensor.numel() for tensor in (*call.tensors, *outputs)
            ) and not (schema.base == "copy_" and is_same_data(*call.tensors[:2]))
            for tensor in outputs:
                # The indices and values of a sparse tensor have storages, and it has none.
                if isinstance(tensor, FakeTensor) and tensor.layout == torch.strided:
                    self.storages.number(tensor)
            if on_device:
                self.workspaces.use(call, outputs)
            if event is not None:
                event.on_device = on_device
                if kernel is None and not schema.is_view:
                    self._describe_results(call, result, event)
                if on_device and blocks_host(call, event.name.removeprefix("aten::")):
                    self._log.wait_on_host(event.stream)
            return result
        finally:
            self._log.end(event)

    def _describe_inputs(self, name: str, operands: Sequence[Any]) -> Operands:
        return self.describe(with_lengths(name, operands, self.known.get))

    def _describe_results(self, call: OperatorCall, result: Any, event: RecordedEvent) -> None:
        results = result if isinstance(result, tuple) else (result,)
        if result is None and call.schema.namespace != "aten":
            # Without results its operands show what a custom operator writes.
            results = tuple(call.written())
        event.outputs = self.describe(results)
        if not event.on_device:
            return
        operands = call.operands
        # The arguments that an operator writes are the last ones. Those of FSDP pass them on.
        if event.name.startswith("aten::"):
            operands = operands[: len(operands) - len(call.given_results())]
        inner = inner_of(event.name, operands, result)
        if inner is not None:
            event.name = inner.name
            event.inputs = self._describe_inputs(inner.name, inner.args)
            if inner.results is not None:
                event.outputs = self.describe(inner.results)

    def _prepare(self, call: OperatorCall) -> object:
        """Run the operators that an operator's CUDA implementation calls first."""
        schema = call.schema
        if not schema.is_prepared or schema.is_composite or not any(map(is_on_gpu, call.tensors)):
            return None
        with self:
            return run_before(schema.name, call.operands)

    def _write_in_place(self, call: OperatorCall) -> Any:
        """Return the first operand of an operator that autograd runs in place."""
        self._forget_numbers(call.args[0])
        return call.args[0]

    def _forget_numbers(self, written: Tensor) -> None:
        """Forget what is known of a tensor's numbers, which an operator or a kernel wrote."""
        self.known.spoil(written)
        self.zero_patterns.forget(written)
        mark_written(written, zero=False)

    def begin_function(self, name: str) -> RecordedEvent | None:
        """Begin the forward of an autograd function, with the number that its node will get."""
        if self._emulating or not self._log.recording:
            return None
        self._autograd.follow()
        self._log.call_python("function")
        return self._log.begin(name, sequence=self._autograd.number_of_function())

    def launch(self, launch: KernelLaunch) -> None:
        """Record a kernel that Python launches without an operator."""
        self._chosen.use(launch.reads)
        event = self._begin(launch.name)
        if event is not None:
            event.inputs = self._describe_inputs(launch.name, launch.reads)
            event.outputs = self.describe(launch.writes)
            event.on_device = True
            self._log.end(event)
        # Without an analysis of its source, it may write each of its tensors.
        for tensor in launch.writes or launch.tensors:
            self._forget_numbers(tensor)
        if launch.choice is not None:
            self.known.overwrite(launch.choice.result, self.routers.fused(launch.choice))

    def launch_generated(
        self, name: str, reads: Sequence[Shaped], writes: Sequence[Shaped], work: GeneratedWork
    ) -> None:
        """Record a kernel that Inductor generated.

        Args:
            name: as Inductor names it.
            reads: tensors that it reads.
            writes: tensors that it writes.
            work: its FLOPs and instructions.
        """
        event = self._begin(name)
        if event is not None:
            event.work = work
            event.inputs, event.outputs = self.describe(reads), self.describe(writes)
            event.on_device = True
            self._log.end(event)
        for written in writes:
            # Its numbers are known so far: those of `empty_strided`, which count as zeros.
            self._forget_numbers(written.storage)

    def _begin(self, name: str) -> RecordedEvent | None:
        if self._emulating or not self._log.recording:
            return None
        if is_of_reducer(self._autograd.follow(), name):
            self._log.call_python(REDUCER)
        return self._log.begin(
            name,
            sequence=self._autograd.number_of_operator(),
            untracked=self._autograd.is_untracked(),
        )

    def follow_backward(self) -> None:
        """Open the range of the autograd node that runs on this thread."""
        self._autograd.follow()

    def _run(self, call: OperatorCall) -> Any:
        schema = call.schema
        if schema.communicates:
            for tensor in call.tensors:
                self.zero_patterns.forget(tensor)
        if schema.namespace == "c10d":
            return self._emulate(self._collectives[schema.base], call)
        if schema.namespace.startswith(FUNCTIONAL):
            with self:
                return self._functional.run(schema.base, call.operands)
        if schema.base == "_local_scalar_dense":
            return self._read(call.args[0])
        if schema.base in _WITHOUT_EFFECT:
            return None
        if schema.namespace == _FUSED_WITH_COLLECTIVES:
            with self:
                return call.func._op_dk(_CUDA, *call.args, **call.kwargs)
        numbers = self._known_results.numbers(call)
        if numbers is None:
            numbers = self.zero_patterns.numbers(call)
        masks = self.zero_patterns.of_results(call) if numbers is None else None
        result = self._run_parts(call) if self._has_parts(call) else _FAILED
        # Without results no shape is needed: not all fused optimizers have a fake implementation.
        if result is _FAILED:
            returns = call.func._schema.returns
            result = self._results.of(call, numbers) if returns else None
        if numbers is not None:
            self.known.set(result, numbers)
        elif not schema.is_view and schema.base not in _CHECKS:
            for tensor in call.written():
                self.known.spoil(tensor)
                mark_written(tensor, zero=schema.base in _ZEROS)
        self.zero_patterns.follow(call, result, masks)
        self._chosen.follow(call, result, self.routers.take_use())
        self.detections.follow(call, result)
        self._sparse.follow(call, result)
        return result

    def _has_parts(self, call: OperatorCall) -> bool:
        """Return whether the operators that an operator calls run one by one."""
        if not call.schema.is_composite:
            return False
        # Only a recorded step shows the parts of a copy, which allocate nothing but its result.
        copies = call.schema.base in _COPIES and call.is_fake
        return self._log.recording or not copies

    def _emulate(self, emulation: Callable[..., Any], call: OperatorCall) -> Any:
        """Emulate a communication call: known numbers move, and no operator is recorded."""
        self._emulating += 1
        try:
            with self:
                return emulation(*call.args, **call.kwargs)
        finally:
            self._emulating -= 1

    def _run_parts(self, call: OperatorCall) -> Any:
        """Run an operator's kernel for every backend, whose parts this mode records in turn."""
        mark = self._log.mark()
        self._composites += 1
        try:
            with self:
                return call.func._op_dk(_COMPOSITE, *call.args, **call.kwargs)
        except RuntimeError:
            # The kernel reads numbers, or the memory of a tensor: as one operator it has none.
            self._log.forget_since(mark)
            # Later calls of the operator skip the attempt.
            self._schemas[call.func] = replace(call.schema, is_composite=False)
            return _FAILED
        finally:
            self._composites -= 1

    def _read(self, tensor: Tensor) -> Any:
        numbers = self.known.get(tensor)
        if numbers is None:
            return self._unknown.scalar(tensor)
        with unset_fake_temporarily():
            return numbers.item()


_FAILED = object()


def _is_large(tensor: Tensor) -> bool:
    """Return whether a tensor that is created on the CPU is too large to keep its numbers."""
    if is_integral(tensor.dtype):
        return tensor.nbytes > _REAL_INTEGER_BYTES
    return tensor.numel() > REAL_ELEMENTS
