"""Let AOTAutograd and Inductor transform traced graphs without a device.

They compute constants on the constants' device, and give a recomputed random operator the state of
a CUDA generator.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from onerank.capture.patches import patched, resolve

JOINT_GRAPH = "torch._inductor.fx_passes.joint_graph"

PARTITIONERS = "torch._functorch.partitioners"

PROXY_TENSOR = "torch.fx.experimental.proxy_tensor"

_RANDOM_PRIMS = "torch._prims.rng_prims"


class _OnCpu(TorchDispatchMode):
    """Creates on the CPU what is to be created on the GPU."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(torch.device, _cpu, (args, kwargs or {}))
        return func(*args, **kwargs)


def _cpu(_: torch.device) -> torch.device:
    return torch.device("cpu")


def folded_constants() -> contextlib.AbstractContextManager[None]:
    """Let Inductor compute constants of one value, which it folds, on the CPU."""
    owner = f"{JOINT_GRAPH}.UniformValueConstantFolder"

    def on_cpu(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            with _OnCpu():
                return method(*args, **kwargs)

        return run

    # The constructor folds products with 0 into zeros on the device; torchao's rowwise recipe has
    # such products.
    names = ("__init__", "run")
    return patched(owner, {name: on_cpu(getattr(resolve(owner), name)) for name in names})


def propagated_constants() -> contextlib.AbstractContextManager[None]:
    """Let AOTAutograd compute on the CPU what follows from constants, as from `torch.tensor(0.5)`.

    It computes their values without fake tensors, on the constants' device.
    """
    unset = resolve(PROXY_TENSOR).unset_fake_temporarily

    @contextlib.contextmanager
    def on_cpu() -> Generator[Any]:
        with unset() as fake_mode, _OnCpu():
            yield fake_mode

    return patched(PROXY_TENSOR, {"unset_fake_temporarily": on_cpu})


@contextlib.contextmanager
def recomputed_random_operators() -> Generator[None]:
    """Let recomputed random operators, fused attention among them, run without a CUDA generator.

    torch wraps each of them, so that the recomputation draws the numbers of the first run
    (`functionalize_rng_ops`). Setting the state of a generator launches no kernel, but the wrapper
    changes the graph: Inductor copies operands of attention to contiguous buffers, and passes views
    to a wrapped operator. Kernels and buffers differ, and so does the order of the graph, which
    depends on the sizes of buffers (`reorder_for_peak_memory`). So this wraps the operators too,
    without a state.
    """
    partitioners: Any = importlib.import_module(PARTITIONERS)
    wrapper: Any = importlib.import_module(_RANDOM_PRIMS).graphsafe_run_with_rng_state

    def wrapped(joint: Any, forward: Any, backward: Any, _: int) -> tuple[Any, Any]:
        graphs = forward.graph, backward.graph
        found = [{node.name: node for node in graph.nodes} for graph in graphs]
        for node in joint.graph.nodes:
            tags = getattr(node.target, "tags", ())
            is_random = torch.Tag.nondeterministic_seeded in tags
            # An operator whose result no gradient needs is not in the backward.
            if not (is_random and partitioners.must_recompute(node)):
                continue
            if not all(node.name in nodes for nodes in found):
                continue
            for graph, nodes in zip(graphs, found, strict=True):
                random = nodes[node.name]
                with graph.inserting_before(random):
                    call = graph.create_node(
                        "call_function",
                        wrapper,
                        args=(random.target, *random.args),
                        kwargs={**random.kwargs, "rng_state": None},
                    )
                random.replace_all_uses_with(call)
                graph.erase_node(random)
        forward.recompile()
        backward.recompile()
        return forward, backward

    def run(_: Any, operator: Any, *args: Any, rng_state: None, **kwargs: Any) -> Any:
        return operator(*args, **kwargs)

    with (
        patched(PARTITIONERS, {"functionalize_rng_ops": wrapped}),
        patched(f"{_RANDOM_PRIMS}.graphsafe_run_with_rng_state.__class__", {"__call__": run}),
    ):
        yield
