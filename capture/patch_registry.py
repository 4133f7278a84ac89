"""The registry of patches: every symbol of torch and other libraries that a capture replaces.

`PATCHES` says for each symbol why it is replaced, and which modules do so in which order. Where
several modules patch one symbol, a later one in `by` wraps an earlier one. `patches.py` installs
the replacements, and refuses a symbol or a module that is not listed here.

Operators of the dispatcher are not listed: `fake_world.c10d_patches.override` registers kernels for
all `c10d` operators with torch.library, torch's own interface for that. Nor are `step` methods of
optimizer classes that a script defines: `patches.replaced` finds these classes at run time.
"""

from dataclasses import dataclass


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


DEEP_GEMM = (
    *(
        f"{kind}_gemm_{layout}"
        for kind in ("fp8", "fp8_fp4", "bf16", "cublaslt")
        for layout in ("nt", "nn", "tn", "tt")
    ),
    *(
        f"m_grouped_{kind}_gemm_{layout}"
        for kind in ("fp8", "fp8_fp4", "bf16")
        for layout in ("nt_contiguous", "nn_contiguous", "nt_masked")
    ),
    "k_grouped_fp8_gemm_nt_contiguous",
    "k_grouped_fp8_gemm_tn_contiguous",
    "k_grouped_bf16_gemm_tn_contiguous",
)
"""Functions of DeepGEMM 2.6.1 that multiply matrices (csrc/apis/gemm.hpp)."""


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
        "DistributedDataParallel again. Under torchrun it must see none until it creates one.",
        ("fake_world.c10d_patches",),
        everywhere=True,
    ),
    Patch(
        "torch.distributed.tensor._redistribute",
        ("redistribute_local_tensor",),
        "Without a device the host's time is predicted from counts of what it does in Python.",
        ("no_device.python_calls",),
        everywhere=True,
    ),
    Patch(
        "torch.distributed._functional_collectives",
        ("_are_we_tracing", "_wrap_tensor_autograd"),
        "torch takes fake tensors for those of a compiler, and waits for each collective at once.",
        ("no_device.operators.functional_collectives",),
        everywhere=True,
    ),
    Patch(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group",
        ("foreach_all_gather", "foreach_reduce"),
        "As above: gathers and reductions of FSDP2 and their parameters are counted.",
        ("no_device.python_calls",),
    ),
    Patch(
        "torch.distributed.fsdp._flat_param.FlatParamHandle",
        ("_all_gather_flat_param",),
        "As above: gathers of FSDP1 and their parameters are counted.",
        ("no_device.python_calls",),
    ),
    Patch(
        "torch.distributed.fsdp._runtime_utils",
        ("_reduce_grad", "_reduce_grad_no_shard"),
        "As above: reductions of FSDP1 and their parameters are counted.",
        ("no_device.python_calls",),
    ),
    Patch(
        "torch.distributed.pipelining.stage._PipelineStageBase",
        ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"),
        "Label sends and receives with the phase and micro-batch for which the stage builds them.",
        ("fake_world.p2p_phases",),
    ),
    Patch(
        "torch.distributed.pipelining.stage._PipelineStage",
        ("_move_submod_to_device",),
        "It leaves fake parameters where they are, as parameters without memory.",
        ("no_device.torch_without_gpu",),
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
        "torch.cuda",
        ("_compile_kernel",),
        "It compiles CUDA source, and no driver loads the kernel.",
        ("no_device.emulated_process",),
    ),
    Patch(
        "torch.accelerator",
        ("device_count",),
        "As torch.cuda.device_count.",
        ("no_device.cuda_api", "fake_world.device_remap"),
    ),
    Patch(
        "builtins",
        ("__build_class__",),
        "The class whose method is the step may be defined at any time.",
        ("script.inference_steps",),
    ),
    Patch(
        "torch.cuda.CUDAGraph",
        ("capture_begin", "capture_end", "replay"),
        "A replay runs no operator, so those of the capture are recorded.",
        ("profiling.cuda_graphs",),
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
        ("Generator", "Stream", "Event"),
        "A generator, a stream or an event of the GPU needs a driver.",
        ("no_device.cuda_api",),
    ),
    Patch(
        "torch.Tensor",
        ("type",),
        "A legacy type of the GPU, such as torch.cuda.FloatTensor, needs a CUDA build.",
        ("no_device.cuda_api",),
    ),
    Patch(
        "torch",
        ("set_default_tensor_type",),
        "A legacy type of the GPU, such as torch.cuda.FloatTensor, needs a CUDA build.",
        ("no_device.cuda_api",),
    ),
    Patch(
        "torch.random",
        ("set_rng_state",),
        "A state that another rank sent has no numbers.",
        ("no_device.cuda_api",),
        everywhere=True,
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
        ("no_device.torch_without_gpu",),
    ),
    Patch(
        "transformers.generation.stopping_criteria.StoppingCriteriaList",
        ("__call__",),
        "No device computes the tokens that end sequences: they end at their largest length.",
        ("no_device.generation_ends",),
    ),
    Patch(
        "transformers.generation.utils.GenerationMixin",
        ("_beam_search_has_unfinished_sequences",),
        "Beam search ends by scores, which no device computes: it would end after its prefill.",
        ("no_device.generation_ends",),
    ),
    Patch(
        "torch.distributed.utils",
        ("_verify_param_shape_across_processes",),
        "DDP reads the shapes of other ranks' parameters from a tensor; fake ones have no values.",
        ("no_device.torch_without_gpu",),
        everywhere=True,
    ),
    Patch(
        "torch.Tensor",
        ("data_ptr", "_make_subclass"),
        "torch and our slices identify tensors by their address. Weights of bitsandbytes "
        "are of a subclass, and C++ makes none of a fake tensor.",
        ("no_device.emulated_process",),
    ),
    Patch(
        "torch._subclasses.fake_tensor.FakeTensorMode",
        ("avoid_device_init", "create_symbolic_nested_int", "in_kernel_invocation"),
        "torch.cuda says that there is a device, but no tensor may be created on it. A nested "
        "tensor gets a ragged size without a graph that has symbols. While one thread runs an "
        "operator, another one that loads data reads the device of a tensor.",
        ("no_device.torch_without_gpu", "no_device.emulated_process"),
    ),
    Patch(
        "torch.nested._internal.nested_tensor",
        ("get_tensor_symint",),
        "A nested tensor of real numbers keeps its ragged size when it moves to the emulated GPU.",
        ("no_device.emulated_process",),
    ),
    Patch(
        "torch._subclasses.fake_tensor.FakeTensor",
        (
            *("__new__", "__deepcopy__", "__setattr__", "as_subclass", "data", "set_"),
            *("numpy", "tolist", "new_tensor", "__format__", "__repr__"),
        ),
        "A deep copy takes memory of the GPU. "
        "Libraries create a parameter by the class of another one, which is FakeTensor. FSDP1 "
        "moves a parameter by its data, which leaves a fake tensor's device as it was. Scripts "
        "log a loss by way of NumPy, and read counts as a list. torchao takes a tensor that "
        "prints as FakeTensor for one of a compiler, and skips what a GPU would run. nanotron "
        "gives a tensor a part of a storage. C++ makes no instance of a subclass of a fake tensor. "
        "Megatron-LM sets a number under the name of a method, which torch calls.",
        ("no_device.emulated_process",),
    ),
    Patch(
        "torch._subclasses.fake_tensor.FakeTensor",
        ("__reduce_ex__",),
        "A tensor without numbers is saved by its shape.",
        ("no_device.saved_files",),
    ),
    Patch(
        "torch.distributed.checkpoint._state_dict_stager.StateDictStager",
        ("_offload_tensor",),
        "A fake tensor has no memory that a save could stage on the host.",
        ("no_device.saved_files",),
    ),
    Patch(
        "torch._VF",
        ("lstm", "gru", "rnn_tanh", "rnn_relu"),
        "C++ decides whether cuDNN runs recurrent layers; a build for the CPU has none, and one "
        "for CUDA needs a GPU.",
        ("no_device.emulated_process",),
    ),
    Patch(
        "torch",
        ("_use_cudnn_rnn_flatten_weight",),
        "cuDNN's flat buffer of weights is made by addresses.",
        ("no_device.torch_without_gpu",),
    ),
    Patch(
        "torch.nn.DataParallel",
        ("scatter",),
        "It moves inputs to the GPU by C++ code that a CPU build lacks.",
        ("no_device.torch_without_gpu",),
    ),
    Patch(
        "torch.utils.data.DataLoader",
        ("_get_iterator",),
        "Worker processes cannot send fake tensors.",
        ("no_device.torch_without_gpu",),
    ),
    Patch(
        "torch",
        ("save", "load"),
        "There are no values to save. A data set that is loaded keeps its values.",
        ("no_device.saved_files",),
    ),
    Patch(
        "torch",
        ("tensor", "as_tensor"),
        "In a thread of the backward C++ copies the new tensor to its device past every mode. "
        "Pinned memory needs a driver. A device may be another GPU of the node.",
        ("no_device.emulated_process", "fake_world.device_remap"),
    ),
    Patch(
        "torch.distributed.distributed_c10d",
        ("is_nccl_available",),
        "Scripts and communication hooks look for NCCL, which a CPU build of torch lacks.",
        ("no_device.torch_without_gpu",),
        everywhere=True,
    ),
    Patch(
        "torch.distributed.distributed_c10d",
        ("ProcessGroupNCCL",),
        "Where NCCL is available, torch compares each backend with its class.",
        ("no_device.torch_without_gpu",),
        in_cuda_builds=True,
    ),
    Patch(
        "torch.distributed",
        ("ProcessGroupNCCL",),
        "Scripts create its options, which a CPU build of torch lacks.",
        ("no_device.torch_without_gpu",),
        in_cuda_builds=True,
    ),
    Patch(
        "torch._C",
        ("_get_accelerator",),
        "FSDP2 makes its mesh of this device if it is given none.",
        ("no_device.torch_without_gpu",),
    ),
    Patch(
        "torch._C",
        ("_conv_determine_backend_memory_format",),
        "A build without cuDNN has backends whose results never have their channels last.",
        ("no_device.torch_without_gpu",),
    ),
    Patch(
        "torch._C",
        ("_cuda_getCurrentRawStream",),
        "Libraries with kernels in C (bitsandbytes) read it when they are imported.",
        ("no_device.torch_without_gpu",),
        in_cuda_builds=True,
    ),
    Patch(
        "torch.distributions.Distribution",
        ("_validate_args",),
        "Distributions compare the values of samples with their support; fake tensors have none.",
        ("no_device.torch_without_gpu",),
    ),
    Patch(
        "triton.runtime.jit.JITFunction",
        ("run",),
        "A Triton kernel is recorded by its operands; nothing can run it.",
        ("no_device.operators.triton_kernels",),
    ),
    Patch(
        "triton.runtime.autotuner.Autotuner",
        ("run",),
        "Triton's tuner times configurations on the device.",
        ("no_device.operators.triton_kernels",),
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
        ("no_device.python_calls",),
    ),
    Patch(
        "torch.utils._foreach_utils",
        ("_has_foreach_support",),
        "Fake gradients are clipped by foreach kernels too.",
        ("no_device.torch_without_gpu",),
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
        "Dynamo and Inductor query the GPU through functions of torch.cuda that they imported.",
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
        "torch._dynamo.convert_frame.ConvertFrameAssert",
        ("__call__",),
        "What fails to compile on the emulated GPU runs without Dynamo.",
        ("no_device.inductor",),
    ),
    Patch(
        "torch.fx.experimental.proxy_tensor",
        ("unset_fake_temporarily",),
        "AOTAutograd computes the values of constants on their device.",
        ("no_device.inductor",),
    ),
    Patch(
        "torch._inductor.fx_passes.joint_graph.UniformValueConstantFolder",
        ("__init__", "run"),
        "Inductor computes constants on their device to fold them.",
        ("no_device.inductor",),
    ),
    Patch(
        "torch.distributed._symmetric_memory",
        (
            *("_pipelined_multi_all_gather_and_consume", "_pipelined_produce_and_all2all"),
            "_should_use_multimem_all_gather_matmul",
        ),
        "GEMMs fused with a collective read the memory of other GPUs.",
        ("no_device.torch_without_gpu",),
    ),
    Patch(
        "torch._functorch.partitioners",
        ("functionalize_rng_ops",),
        "A recomputed random operator takes the state of a CUDA generator, which needs a GPU.",
        ("no_device.inductor",),
    ),
    Patch(
        "torch._prims.rng_prims.graphsafe_run_with_rng_state.__class__",
        ("__call__",),
        "It runs a recomputed random operator with the state of a CUDA generator.",
        ("no_device.inductor",),
    ),
    Patch(
        "torch._inductor.fx_passes.pad_mm",
        ("_should_pad", "has_triton"),
        "Inductor pads the operands of a GEMM if that is faster, which it measures.",
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
        "torch._inductor.codegen.triton_split_scan.TritonSplitScanKernel",
        ("scan",),
        "It asks Triton for the size of a data type.",
        ("no_device.inductor",),
    ),
    Patch(
        "deep_gemm",
        DEEP_GEMM,
        "A function of a C++ extension is recorded by its operands; nothing can run it.",
        ("no_device.extensions.products",),
    ),
    Patch(
        "transformer_engine.common",
        ("load_framework_extension",),
        "The module of its extension is provided; a library would need CUDA's.",
        ("no_device.extensions.install",),
    ),
    Patch(
        "transformer_engine.pytorch.attention.dot_product_attention.utils",
        ("get_attention_backend",),
        "It refuses cuDNN's attention for queries of another class than torch.Tensor.",
        ("no_device.extensions.install",),
    ),
    Patch(
        "torch.utils.cpp_extension",
        ("load", "load_inline"),
        "Nothing can compile or run an extension; its functions are recorded or refused by name.",
        ("no_device.extensions.install",),
    ),
    Patch(
        "deepspeed.ops.op_builder.builder.OpBuilder",
        ("load",),
        "Nothing can compile or run an extension; its functions are recorded or refused by name.",
        ("no_device.extensions.install",),
    ),
    Patch(
        "torch.nn.attention.flex_attention",
        ("flex_attention",),
        "Inductor generates its kernel from a template, for which it needs Triton.",
        ("no_device.inductor",),
        everywhere=True,
    ),
    Patch(
        "torch.nn.attention.flex_attention",
        ("_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG",),
        "As an operator, flex attention need not compile itself.",
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
        ("no_device.torch_without_gpu",),
    ),
    Patch(
        "torch.distributed",
        ("Logger",),
        "DDP times CUDA steps by a timer that only a CUDA build has, and that needs a GPU.",
        ("no_device.torch_without_gpu",),
    ),
    Patch(
        "torch.utils",
        ("swap_tensors",),
        "torch moves a fake parameter by a swap, which weak references to it forbid.",
        ("no_device.emulated_process",),
    ),
    Patch(
        "torch.UntypedStorage",
        ("resize_", "data_ptr", "__getitem__"),
        "FSDP frees and allocates gathered parameters by resizing their storage, and compares "
        "addresses. nanotron gives gradients parts of a storage.",
        ("no_device.emulated_process",),
    ),
    Patch(
        "torch.autograd",
        (
            "_record_function_with_args_enter",
            "_record_function_with_args_exit",
            "_profiler_enabled",
        ),
        "The ranges of communication calls go to the log of operators; no profiler runs.",
        ("no_device.python_calls",),
    ),
    Patch(
        "torch.nn.functional",
        ("scaled_dot_product_attention",),
        "torch chooses the attention kernel in C++ that only a CUDA build has.",
        ("no_device.attention_backends",),
        everywhere=True,
    ),
    Patch(
        "torch.nn.attention._fa3",
        ("_fa3_import_module",),
        "FlashAttention 3 needs CUDA to build and to import; its operators are recorded.",
        ("no_device.operators.flash_attention_3",),
    ),
    Patch(
        "torch.backends.cuda",
        ("can_use_cudnn_attention", "can_use_flash_attention", "can_use_efficient_attention"),
        "torch's choice for nested tensors calls them, and scripts do; their C++ queries a device.",
        ("no_device.attention_backends",),
        everywhere=True,
    ),
    Patch(
        "torch.nn.functional",
        ("one_hot",),
        "torch compares a fake tensor with every class; on a GPU it writes ones into zeros.",
        ("no_device.emulated_process",),
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
        ("spawn", "start_processes"),
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
        "FSDP1 gathers optimizer states from all ranks; this process has only this rank's.",
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
            "parallelize.data.apply_data_parallel",
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
        "transformers.generation.utils.GenerationMixin",
        ("generate", "init_continuous_batching"),
        "Slice a model before its KV cache is created, by the layers and heads of the rank.",
        ("parallelize.shard_model",),
    ),
    Patch(
        "transformers.generation.continuous_batching.cache.PagedAttentionCache",
        ("__init__",),
        "Size the paged cache of a sliced model by the heads of this rank.",
        ("parallelize.shard_model",),
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
        ("save_file", "save", "load"),
        "safetensors knows plain tensors only: save this rank's shard of a DTensor. It copies a "
        "tensor from its address, and a fake one has none. Loaded weights are fake.",
        ("no_device.saved_files", "parallelize.data.apply_data_parallel"),
        everywhere=True,
    ),
    Patch(
        "safetensors",
        ("safe_open",),
        "Weights that a script loads are fake: a conversion would read the whole file.",
        ("no_device.saved_files",),
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
        ("compile_compare", "no_device.inductor"),
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
