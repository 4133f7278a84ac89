"""Patches that observe a script and change its models: steps, backwards, optimizers, modules."""

from onerank.capture.patch_registry.patch import Patch

SCRIPT: tuple[Patch, ...] = (
    # Steps, backward passes and optimizers of the script.
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
        "torch.optim.Optimizer",
        ("_patch_step_function",),
        "torch calls it once per optimizer: one that does not step is known too.",
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
)
