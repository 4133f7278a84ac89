"""Host time of what Python dispatches: DTensors, tensor subclasses, autograd functions, FSDP, DDP.

    torchrun --nproc-per-node 2 -m benchmarks.predictions.python_dispatch [--json FILE]
    python -m benchmarks.predictions.python_dispatch --fake

Each operator runs on small tensors, on which the GPU takes less time than the host. A sample is the
host's time of many calls, from an idle GPU to the last launch, divided by their number. The table
has the median and the quartiles of the samples. The extra time of a sort of dispatch is the time of
a call with it minus the time of the same call on plain tensors, in samples taken one after another.

A call also runs once under a dispatch mode that counts what Python does in it, by the kinds of
`onerank.ir.python_calls`, and operators on plain tensors that launch something. `--json` has both;
`python -m tools.fit.fit_python_calls` makes figures of a host description of it.

With `--fake` one process emulates two ranks by torch's fake process group, on a GPU or on a CPU.
Collectives then take no time.
"""

import contextlib
import itertools
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    _flat_param,
    _runtime_utils,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    _api,
    _dispatch,
    _redistribute,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from benchmarks.harness import gpus_and_torch, parser_of, print_conditions, version_of

SIZE = 64
LISTED = 64
LAYERS = 16
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"

_torch: Any = torch


class Wrapper(Tensor):
    """A tensor subclass that wraps another tensor and runs operators on that."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapper":
        """Return a wrapper of `inner`."""
        wrapper = _torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            dtype=inner.dtype,
            device=inner.device,
            requires_grad=inner.requires_grad,
        )
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on the wrapped tensors."""
        args, kwargs = tree_map_only(Wrapper, lambda each: each.inner, (args, kwargs or {}))
        return tree_map_only(Tensor, Wrapper, func(*args, **kwargs))


class Identity(torch.autograd.Function):
    """An autograd function that launches nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the input."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Return the gradient."""
        return gradients[0]


class Counts(TorchDispatchMode):
    """Counts operators, and what Python does besides them.

    Attributes:
        counts: count by kind of `onerank.ir.python_calls`, and "operator".
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operator; subclasses of Tensor run it."""
        if any(issubclass(each, DTensor) for each in types):
            listed = itertools.chain.from_iterable(each for each in args if isinstance(each, list))
            tracked = torch.is_grad_enabled() or _torch._C._current_graph_task_id() != -1
            self.counts["dtensor" if tracked else "dtensor_untracked"] += 1
            self.counts["dtensor_listed"] += sum(isinstance(each, DTensor) for each in listed)
            return NotImplemented
        if any(issubclass(each, Wrapper) for each in types):
            self.counts["subclass"] += 1
            return NotImplemented
        results = func._schema.returns
        views = any(each.alias_info and not each.alias_info.is_write for each in results)
        self.counts["operator"] += not views
        return func(*args, **(kwargs or {}))


