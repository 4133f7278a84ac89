"""The experts that a script's own router chooses, by `--moe-routing`.

A router's scores depend on parameters, so without a device they are unknown. The choice decides how
many tokens each expert computes, and with it all later shapes. So its indices get the numbers of
static routing. Weights and losses stay unknown.
"""

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from onerank.capture.parallelize.experts.routing import Routing, chosen_experts
from onerank.capture.script.optimizer_steps import self_of
from onerank.ir.errors import SliceError
from onerank.ir.notes import Note

CHOICES = ("topk", "argmax")
"""The operators by which routers choose, without namespace; `argmax` chooses one expert."""

# As many as Qwen3-Next has. A choice among more counts as one of something else, such as tokens of
# a vocabulary or boxes of an image.
_MOST_EXPERTS = 512

# Functions of these modules choose among tokens and beams, which may be as few as experts.
_GENERATION = "transformers.generation."

# Functions of these modules run what torch.compile has compiled.
_COMPILED = ("torch._functorch.", "torch._inductor.")


class ChoiceForm(Enum):
    """How a fused router writes the experts of a token, of which there are E, k chosen."""

    INDICES = "indices"  # [..., k]
    MAP = "map"  # bools [..., E]
    BITS = "bits"  # bytes [..., ceil(E / 8)]; bit e % 8 of byte e // 8 is expert e's


@dataclass(frozen=True)
class FusedChoice:
    """The experts that a fused router's kernel chooses.

    Attributes:
        scores: [..., experts], from which the kernel chooses.
        top_k: experts of each token.
        result: the tensor to which it writes the choice.
        form: the result's form.
    """

    scores: Tensor
    top_k: int
    result: Tensor
    form: ChoiceForm

    def written(self, indices: Tensor) -> Tensor:
        """Return the numbers of the result, given the chosen experts [..., top_k]."""
        if self.form is ChoiceForm.INDICES:
            return indices.to(self.result.dtype)
        experts = self.scores.shape[-1]
        chosen = torch.zeros(*indices.shape[:-1], experts, dtype=torch.bool)
        chosen.scatter_(-1, indices, value=True)
        if self.form is ChoiceForm.MAP:
            return chosen.to(self.result.dtype)
        padded = torch.nn.functional.pad(chosen, (0, -experts % 8)).unflatten(-1, (-1, 8))
        return (padded * torch.tensor([1 << bit for bit in range(8)])).sum(-1).to(torch.uint8)


