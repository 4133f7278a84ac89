"""The layer and the role of every module of a model, from its structure and class names.

A *layer* is an element of a repeated container: an element with children in a ModuleList; in a
Sequential or ModuleDict of at least two such elements of one class. The outermost such container
counts, so the experts of a layer are not layers.

The *role* of a module is that of the outermost enclosing module that one of these rules names:

- embedding: an nn.Embedding or EmbeddingBag; outside layers, a class named Embedding that holds no
  layer.
- norm: a normalisation of torch.nn, or a class named Norm whose parameters have at most one
  dimension.
- loss: a loss of torch.nn, or a class named Loss.
- attention: an nn.MultiheadAttention; a class named Attention or Attn; a module that holds query,
  key and value projections, separate or fused.
- head: outside layers, a module that holds projections and either follows the layers or has the
  size of an embedding.
- experts: within a layer, a class named Experts, a ModuleList of at least two equal elements, or
  parameters of three dimensions, one matrix per expert. router: next to experts, a class named
  Router, or a projection with one row per expert. Both keep their role within an mlp.
- mlp: within a layer, a module of projections, activations, dropouts and norms only, or one that
  holds experts; a single projection only if the layer also has attention.

Operators of a layer outside all of these modules have the role "layer". Modules that no rule names
have the role "other". If an mlp calls an attention operator directly, the converter changes its
role to attention (`onerank.converters.sources.kineto.link.module_phase`).
"""

import re
from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.loss import _Loss

from onerank.ir import Module

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.LocalResponseNorm, _BatchNorm)
_PROJECTIONS = (nn.Linear, nn.Bilinear)
_QUERIES = re.compile(r"(q|query|queries|to_q|wq)(_?proj|_?linear|_?lin|_a_proj|_b_proj)?")
_KEYS = re.compile(r"(k|key|keys|to_k|wk)(_?proj|_?linear|_?lin)?|kv_a_proj.*|kv_b_proj")
_FUSED = re.compile(r"(w?qkv|in|c)_?proj_weight|w?qkv(_?proj)?|query_key_value|c_attn|to_qkv", re.I)
WRAPPED = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Attributes in which torch.compile, checkpoint_wrapper and FSDP store the module they wrap."""


def describe(root: nn.Module) -> list[tuple[nn.Module, Module]]:
    """Return every module within `root`, itself first, with its path, class, role and layer.

    Paths are those of `named_modules`, except for `root`, which has the name of its class. A
    wrapper, such as checkpoint_wrapper's, has the path of the module inside. So has a wrapper of
    the whole model whose only child is named `module` (DistributedDataParallel).
    """
    return _ModelWalk(root).described


class _ModelWalk:
    """Walks down a model and passes role and layer to the modules below.

    Attributes:
        described: the result of `describe`.
    """

    def __init__(self, root: nn.Module) -> None:
        self.described: list[tuple[nn.Module, Module]] = []
        self._seen: set[nn.Module] = set()
        self._layers = set(_layers(root))
        self._past_layers = False
        self._vocabularies = {
            tuple(m.weight.shape) for m in root.modules() if isinstance(m, _EMBEDDINGS)
        }
        model = _wrappers(root)[-1]
        self._walk(root, "", type(model).__name__, layer="", role="other", scope="")

    def _walk(
        self,
        module: nn.Module,
        prefix: str,
        path: str,
        *,
        layer: str,
        role: str,
        scope: str,
        has_attention_sibling: bool = False,
    ) -> None:
        # A module that a model registers twice (tied embeddings) keeps its first path.
        if module in self._seen:
            return
        wrapped = _wrappers(module, outermost=not prefix)
        module = wrapped[-1]
        self._seen.update(wrapped)
        if not self._layers.isdisjoint(wrapped):
            layer, role, scope = path, "layer", ""
            self._past_layers = True
        elif role in ("other", "layer"):
            role_by_rule = self._role(
                module, in_layer=bool(layer), has_attention_sibling=has_attention_sibling
            )
            if role_by_rule:
                role, scope = role_by_rule, path
            elif not layer or not _has_no_parameters(module):
                role = "other"
        within = "" if scope == path else scope
        description = Module(path, type(module).__name__, role, layer, within)
        self.described += [(wrapper, description) for wrapper in wrapped]
        expert_roles = _expert_roles(module) if role == "mlp" else {}
        attention = any(_attends(child) for child in module.children())
        for name, child in module.named_children():
            below = f"{prefix}.{name}" if prefix else name
            place = {"layer": layer, "role": role, "scope": scope}
            if child in expert_roles:
                place |= {"role": expert_roles[child], "scope": below}
            self._walk(child, below, below, **place, has_attention_sibling=attention)

    def _role(self, module: nn.Module, *, in_layer: bool, has_attention_sibling: bool) -> str:
        """Return the role by the rules of this module's docstring; "" if no rule applies."""
        named = type(module).__name__.lower()
        # A module around layers (a whole decoder) has no role, whatever its name says.
        whole = not any(child in self._layers for child in module.modules())
        projects = whole and _has_projection(module)
        # The first rule that applies decides.
        rules = {
            "embedding": isinstance(module, _EMBEDDINGS)
            or ("embedding" in named and whole and not in_layer),
            "norm": isinstance(module, _NORMS) or ("norm" in named and _is_flat(module)),
            "loss": isinstance(module, _Loss) or named.endswith("loss"),
            "attention": whole and _attends(module),
            "head": projects
            and not in_layer
            and (self._past_layers or self._is_vocabulary(module)),
            "mlp": projects
            and in_layer
            and (has_attention_sibling or next(module.children(), None) is not None)
            and bool(_expert_roles(module) or _is_feed_forward(module)),
        }
        return next((role for role, holds in rules.items() if holds), "")

    def _is_vocabulary(self, module: nn.Module) -> bool:
        # A weight may be a module that computes it.
        weight = getattr(module, "weight", None)
        return isinstance(weight, Tensor) and tuple(weight.shape) in self._vocabularies


