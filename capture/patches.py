"""Patches of torch and other libraries: one registry, one way to install.

`PATCHES` lists every symbol that a capture replaces: why, and which modules do it in which order.
`patched` and `rebound` install a replacement for the duration of a context and refuse a symbol or
a module that the registry does not list. Where several modules patch one symbol, a later one in
`by` wraps an earlier one; installing them in another order is an error.
"""

import contextlib
import gc
import importlib
import sys
import sysconfig
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import CodeType
from typing import Any, TypeVar

import torch

_PACKAGE = "onerank.capture."


@dataclass(frozen=True, slots=True)
class Patch:
    """Symbols of one owner that a capture replaces.

    Attributes:
        owner: module or class, as a dotted path.
        names: attributes of it; empty where a capture looks them up at run time.
        why: what the replacement is for.
        by: modules below `onerank.capture` that install it, in the order of installation.
        everywhere: whether copies are replaced too, as `from torch.distributed import barrier`
            makes them.
        in_cuda_builds: whether a CPU build of torch lacks the names.
    """

    owner: str
    names: tuple[str, ...]
    why: str
    by: tuple[str, ...]
    everywhere: bool = False
    in_cuda_builds: bool = False


PATCHES: tuple[Patch, ...] = (
    # The fake world: nothing may reach the other ranks, which do not exist.
    Patch(
        "torch.distributed.distributed_c10d",
        (
            *("init_process_group", "_new_process_group_helper", "_store_based_barrier"),
            *("split_group", "recv", "barrier", "batch_isend_irecv", "all_gather_object"),
            *("gather_object", "broadcast_object_list", "scatter_object_list"),
            *("send_object_list", "recv_object_list"),
        ),
        "Python decides here before the dispatcher is reached: record the call, contact no peer. "
        "Before that, a call of init_process_group shows that a script distributes itself.",
        ("emulate_torchrun", "fake_world.c10d_patches"),
        everywhere=True,
    ),
    Patch(
        "torch.distributed.distributed_c10d",
        ("is_initialized",),
        "A script whose models onerank slices must see no process group: it would wrap them in "
        "DistributedDataParallel again.",
        ("fake_world.c10d_patches",),
        everywhere=True,
    ),
    Patch(
        "torch.distributed.pipelining.stage._PipelineStageBase",
        ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"),
        "Label sends and receives with the phase and micro-batch for which the stage builds them.",
        ("fake_world.p2p_phases",),
    ),
    Patch(
        "torch.distributed",
        ("new_subgroups",),
        "torch counts the GPUs of this host; the job's nodes have more.",
        ("fake_world.device_remap",),
    ),
    Patch(
        "torch.distributed.fsdp._init_utils",
        ("_init_intra_and_inter_node_groups", "_get_device_from_device_id"),
        "HYBRID_SHARD groups by GPUs per node; a device id may name another GPU of the node.",
        ("fake_world.device_remap",),
    ),
    Patch(
        "torch.cuda",
        ("device_count",),
        "A script that counts GPUs finds those of the job's node.",
        ("no_device.cuda_api", "fake_world.device_remap"),
    ),
    Patch(
        "torch.accelerator",
        ("device_count",),
        "As torch.cuda.device_count.",
        ("no_device.cuda_api", "fake_world.device_remap"),
    ),
    # A capture without a device.
    Patch(
        "torch.cuda",
        (),
        "Without a device, answer as on the GPU that the capture stands for.",
        ("no_device.cuda_api",),
    ),
    Patch("torch.accelerator", (), "As torch.cuda.", ("no_device.cuda_api",)),
    Patch("torch.cuda.memory", (), "As torch.cuda.", ("no_device.cuda_api",)),
    Patch("torch.cuda.random", (), "As torch.cuda.", ("no_device.cuda_api",)),
    Patch("torch.cuda.nccl", (), "As torch.cuda.", ("no_device.cuda_api",)),
    Patch(
        "torch.cuda.nvtx",
        ("_nvtx",),
        "A CPU build has no NVTX, whose ranges scripts open.",
        ("no_device.cuda_api",),
    ),
    Patch(
        "torch.version",
        ("cuda",),
        "Libraries read it to find out whether torch is built for CUDA.",
        ("no_device.cuda_api",),
    ),
    Patch(
        "torch.Tensor",
        ("pin_memory", "is_pinned", "record_stream"),
        "Pinning memory needs a driver, and no stream runs.",
        ("no_device.cuda_api",),
    ),
    Patch(
        "torch",
        ("Generator",),
        "A generator of the GPU needs a driver.",
        ("no_device.cuda_api",),
    ),
    Patch(
        "torch.nn.Parameter",
        ("__new__",),
        "Parameters have shapes alone, so that large models fit and none is trained.",
        ("no_device.emulated_process",),
    ),
    Patch(
        "transformers.utils.import_utils",
        ("is_fake_tensor",),
        "transformers builds masks for fake tensors that it leaves out on a device.",
        ("no_device.emulated_process",),
    ),
    Patch(
        "torch.distributed.utils",
        ("_verify_param_shape_across_processes",),
        "DDP reads the shapes of other ranks' parameters from a tensor without numbers.",
        ("no_device.emulated_process",),
        everywhere=True,
    ),
    Patch(
        "torch.Tensor",
        ("data_ptr",),
        "torch, and our own slices, tell tensors apart by their address.",
        ("no_device.emulated_process",),
    ),
    Patch(
        "torch._subclasses.fake_tensor.FakeTensorMode",
        ("avoid_device_init", "create_symbolic_nested_int"),
        "torch.cuda says that there is a device, but no tensor may be created on it. A nested "
        "tensor has no sizes there.",
        ("no_device.emulated_process",),
    ),
    Patch(
        "torch._subclasses.fake_tensor.FakeTensor",
        ("data", "numpy", "tolist", "__format__"),
        "FSDP1 moves a parameter by its data, which leaves a fake tensor's device as it was. "
        "Scripts log a loss by way of NumPy, and read counts as a list.",
        ("no_device.emulated_process",),
    ),
    Patch(
        "torch.nn.DataParallel",
        ("scatter",),
        "It moves inputs to the GPU by C++ code that a CPU build lacks.",
        ("no_device.emulated_process",),
    ),
    Patch(
        "torch",
        ("save",),
        "There are no values to save.",
        ("no_device.emulated_process",),
    ),
    Patch(
        "torch.distributed.distributed_c10d",
        ("is_nccl_available",),
        "Scripts and communication hooks look for NCCL, which a CPU build of torch lacks.",
        ("no_device.emulated_process",),
        everywhere=True,
    ),
    Patch(
        "torch.distributed.distributed_c10d",
        ("ProcessGroupNCCL",),
        "Where NCCL is available, torch compares each backend with its class.",
        ("no_device.emulated_process",),
        in_cuda_builds=True,
    ),
    Patch(
        "torch._C",
        ("_get_accelerator",),
        "FSDP2 makes its mesh of this device if it is given none.",
        ("no_device.emulated_process",),
    ),
    Patch(
        "torch.distributions.Distribution",
        ("_validate_args",),
        "Distributions check each sample against their support, in numbers.",
        ("no_device.emulated_process",),
    ),
    Patch(
        "triton.runtime.jit.JITFunction",
        ("run",),
        "A Triton kernel is recorded by its operands; nothing can run it.",
        ("no_device.emulated_process",),
    ),
    Patch(
        "triton.runtime.autotuner.Autotuner",
        ("run",),
        "Triton's tuner times configurations on the device.",
        ("no_device.emulated_process",),
    ),
    Patch(
        "threading.Thread",
        ("start",),
        "transformers moves weights to the device in threads, where no mode would be on.",
        ("no_device.emulated_process",),
    ),
    Patch(
        "torch.autograd.Function",
        ("apply",),
        "The log needs the number of the function's node to find its module in backward.",
        ("no_device.emulated_process",),
    ),
    Patch(
        "torch.utils._foreach_utils",
        ("_has_foreach_support",),
        "Fake gradients are clipped by foreach kernels too.",
        ("no_device.emulated_process",),
        everywhere=True,
    ),
    Patch(
        "torch",
        ("compile",),
        "Inductor compiles for the emulated GPU, and without timing kernels. A compiled call of a "
        "model, as transformers' generate makes for a static cache, has no hooks that run.",
        ("no_device.inductor", "profiling.module_scopes"),
    ),
    Patch(
        "torch._dynamo.device_interface.CudaInterface",
        (
            *("current_device", "set_device", "device_count", "stream", "current_stream"),
            *("set_stream", "synchronize", "get_device_properties", "exchange_device"),
            *("maybe_exchange_device", "memory_allocated", "is_bf16_supported", "get_raw_stream"),
            "raise_if_triton_unavailable",
        ),
        "Dynamo and Inductor ask for the GPU by functions of torch.cuda that they hold.",
        ("no_device.inductor",),
    ),
    Patch(
        "torch._inductor.scheduler",
        ("has_triton",),
        "Inductor writes Triton kernels, which nothing compiles.",
        ("no_device.inductor",),
    ),
    Patch(
        "torch._inductor.codegen.triton",
        ("gen_attr_descriptor_import",),
        "Inductor looks up the version of Triton, which may not be installed.",
        ("no_device.inductor",),
    ),
    Patch(
        "torch._inductor.fx_passes.joint_graph.UniformValueConstantFolder",
        ("run",),
        "Inductor computes constants on their device to fold them.",
        ("no_device.inductor",),
    ),
    Patch(
        "torch._inductor.fx_passes.pad_mm",
        ("_should_pad", "has_triton"),
        "Inductor pads the operands of a product if that is faster, which it measures.",
        ("no_device.inductor",),
    ),
    Patch(
        "torch.utils._triton",
        ("triton_hash_with_backend",),
        "It asks Triton's driver for the GPU.",
        ("no_device.inductor",),
    ),
    Patch(
        "torch._inductor.async_compile.AsyncCompile",
        ("triton",),
        "A generated kernel is recorded by its operands; nothing can compile it.",
        ("no_device.inductor",),
    ),
    Patch(
        "torch._inductor.codecache.PyCodeCache",
        ("load_by_key_path",),
        "The generated wrapper allocates and launches on fake tensors.",
        ("no_device.inductor",),
    ),
    Patch(
        "torch.distributed.tensor._sharding_prop.ShardingPropagator",
        ("_propagate_tensor_meta_non_cached",),
        "DTensor infers global shapes by running operators on fake tensors: no work of the rank.",
        ("no_device.emulated_process",),
    ),
    Patch(
        "torch.distributed",
        ("Logger", "Reducer"),
        "DDP times CUDA steps by a timer that only a CUDA build has, and that needs a GPU.",
        ("no_device.emulated_process",),
    ),
    Patch(
        "torch.utils",
        ("swap_tensors",),
        "torch moves a fake parameter by a swap, which weak references to it forbid.",
        ("no_device.emulated_process",),
    ),
    Patch(
        "torch.UntypedStorage",
        ("resize_", "data_ptr"),
        "FSDP frees and allocates gathered parameters by resizing their storage, and compares "
        "addresses.",
        ("no_device.emulated_process",),
    ),
    Patch(
        "torch.autograd",
        ("_record_function_with_args_enter", "_record_function_with_args_exit"),
        "The ranges of communication calls go to the log of operators; no profiler runs.",
        ("no_device.emulated_process",),
    ),
    Patch(
        "torch.nn.functional",
        ("scaled_dot_product_attention",),
        "torch chooses the attention kernel in C++ that only a CUDA build has.",
        ("no_device.attention_backends",),
        everywhere=True,
    ),
    Patch(
        "torch._utils",
        ("_get_device_index",),
        "The index of another GPU of the node means the current device.",
        ("fake_world.device_remap",),
        everywhere=True,
    ),
    Patch(
        "torch.cuda._utils",
        ("_get_device_index",),
        "As torch._utils._get_device_index, which it has under the same name.",
        ("fake_world.device_remap",),
        everywhere=True,
    ),
    Patch(
        "torch.accelerator._utils",
        ("_get_device_index",),
        "As torch._utils._get_device_index, which it has under the same name.",
        ("fake_world.device_remap",),
        everywhere=True,
    ),
    Patch(
        "torch",
        (),
        "Factory functions such as torch.empty accept another GPU of the node as their device.",
        ("fake_world.device_remap",),
    ),
    Patch(
        "torch.Tensor",
        (),
        "Tensor.to, Tensor.cuda and the new_* factories accept another GPU of the node.",
        ("fake_world.device_remap",),
    ),
    Patch(
        "torch.utils._device.DeviceContext",
        ("__init__",),
        "`with torch.device(...)` accepts another GPU of the node.",
        ("fake_world.device_remap",),
    ),
    Patch(
        "torch.accelerator.device_index",
        ("__init__",),
        "`with torch.accelerator.device_index(...)` accepts another GPU of the node.",
        ("fake_world.device_remap",),
    ),
    Patch(
        "torch.multiprocessing",
        ("spawn",),
        "A script that spawns its ranks runs the captured one in this process.",
        ("emulate_torchrun",),
    ),
    Patch(
        "subprocess.Popen",
        ("__init__",),
        "Refuse a process that a launcher starts as another rank: it would wait for its peers.",
        ("emulate_torchrun",),
    ),
    # Checkpoints and FSDP1 states, which gather from absent ranks.
    Patch(
        "torch.distributed._shard.sharded_tensor.api",
        ("build_global_metadata",),
        "Complete the metadata of a ShardedTensor with the shards of absent ranks.",
        ("checkpoints.distributed_checkpoint",),
    ),
    Patch(
        "torch.distributed.checkpoint.state_dict_saver",
        ("_save_state_dict", "_ProcessBasedAsyncCheckpointExecutor"),
        "Skip saving shards of absent ranks; a saving process would look for its peers.",
        ("checkpoints.distributed_checkpoint",),
    ),
    Patch(
        "torch.distributed.checkpoint.state_dict_loader",
        ("_load_state_dict", "_DistWrapper"),
        "Load without the plans of absent ranks.",
        ("checkpoints.distributed_checkpoint",),
    ),
    Patch(
        "torch.distributed.fsdp._state_dict_utils",
        ("_sharded_pre_load_state_dict_hook",),
        "FSDP1 gathers the shards that a checkpoint was loaded in.",
        ("checkpoints.fsdp1_states",),
    ),
    Patch(
        "torch.distributed.fsdp._optim_utils",
        (
            *("_gather_state_dict", "_shard_orig_param_state", "_map_param_key_to_optim_keys"),
            *("_allgather_state_info", "_gather_all_orig_param_state"),
        ),
        "FSDP1 gathers optimizer states; absent ranks have states of their own parts.",
        ("checkpoints.fsdp1_states",),
    ),
    # Steps, backward passes and optimizers of the script.
    Patch(
        "torch.autograd",
        ("_engine_run_backward",),
        "The one entry of every backward pass, by Tensor.backward or autograd.grad. Gradient sums "
        "belong to the backward, so they run inside of what detects its end.",
        (
            "fake_world.p2p_phases",
            "parallelize.data.grad_accumulation",
            "parallelize.data.auto_wrap",
            "script.optimizer_steps",
            "script.before_first_step",
        ),
    ),
    Patch(
        "torch.autograd",
        ("grad", "backward"),
        "FSDP frees weights after a backward: refuse create_graph=True. The probe samples "
        "losses; it is installed around the whole run, so before a model is sharded.",
        ("verify.numerics", "parallelize.data.fsdp"),
    ),
    Patch(
        "torch.optim.Optimizer",
        ("profile_hook_step",),
        "torch calls it once per optimizer class: the place to watch every later `step`.",
        ("script.optimizer_steps",),
    ),
    Patch(
        "torch.amp.GradScaler",
        ("step",),
        "A loss scaler skips steps; both the step's end and gradient sums must know.",
        ("parallelize.data.optimizers", "script.optimizer_steps"),
    ),
    Patch(
        "torch.amp.GradScaler",
        ("unscale_", "_check_inf_per_device"),
        "Gradients that are not finite on one rank skip the step on all.",
        ("parallelize.data.optimizers",),
    ),
    Patch(
        "torch.nn.utils",
        ("clip_grad_norm_",),
        "The norm of sharded gradients is a sum over ranks: of slices, FSDP2 meshes, ZeRO shards.",
        (
            "parallelize.data.fsdp",
            "parallelize.data.zero",
            "parallelize.data.grad_clipping",
        ),
    ),
    Patch(
        "torch.nn.utils",
        ("clip_grad_value_",),
        "As clip_grad_norm_; no sum is needed.",
        ("parallelize.data.fsdp", "parallelize.data.zero"),
    ),
    Patch(
        "os",
        ("_exit",),
        "A script that ends by os._exit would end the capture with it.",
        ("script.runner",),
    ),
    # Models.
    Patch(
        "transformers.modeling_utils.PreTrainedModel",
        ("__init__", "post_init"),
        "Initialize weights when they are sharded, one part at a time; build fewer layers.",
        ("parallelize.data.fsdp", "parallelize.fewer_layers"),
    ),
    Patch(
        "transformers.modeling_utils.PreTrainedModel",
        ("from_pretrained",),
        "Load weights whole: they are sliced or sharded after the last one is loaded.",
        ("parallelize.shard_model", "parallelize.data.fsdp"),
    ),
    Patch(
        "torch.nn.Module",
        ("register_parameter",),
        "As PreTrainedModel.__init__: parameters stay on meta until the model is moved or used.",
        ("parallelize.data.fsdp",),
    ),
    Patch(
        "torch.nn.Module",
        ("_apply",),
        "A move slices the model first, and creates its deferred weights afterwards.",
        ("parallelize.shard_model", "parallelize.data.fsdp"),
    ),
    Patch(
        "torch.nn.Module",
        ("compile",),
        "Time modules that a script compiles in place; their hooks would be compiled too.",
        ("profiling.module_scopes",),
    ),
    Patch(
        "torch.nn.Module",
        ("__call__",),
        "Slice a model at its first call: module hooks that it gets meanwhile would not run. "
        "Verification needs keyword arguments, which global module hooks lack.",
        ("parallelize.shard_model", "verify.numerics"),
    ),
    Patch(
        "safetensors.torch",
        ("save_file", "save"),
        "safetensors knows plain tensors only: save this rank's shard of a DTensor.",
        ("parallelize.data.auto_wrap",),
        everywhere=True,
    ),
    # torch.compile.
    Patch(
        "torch._inductor.debug",
        ("set_kernel_post_grad_provenance_tracing",),
        "Inductor reports here which graph nodes a generated kernel came from.",
        ("compile_compare",),
        everywhere=True,
    ),
    Patch(
        "torch._inductor.codegen.triton.TritonScheduling",
        ("define_kernel",),
        "The generated kernel's name is known only here.",
        ("compile_compare",),
    ),
    Patch(
        "torch._inductor.output_code.CompiledFxGraph",
        ("__init__", "__call__"),
        "Mark each run of a compiled graph in the profile.",
        ("compile_compare",),
    ),
)

