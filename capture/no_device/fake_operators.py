"""Run operators on fake tensors, and record them.

Tensors on the GPU, parameters, and tensors on the CPU that are computed from either are fake: they
have a shape, strides, a dtype and a device, but no numbers. Everything else on the CPU is real and
computed: data loaders, masks, schedules, counters.

If the numbers of all inputs of a small tensor on the GPU are known, its numbers are computed on the
CPU too (`Known`). Token counts and loss scales that a script reads back are therefore right, as
long as they do not depend on parameters.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.out_dtype import out_dtype, out_dtype_dense
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from onerank.capture.fake_tensors import KNOWN_ELEMENTS, is_small, mark_written
from onerank.capture.no_device.block_masks import FLEX_ATTENTION, BlockMasks
from onerank.capture.no_device.event_log import Describer, EventLog, RecordedEvent
from onerank.capture.no_device.fake_kernels import RepeatedCalls, lacks_fake, shapes_of
from onerank.capture.no_device.functional_collectives import FunctionalCollectives
from onerank.capture.no_device.gpu_operators import (
    Shaped,
    WrappedNumber,
    has_preparation,
    inner_of,
    run_before,
)
from onerank.capture.no_device.router_choices import CHOICE, RouterChoices
from onerank.capture.no_device.tensor_values import (
    Known,
    Storages,
    UnknownValues,
    Workspaces,
)
from onerank.capture.no_device.triton_kernels import WRAPPED, TritonLaunch, wrapped_launch

# torch's dispatcher and autograd's nodes have no public names and no types.
_torch: Any = torch

REAL_ELEMENTS = 1 << 20
"""Largest tensor of floats that is created on the CPU with its numbers: 4 MB in 32 bits. Larger
ones are weights of a model that is built on the CPU."""

# Largest tensor of integers or bools that is created on the CPU with its numbers: 1 GB. A script
# reads the tokens of a data set into one, up to 200 MB in fineweb's files.
_REAL_INTEGER_BYTES = 1 << 30

_COMPOSITE = _torch._C.DispatchKey.CompositeExplicitAutograd

_CUDA = _torch._C.DispatchKey.CUDA

_UNRECORDED = ("prim", "inductor")

# Namespaces of DTensor's collectives.
_FUNCTIONAL = ("_c10d_functional", "_dtensor")

# Operators of asynchronous tensor parallelism: Python calls products and copies on two streams.
_FUSED_WITH_COLLECTIVES = "symm_mem"

_WITHOUT_EFFECT = ("record_stream", "_assert_async", "_assert_scalar")

# It creates a tensor from a file, whose numbers are there.
_MAPPED_FILE = "from_file"

# Operators that create constants in the shape or the dtype of a tensor.
_CONSTANTS = frozenset("zeros_like ones_like full_like new_zeros new_ones new_full".split())

# A loss scaler's check of gradients: as all are finite, the flag that it sets stays 0.
_CHECKS = ("_amp_foreach_non_finite_check_and_unscale_",)

_ZEROS = ("zero_", "_foreach_zero_")

# What autograd writes into a tensor of zeros, or adds to a gradient.
_IN_PLACE_OF_AUTOGRAD = ("add", "index_put", "scatter", "scatter_add", "index_add")

# Above the sequence numbers of autograd: nodes such as AccumulateGrad have the largest integer.
_UNNUMBERED = 1 << 62

_PLAIN = (Tensor, nn.Parameter, FakeTensor)

_RANDOM = frozenset(
    "uniform_ normal_ bernoulli_ random_ exponential_ cauchy_ geometric_ log_normal_ rand randn "
    "randint randperm rand_like randn_like randint_like bernoulli normal multinomial "
    "native_dropout".split()
)

# In-place operators that change the shape: only their fake implementation gives the result.
_RESHAPES_IN_PLACE = frozenset(
    "resize_ resize_as_ set_ t_ transpose_ squeeze_ unsqueeze_ detach_ as_strided_".split()
)

# Operators whose result or its size the host reads, so that it waits for their stream
# (`cudaStreamSynchronize` in their CUDA implementations).
_READ_BY_HOST = frozenset(
    "_local_scalar_dense nonzero masked_select _unique2 unique_dim unique_consecutive "
    "unique_dim_consecutive bincount equal".split()
)

# Operators that run in cuBLAS, which keeps a workspace.
_PRODUCTS = frozenset("mm addmm bmm baddbmm addmv mv dot _scaled_mm".split())

# Prefixes of operators with a CUDA kernel: a GPU does not run their composite kernel.
_OF_A_GPU = (
    "_foreach_",
    "_fused_",
    "_amp_",
    "convolution",
    "_convolution",
    "_batch_norm",
    "_native_batch_norm",
    "_grouped_mm",
    "_scaled_dot_product",
    "_grid_sampler",
    "_pin_memory",
    "copy_",
    "lift",
    "detach",
)


@dataclass(frozen=True, slots=True)
class _Schema:
    """Properties of an operator that decide how the mode runs and records it.

    Attributes:
        name: with its namespace, as a profile has it.
        namespace: "aten", "c10d" ...
        base: without namespace.
        arguments: (name, default) in order.
        tensors: places of the arguments that are tensors.
        is_view: whether its results share memory with an input that it does not write.
        writes_first: whether it writes its first argument and returns it.
        is_random: whether it draws random numbers.
        is_composite: whether its kernel for every backend calls other operators, which a profile
            shows inside it.
        is_decomposed: whether its only implementation calls other operators, on all devices.
        written: places and names of the arguments that it writes.
        is_prepared: whether its CUDA implementation calls other operators first.
    """

    name: str
    namespace: str
    base: str
    arguments: tuple[tuple[str, Any], ...]
    tensors: tuple[int, ...]
    is_view: bool
    writes_first: bool
    is_random: bool
    is_composite: bool
    is_decomposed: bool
    written: tuple[tuple[int, str], ...]
    is_prepared: bool

    @property
    def communicates(self) -> bool:
        """Whether the operator is a communication call or a wait for one."""
        return self.namespace.startswith(("c10d", *_FUNCTIONAL))

    @classmethod
    def of(cls, func: Any) -> "_Schema":
        schema = func._schema
        namespace, _, base = schema.name.partition("::")
        aliases = [argument.alias_info for argument in schema.returns]
        reads = any(alias is not None and not alias.is_write for alias in aliases)
        is_view = reads or base in ("_unsafe_view", "_reshape_alias", "lift_fresh")
        first = schema.arguments[0].alias_info if schema.arguments else None
        writes_first = (
            first is not None
            and first.is_write
            and len(aliases) == 1
            and aliases[0] is not None
            and aliases[0].is_write
            and base not in _RESHAPES_IN_PLACE
            and str(schema.returns[0].type) == "Tensor"
        )
        return cls(
            schema.name,
            namespace,
            base,
            tuple((argument.name, argument.default_value) for argument in schema.arguments),
            tuple(n for n, a in enumerate(schema.arguments) if str(a.type) == "Tensor"),
            is_view,
            writes_first,
            base in _RANDOM,
            not is_view
            and namespace == "aten"
            and not base.startswith(_OF_A_GPU)
            and base not in _RANDOM
            and _has_kernel(func, "CompositeExplicitAutograd")
            and not _has_kernel(func, "CPU"),
            namespace == "aten"
            and _has_kernel(func, "CompositeImplicitAutograd")
            and not _has_kernel(func, "CUDA"),
            tuple(
                (n, a.name)
                for n, a in enumerate(schema.arguments)
                if a.alias_info is not None and a.alias_info.is_write
            ),
            has_preparation(schema.name),
        )


def _has_kernel(func: Any, key: str) -> bool:
    return _torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of an operator.

    Attributes:
        func: the operator.
        schema: what the mode knows of it.
        args: positional arguments.
        kwargs: arguments by name.
        tensors: the tensors among both.
    """

    func: Any
    schema: _Schema
    args: Any
    kwargs: dict[str, Any]
    tensors: tuple[Tensor, ...]

    @property
    def operands(self) -> list[Any]:
        """All arguments in the schema's order, defaults included."""
        rest = self.schema.arguments[len(self.args) :]
        values = [*self.args, *(self.kwargs.get(name, default) for name, default in rest)]
        for place in self.schema.tensors:
            if isinstance(values[place], int | float | complex):
                values[place] = WrappedNumber(values[place])
        return values

    def given_results(self) -> tuple[Tensor, ...]:
        """Return the tensors that an out-variant returns; none for any other operator."""
        names = (argument.name for argument in self.func._schema.arguments if argument.is_out)
        return tuple(self.kwargs[name] for name in names if self.kwargs.get(name) is not None)

    def written(self) -> Iterator[Tensor]:
        """Yield the tensors that the operator writes."""
        for position, name in self.schema.written:
            given = position < len(self.args)
            value = self.args[position] if given else self.kwargs.get(name)
            yield from tensors_in((value,))


