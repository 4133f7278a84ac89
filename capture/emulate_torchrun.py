"""Run a script that uses torch.distributed as one rank, as torchrun would start it."""

import contextlib
from collections.abc import Generator, Sequence
from pathlib import Path

import torch

from onerank.capture.fake_world.block_spawn import block_launchers, spawning_nobody
from onerank.capture.fake_world.checkpoint.dcp import checkpoints_alone
from onerank.capture.fake_world.device_remap import gpus_of_a_node, nodes_of, ranks_per_node
from onerank.capture.fake_world.object_collectives import Act, Messages
from onerank.capture.fake_world.recorder import Recorder
from onerank.capture.options import Options
from onerank.capture.parallelize.fewer_layers import FewerLayers
from onerank.capture.script.runner import environment, play_script
from onerank.capture.script.step_hooks import after_step


def actor(script: Path, args: Sequence[str], options: Options) -> Act:
    """Return what runs the script, which distributes itself, as another rank."""
    size = options.world.size

    def act(rank: int, messages: Messages) -> None:
        recorder, taken = Recorder(rank, size, messages), 0

        def stepped(**_: object) -> None:
            nonlocal taken
            taken += 1
            if taken % options.windows.optimizer_steps == 0:
                recorder.next_step()

        torch.set_num_threads(1)  # a forked process cannot use threads that its parent made
        recorder.start()
        shallow = FewerLayers(options.depth)
        with contextlib.ExitStack() as stack:
            stack.enter_context(launched(options, rank))
            stack.enter_context(checkpoints_alone())
            stack.enter_context(shallow.installed())
            stack.enter_context(after_step(stepped))
            play_script(script, args, options.module)

    return act


@contextlib.contextmanager
def launched(options: Options, rank: int) -> Generator[None]:
    """Present the script as a torchrun rank, and prevent it from starting ranks."""
    size = options.world.size
    per_node = ranks_per_node(size, options.nproc_per_node)
    local = rank % per_node if options.true_local_rank else 0
    with contextlib.ExitStack() as stack:
        for found in (
            environment(torchrun_variables(rank, size, per_node, local)),
            nodes_of(per_node),
            gpus_of_a_node(per_node, rank % per_node),
            spawning_nobody(),
            block_launchers(),
        ):
            stack.enter_context(found)
        yield


def torchrun_variables(rank: int, size: int, per_node: int, local: int = 0) -> dict[str, str]:
    """Return the environment torchrun would give a rank.

    `local` is LOCAL_RANK: 0 names the one GPU of this machine.
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
        "TORCHELASTIC_RUN_ID": "onerank",  # by this torch and Lightning know that all are started
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