INSTALLED_ELSEWHERE: tuple[Patch, ...] = (
    Patch(
        "torch.nn.functional",
        ("cross_entropy",),
        "The loss of a sharded head. Forward hooks of the model set and undo it: torch.compile "
        "traces their assignments, but not a context manager. Verification runs a rank per thread "
        "and swaps the attribute whenever another thread continues.",
        ("parallelize.tensor.vocab_parallel", "verify.threaded_world"),
    ),
    Patch(
        "torch.nn",
        ("CrossEntropyLoss",),
        "As cross_entropy, while torch.compile traces: it recognises the class by identity and "
        "calls torch's own function for it.",
        ("parallelize.tensor.vocab_parallel",),
    ),
    Patch(
        "torch.distributed._shard.sharded_tensor.api",
        ("_SHARDED_OPS",),
        "The device of a ShardedTensor without a local shard. torch looks it up in this table by "
        "function, so the entry is replaced and no attribute.",
        ("checkpoints.distributed_checkpoint",),
    ),
)
"""Replacements that `patched` cannot install; `why` gives the reason."""
"""Every symbol of a library that a capture replaces, except operators of the dispatcher.

`fake_world.c10d_patches.override` registers kernels for all `c10d` operators with torch.library,
torch's own interface for that. `step` methods of optimizer classes that a script defines are
replaced by `replaced`, on classes that are known only at run time.
"""

