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
_BLOCK = 1 << 24  # elements whose bits are summed at a time
_PERIOD = 65521  # positions weigh differently, so that elements that change places are seen
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Sample:
    """What is kept of a tensor: shape, checksum of its bits, norm, and elements of it."""

    shape: tuple[int, ...]
    checksum: int
    norm: float
    values: Tensor


@dataclass
class Step:
    """What one optimizer step saw.

    Attributes:
        profiled: whether a profiler was on when the step's last gradient was there.
        inputs: checksums of the tensors that outermost modules were called with.
        losses: tensors whose backward was asked for, in order.
        outputs: floating-point outputs of outermost modules, in order.
        gradients: by parameter name.
    """

    profiled: bool = False
    inputs: list[int] = field(default_factory=list[int])
    losses: list[Sample] = field(default_factory=list[Sample])
    outputs: list[Sample] = field(default_factory=list[Sample])
    gradients: dict[str, Sample] = field(default_factory=dict[str, Sample])


class Probe:
    """Writes a `Step` for every optimizer step while installed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._step = Step()
        self._depth = 0
        self._names: Any = WeakTensorKeyDictionary()  # parameter -> name
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Watch modules, backward passes and optimizers while the context lasts."""
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
        """Write what was seen since the last call."""
        torch.save(self._step, self._directory / f"{number}.pt")
        self._step = Step()

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth += 1
        if self._depth == 1:
            self._step.inputs += [_checksum(t) for t in tree_leaves(inputs) if _is_kept(t)]
            if module not in self._seen:
                self._seen.add(module)
                self._names.update((p, name) for name, p in module.named_parameters())

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth -= 1
        if self._depth == 0:
            # as they lie there: a model's output may gather what is sharded when it is asked
            values = list(dict.values(output)) if isinstance(output, dict) else output
            self._step.outputs += _samples([values])

    def _gradients(self, optimizer: Any, *_: Any) -> None:
        self._step.profiled |= profiler_on()
        for group_number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    unnamed = f"parameter {place} of group {group_number}"
                    name = self._names.get(parameter, unnamed)
                    for sample in _samples([parameter.grad]):
                        self._step.gradients[name] = sample


def load_steps(directory: Path) -> list[Step]:
    """Read the steps that a probe wrote, in order."""
    files = sorted(directory.glob("*.pt"), key=lambda path: int(path.stem))
    return [torch.load(path, weights_only=False) for path in files]


def _is_kept(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_meta


@torch.no_grad()
def _samples(values: Iterable[Any]) -> list[Sample]:
    kept: list[Sample] = []
    for value in tree_leaves(list(values)):
        if not _is_kept(value) or not (value.is_floating_point() or value.is_complex()):
            continue
        local, flat = _flat(value)
        places = torch.linspace(0, max(flat.numel() - 1, 0), min(flat.numel(), SAMPLES)).long()
        kept.append(
            Sample(
                shape=tuple(local.shape),
                checksum=_checksum(value),
                norm=float(torch.linalg.vector_norm(flat.float())),
                values=flat[places.to(flat.device)].cpu(),
            )
        )
    return kept


def _flat(tensor: Any) -> tuple[Tensor, Tensor]:
    """Return this rank's part of a tensor, and its values in one row."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    local = local.detach()
    return local, (local.coalesce().values() if local.is_sparse else local).reshape(-1)


@torch.no_grad()
def _checksum(tensor: Any) -> int:
    """Return a sum of the tensor's bits, weighed by their places, modulo 2 ** 64."""
    flat = _flat(tensor)[1]
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    bits = flat.view(torch.uint8 if flat.dtype == torch.bool else _BITS[flat.element_size()])
    total = 0
    for block in bits.split(_BLOCK):
        weights = torch.arange(1, block.numel() + 1, device=block.device).remainder_(_PERIOD)
        total = total * 31 + int((block.long() * weights).sum())
    return total % (1 << 64)
