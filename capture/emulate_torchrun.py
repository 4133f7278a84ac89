"""Run a script that uses torch.distributed as one rank, as torchrun would start it."""

import contextlib
from collections.abc import Generator, Sequence
from pathlib import Path

import torch

from onerank.capture.fake_world.block_spawn import block_launchers, spawn_in_process
from onerank.capture.fake_world.checkpoint.dcp import skip_checkpoints
from onerank.capture.fake_world.device_remap import (
    node_sized_groups,
    ranks_per_node,
    report_node_gpus,
)
from onerank.capture.fake_world.object_collectives import Messages, RunAsRank
from onerank.capture.fake_world.recorder import Recorder
from onerank.capture.options import Options
from onerank.capture.parallelize.fewer_layers import FewerLayers
from onerank.capture.script.runner import environment, play_script
from onerank.capture.script.step_hooks import after_step


def sender_runner(script: Path, args: Sequence[str], options: Options) -> RunAsRank:
    """Return a function that runs the script as a given rank, to learn what that rank sends.

    The function runs in a forked process and never profiles.
    """
    size = options.world.size

    def run_rank(rank: int, messages: Messages) -> None:
        recorder, optimizer_steps = Recorder(rank, size, messages), 0

        def count_step(**_: object) -> None:
            nonlocal optimizer_steps
            optimizer_steps += 1
            if optimizer_steps % options.windows.optimizer_steps == 0:
                recorder.next_step()

        torch.set_num_threads(1)  # a forked process has lost the threads of its parent's pool
        recorder.start()
        fewer_layers = FewerLayers(options.depth)
        with contextlib.ExitStack() as stack:
            stack.enter_context(emulated_launch(options, rank))
            stack.enter_context(skip_checkpoints())
            stack.enter_context(fewer_layers.installed())
            stack.enter_context(after_step(count_step))
            play_script(script, args, options.module)

    return run_rank


@contextlib.contextmanager
def emulated_launch(options: Options, rank: int) -> Generator[None]:
    """Run the script as a rank that torchrun started.

    The script sees the environment and GPU count of its node. `torch.multiprocessing.spawn` runs
    in this process, and starting another rank as a process is an error.
    """
    size = options.world.size
    per_node = ranks_per_node(size, options.nproc_per_node)
    local = rank % per_node if options.true_local_rank else 0
    with contextlib.ExitStack() as stack:
        for context in (
            environment(torchrun_variables(rank, size, per_node, local)),
            node_sized_groups(per_node),
            report_node_gpus(per_node, rank % per_node),
            spawn_in_process(),
            block_launchers(),
        ):
            stack.enter_context(context)
        yield


def torchrun_variables(rank: int, size: int, per_node: int, local: int = 0) -> dict[str, str]:
    """Return the environment torchrun would give a rank.

    `local` is LOCAL_RANK: 0 names the one GPU of this host.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_RANK": str(rank // per_node),
        "GROUP_WORLD_SIZE": str(size // per_node),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "onerank",  # torch and Lightning detect torchrun by it
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