_active: dict[tuple[str, str], list[int]] = {}  # (owner, name) -> positions in `by`, outermost last


def _position(owner: str, name: str, module: str, *, everywhere: bool) -> int:
    """Return the place of an installing module in the registry's order."""
    short = module.removeprefix(_PACKAGE)
    for patch in PATCHES:
        if patch.owner == owner and (name in patch.names or not patch.names):
            assert short in patch.by, f"{short} patches {owner}.{name}, which {patch.by} may"
            assert patch.everywhere == everywhere, f"{owner}.{name}: everywhere={everywhere}"
            return patch.by.index(short)
    raise AssertionError(f"{short} patches {owner}.{name}, which is not in PATCHES")


@contextlib.contextmanager
def _registered(owner: str, names: list[str], module: str, *, everywhere: bool) -> Generator[None]:
    """Check the registry and the order of installation, and note what is installed."""
    places = {name: _position(owner, name, module, everywhere=everywhere) for name in names}
    for name, place in places.items():
        stack = _active.setdefault((owner, name), [])
        # Each replacement calls the function that it replaces, so the order of installation decides
        # which one runs inside the other.
        assert not stack or stack[-1] <= place, f"{module} patches {owner}.{name} too late"
        stack.append(place)
    try:
        yield
    finally:
        for name in places:
            _active[owner, name].pop()


