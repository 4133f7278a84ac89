"""Patches of torch.compile: it works without a device, and names the kernels it generates."""

from onerank.capture.patch_registry.patch import Patch

COMPILER: tuple[Patch, ...] = (
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
        ("no_device.graph_transforms",),
    ),
    Patch(
        "torch._inductor.fx_passes.joint_graph.UniformValueConstantFolder",
        ("__init__", "run"),
        "Inductor computes constants on their device to fold them.",
        ("no_device.graph_transforms",),
    ),
    Patch(
        "torch._functorch.partitioners",
        ("functionalize_rng_ops",),
        "A recomputed random operator takes the state of a CUDA generator, which needs a GPU.",
        ("no_device.graph_transforms",),
    ),
    Patch(
        "torch._prims.rng_prims.graphsafe_run_with_rng_state.__class__",
        ("__call__",),
        "It runs a recomputed random operator with the state of a CUDA generator.",
        ("no_device.graph_transforms",),
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