class FakeOperators(TorchDispatchMode):
    """The dispatch mode of a capture without a device.

    Attributes:
        storages: storages of all fake tensors.
        known: numbers of the small fake tensors that have known ones.
        workspaces: memory that cuBLAS would keep.
        describe: describes operands for the log.
        block_masks: counts what flex attention computes.
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
        workspace_bytes: int,
        routers: RouterChoices,
    ) -> None:
        """Create the mode; `FakeTensorMode` has to be on below it.

        Args:
            log: receives the operators.
            unknown: decides what a script reads from an unknown tensor.
            collectives: c10d operator without namespace -> its emulation.
            workspace_bytes: memory that cuBLAS keeps per thread.
            routers: gives the choices of routers.
        """
        super().__init__()
        self._log = log
        self._unknown = unknown
        self._collectives = collectives
        self._routers = routers
        self.storages = Storages(log)
        self.known = Known(self.storages)
        self.workspaces = Workspaces(log, workspace_bytes)
        self.describe = Describer(self.storages.number)
        self._functional = FunctionalCollectives(self.storages.number)
        self._schemas: dict[Any, _Schema] = {}
        self._repeated = RepeatedCalls()
        self.block_masks = BlockMasks(self.known.get)
        # Reentrant, since an operator's parts come back to this mode on the same thread.
        self._lock = threading.RLock()
        self._last_sequence = -1
        self._emulating = 0  # communication calls that run: their operators are no work of the job
        self._composites = 0  # operators that run whose parts belong to fake tensors

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        # FakeTensorMode keeps the state of a call in the mode, for one thread at a time.
        with self._lock:
            return self._dispatch(func, types, args, kwargs)

    def _dispatch(  # noqa: PLR0911  one line per kind of operator
        self, func: Any, types: Sequence[type], args: Any, kwargs: Any
    ) -> Any:
        # torch's own answer would be the meta device, on which fake tensors are.
        if func is _torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if not all(kind in _PLAIN or issubclass(kind, FakeTensor) for kind in types):
            # A subclass such as DTensor runs operators on what it wraps.
            return NotImplemented
        if isinstance(func, HigherOrderOperator):
            return self._run_higher_order(func, args, kwargs or {})
        schema = self._schemas.get(func)
        if schema is None:
            schema = self._schemas[func] = _Schema.of(func)
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
            return self._annotate(schema, args)
        # DDP's reducer insists on True for a tensor that it pinned.
        if schema.base == "is_pinned":
            return True
        if schema.namespace in _UNRECORDED:
            return func(*args, **kwargs)
        tensors = tuple(tensors_in((*args, *kwargs.values())))
        call = _Call(func, schema, args, kwargs, tensors)
        fakes = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if not fakes and not _on_cuda(kwargs.get("device")) and not schema.communicates:
            return self._run_on_cpu(call)
        return self._record(call)

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
            _, _, operator, *rest = args
            with self:
                return operator(*rest, **kwargs)
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

    def _run_on_cpu(self, call: _Call) -> Any:
        """Run an operator on real tensors; a large result of a factory is fake."""
        if not call.tensors and call.schema.base != _MAPPED_FILE:
            result = call.func(*call.args, **call.kwargs)
            results = [*tensors_in((result,))]
            large = any(map(_is_large, results))
            if large or self._composites or any(tensor.is_meta for tensor in results):
                return result
        with unset_fake_temporarily():
            return call.func(*call.args, **call.kwargs)

    def _record(self, call: _Call) -> Any:
        """Run an operator with fake operands, and record it."""
        schema = call.schema
        in_place = schema.base in _IN_PLACE_OF_AUTOGRAD and self._is_in_place(call)
        prepared = self._prepare(call)
        event = self._begin(f"{schema.name}_" if in_place else schema.name)
        if event is not None and not schema.is_view:
            event.inputs = self.describe(call.operands)
        try:
            result = call.args[0] if in_place else self._run(call)
            del prepared
            outputs = [*tensors_in((result,))]
            # An operator on empty tensors launches nothing.
            on_device = any(
                _is_on_gpu(tensor) and tensor.numel() for tensor in (*call.tensors, *outputs)
            ) and not (schema.base == "copy_" and _is_same_data(*call.tensors[:2]))
            if on_device and schema.base in _PRODUCTS:
                self.workspaces.use()
            for tensor in outputs:
                if isinstance(tensor, FakeTensor):
                    self.storages.number(tensor)
            if event is not None:
                event.on_device = on_device
                if not schema.is_view:
                    self._describe_results(call, result, event)
                if on_device and _blocks_host(call, event.name.removeprefix("aten::")):
                    self._log.wait_on_host(event.stream)
            return result
        finally:
            self._log.end(event)

    def _describe_results(self, call: _Call, result: Any, event: RecordedEvent) -> None:
        event.outputs = self.describe(result if isinstance(result, tuple) else (result,))
        if not event.on_device:
            return
        inner = inner_of(event.name, call.operands, result)
        if inner is not None:
            event.name = inner.name
            event.inputs = self.describe(inner.args)
            if inner.results is not None:
                event.outputs = self.describe(inner.results)

    def _prepare(self, call: _Call) -> object:
        """Run the operators that an operator's CUDA implementation calls first."""
        schema = call.schema
        if not schema.is_prepared or schema.is_composite or not any(map(_is_on_gpu, call.tensors)):
            return None
        with self:
            return run_before(schema.name, call.operands)

    def _is_in_place(self, call: _Call) -> bool:
        """Whether autograd would write an operator's result into its first operand.

        It adds two gradients of one tensor in place if nothing else has the first one's memory
        (`accumulate` in torch/csrc/autograd/input_buffer.cpp), and writes the gradient of an
        indexed tensor into zeros that it creates (`index_backward` and others in
        FunctionsManual.cpp). It never does so for tensors of a subclass, such as fake ones.
        """
        if _torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
            return False
        innermost = self._log.innermost()
        if innermost is not None and innermost.category == "cpu_op" and innermost.node is None:
            return False  # a part of another operator
        first = call.tensors[0]
        if call.schema.base == "add":
            if len(call.tensors) != 2 or len(call.args) != 2 or call.kwargs:
                return False
            second = call.tensors[1]
            if (first.shape, first.dtype) != (second.shape, second.dtype):
                return False
        storage: Any = first.untyped_storage()
        holders = 2  # the tensor, and the Python object of its storage
        return _torch._C._storage_Use_Count(storage._cdata) <= holders

    def begin_function(self, name: str) -> RecordedEvent | None:
        """Begin the forward of an autograd function, with the number that its node will get."""
        if self._emulating or not self._log.recording:
            return None
        self.follow_backward()
        sequence = -1
        if torch.is_grad_enabled():
            sequence = self._last_sequence = _torch.autograd._get_sequence_nr()
        return self._log.begin(name, sequence=sequence)

    def launch(self, launch: TritonLaunch) -> None:
        """Record a Triton kernel that Python launches."""
        event = self._begin(launch.name)
        if event is not None:
            event.inputs = self.describe(launch.reads)
            event.outputs = self.describe(launch.writes)
            event.on_device = True
            self._log.end(event)
        # Without an analysis of its source, it may write each of its tensors.
        for tensor in launch.writes or launch.tensors:
            self.known.spoil(tensor)
            mark_written(tensor, zero=False)

    def launch_generated(
        self, name: str, reads: Sequence[Shaped], writes: Sequence[Shaped], flops: int
    ) -> None:
        """Record a kernel that Inductor generated.

        Args:
            name: as Inductor names it.
            reads: tensors that it reads.
            writes: tensors that it writes.
            flops: its FLOPs, or UNKNOWN.
        """
        event = self._begin(name)
        if event is not None:
            event.flops = flops
            event.inputs, event.outputs = self.describe(reads), self.describe(writes)
            event.on_device = True
            self._log.end(event)
        for written in writes:
            # Its numbers are known so far: those of `empty_strided`, which count as zeros.
            self.known.spoil(written.storage)
            mark_written(written.storage, zero=False)

    def _begin(self, name: str) -> RecordedEvent | None:
        if self._emulating or not self._log.recording:
            return None
        self.follow_backward()
        sequence = -1
        if torch.is_grad_enabled():
            latest = _torch.autograd._get_sequence_nr() - 1
            # The node of a differentiable operator is numbered before the operator runs here; an
            # operator without a node repeats the number of the one before.
            if latest != self._last_sequence:
                sequence = self._last_sequence = latest
        return self._log.begin(name, sequence=sequence)

    def follow_backward(self) -> Any:
        """Open the range of the autograd node that runs on this thread, as torch's engine does.

        Returns:
            The node; None outside of backward.
        """
        node = _torch._C._current_autograd_node()
        if not self._log.recording or node == self._log.innermost_node():
            return node
        innermost = self._log.innermost()
        if innermost is not None and innermost.node is not None:
            self._log.end(innermost)
        if node is None:
            return None
        number: int = node._sequence_nr()
        sequence = number if number < _UNNUMBERED else -1
        self._log.begin(
            f"autograd::engine::evaluate_function: {node.name()}",
            sequence=sequence,
            forward_thread=1 if sequence >= 0 else 0,
            node=node,
        )
        return node

    def _run(self, call: _Call) -> Any:
        schema = call.schema
        if schema.namespace == "c10d":
            return self._emulate(self._collectives[schema.base], call)
        if schema.namespace.startswith(_FUNCTIONAL):
            with self:
                return self._functional.run(schema.base, call.operands)
        if schema.base == "_local_scalar_dense":
            return self._read(call.args[0])
        if schema.base in _WITHOUT_EFFECT:
            return None
        if schema.namespace == _FUSED_WITH_COLLECTIVES:
            with self:
                return call.func._op_dk(_CUDA, *call.args, **call.kwargs)
        numbers = self._numbers_of_results(call)
        result = self._run_parts(call) if schema.is_composite else _FAILED
        # Without results no shape is needed: not all fused optimizers have a fake implementation.
        if result is _FAILED:
            returns = call.func._schema.returns
            result = self._run_on_shapes(call, numbers) if returns else None
        if numbers is not None:
            self.known.set(result, numbers)
        elif not schema.is_view and schema.base not in _CHECKS:
            for tensor in call.written():
                self.known.spoil(tensor)
                mark_written(tensor, zero=schema.base in _ZEROS)
        return result

    def _run_on_shapes(self, call: _Call, numbers: Any) -> Any:
        """Return the results of an operator by its fake implementation, or by known numbers."""
        first = call.args[0] if call.args else None
        if call.schema.writes_first and isinstance(first, FakeTensor) and first.is_cuda:
            return first  # its shape stays, and its numbers have no meaning
        shapes = shapes_of(call.schema.name.removeprefix("aten::"), call.args)
        try:
            run = shapes or call.func
            return self._repeated.run(run, call.func, call.tensors, call.args, call.kwargs)
        except DynamicOutputShapeException:
            if numbers is not None:
                return tree_map_only(Tensor, _like, numbers)
            selected = self._select_by_known_masks(call)
            return self._unknown.refuse(call.schema.name) if selected is None else selected
        except DataDependentOutputException:
            return self._unknown.answer() if numbers is None else numbers
        except RuntimeError:
            if lacks_fake(call.func):
                # Inductor calls `_scaled_mm.out`, which has no fake implementation.
                given = call.given_results() or self._unknown.refuse_operator(call.schema.name)
                return given[0] if len(given) == 1 else given
            raise

    def _select_by_known_masks(self, call: _Call) -> Any:
        """Return the elements of a tensor that masks of known numbers select.

        None if a mask is unknown, and for operators other than `index` and `masked_select`.

        A loss often takes the rows of hidden states whose labels are not padding.
        """
        if call.schema.base == "masked_select":
            mask = self.known.get(call.operands[1])
            if mask is None:
                return None
            with unset_fake_temporarily():
                shape = torch.broadcast_shapes(call.operands[0].shape, mask.shape)
                count = int(mask.expand(shape).sum())
            return call.operands[0].new_empty(count)
        if call.schema.base != "index":
            return None
        tensor, indices = call.operands
        positions: list[Any] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                positions.append(index)
                continue
            mask = self.known.get(index)
            if mask is None:
                return None
            with unset_fake_temporarily():
                count = int(mask.count_nonzero())
            # A mask of n dimensions stands for n indices, one for each of them.
            selected = tensor.new_empty(count, dtype=torch.int64)
            positions += [selected] * index.dim()
        return call.func(tensor, positions)

    def _emulate(self, emulation: Callable[..., Any], call: _Call) -> Any:
        """Emulate a communication call: known numbers move, and no operator is recorded."""
        self._emulating += 1
        try:
            with self:
                return emulation(*call.args, **call.kwargs)
        finally:
            self._emulating -= 1

    def _run_parts(self, call: _Call) -> Any:
        """Run an operator's kernel for every backend, whose parts this mode records in turn."""
        mark = self._log.mark()
        self._composites += 1
        try:
            with self:
                return call.func._op_dk(_COMPOSITE, *call.args, **call.kwargs)
        except (RuntimeError, NotImplementedError):
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

    def _numbers_of_results(self, call: _Call) -> Any:
        """Return the numbers of the results; None if they are not known or not small.

        Of several results, those without numbers are None.
        """
        if call.schema.base in _CONSTANTS:
            return self._constants(call)
        if call.schema.base == CHOICE and self.known.get(call.tensors[0]) is None:
            chosen = self._routers.chosen(call.operands)
            return None if chosen is None else (None, chosen)
        return self._computed(call)

    def _computed(self, call: _Call) -> Any:
        """Return the results computed from known numbers, else None."""
        # Numbers of large tensors would make the capture as slow as a real step on the CPU.
        small = all(map(is_small, call.tensors))
        if not small or call.schema.is_random or call.schema.namespace != "aten":
            return None
        if (answer := _answer_on_finiteness(call)) is not None:
            with unset_fake_temporarily():
                return torch.full(call.tensors[0].shape, answer)
        numbers = {id(tensor): self.known.get(tensor) for tensor in call.tensors}
        known = all(value is not None for value in numbers.values())
        if not known and call.schema.base == "isin":
            # Generated tokens against the end of a sequence: a generation must reach its length.
            with unset_fake_temporarily():
                return torch.full(call.tensors[0].shape, fill_value=self._unknown.answer())
        if not known or (not numbers and not _is_small_factory(call.args)):
            return None
        args, kwargs = tree_map_only(
            Tensor, lambda tensor: numbers[id(tensor)], (call.args, dict(call.kwargs))
        )
        results = _run_with_numbers(call, args, kwargs)
        fits = all(map(is_small, tensors_in((results,))))
        return results if fits else None

    def _constants(self, call: _Call) -> Any:
        """Return what is created like a tensor whose numbers do not matter; None if it is large."""
        first = call.tensors[0]
        shape = first.shape if call.schema.base.endswith("_like") else call.args[1]
        dtype = call.kwargs.get("dtype") or first.dtype
        if not is_small(torch.empty(shape, dtype=dtype, device="meta")):
            return None
        with unset_fake_temporarily():
            like = torch.empty((), dtype=first.dtype).expand(first.shape)
        kwargs = {name: value for name, value in call.kwargs.items() if name != "memory_format"}
        return _run_with_numbers(call, (like, *call.args[1:]), kwargs)

    def _annotate(self, schema: _Schema, args: Any) -> Any:
        """Record a `record_function` range that Python opens or closes."""
        open_ranges: list[RecordedEvent | None] = _local.__dict__.setdefault("open_ranges", [])
        if schema.base.startswith("_record_function_enter"):
            self.follow_backward()
            open_ranges.append(self._log.begin(args[0], "user_annotation"))
            with unset_fake_temporarily():
                return _torch.ops.profiler._record_function_enter_new(args[0], None)
        # Each access makes a new Python object of the record, so nesting identifies the range.
        if open_ranges:
            self._log.end(open_ranges.pop())
        with unset_fake_temporarily():
            return _torch.ops.profiler._record_function_exit._RecordFunction(args[0])


