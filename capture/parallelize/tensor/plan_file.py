"""Plan files: which modules to slice in a model without a tensor-parallel plan in transformers.

A plan is a TOML file. onerank ships some under `plans/`; a user passes the path of another:

    model = "GPT"                                  # the class to slice, or a list of classes
    [modules]                                      # * stands for a number
    "transformer.wte" = { style = "embedding_rowwise" }
    "transformer.h.*.attn" = { divide = ["n_head", "n_embd"], narrow_input = true }
    "transformer.h.*.attn.c_attn" = { style = "colwise", parts = 3 }
    "transformer.h.*.attn.c_proj" = { style = "rowwise" }
    "lm_head" = { style = "head" }

- `parts`: of a fused layer, the number of equal parts (3: q, k and v) or their proportions ([4, 1,
  1]: four times as many query heads as key-value heads). For a row-parallel layer, of its input.
  "grouped": for each key-value head its query heads, its key and its value together.
- `kv_heads`: of a layer that computes keys or values, the attribute of its parent that counts the
  key-value heads, named in the parent's `divide` too. `--tp` may then be a multiple of it.
- `divide`: attributes of the module that count what is sliced.
- `multiple`: each rank's share is a multiple of this number.
- `narrow_input`: for a module that reads its width from its input's shape. It sees a slice of the
  input; its column-parallel layers get the whole input.
- `head_bias`: arguments that bias the scores of each head, [heads, ...], [batch x heads, ...] or,
  with four dimensions, [batch, heads, ...]. The module gets the part of its heads, which the first
  entry of `divide` counts.
- `optional = true`: some configurations of the class lack this module.
- `adapter = ["lora_A", "lora_B"]`: names of a layer's low-rank matrices, for a subclass of a linear
  layer or a module that contains one. PEFT's names are known.

Modules that a plan does not name stay whole. A plan that slices nothing, but names adapters or
modules to keep whole, is combined with the model's own plan.
"""

import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from onerank.capture.parallelize.hugging_face import Conv1D, PreTrainedModel
from onerank.capture.parallelize.module_names import name_pattern, parent_of
from onerank.ir.errors import SliceError
from onerank.ir.input_files import load_toml

if TYPE_CHECKING:
    from torch import nn

PLAN_STYLES = {
    "colwise": "output features sliced",
    "rowwise": "input features sliced, the sum reduced",
    "colwise_gather_output": "output features sliced, then gathered",
    "colwise_own_boundary": "as colwise, of a layer whose block is more than what is sliced",
    "rowwise_split_input": "whole input split, input features sliced",
    "embedding_rowwise": "vocabulary sliced",
    "head": "vocabulary sliced, up to torch.nn.functional.cross_entropy in the model's forward",
    "embedding_split_output": "kept whole, of its output the features of this rank's heads",
    "depthwise": "channels of a depthwise convolution sliced",
    "moe_tp_experts": "intermediate features of every expert sliced, of transformers' experts",
    "replicated": "kept whole",
    "replicated_with_grad_allreduce": "kept whole between sliced layers, its gradients summed",
}

KEPT_WHOLE = ("replicated", "replicated_with_grad_allreduce")

GROUPED = "grouped"

_SHIPPED = Path(__file__).with_name("plans")

_SKELETON_LINES = 40


# Most equal parts of a fused layer; the shipped plans have up to 12.
_MOST_PARTS = 4096


class ModuleRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to slice the modules that a pattern matches; fields as in this file's docstring."""

    style: str = ""
    parts: int | tuple[int, ...] | Literal["grouped"] = 1
    kv_heads: str = ""
    divide: tuple[str, ...] = ()
    multiple: int = 1
    head_bias: tuple[str, ...] = ()
    narrow_input: bool = False
    adapter: tuple[str, str] | None = None
    optional: bool = False

    @property
    def slices(self) -> bool:
        """Whether the rule slices the module."""
        return self.style not in ("", *KEPT_WHOLE)

    @property
    def proportions(self) -> tuple[int, ...]:
        """Proportions of a fused layer's parts."""
        if self.parts == GROUPED:
            # Groups follow each other, so a rank's share is contiguous.
            return (1,)
        return (1,) * self.parts if isinstance(self.parts, int) else self.parts


class ShardingPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Slicing rules for one model class, or for several with the same module structure.

    Attributes:
        model: name of the class, or names.
        modules: pattern of module names -> rule.
    """

    model: str | Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    modules: dict[str, ModuleRule]

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the model classes that the plan applies to."""
        return (self.model,) if isinstance(self.model, str) else self.model

    def rules_of(self, model: "nn.Module") -> dict[str, ModuleRule]:
        """Return module name -> rule for every module the plan matches.

        Raises:
            SliceError: a pattern matches no module, or a module lacks an attribute to divide.
        """
        patterns = {pattern: name_pattern(pattern) for pattern in self.modules}
        rules: dict[str, ModuleRule] = {}
        matched: set[str] = set()
        for name, module in model.named_modules():
            pattern = next((key for key, expr in patterns.items() if expr.fullmatch(name)), None)
            if pattern is None:
                continue
            matched.add(pattern)
            rules[name] = self.modules[pattern]
            if rules[name].head_bias and not rules[name].divide:
                raise SliceError(
                    f"the plan slices {', '.join(rules[name].head_bias)} of {name} by heads, but "
                    "does not say which attribute has the number of heads\n  "
                    "name that attribute first in divide",
                    code="plan-no-heads",
                )
            for attribute in rules[name].divide:
                if not isinstance(getattr(module, attribute, None), int):
                    raise SliceError(
                        f"the plan divides {name}.{attribute}, but that "
                        f"{type(module).__name__} has no whole number of this name; it has "
                        f"{_counts(module) or 'none'}",
                        code="plan-unknown-attribute",
                    )
        for name, rule in rules.items():
            block = parent_of(name)
            if rule.kv_heads and rule.kv_heads not in rules.get(block, ModuleRule()).divide:
                raise SliceError(
                    f"the plan gives {rule.kv_heads} as kv_heads of {name}, but does not divide "
                    f"that attribute\n  name it in divide of {block or 'its parent'}, after the "
                    "query heads",
                    code="plan-kv-heads",
                )
        needed = [pattern for pattern, rule in self.modules.items() if not rule.optional]
        if missing := [pattern for pattern in needed if pattern not in matched]:
            raise SliceError(
                f"the plan names {', '.join(missing)}, which {type(model).__name__} does not have; "
                f"its own modules as a plan:\n{skeleton(model)}",
                code="plan-unknown-module",
            )
        return rules


def read_plan(path: Path) -> ShardingPlan:
    """Read a plan file.

    Raises:
        SliceError: the file is unreadable or malformed, or has an unknown style or invalid parts.
    """
    content = load_toml(path, error=SliceError)
    try:
        plan = msgspec.convert(content, ShardingPlan)
    except msgspec.MsgspecError as error:
        raise SliceError(
            f'--sharding-plan {path} is not a plan: {error}; expected model = "CLASS" and '
            '[modules] with lines like "layers.*.up" = { style = "colwise" }',
            code="plan-malformed",
        ) from error
    for pattern, rule in plan.modules.items():
        if rule.style and rule.style not in PLAN_STYLES:
            raise SliceError(
                f"--sharding-plan {path}: {pattern!r} has style {rule.style!r}; styles are "
                + ", ".join(f"{style} ({meaning})" for style, meaning in PLAN_STYLES.items()),
                code="plan-unknown-style",
            )
        few = not isinstance(rule.parts, int) or rule.parts <= _MOST_PARTS
        if not few or not rule.proportions or min(rule.proportions) < 1:
            raise SliceError(
                f"--sharding-plan {path}: {pattern!r} has parts = {rule.parts}; expected 1 to "
                f"{_MOST_PARTS}, or a list of proportions",
                code="plan-bad-parts",
            )
    return plan


@functools.cache
def _shipped() -> dict[str, ShardingPlan]:
    plans = (read_plan(path) for path in sorted(_SHIPPED.glob("*.toml")))
    return {name: plan for plan in plans for name in plan.classes}


def shipped_plan(model: "nn.Module") -> ShardingPlan | None:
    """Return the plan that onerank ships for a model without a plan of its layers."""
    if not isinstance(model, PreTrainedModel):
        return None
    # A plan of the head alone, as LFM2's, would leave all layers whole, and one of experts alone,
    # as LFM2-MoE's, their attention.
    of_layers = [name for name in getattr(model, "_tp_plan", None) or {} if "*" in name]
    if any(".experts" not in name for name in of_layers):
        return None
    return _shipped().get(type(model).__name__)


