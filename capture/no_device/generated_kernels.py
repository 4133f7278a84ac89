"""What a kernel that Inductor generated reads, writes and computes, from its source.

A capture without a device compiles no kernel. The source names the tensors that the kernel loads
and stores, and where; `inductor` adds the FLOPs of its loops as a comment.
"""

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from onerank.capture.no_device.event_log import Shaped
from onerank.capture.no_device.generated_instructions import instructions_of
from onerank.capture.no_device.operators.fake_operators import FakeOperators
from onerank.capture.patches import untraced
from onerank.ir import UNKNOWN, GeneratedWork

FLOPS_COMMENT = "# onerank FLOPs: "
"""Precedes the FLOPs in the source of a kernel."""

_SECTOR_BYTES = 32

_LOOPED_SCATTERED_BYTES = 8
"""Bytes that an element costs which a looped reduction stores across its rows.

Inductor's tuning lets most of them process several rows at once, so a store fills a part of a
sector. Measured on an H100 with torch 2.11: 1.8 TB/s where coalesced kernels reach 2.9, for
4096 float8 elements of 16,384 and of 98,304 rows. A reduction of `ReductionHint.INNER` processes
one row: 14336 elements of 16,384 rows take 4.5 ms, with 14 GB of writes to the cache.
"""


_GATHERED_LOAD_INSTRUCTIONS = 165
"""Instructions of a thread that an SM issues while the cache serves it a sector.

The threads of a warp that load from different sectors need 32 of them. An SM issues 128
instructions a cycle and takes 25 bytes from the cache. Chosen on three kernels of float8 training
on an H200 that load 134 million elements of a byte across the rows of a concatenation, in 815 to
896 us (2026-11-28-torchtitan-8-2xh200); the other generated kernels of that step load along rows.
"""


