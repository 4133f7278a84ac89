"""Patches for a capture without a device: torch and libraries run on shapes, as on a GPU."""

from onerank.capture.patch_registry.patch import Patch

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


# The GPU, which torch and scripts query, and which a CPU build lacks.
_GPU: tuple[Patch, ...] = (
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
        "torch._dynamo.variables.optimizer.OptimizerVariable",
        ("call_method",),
        "Dynamo creates the states of an optimizer on the GPU while it traces the step.",
        ("no_device.emulated_process",),
    ),
    Patch(
        "torch.cuda.profiler",
        ("start", "stop"),
        "A CPU build has no CUDA runtime, whose profiler scripts start and stop.",
        ("no_device.cuda_api",),
    ),
    Patch(
        "torch._C",
        ("_cuda_attach_out_of_memory_observer",),
        "A CPU build has no allocator of a GPU to observe.",
        ("no_device.cuda_api",),
        in_cuda_builds=True,
    ),
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
)

# Tensors that have shapes and no memory.
_FAKE_TENSORS: tuple[Patch, ...] = (
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
        "xformers.ops.fmha.common",
        ("_built_with_cuda",),
        "xformers' kernels are those of torch, and need no extension that was built with CUDA.",
        ("no_device.torch_without_gpu",),
    ),
    *(
        Patch(
            f"xformers.ops.fmha.cutlass.{operator}",
            ("SUPPORTED_ATTN_BIAS_TYPES",),
            "A fake tensor is a mask as a tensor is.",
            ("no_device.torch_without_gpu",),
        )
        for operator in ("FwOp", "BwOp")
    ),
    Patch(
        "torch.Tensor",
        ("data",),
        "A tensor without memory that is given that of a fake tensor becomes one.",
        ("no_device.emulated_process",),
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
        "torch.utils.data.DataLoader",
        ("_get_iterator",),
        "Worker processes cannot send fake tensors.",
        ("no_device.torch_without_gpu",),
    ),
    Patch(
        "torch",
        ("tensor", "as_tensor"),
        "In a thread of the backward C++ copies the new tensor to its device past every mode. "
        "Pinned memory needs a driver. A device may be another GPU of the node.",
        ("no_device.emulated_process", "fake_world.device_remap"),
    ),
    Patch(
        "threading.Thread",
        ("start",),
        "transformers moves weights to the device in threads, where no mode would be on.",
        ("no_device.emulated_process",),
    ),
    Patch(
        "torch.utils._foreach_utils",
        ("_has_foreach_support",),
        "Fake gradients are clipped by foreach kernels too.",
        ("no_device.torch_without_gpu",),
        everywhere=True,
    ),
    Patch(
        "torch.utils",
        ("swap_tensors",),
        "torch moves a fake parameter by a swap, which weak references to it forbid.",
        ("no_device.emulated_process",),
    ),
    Patch(
        "torch._C._distributed_c10d.Reducer",
        ("_rebuild_buckets",),
        "The step in which DDP orders its buckets anew is no step of a long run.",
        ("no_device.emulated_process",),
    ),
    Patch(
        "torch.UntypedStorage",
        ("resize_", "data_ptr", "from_buffer", "share_memory_", "__getitem__"),
        "FSDP frees and allocates gathered parameters by resizing their storage, and compares "
        "addresses. nanotron gives gradients parts of a storage. A storage of bytes has memory. "
        "Only memory of the CPU is shared.",
        ("no_device.emulated_process",),
    ),
    Patch(
        "torch",
        ("ctc_loss",),
        "Under a dispatch mode C++ leaves lengths on the host, and losses on the GPU meet them.",
        ("no_device.emulated_process",),
    ),
    Patch(
        "torch.nn.functional",
        ("one_hot",),
        "torch compares a fake tensor with every class; on a GPU it writes ones into zeros.",
        ("no_device.emulated_process",),
        everywhere=True,
    ),
)