class RouterChoices:
    """Numbers of the indices that `topk` or `argmax` returns for unknown scores.

    Attributes:
        calls: calls of `topk`, `argmax` and fused routers whose indices are known and used.
    """

    def __init__(self, routing: Routing | None) -> None:
        """Create the choices.

        Args:
            routing: distribution of tokens over experts; None: choices stay unknown.
        """
        self.calls = 0
        self._routing = routing
        self._indices: dict[tuple[int, int, int, int], Tensor] = {}
        # The modules that chose, in the order of their first choice: the layers.
        self._layers: list[weakref.ref[nn.Module]] = []
        self._used_layers: set[int] = set()
        self._classes: set[str] = set()  # of the modules whose choices are used
        self._use: Callable[[], None] | None = None

    def take_use(self) -> Callable[[], None] | None:
        """Return what counts the latest choice once its indices are used; None without a new one.

        Metrics choose classes, too, but only compare them with labels.
        """
        use, self._use = self._use, None
        return use

    def results(self, operator: str, operands: Sequence[Any]) -> Any:
        """Return the numbers of a choice's results, None for values; None if no router chooses.

        Args:
            operator: one of `CHOICES`.
            operands: its arguments in the schema's order.
        """
        scores = operands[0]
        if operator == "topk":
            indices = self._chosen(scores, operands[1], operands[2])
            return None if indices is None else (None, indices)
        # An argmax of fewer rows than columns more likely chooses the next token of each sequence.
        if scores.dim() == 0 or scores.numel() < scores.shape[-1] ** 2:
            return None
        indices = self._chosen(scores, 1, operands[1])
        if indices is None:
            return None
        with unset_fake_temporarily():
            return indices if operands[2] else indices.squeeze(-1)

    def fused(self, choice: FusedChoice) -> Tensor | None:
        """Return the numbers that a fused router writes; None if they stay unknown."""
        indices = self._chosen(choice.scores, choice.top_k, -1)
        use = self.take_use()
        if indices is None or use is None:
            return None
        use()
        with unset_fake_temporarily():
            return choice.written(indices)

    def _chosen(self, scores: Tensor, top_k: int, dimension: int | None) -> Tensor | None:
        """Return the indices of the chosen experts; None if the call is no router's.

        Args:
            scores: [..., experts].
            top_k: experts of each row.
            dimension: the dimension of the choice; None: all elements.
        """
        experts = scores.shape[-1] if scores.dim() else 0
        last = dimension in (-1, scores.dim() - 1)
        if self._routing is None or not last or not 2 <= experts <= _MOST_EXPERTS:
            return None
        if not scores.dtype.is_floating_point or not 1 <= top_k <= experts or not scores.numel():
            return None
        table = self._routing.table
        if any(len(line) != experts for line in table) or _generation_calls() or _evaluates():
            return None
        layer, module = 0, _calling_module()
        if len(table) > 1:
            if module is None:
                return None  # nothing says which layer calls
            layer = self._layer(module)
        self._use = self._count(layer, type(module).__name__ if module is not None else None)
        if _compiled_calls():
            # Generated kernels use the indices, which no operator shows.
            self._use()
        tokens = scores.numel() // experts
        key = layer, experts, tokens, top_k
        with unset_fake_temporarily():
            if key not in self._indices:
                line = min(layer, max(len(table) - 1, 0))
                counts = self._routing.tokens_per_expert(line, experts, tokens, top_k)
                self._indices[key] = chosen_experts(counts, top_k)
            return self._indices[key].view(*scores.shape[:-1], top_k)

    def _count(self, layer: int, module: str | None) -> Callable[[], None]:
        """Return a function that counts a choice of a layer, the first time it is called.

        Args:
            layer: its number.
            module: the class of the module that chooses, if one does.

        The function raises `SliceError` if more layers choose than the table has lines.
        """
        counted = False

        def count() -> None:
            nonlocal counted
            if counted:
                return
            counted = True
            self.calls += 1
            if module is not None:
                self._classes.add(module)
            self._used_layers.add(layer)
            if self._lines > 1:
                self._check_count(len(self._used_layers) <= self._lines)

        return count

    def _layer(self, module: nn.Module) -> int:
        """Return the number of a layer by the module that chooses in it."""
        known = [reference() for reference in self._layers]
        for number, other in enumerate(known):
            if other is module:
                return number
        self._layers.append(weakref.ref(module))
        return len(self._layers) - 1

    def check(self) -> None:
        """Check that each line of a table belongs to a layer, after a step.

        Raises:
            SliceError: a table has more lines than modules chose.
        """
        if self._lines > 1 and self.calls:
            self._check_count(len(self._used_layers) == self._lines)

    @property
    def _lines(self) -> int:
        return len(self._routing.table) if self._routing is not None else 0

    def _check_count(self, holds: bool) -> None:
        if holds:
            return
        assert self._routing is not None, "only a table has lines"
        raise SliceError(
            f"--moe-routing {self._routing.name}: {self._lines} lines, but "
            f"{'at least ' if len(self._used_layers) > self._lines else ''}"
            f"{len(self._used_layers)} modules "
            "of the script choose experts\n"
            "  give a line for each of them, in the order of their first choice on this rank, or "
            "1 for all",
            code="routing-layer-count",
        )

    def notes(self) -> list[Note]:
        """Return a note on the choices, if any."""
        if not self.calls or self._routing is None:
            return []
        # A codebook chooses, too: only the class of its module says that it is no router.
        classes = ", ".join(sorted(self._classes)) or "the script"
        return [
            Note(
                f"no device computed the scores of {classes}, so {self.calls} calls of topk, "
                f"argmax or fused routers chose by --moe-routing {self._routing.name}",
                code="no-device-routers",
            )
        ]


def _generation_calls() -> bool:
    """Return whether transformers' generation calls, and no module that it runs."""
    for frame in _frames_outward():
        if _module_name(frame).startswith(_GENERATION):
            return True
        if _module_of(frame) is not None:
            return False
    return False


def _evaluates() -> bool:
    """Return whether the script counts predictions: outside modules, without gradients."""
    # A graph that torch.compile runs has no gradients either.
    return not torch.is_grad_enabled() and _calling_module() is None and not _compiled_calls()


def _compiled_calls() -> bool:
    """Return whether a graph of torch.compile runs."""
    return any(_module_name(frame).startswith(_COMPILED) for frame in _frames_outward())


def _module_name(frame: FrameType) -> str:
    """Return the name of the Python module whose code a frame runs, "" without one."""
    return str(frame.f_globals.get("__name__", ""))


def _calling_module() -> nn.Module | None:
    """Return the innermost module of which a method runs, None outside of modules."""
    modules = (_module_of(frame) for frame in _frames_outward())
    return next((module for module in modules if module is not None), None)


def _frames_outward() -> Iterator[FrameType]:
    """Yield the running functions of this thread, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module_of(frame: FrameType) -> nn.Module | None:
    """Return the module of which a frame runs a method, None for other functions."""
    # A function such as `evaluate(model, batch)` has a module as its first argument, too.
    is_method = frame.f_code.co_varnames[:1] == ("self",)
    instance = self_of(frame) if is_method else None
    return instance if isinstance(instance, nn.Module) else None