@dataclass(frozen=True)
class KernelAccesses:
    """Reads and writes of a generated kernel.

    Attributes:
        parameters: names of its parameters, in order.
        loads: pointer -> distinct places from which each iteration reads.
        stores: the same for writes.
        scattered: pointer -> bytes that the store of an element moves, for pointers to which
            neighbouring threads store in different sectors.
        gathered: pointers from which neighbouring threads load from different sectors.
        sizes: iterations along each axis that the source states.
        combined: pointer -> iterations that use it, in a kernel that combines loops of several
            sizes, as those of a compiled optimizer over its parameters.
        flops: FLOPs that the source states; UNKNOWN if it states none.
        instructions: those of an iteration.
    """

    parameters: tuple[str, ...]
    loads: dict[str, int]
    stores: dict[str, int]
    scattered: dict[str, int]
    gathered: frozenset[str]
    sizes: dict[str, int]
    combined: dict[str, int]
    flops: int
    instructions: float

    @classmethod
    def of(cls, name: str, source: str) -> "KernelAccesses":
        """Read a kernel's source."""
        signature = re.search(rf"def {re.escape(name)}\(([^)]*)\)|def triton_\(([^)]*)\)", source)
        text = (signature.group(1) or signature.group(2) or "") if signature else ""
        parameters = tuple(part.split(":")[0].strip() for part in text.split(","))
        # The source states the sizes that Inductor knows; others are arguments of the launch.
        sizes = re.findall(r"^    (\w+numel) = (\d+)$", source, re.MULTILINE)
        loops = _combined_loops(source)
        flops = re.search(rf"^{FLOPS_COMMENT}(\d+)$", source, re.MULTILINE)
        return cls(
            parameters,
            # An atomic addition reads what it changes.
            _places(r"tl\.(?:load|atomic_add)\((\w+) \+ (\([^\n]*?\)),", source),
            _places(r"tl\.(?:store|atomic_add)\((\w+) \+ (\([^\n]*?\)),", source),
            _scattered(source),
            _gathered(source),
            {axis: int(size) for axis, size in sizes} or _in_all(loops),
            {pointer: count for count, pointers in loops for pointer in pointers},
            int(flops.group(1)) if flops else UNKNOWN,
            instructions_of(source) / max(len(loops), 1),
        )

    def _iterations(self, by_name: dict[str, Any]) -> int:
        axes = {name: value for name, value in by_name.items() if name.endswith("numel")}
        return prod(
            size for size in (axes | self.sizes).values() if isinstance(size, int) and size > 0
        )

    def work(self, args: tuple[Any, ...]) -> GeneratedWork:
        """Return the FLOPs and the instructions of a launch."""
        iterations = self._iterations(dict(zip(self.parameters, args, strict=False)))
        waits = len(self.gathered) * _GATHERED_LOAD_INSTRUCTIONS
        return GeneratedWork(self.flops, round((self.instructions + waits) * iterations))

    def operands(self, args: tuple[Any, ...]) -> tuple[list[Shaped], list[Shaped]]:
        """Return the tensors that a launch reads, and those that it writes.

        Each has as many elements as the launch touches: one of an embedding's table for each
        iteration, and the whole of a tensor that has fewer. A tensor that is stored element by
        element, each in another sector, has a last axis for the rest of what the store moves:
        annotate derives the bytes of a kernel from its shapes.
        """
        by_name = dict(zip(self.parameters, args, strict=False))
        iterations = self._iterations(by_name)
        return (
            self._touched(by_name, self.loads, iterations, {}),
            self._touched(by_name, self.stores, iterations, self.scattered),
        )

    def _touched(
        self,
        by_name: dict[str, Any],
        places: dict[str, int],
        iterations: int,
        scattered: dict[str, int],
    ) -> list[Shaped]:
        touched: list[Shaped] = []
        for name, tensor in by_name.items():
            if name in places and isinstance(tensor, Tensor):
                elements = places[name] * self.combined.get(name, iterations)
                # An expanded axis, whose stride is 0, is stored once.
                axes = zip(tensor.shape, tensor.stride(), strict=True)
                stored = [size for size, step in axes if step or size == 0]
                shape = stored if prod(stored) <= elements else [elements]
                if scattered.get(name, 0) > tensor.element_size():
                    shape = [*shape, scattered[name] // tensor.element_size()]
                touched.append(Shaped(tensor, tensor.dtype, shape))
        return touched


def _combined_loops(source: str) -> list[tuple[int, set[str]]]:
    """Return iterations and pointers of each loop that a kernel combines; [] for other kernels."""
    loops = re.split(r"^    (?:if|elif) pid < num_xblocks_\d+:$", source, flags=re.MULTILINE)[1:]
    return [
        (
            prod(
                int(size) for size in re.findall(r"^        \w+numel = (\d+)$", loop, re.MULTILINE)
            ),
            set(re.findall(r"tl\.(?:load|store|atomic_add)\((\w+) \+ ", loop)),
        )
        for loop in loops
    ]


def _in_all(loops: list[tuple[int, set[str]]]) -> dict[str, int]:
    return {"xnumel": sum(count for count, _ in loops)} if loops else {}


def _scattered(source: str) -> dict[str, int]:
    """Return the pointers to which a reduction stores across its rows: `KernelAccesses.scattered`.

    Threads of a reduction are neighbours along a row. A pointwise kernel has tiles instead, which
    it transposes on chip.
    """
    stores = re.findall(r"tl\.store\((\w+) \+ \([^\n]*?\d\*r\d_\d[^\n]*?\),", source)
    looped = re.search(r"^\s*for r\d_offset in", source, re.MULTILINE)
    if looped and "ReductionHint.INNER" not in source:
        each = _LOOPED_SCATTERED_BYTES
    elif "RSPLIT_SIZE" in source:
        # A program stores row after row, and all of them together touch more sectors than L2 holds
        # before the next row adds its bytes. So each store reads a sector and writes it.
        each = 2 * _SECTOR_BYTES
    else:
        each = _SECTOR_BYTES
    return dict.fromkeys(stores, each)


# Neighbouring elements whose addresses are compared, from places inside of rows of any length.
_PROBED = (1, 4097, 100003)
_ASSIGNED = re.compile(r"^    ([a-z]\w*) = ([\w\s()+*/%-]+)$", re.MULTILINE)
_LOADED = re.compile(r"tl\.load\((\w+) \+ (\([\w\s()+*/%-]*\)), ")


def _gathered(source: str) -> frozenset[str]:
    """Return the pointers from which neighbouring threads load from different sectors.

    A pointwise kernel of one axis cannot transpose on chip. Inductor generates one where the part
    of a concatenation that an element comes from decides the load.
    """
    if "yindex" in source or re.search(r"\br\d_\d\b|\brindex\b", source):
        return frozenset()
    assigned = _ASSIGNED.findall(source)
    places = _LOADED.findall(source)

    def address(index: str, at: int) -> int | None:
        values = {"xindex": at}
        for name, text in assigned:
            value = _evaluated(text, values)
            if name not in values and value is not None:
                values[name] = value
        return _evaluated(index, values)

    def is_gathered(index: str) -> bool:
        for at in _PROBED:
            one, other = address(index, at), address(index, at + 1)
            # Elements have one byte at least.
            if one is None or other is None or abs(other - one) < _SECTOR_BYTES:
                return False
        return True

    return frozenset(pointer for pointer, index in places if is_gathered(index))


_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _evaluated(text: str, values: Mapping[str, int]) -> int | None:
    """Return the value of an expression of integers; None if it contains anything unknown.

    An address that is loaded itself is unknown.
    """

    def of(node: ast.expr) -> int | None:
        match node:
            case ast.Constant(value=int(value)):
                return value
            case ast.Name(id=name):
                return values.get(name)
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _ARITHMETIC:
                one, other = of(left), of(right)
                if one is None or other is None:
                    return None
                return _ARITHMETIC[type(sign)](one, other)
        return None

    try:
        return of(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError):
        return None


def _places(pattern: str, source: str) -> dict[str, int]:
    places = set(re.findall(pattern, source))
    return dict(Counter(pointer for pointer, _ in places))


class GeneratedKernel:
    """A generated kernel that nothing compiles."""

    def __init__(self, name: str, accesses: KernelAccesses, operators: FakeOperators) -> None:
        self._name = name
        self._accesses = accesses
        self._operators = operators

    def run(self, *args: Any, stream: Any = None, **_: Any) -> None:
        """Record a launch."""
        reads, writes = self._accesses.operands(args)
        work = self._accesses.work(args)
        self._operators.launch_generated(self._name, reads, writes, work)


# Dynamo must not trace the recording of a step.
untraced(GeneratedKernel.run)