def resolve(owner: str) -> Any:
    """Return the module or class of a dotted path.

    Raises:
        ImportError: the library is not installed.
        AttributeError: this version of the library lacks it.
    """
    parts = owner.split(".")
    for end in range(len(parts), 0, -1):
        try:
            target: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            if end == 1:
                raise
            continue
        for name in parts[end:]:
            target = getattr(target, name)
        return target
    raise ImportError(owner)


def patched(
    owner: str, replacements: Mapping[str, Any], *, by: str | None = None
) -> AbstractContextManager[None]:
    """Return a context in which attributes of a library's module or class are replaced.

    Args:
        owner: dotted path, as in `PATCHES`.
        replacements: attribute -> what replaces it.
        by: name of the installing module; None is the caller's.
    """
    caller = str(sys._getframe(1).f_globals["__name__"])  # pyright: ignore[reportPrivateUsage]
    return _patched(owner, replacements, by or caller)


@contextlib.contextmanager
def _patched(owner: str, replacements: Mapping[str, Any], module: str) -> Generator[None]:
    target = resolve(owner)
    with (
        _registered(owner, list(replacements), module, everywhere=False),
        contextlib.ExitStack() as undo,
    ):
        for name, by in replacements.items():
            undo.enter_context(replaced(target, name, by))
        yield


