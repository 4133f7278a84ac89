"""Triton kernels that a script launches: their operands, and which of them they read and write.

Kernels are not compiled. Their Python source shows which arguments `tl.load` and `tl.store` reach.
"""

import ast
import contextlib
import inspect
import textwrap
from collections.abc import Callable, Generator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch._higher_order_ops import triton_kernel_wrap
from torch._subclasses.fake_tensor import FakeTensor

from onerank.capture.no_device.operators.router_choices import FusedChoice
from onerank.capture.patches import patched, resolve

_wrapped_kernels: Any = triton_kernel_wrap  # private in torch, without types

MODULE, TUNER = "triton.runtime.jit", "triton.runtime.autotuner"

WRAPPED: Any = _wrapped_kernels.triton_kernel_wrapper_mutation
"""The operator through which `torch.library.wrap_triton` launches a kernel."""


@dataclass(frozen=True)
class KernelLaunch:
    """The launch of a kernel from Python, by Triton or by a function of a C++ extension.

    Attributes:
        name: the kernel's, with a namespace.
        reads: its arguments in the order of its signature; None for those that it only writes.
        writes: the tensors that it writes; none if a Triton kernel's source does not show them.
        tensors: all tensors among its arguments.
        choice: the experts that it chooses, of a fused router.
    """

    name: str
    reads: Sequence[Any]
    writes: Sequence[Tensor]
    tensors: Sequence[Tensor]
    choice: FusedChoice | None = None

    @classmethod
    def of_arguments(
        cls, name: str, arguments: Sequence[Any], *, written: Set[int], read: Set[int] = frozenset()
    ) -> "KernelLaunch":
        """Return the launch of a kernel that writes some of its arguments.

        Args:
            name: the kernel's, with a namespace.
            arguments: in the order of its signature.
            written: places of the arguments that it writes.
            read: places of those that it reads; it reads all others that it does not write.
        """
        is_tensor = [isinstance(argument, Tensor) for argument in arguments]
        only_written = written - read
        return cls(
            name,
            reads=[None if at in only_written else each for at, each in enumerate(arguments)],
            writes=[each for at, each in enumerate(arguments) if at in written and is_tensor[at]],
            tensors=[each for at, each in enumerate(arguments) if is_tensor[at]],
        )


def launch_of(kernel: Any, args: Sequence[Any], named: dict[str, Any]) -> KernelLaunch:
    """Return the launch of a kernel.

    Args:
        kernel: a `JITFunction`, or a tuner or a heuristic around one.
        args: its positional arguments.
        named: its arguments by name; names of no parameter, such as `num_warps`, are ignored.
    """
    while hasattr(kernel.fn, "run"):
        kernel = kernel.fn
    values = {**dict(zip(kernel.arg_names, args, strict=False)), **named}
    # A descriptor of a tensor's tiles, for the tensor memory accelerator, holds the tensor.
    operands = [_tensor_of(values.get(name)) for name in kernel.arg_names]
    accesses = _accesses_of(kernel)
    return KernelLaunch.of_arguments(
        f"triton::{kernel.__name__}", operands, written=accesses.written, read=accesses.read
    )


def wrapped_launch(kernel_idx: int, constant_args_idx: int, kwargs: dict[str, Any]) -> KernelLaunch:
    """Return the launch that the operator `WRAPPED` stands for.

    Args:
        kernel_idx: number of the kernel in torch's table.
        constant_args_idx: number, in this table, of its arguments that are no tensors.
        kwargs: its tensors, by name.
    """
    table = _wrapped_kernels.kernel_side_table
    constants = table.get_constant_args(constant_args_idx)
    return launch_of(table.get_kernel(kernel_idx), (), {**constants, **kwargs})


@contextlib.contextmanager
def recorded_launches(record: Callable[[KernelLaunch], None]) -> Generator[None]:
    """Record launches of kernels on fake tensors instead of compiling and running them."""
    original = resolve(f"{MODULE}.JITFunction").run

    def run(kernel: Any, *args: Any, **options: Any) -> Any:
        operands = map(_tensor_of, (*args, *options.values()))
        if not any(isinstance(operand, FakeTensor) for operand in operands):
            return original(kernel, *args, **options)
        record(launch_of(kernel, args, options))
        return None

    with patched(f"{MODULE}.JITFunction", {"run": run}):
        yield


def first_configuration() -> contextlib.AbstractContextManager[None]:
    """Let Triton's tuner take the first configuration: there are no times to compare."""

    def run(tuner: Any, *args: Any, **options: Any) -> Any:
        # mamba_ssm reads the best configuration after a launch, for sizes of a result.
        tuner.best_config = tuner.configs[0]
        return tuner.fn.run(*args, **options, **tuner.best_config.all_kwargs())

    return patched(f"{TUNER}.Autotuner", {"run": run})


def _tensor_of(operand: Any) -> Any:
    base = getattr(operand, "base", None)
    return base if isinstance(base, Tensor) and not isinstance(operand, Tensor) else operand


@dataclass
class _Accesses:
    """Positions of the arguments whose memory a kernel reads, and of those that it writes."""

    read: set[int] = field(default_factory=set[int])
    written: set[int] = field(default_factory=set[int])


# By the kernel's function: a kernel is launched many times.
_known: dict[Any, _Accesses] = {}