def rules_for(model: "nn.Module", plan: ShardingPlan | None) -> dict[str, ModuleRule]:
    """Return module name -> rule from a plan or the plan shipped for the model; {} without both.

    A plan that slices nothing adds its rules to the shipped plan's.

    Raises:
        SliceError: as for `ShardingPlan.rules_of`.
    """
    plan_rules = plan.rules_of(model) if plan else {}
    if any(rule.slices for rule in plan_rules.values()):
        return plan_rules
    shipped = shipped_plan(model)
    rules = shipped.rules_of(model) if shipped else {}
    # The plan only adds adapters and modules to keep whole.
    for name, rule in plan_rules.items():
        shipped_rule = rules.get(name, ModuleRule())
        rules[name] = msgspec.structs.replace(
            shipped_rule, adapter=rule.adapter, style=rule.style or shipped_rule.style
        )
    return rules


def without_plan(model: "nn.Module") -> str:
    """Return the error message for a model without a plan, with a skeleton plan to fill in."""
    return (
        f"{class_name(model)} has no tensor-parallel plan, neither transformers' nor onerank's, so "
        "what to slice is not known. Models with one are, for example, Llama, Qwen, Mistral, Gemma "
        f"and GPT-2. For others, fill in a plan (styles: {', '.join(PLAN_STYLES)}), leave out what "
        f"stays whole, and give it with --sharding-plan FILE:\n\n{skeleton(model)}"
    )


def whole_plan(model: "nn.Module", names: Iterable[str]) -> str:
    """Return, as text, a plan that keeps modules whole and adds to the model's own plan."""
    patterns = dict.fromkeys(_pattern(name) for name in names)
    lines = [f'{pattern} = {{ style = "{KEPT_WHOLE[0]}" }}' for pattern in patterns]
    return "\n".join([f'model = "{class_name(model)}"', "[modules]", *lines])


def skeleton(model: "nn.Module") -> str:
    """Return a plan of `model` with the styles left to fill in, as text."""
    lines: dict[str, str] = {}
    for name, module in model.named_modules():
        pattern = _pattern(name)
        if (shape := _shape(module)) is not None:
            lines.setdefault(pattern, f'{pattern} = {{ style = "" }}  # {shape}')
        elif name and any(_shape(child) for child in module.children()):
            counts = _counts(module)
            if counts:
                lines.setdefault(pattern, f"{pattern} = {{ divide = [] }}  # {counts}")
    shown = list(lines.values())
    if len(shown) > _SKELETON_LINES:
        left_out = len(shown) - _SKELETON_LINES
        shown = [*shown[:_SKELETON_LINES], f"# and {left_out} more"]
    return "\n".join([f'model = "{class_name(model)}"', "[modules]", *shown])


def class_name(model: "nn.Module") -> str:
    """Return the name of the class as the script wrote it.

    `fully_shard` gives a module a class of its own, FSDPName of FSDPModule and Name.
    """
    kind, *bases = type(model).__mro__
    sharded = bases[0].__name__ == "FSDPModule"
    return (bases[1] if sharded else kind).__name__


def _pattern(name: str) -> str:
    return '"' + re.sub(r"\.\d+(?=\.|$)", ".*", name) + '"'


def _shape(module: "nn.Module") -> str | None:
    # Late, because the command line reads a plan file without torch.
    from torch import nn

    if isinstance(module, nn.Embedding):
        return f"Embedding {module.num_embeddings} x {module.embedding_dim}"
    if isinstance(module, nn.Linear):
        return f"Linear {module.in_features} -> {module.out_features}"
    if isinstance(module, Conv1D):
        return f"Conv1D {module.nx} -> {module.nf}"
    return None


def _counts(module: "nn.Module") -> str:
    return ", ".join(f"{key} = {value}" for key, value in _whole_numbers(module))


def _whole_numbers(module: Any) -> Iterator[tuple[str, int]]:
    from torch import SymInt  # late, as above

    for key, value in vars(module).items():
        plain = isinstance(value, int) and not isinstance(value, bool | SymInt)
        if plain and value > 1 and not key.startswith("_"):
            yield key, value