class _ImportHook:
    """A finder that calls functions after their module has been imported."""

    def __init__(self) -> None:
        self.callbacks: dict[str, list[Callable[[], object]]] = {}

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        callbacks = self.callbacks.get(name)
        if not callbacks:
            return None
        # Without itself, or it would ask itself without end.
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def executed(module: Any) -> None:
                # An attribute of the instance, which hid the method.
                del loader.exec_module
                execute(module)
                for callback in list(callbacks):
                    callback()

            loader.exec_module = executed
        return spec


_import_hook = _ImportHook()


@contextlib.contextmanager
def after_import(
    module: str, install: Callable[[], AbstractContextManager[None]]
) -> Generator[None]:
    """Enter a context once a module is imported, at once if it is; leave it with this one.

    Args:
        module: dotted name of a module that the script may import.
        install: returns the context, such as one that patches the module.
    """
    with contextlib.ExitStack() as undo:
        if module in sys.modules:
            undo.enter_context(install())
            yield
            return
        callbacks = _import_hook.callbacks.setdefault(module, [])

        def imported() -> None:
            undo.enter_context(install())

        callbacks.append(imported)
        if _import_hook not in sys.meta_path:
            sys.meta_path.insert(0, _import_hook)
        try:
            yield
        finally:
            callbacks.remove(imported)
            if not any(_import_hook.callbacks.values()):
                sys.meta_path.remove(_import_hook)