def _accesses_of(kernel: Any) -> _Accesses:
    function = kernel.fn
    if function not in _known:
        # Set before the source is read: a kernel may call itself.
        _known[function] = _Accesses()
        # Without a readable source the accesses stay empty: the launch then reads every argument
        # and may write every tensor.
        with contextlib.suppress(OSError, SyntaxError, TypeError, ValueError):
            source = textwrap.dedent(inspect.getsource(function))
            _known[function] = _Source(ast.parse(source), function).accesses
    return _known[function]


# Calls that return an address in the memory of their first argument.
_ADDRESSES = frozenset(
    "make_block_ptr advance make_tensor_descriptor _experimental_make_tensor_descriptor "
    "multiple_of max_contiguous max_constancy to cast".split()
)

_LOADS = frozenset(("load", "_experimental_descriptor_load", "load_tensor_descriptor"))

_STORES = frozenset(("store", "_experimental_descriptor_store", "store_tensor_descriptor"))


class _Source(ast.NodeVisitor):
    """Follows the arguments of a kernel through its source to the calls that access memory.

    Attributes:
        accesses: which arguments are read and written.
    """

    def __init__(self, source: ast.Module, function: Any) -> None:
        self.accesses = _Accesses()
        self._globals: dict[str, Any] = getattr(function, "__globals__", {})
        (kernel,) = (node for node in source.body if isinstance(node, ast.FunctionDef))
        parameters = [*kernel.args.posonlyargs, *kernel.args.args, *kernel.args.kwonlyargs]
        # Name of a variable -> arguments whose address it may hold. Strides and counts are
        # arguments too; as they are no tensors, they do no harm.
        self._origins = {parameter.arg: {at} for at, parameter in enumerate(parameters)}
        self._visit_all(kernel.body)

    def visit_If(self, node: ast.If) -> None:
        """Visit both branches: after them, a variable may hold the addresses of either."""
        self.visit(node.test)
        before = self._held()
        self._visit_all(node.body)
        after = self._origins
        self._origins = before
        self._visit_all(node.orelse)
        self._merge(after)

    def visit_For(self, node: ast.For | ast.While) -> None:
        """Visit a loop's body twice, since it may use an address that it assigns further down."""
        for _ in range(2):
            before = self._held()
            self._visit_all(node.body)
            self._merge(before)

    visit_While = visit_For  # noqa: N815  named by ast.NodeVisitor

    def _visit_all(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self.visit(statement)

    def _held(self) -> dict[str, set[int]]:
        return {name: set(held) for name, held in self._origins.items()}

    def _merge(self, other: dict[str, set[int]]) -> None:
        for name, held in other.items():
            self._origins[name] = self._origins.get(name, set()) | held

    def visit_Assign(self, node: ast.Assign) -> None:
        """Let a variable hold the addresses of the value."""
        self.generic_visit(node)
        for target in node.targets:
            self._assign(target, node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Add the addresses of the value to those that a variable may hold."""
        self.generic_visit(node)
        if isinstance(node.target, ast.Name):
            held = self._origins.get(node.target.id, set())
            self._origins[node.target.id] = held | self._origins_of(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Let a variable hold the addresses of the value."""
        self.generic_visit(node)
        if node.value is not None:
            self._assign(node.target, node.value)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for name, part in zip(target.elts, value.elts, strict=False):
                self._assign(name, part)
        elif isinstance(target, ast.Name):
            self._origins[target.id] = self._origins_of(value)

    def visit_Call(self, node: ast.Call) -> None:
        """Note a call that accesses memory, or what a called kernel accesses."""
        self.generic_visit(node)
        name = _name_of(node.func)
        address = self._address(node)
        if name in _LOADS or name.startswith("atomic_"):
            self.accesses.read |= address
        if name in _STORES or name.startswith("atomic_"):
            self.accesses.written |= address
        called = self._globals.get(name) if isinstance(node.func, ast.Name) else None
        if called is not None and hasattr(called, "arg_names") and hasattr(called, "fn"):
            self._call(called, node)

    def _call(self, called: Any, node: ast.Call) -> None:
        accesses = _accesses_of(called)
        arguments: dict[int, ast.expr] = dict(enumerate(node.args))
        for keyword in node.keywords:
            if keyword.arg in called.arg_names:
                arguments[called.arg_names.index(keyword.arg)] = keyword.value
        for at, argument in arguments.items():
            origins = self._origins_of(argument)
            if at in accesses.read:
                self.accesses.read |= origins
            if at in accesses.written:
                self.accesses.written |= origins

    def _address(self, node: ast.Call) -> set[int]:
        """Return the arguments that a call's address may lie in."""
        # A descriptor has methods: `descriptor.load(offsets)`.
        if isinstance(node.func, ast.Attribute):
            origins = self._origins_of(node.func.value)
            if origins:
                return origins
        named = [keyword.value for keyword in node.keywords if keyword.arg == "pointer"]
        first = [*node.args, *named][:1]
        return self._origins_of(first[0]) if first else set()

    def _origins_of(self, value: ast.expr) -> set[int]:
        match value:
            case ast.Name():
                return set(self._origins.get(value.id, ()))
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
                return self._origins_of(left) | self._origins_of(right)
            case ast.IfExp(body=body, orelse=orelse):
                return self._origins_of(body) | self._origins_of(orelse)
            case ast.Call() if _name_of(value.func) in _ADDRESSES:
                base = [keyword.value for keyword in value.keywords if keyword.arg == "base"]
                owner = [value.func.value] if isinstance(value.func, ast.Attribute) else []
                operands = (*owner, *value.args[:1], *base)
                return {at for operand in operands for at in self._origins_of(operand)}
            case _:
                # What is loaded is a number; an address that depends on it lies elsewhere.
                return set()


def _name_of(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