def _wrappers(module: nn.Module, *, outermost: bool = True) -> list[nn.Module]:
    """Return the wrappers around a module from the outside in, and the module itself last."""
    chain = [module]
    while len(inner := [*chain[-1].named_children()]) == 1:
        name, child = inner[0]
        if name not in WRAPPED and not (outermost and name == "module"):
            break
        chain.append(child)
    return chain


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of a model: elements of its outermost repeated containers."""
    for child in module.children():
        elements = [_wrappers(element, outermost=False)[-1] for element in child.children()]
        compound = [element for element in elements if next(element.children(), None) is not None]
        same_class = len({type(element) for element in compound}) == 1
        if isinstance(child, nn.ModuleList):
            repeated = bool(compound) and len(compound) == len(elements)
        else:
            # These containers also join different parts, as an MLP of a Sequential does.
            repeated = (
                isinstance(child, nn.Sequential | nn.ModuleDict)
                and same_class
                and len(compound) == len(elements) > 1
            )
        if repeated:
            yield from elements
        else:
            yield from _layers(child)


def _is_flat(module: nn.Module) -> bool:
    return all(parameter.dim() <= 1 for parameter in module.parameters())


def _is_projection(module: nn.Module) -> bool:
    """Return whether the module multiplies by a single matrix, with or without a bias.

    The class need not be nn.Linear (GPT-2 has Conv1D), and may contain other modules (LoRA).
    """
    if isinstance(module, _PROJECTIONS):
        return True
    dims = [parameter.dim() for parameter in module.parameters(recurse=False)]
    return max(dims, default=0) == 2 and not isinstance(module, _EMBEDDINGS) and len(dims) <= 2


def _has_projection(module: nn.Module) -> bool:
    return any(_is_projection(part) for part in module.modules())


def _attends(module: nn.Module) -> bool:
    if isinstance(module, nn.MultiheadAttention):
        return True
    if not _has_projection(module):
        return False
    named = type(module).__name__.lower()
    if "attention" in named or "attn" in named:
        return True
    names = [name for name, _ in module.named_children()]
    names += [name for name, _ in module.named_parameters(recurse=False)]
    parts = any(map(_QUERIES.fullmatch, names)) and any(map(_KEYS.fullmatch, names))
    return parts or any(map(_FUSED.fullmatch, names))


def _has_no_parameters(module: nn.Module) -> bool:
    """Return whether the module has no parameters, like an activation or a dropout."""
    return next(module.parameters(), None) is None


def _is_feed_forward(module: nn.Module) -> bool:
    """Return whether every part is a projection, a norm, or has no parameters."""
    return all(
        _is_projection(part)
        or isinstance(part, _NORMS)
        or ("norm" in type(part).__name__.lower() and _is_flat(part))
        or next(part.parameters(recurse=False), None) is None
        for part in module.modules()
    )


def _expert_roles(module: nn.Module) -> dict[nn.Module, str]:
    """Return "experts" or "router" for such children of a mixture of experts; {} for others."""
    children = [*module.children()]
    counts = {child: count for child in children if (count := _expert_count(child))}
    if not counts:
        return {}
    roles = dict.fromkeys(counts, "experts")
    experts = max(counts.values())
    for child in children:
        if child not in roles and _routes(child, experts):
            roles[child] = "router"
    return roles


def _routes(module: nn.Module, experts: int) -> bool:
    """Return whether the module scores experts, of which this rank has `experts`."""
    if "router" in type(module).__name__.lower():
        return True
    # A multiple: under expert parallelism the router scores all experts, and a rank has a share.
    rows = next((p.shape[0] for p in module.parameters(recurse=False) if p.dim() == 2), 0)
    return _is_projection(module) and rows > 1 and rows % experts == 0


def _expert_count(module: nn.Module) -> int:
    """Return the number of experts in the module; 0 if it contains none."""
    if isinstance(module, nn.ModuleList):
        same_class = len({type(child) for child in module}) == 1
        repeated = same_class and len(module) > 1 and all(map(_has_projection, module))
        return len(module) if repeated else 0
    # No experts: the weight of a 1-D convolution has three dimensions too.
    if isinstance(module, _ConvNd):
        return 0
    cubes = [p.shape[0] for p in module.parameters(recurse=False) if p.dim() == 3]
    named = type(module).__name__.lower()
    if cubes:
        return cubes[0]
    return 1 if "experts" in named and "shared" not in named else 0
