"""Record what a training step computes, without a profiler: loss, outputs, gradients.

A tensor is recorded as a checksum of all its bits, its norm, and up to 16,384 evenly spaced
elements, so that a step of a large model takes megabytes.
"""

import contextlib
import weakref
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from onerank.capture.patches import patched
from onerank.capture.profiling.module_scopes import profiler_on

SAMPLES = 16384
_BLOCK = 1 << 24  # elements per partial checksum, which bounds its temporary memory
_PERIOD = 65521  # weights repeat after so many positions; a swap of elements changes the sum
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Sample:
    """A tensor's shape, checksum of all bits, norm, and up to 16,384 of its elements."""

    shape: tuple[int, ...]
    checksum: int
    norm: float
    values: Tensor


@dataclass
class StepRecord:
    """The inputs, losses, outputs and gradients of one training step.

    Attributes:
        profiled: whether a profiler was on at the optimizer's step.
        inputs: checksums of the positional input tensors of outermost modules.
        losses: tensors whose backward was called, in order.
        outputs: floating-point outputs of outermost modules, in order.
        gradients: by parameter name.
    """

    profiled: bool = False
    inputs: list[int] = field(default_factory=list[int])
    losses: list[Sample] = field(default_factory=list[Sample])
    outputs: list[Sample] = field(default_factory=list[Sample])
    gradients: dict[str, Sample] = field(default_factory=dict[str, Sample])


class Probe:
    """Records loss, outputs and gradients of steps while installed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._step = StepRecord()
        self._depth = 0
        self._names: Any = WeakTensorKeyDictionary()  # parameter -> name
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Observe modules, backward passes and optimizers while the context lasts."""
        backward: Callable[..., None] = torch.autograd.backward

        def watched(tensors: Any, *args: Any, **kwargs: Any) -> None:
            self._step.losses += _samples([tensors])
            backward(tensors, *args, **kwargs)

        hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
            register_optimizer_step_pre_hook(self._gradients),
        ]
        try:
            with patched("torch.autograd", {"backward": watched}):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def step(self, number: int) -> None:
        """Write the record since the last call as step `number`."""
        torch.save(self._step, self._directory / f"{number}.pt")
        self._step = StepRecord()

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth += 1
        if self._depth == 1:
            self._step.inputs += [_checksum(t) for t in tree_leaves(inputs) if _is_recorded(t)]
            if module not in self._seen:
                self._seen.add(module)
                self._names.update((p, name) for name, p in module.named_parameters())

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth -= 1
        if self._depth == 0:
            # Not through the output's methods: a ModelOutput may gather sharded logits on access.
            values = list(dict.values(output)) if isinstance(output, dict) else output
            self._step.outputs += _samples([values])

    def _gradients(self, optimizer: Any, *_: Any) -> None:
        self._step.profiled |= profiler_on()
        for group_number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    unnamed = f"parameter {index} of group {group_number}"
                    name = self._names.get(parameter, unnamed)
                    for sample in _samples([parameter.grad]):
                        self._step.gradients[name] = sample


def load_steps(directory: Path) -> list[StepRecord]:
    """Read the records that a probe wrote, in the order of steps."""
    files = sorted(directory.glob("*.pt"), key=lambda path: int(path.stem))
    return [torch.load(path, weights_only=False) for path in files]


def _is_recorded(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_meta


@torch.no_grad()
def _samples(values: Iterable[Any]) -> list[Sample]:
    samples: list[Sample] = []
    for value in tree_leaves(list(values)):
        if not _is_recorded(value) or not (value.is_floating_point() or value.is_complex()):
            continue
        local, flat = _flat(value)
        positions = torch.linspace(0, max(flat.numel() - 1, 0), min(flat.numel(), SAMPLES)).long()
        samples.append(
            Sample(
                shape=tuple(local.shape),
                checksum=_checksum(value),
                norm=float(torch.linalg.vector_norm(flat.float())),
                values=flat[positions.to(flat.device)].cpu(),
            )
        )
    return samples


def _flat(tensor: Any) -> tuple[Tensor, Tensor]:
    """Return this rank's part of a tensor, and its values flattened."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    local = local.detach()
    return local, (local.coalesce().values() if local.is_sparse else local).reshape(-1)


@torch.no_grad()
def _checksum(tensor: Any) -> int:
    """Return the sum of the elements' bits, weighted by position, modulo 2 ** 64."""
    flat = _flat(tensor)[1]
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    bits = flat.view(torch.uint8 if flat.dtype == torch.bool else _BITS[flat.element_size()])
    total = 0
    for block in bits.split(_BLOCK):
        weights = torch.arange(1, block.numel() + 1, device=block.device).remainder_(_PERIOD)
        total = total * 31 + int((block.long() * weights).sum())
    return total % (1 << 64)