# Numbers that no device computes.
_VALUES: tuple[Patch, ...] = (
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
        "torch.distributions.Distribution",
        ("_validate_args",),
        "Distributions compare the values of samples with their support; fake tensors have none.",
        ("no_device.torch_without_gpu",),
    ),
)

# Files of weights and checkpoints, whose tensors have no numbers.
_FILES: tuple[Patch, ...] = (
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
        "torch",
        ("save", "load"),
        "There are no values to save. A data set that is loaded keeps its values.",
        ("no_device.saved_files",),
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
)

# torch.distributed, where it is written for a GPU or for tensors with values.
_COMMUNICATION: tuple[Patch, ...] = (
    Patch(
        "torch.distributed._functional_collectives",
        ("_are_we_tracing", "_wrap_tensor_autograd"),
        "torch takes fake tensors for those of a compiler, and waits for each collective at once.",
        ("no_device.operators.functional_collectives",),
        everywhere=True,
    ),
    Patch(
        "torch.distributed.pipelining.stage._PipelineStage",
        ("_move_submod_to_device",),
        "It leaves fake parameters where they are, as parameters without memory.",
        ("no_device.torch_without_gpu",),
    ),
    Patch(
        "torch.distributed.utils",
        ("_verify_param_shape_across_processes",),
        "DDP reads the shapes of other ranks' parameters from a tensor; fake ones have no values.",
        ("no_device.torch_without_gpu",),
        everywhere=True,
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
        "torch.distributed._symmetric_memory",
        (
            *("_pipelined_multi_all_gather_and_consume", "_pipelined_produce_and_all2all"),
            "_should_use_multimem_all_gather_matmul",
        ),
        "GEMMs fused with a collective read the memory of other GPUs.",
        ("no_device.torch_without_gpu",),
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
)

# Attention kernels, which torch chooses in C++ that only a CUDA build has.
_ATTENTION: tuple[Patch, ...] = (
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
        (
            *("can_use_cudnn_attention", "can_use_flash_attention", "can_use_efficient_attention"),
            "is_flash_attention_available",
        ),
        "torch's choice for nested tensors calls them, and scripts do; their C++ queries a device.",
        ("no_device.attention_backends",),
        everywhere=True,
    ),
)

# Kernels that nothing can compile or run: Triton, CUDA source and C++ extensions.
_EXTENSIONS: tuple[Patch, ...] = (
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
)

# Python calls that are counted, since the host's time is predicted from them.
_COUNTED: tuple[Patch, ...] = (
    Patch(
        "torch.distributed.tensor._redistribute",
        ("redistribute_local_tensor",),
        "DTensors that change their placement.",
        ("no_device.python_calls",),
        everywhere=True,
    ),
    Patch(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group",
        ("foreach_all_gather", "foreach_reduce"),
        "Gathers and reductions of FSDP2, and their parameters.",
        ("no_device.python_calls",),
    ),
    Patch(
        "torch.distributed.fsdp._flat_param.FlatParamHandle",
        ("_all_gather_flat_param",),
        "Gathers of FSDP1, and their parameters.",
        ("no_device.python_calls",),
    ),
    Patch(
        "torch.distributed.fsdp._runtime_utils",
        ("_reduce_grad", "_reduce_grad_no_shard"),
        "Reductions of FSDP1, and their parameters.",
        ("no_device.python_calls",),
    ),
    Patch(
        "torch.distributed.pipelining._backward",
        ("stage_backward_weight",),
        "Groups of weights in a split backward, for each of which it calls autograd.",
        ("no_device.python_calls",),
        everywhere=True,
    ),
    Patch(
        "torch.autograd.Function",
        ("apply",),
        "The log needs the number of the function's node to find its module in backward.",
        ("no_device.python_calls",),
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
)

NO_DEVICE: tuple[Patch, ...] = (
    *_GPU,
    *_FAKE_TENSORS,
    *_VALUES,
    *_FILES,
    *_COMMUNICATION,
    *_ATTENTION,
    *_EXTENSIONS,
    *_COUNTED,
)