def counts_of(call: Callable[[], object]) -> Counter[str]:
    """Return what one call does."""
    mode = Counts()
    groups: Any = _fsdp_param_group
    apply: Any = torch.autograd.Function.__dict__["apply"]
    redistribute: Any = _redistribute.redistribute_local_tensor

    def counting(original: Any) -> Callable[..., Any]:
        def counted(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            mode.counts["fsdp_group"] += 1
            mode.counts["fsdp_parameter"] += len(parameters)
            return original(parameters, *args, **kwargs)

        return counted

    def gathered(handle: Any, *args: Any) -> Any:
        mode.counts["fsdp1_unit"] += 1
        mode.counts["fsdp1_parameter"] += handle.flat_param._num_params
        return handles["gather"](handle, *args)

    def reduced(state: Any, handle: Any) -> None:
        mode.counts["fsdp1_unit"] += 1
        mode.counts["fsdp1_parameter"] += handle.flat_param._num_params
        handles["reduce"](state, handle)

    flat: Any = _flat_param.FlatParamHandle
    runtime: Any = _runtime_utils
    handles = {"gather": flat._all_gather_flat_param, "reduce": runtime._reduce_grad}

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        result = apply.__func__(cls, *args, **kwargs)
        # Its backward counts too.
        tracked = torch.is_grad_enabled() and getattr(result, "requires_grad", False)
        mode.counts["function"] += 2 if tracked else 1
        return result

    def redistributed(local: Tensor, current: Any, target: Any, **kwargs: Any) -> Tensor:
        mode.counts["redistribute"] += current.placements != target.placements
        return redistribute(local, current, target, **kwargs)

    replaced = mock.patch.object
    with contextlib.ExitStack() as undo:
        for name in ("foreach_all_gather", "foreach_reduce"):
            undo.enter_context(replaced(groups, name, counting(getattr(groups, name))))
        undo.enter_context(replaced(flat, "_all_gather_flat_param", gathered))
        undo.enter_context(replaced(runtime, "_reduce_grad", reduced))
        undo.enter_context(replaced(torch.autograd.Function, "apply", classmethod(applied)))
        for module in (_api, _dispatch, _redistribute):
            undo.enter_context(replaced(module, "redistribute_local_tensor", redistributed))
        undo.enter_context(mode)
        call()
    _synchronize()
    return mode.counts


def host_us(call: Callable[[], object], calls: int, samples: int) -> list[float]:
    """Return the host's time per call in us, of each sample."""
    for _ in range(min(calls, 20)):
        call()
    times: list[float] = []
    for _ in range(samples):
        _synchronize()
        begun = time.perf_counter_ns()
        for _ in range(calls):
            call()
        times.append((time.perf_counter_ns() - begun) / calls / 1e3)
    _synchronize()
    return times


def _synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def operators(mesh: DeviceMesh) -> dict[str, Callable[[], object]]:
    """Return calls by "sort/operator"; "plain" is the sort without dispatch in Python."""
    x = torch.randn(SIZE, SIZE, device=DEVICE)
    w = torch.randn(SIZE, SIZE, device=DEVICE)
    replicated = {name: distribute_tensor(t, mesh, [Replicate()]) for name, t in _pair(x, w)}
    columns = distribute_tensor(w, mesh, [Shard(1)])
    wrapped = {name: Wrapper(t) for name, t in _pair(x, w)}
    kinds = {"plain": {"x": x, "w": w}, "dtensor": replicated, "subclass": wrapped}
    calls: dict[str, Callable[[], object]] = {}
    for sort, operands in kinds.items():
        calls |= {f"{sort}/{name}": call for name, call in _calls(**operands).items()}
        leaf = operands["x"].clone().detach().requires_grad_()
        weight = operands["w"].clone().detach().requires_grad_()
        for name, function in (("mm", torch.mm), ("mul", torch.mul)):
            calls[f"{sort}/{name}, forward and backward"] = _with_backward(function, leaf, weight)
    local = torch.randn(SIZE, SIZE, device=DEVICE)
    calls["dtensor/mm with a sharded weight"] = lambda: torch.mm(replicated["x"], columns)
    leaf = local.clone().requires_grad_()
    calls["plain/x, function"] = lambda: leaf.view_as(leaf)
    calls["function/x, function"] = lambda: Identity.apply(leaf)
    calls["plain/x * 1, forward and backward"] = _with_backward(lambda a: a * a, leaf)
    calls["function/x * 1, forward and backward"] = _with_backward(
        lambda a: Identity.apply(a * a), leaf
    )
    dtensor_leaf = replicated["x"].clone().detach().requires_grad_()
    calls["from_local"] = lambda: DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    calls["to_local"] = dtensor_leaf.to_local
    calls["redistribute, replicated to shard"] = lambda: replicated["x"].redistribute(
        mesh, [Shard(0)]
    )
    partial = DTensor.from_local(local, mesh, [Partial()], run_check=False)
    calls["redistribute, partial to replicated"] = lambda: partial.redistribute(mesh, [Replicate()])
    calls["redistribute, shard to replicated"] = lambda: columns.redistribute(mesh, [Replicate()])
    calls["redistribute, partial to shard"] = lambda: partial.redistribute(mesh, [Shard(0)])
    gathered = torch.empty(2 * SIZE, SIZE, device=DEVICE)
    calls["plain/all_reduce"] = lambda: dist.all_reduce(local)
    calls["plain/all_gather"] = lambda: dist.all_gather_into_tensor(gathered, local)
    return calls


def _pair(x: Tensor, w: Tensor) -> tuple[tuple[str, Tensor], tuple[str, Tensor]]:
    return ("x", x), ("w", w)


def _calls(x: Tensor, w: Tensor) -> dict[str, Callable[[], object]]:
    norm_weight = x[0].clone() if not isinstance(x, DTensor) else None
    calls: dict[str, Callable[[], object]] = {
        "mm": lambda: torch.mm(x, w),
        "mul": lambda: x * w,
        "mul by a number": lambda: x * 2.0,
        "add_": lambda: x.add_(w, alpha=1e-6),
        "relu": lambda: torch.relu(x),
        "softmax": lambda: torch.softmax(x, -1),
        "sum": x.sum,
        "t": x.t,
        "view": lambda: x.view(-1),
        "detach": x.detach,
        "zero_": x.zero_,
    }
    if norm_weight is not None and not isinstance(x, Wrapper):
        calls["layer_norm"] = lambda: nn.functional.layer_norm(x, (SIZE,), norm_weight, norm_weight)
    return calls


def _with_backward(function: Callable[..., Tensor], *leaves: Tensor) -> Callable[[], object]:
    gradient = function(*leaves).detach()

    def call() -> None:
        torch.autograd.grad(function(*leaves), leaves, gradient)

    return call


def optimizers(mesh: DeviceMesh) -> dict[str, Callable[[], object]]:
    """Return steps of optimizers over `LISTED` tensors."""
    calls: dict[str, Callable[[], object]] = {}
    settings: dict[str, dict[str, Any]] = {
        "AdamW foreach": {"foreach": True},
        "AdamW fused": {"fused": True},
        "SGD, one by one": {"foreach": False, "momentum": 0.9, "lr": 1e-3},
    }
    for sort in ("plain", "dtensor"):
        for name, options in settings.items():
            tensors = [torch.randn(SIZE, SIZE, device=DEVICE) for _ in range(LISTED)]
            if sort == "dtensor":
                tensors = [distribute_tensor(each, mesh, [Shard(0)]) for each in tensors]
            parameters = [nn.Parameter(each) for each in tensors]
            for each in parameters:
                each.grad = torch.zeros_like(each)
            kind = torch.optim.SGD if name.startswith("SGD") else torch.optim.AdamW
            calls[f"{sort}/{name}, {LISTED} tensors"] = kind(parameters, **options).step
    return calls


def wrapped(mesh: DeviceMesh, groups: int, parameters: int, sort: str) -> Callable[[], object]:
    """Return forward and backward of a chain of modules: "plain", "fsdp" (FSDP2), "fsdp1" or "ddp".

    Under FSDP each module is a group. All of them are too small for a second bucket of DDP.
    """

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weights = (nn.Parameter(torch.ones(SIZE)) for _ in range(parameters))
            self.weights = nn.ParameterList(weights)

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.weights:
                x = x * weight
            return x

    model: nn.Module = nn.Sequential(*(Many() for _ in range(groups))).to(DEVICE)
    if sort == "fsdp":
        for each in model.children():
            fully_shard(each, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif sort == "fsdp1":
        policy = ModuleWrapPolicy({Many})
        device = next(model.parameters()).device
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=device
        )
    elif sort == "ddp":
        model = DistributedDataParallel(model)
    x = torch.randn(SIZE, device=DEVICE)

    def call() -> None:
        model(x).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None

    return call


def tensor_parallel(mesh: DeviceMesh, *, parallel: bool) -> Callable[[], object]:
    """Return forward and backward of layers that `parallelize_module` divides."""
    layers = [nn.Linear(SIZE, SIZE, device=DEVICE) for _ in range(2 * LAYERS)]
    model = nn.Sequential(*layers)
    if parallel:
        styles = (ColwiseParallel(), RowwiseParallel())
        parallelize_module(model, mesh, {str(n): styles[n % 2] for n in range(2 * LAYERS)})
    x = torch.randn(SIZE, SIZE, device=DEVICE)

    def call() -> None:
        model(x).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None

    return call


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--fake", action="store_true")
    parser.add_argument("--samples", type=int, default=25)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.fake:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    else:
        dist.init_process_group("nccl")
    rank = dist.get_rank()
    if CUDA:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    mesh = init_device_mesh(DEVICE, (2,))
    if rank == 0:
        gpus = 1 if options.fake else 2
        print_conditions(*(gpus_and_torch(gpus) if CUDA else (version_of("torch"),)))
    times: dict[str, list[float]] = {}
    counts: dict[str, Counter[str]] = {}
    for name, call in operators(mesh).items():
        times[name] = host_us(call, options.calls, options.samples)
        counts[name] = counts_of(call)
    for name, call in optimizers(mesh).items():
        times[name] = host_us(call, 3, options.samples)
        counts[name] = counts_of(call)
    for parallel in (False, True):
        name = f"{'dtensor' if parallel else 'plain'}/{2 * LAYERS} tensor-parallel layers"
        call = tensor_parallel(mesh, parallel=parallel)
        times[name] = host_us(call, 3, options.samples)
        counts[name] = counts_of(call)
    # DDP's reducer needs the futures of a process group that communicates.
    sorts = ("plain", "fsdp", "fsdp1") if options.fake else ("plain", "fsdp", "fsdp1", "ddp")
    for groups, parameters in ((4, 2), (4, 10), (8, 2)):
        for sort in sorts:
            name = f"{sort}/{groups} groups of {parameters} parameters"
            call = wrapped(mesh, groups, parameters, sort)
            times[name] = host_us(call, 3, options.samples)
            counts[name] = counts_of(call)
    if rank == 0:
        for name, each in times.items():
            low, middle, high = statistics.quantiles(each, n=4)
            sort, _, operator = name.partition("/")
            plain = times.get(f"plain/{operator}")
            compared = plain is not None and sort != "plain"
            extra = f"{middle - statistics.median(plain):+9.1f}" if compared else ""
            print(f"{name:56} {middle:9.1f} ({low:.1f} to {high:.1f}) {extra}", flush=True)
        if options.json:
            record = {"times_us": times, "counts": counts}
            options.json.write_text(json.dumps(record), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