_local = threading.local()

_FAILED = object()


def tensors_in(operands: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the tensors among operands and in lists of operands."""
    for operand in operands:
        if isinstance(operand, Tensor):
            yield operand
        elif isinstance(operand, list | tuple):
            yield from tensors_in(operand)


def _is_large(tensor: Tensor) -> bool:
    """Whether a tensor that is created on the CPU is fake for its size."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.numel() > REAL_ELEMENTS
    return tensor.nbytes > _REAL_INTEGER_BYTES


def _is_same_data(target: Tensor, source: Tensor) -> bool:
    """Whether two tensors are the same elements, which `copy_` leaves as they are.

    Python copies so at the end of `x[:n] += y`.
    """
    storages: list[Any] = [tensor.untyped_storage() for tensor in (target, source)]
    return (
        storages[0]._cdata == storages[1]._cdata
        and target.storage_offset() == source.storage_offset()
        and target.shape == source.shape
        and target.stride() == source.stride()
        and target.dtype == source.dtype
    )


def _blocks_host(call: _Call, name: str) -> bool:
    """Return whether the host waits for the stream within an operator on the device.

    A copy between host and device waits unless it is `non_blocking` (`copy_kernel_cuda`). Indexing
    with a mask calls `nonzero`, which waits. `repeat_interleave` reads the sum of its repeats,
    unless the size of its result is given (Repeat.h).

    Args:
        call: the call.
        name: the operator that it is recorded as.
    """
    if call.schema.base == "copy_":
        target, source = call.tensors[:2]
        return target.is_cuda != source.is_cuda and not call.operands[2]
    if name in ("index", "_index_put_impl_"):
        return any(
            index.dtype in (torch.bool, torch.uint8) for index in tensors_in(call.operands[1])
        )
    if name == "repeat_interleave":
        return call.operands[-1] is None
    return name in _READ_BY_HOST


def _answer_on_finiteness(call: _Call) -> bool | None:
    """Return whether each number is, or is not, finite; None if the operator does not ask that.

    All numbers count as finite. torch asks by comparing a tensor with itself and with infinity.
    """
    base, args = call.schema.base, call.args
    if base in ("isnan", "isinf", "isfinite"):
        return base == "isfinite"
    if base not in ("eq", "ne"):
        return None
    with_itself = len(call.tensors) == 2 and call.tensors[0] is call.tensors[1]
    if with_itself:
        return base == "eq"
    infinite = isinstance(args[1], float) and math.isinf(args[1])
    return base == "ne" if infinite else None


def _run_with_numbers(call: _Call, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the CPU; None if only GPUs have it, () if it returns nothing.

    Args:
        call: the call.
        args: its positional arguments, with numbers.
        kwargs: its arguments by name, with numbers.
    """
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    with unset_fake_temporarily():
        try:
            results = call.func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            return None
        if call.schema.base.startswith(("empty", "new_empty")):
            # Collectives write parts of it, which are known then.
            results.zero_()
        return () if results is None else results


def _like(numbers: Tensor) -> Tensor:
    """Return a fake tensor on the device with the shape of known numbers."""
    return torch.empty(numbers.shape, dtype=numbers.dtype, device="cuda")


def _is_on_gpu(tensor: Any) -> bool:
    # `is_cuda` of a fake tensor takes ten times as long.
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return device.type == "cuda"


def _on_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _is_small_factory(args: Any) -> bool:
    """Whether the sizes that a factory is given are small, so that its numbers may be computed."""
    total = 1
    for value in args:
        if isinstance(value, list | tuple):
            for size in value:
                total *= size if isinstance(size, int) else KNOWN_ELEMENTS + 1
        elif isinstance(value, int) and not isinstance(value, bool):
            total = max(total, value)
    return total <= KNOWN_ELEMENTS