def rebound(owner: str, replacements: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Return a context in which functions are replaced wherever a module has imported them."""
    module = str(sys._getframe(1).f_globals["__name__"])  # pyright: ignore[reportPrivateUsage]
    return _rebound(owner, replacements, module)


@contextlib.contextmanager
def _rebound(owner: str, replacements: Mapping[str, Any], module: str) -> Generator[None]:
    target = resolve(owner)
    original = [getattr(target, name) for name in replacements]
    ours = list(replacements.values())
    with _registered(owner, list(replacements), module, everywhere=True):
        _rebind(original, ours)
        try:
            yield
        finally:
            _rebind(ours, original)


@contextlib.contextmanager
def replaced(owner: Any, name: str, by: Any) -> Generator[None]:
    """Replace an attribute of an object that the script defines, while the context lasts."""
    # The raw entry of the class: getattr would return a static or class method unwrapped, and
    # restoring that would turn it into a plain function.
    original = owner.__dict__[name] if isinstance(owner, type) and name in owner.__dict__ else None
    inherited = isinstance(owner, type) and name not in owner.__dict__
    absent = not hasattr(owner, name)
    if original is None and not inherited and not absent:
        original = getattr(owner, name)
    setattr(owner, name, by)
    try:
        yield
    finally:
        if inherited or absent:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})

_originals: dict[int, object] = {}  # functions of libraries that `rebound` replaces, by identity
_rebindable: set[int] = set()  # identities of these functions and of what replaces them now
_bindings: dict[str, tuple[int, int, list[str]]] = {}
"""Module of a library -> identity and size of its namespace, names bound to such functions."""


def index_bindings() -> None:
    """Find the names in imported modules that are bound to functions that `rebound` replaces.

    A process that forks calls this first. The search changes the reference count of every object in
    a module, so in each fork it would copy the memory of all modules: 0.1 s of CPU.
    """
    _bindings.clear()
    for patch in PATCHES:
        owner = sys.modules.get(patch.owner)
        for name in patch.names if patch.everywhere and owner is not None else ():
            function = getattr(owner, name, None)
            if id(function) not in _rebindable:
                _originals[id(function)] = function
                _rebindable.add(id(function))
    for name, module in list(sys.modules.items()):
        _bound_names(name, module)


def _bound_names(module_name: str, module: Any) -> list[str]:
    """Return the names of a module that may be bound to functions that `rebound` replaces."""
    namespace: dict[str, object] = getattr(module, "__dict__", {})
    state = id(namespace), len(namespace)
    known = _bindings.get(module_name)
    if known is not None and known[:2] == state:
        return known[2]
    names = [name for name, value in list(namespace.items()) if id(value) in _rebindable]
    # A library binds what it imports once: its namespace grows, or stays as it is. A module of the
    # user may bind an existing name anew, so it is searched each time.
    file, spec = getattr(module, "__file__", None), getattr(module, "__spec__", None)
    is_library = isinstance(file, str) and file.startswith(_LIBRARIES)
    if is_library and not getattr(spec, "_initializing", False):
        _bindings[module_name] = (*state, names)
    return names


def _rebind(old: list[Any], new: list[Any]) -> None:
    """Swap values of module attributes everywhere: `from torch.distributed import ...` copies."""
    swaps = {id(before): after for before, after in zip(old, new, strict=True)}
    unknown = swaps.keys() - _rebindable
    if unknown:
        _originals.update((id(before), before) for before in old if id(before) in unknown)
        _rebindable.update(unknown)
        index_bindings()
    replacements = set(map(id, new)) - _rebindable
    _rebindable.update(replacements)
    for module_name, module in list(sys.modules.items()):
        for name in _bound_names(module_name, module):
            value = module.__dict__.get(name)
            if id(value) in swaps:
                setattr(module, name, swaps[id(value)])
    # A replacement that is gone may be freed, and its identity given to another object.
    _rebindable.difference_update(swaps.keys() - _originals.keys())


_Called = TypeVar("_Called", bound=Callable[..., Any])

_torch: Any = torch  # what follows has no types and no public name

_frames = _torch._C._dynamo.eval_frame

_SKIPPED = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)


def untraced(function: _Called) -> _Called:
    """Return the Python function, which dynamo then traces neither into nor through.

    Hooks of a compiled module communicate, and torch.compile must not trace the recorder.
    """
    # torch.compiler.disable does so too, but it imports all of dynamo, which takes seconds, and
    # it costs the host some time in every call.
    code: CodeType = function.__code__
    _frames.set_code_exec_strategy(code, _SKIPPED)
    return function


T = TypeVar("T")


def live(kind: type[T]) -> list[T]:
    """Return all objects of a class and its subclasses that the garbage collector tracks."""
    objects: list[Any] = gc.get_objects()
    # A process holds hundreds of thousands of objects: check each class once, not each object.
    kinds = {candidate for candidate in set(map(type, objects)) if issubclass(candidate, kind)}
    return [candidate for candidate in objects if type(candidate) in kinds]
