"""Patches for the ranks that do not run, and for the other GPUs of a node.

Nothing may reach these ranks: a call would wait for them without end.
"""

from onerank.capture.patch_registry.patch import Patch

ABSENT_RANKS: tuple[Patch, ...] = (
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
        "torch.distributed.pipelining.stage._PipelineStageBase",
        ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"),
        "Label sends and receives with the phase and micro-batch for which the stage builds them.",
        ("fake_world.p2p_phases",),
    ),
    Patch(
        "torch.distributed",
        ("TCPStore", "FileStore"),
        "A store that the script creates would wait for absent ranks.",
        ("fake_world.c10d_patches",),
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
        ("start_ranks",),
    ),
    Patch(
        "multiprocessing.process.BaseProcess",
        ("start",),
        "The same for a script that starts a process for each rank.",
        ("start_ranks",),
    ),
    Patch(
        "subprocess.Popen",
        ("__init__",),
        "Refuse a process that a launcher starts as another rank: it would wait for its peers.",
        ("start_ranks",),
    ),
    Patch(
        "torch.distributed.rpc",
        ("init_rpc",),
        "Refuse calls of functions on absent ranks: they would wait for ever.",
        ("start_ranks",),
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
)
