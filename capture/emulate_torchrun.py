"""Run a script that uses torch.distributed as one rank, as torchrun would start it."""

import contextlib
import os
import sys
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any, Literal, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from onerank.capture.checkpoints import skip_checkpoints
from onerank.capture.fake_world.c10d_patches import group_from_init
from onerank.capture.fake_world.call_log import Messages
from onerank.capture.fake_world.device_remap import (
    node_sized_groups,
    report_node_gpus,
)
from onerank.capture.fake_world.message_payloads import RunAsRank
from onerank.capture.fake_world.recorder import Recorder
from onerank.capture.isolation import BadForkError, process_events
from onerank.capture.no_device.emulated_process import emulated
from onerank.capture.options import Options, ranks_per_node
from onerank.capture.parallelize.experts.routing import parse_routing
from onerank.capture.parallelize.fewer_layers import FewerLayers
from onerank.capture.patches import after_import, rebound
from onerank.capture.profiling.window_plan import Progress
from onerank.capture.script.optimizer_steps import after_step
from onerank.capture.script.runner import Script, environment, play_script
from onerank.capture.start_ranks import block_launchers, start_in_process
from onerank.capture.validate_options import names_torch_distributed


def decide_torchrun(script: Script, options: Options, progress: Progress) -> Options:
    """Return the options with `torchrun` decided: whether the script distributes itself.

    A text that names torch.distributed does not decide: the branch that uses it may be off. A
    separate process runs such a script as torchrun would start it, until the script creates a
    process group or runs its first forward with gradients. A world of one rank needs no decision.
    With `record_real_job` the text decides, because the script would meet the real ranks.
    """
    world = options.world
    if options.torchrun is not None or options.plan is not None or world.size == 1:
        return options
    if options.record_real_job or not names_torch_distributed(script.path, options):
        return options
    progress(f"running {script.path.name} until it creates a process group or trains")
    created = _creates_process_group(script, options)
    # A script that fails or ends before either does so again in the capture, which reports it.
    return replace(options, torchrun=created is not False)


def _creates_process_group(script: Script, options: Options) -> bool | None:
    """Return whether the script creates a process group before it trains; None if neither."""
    methods: tuple[Literal["fork", "spawn"], ...] = ("fork", "spawn")
    # A fork has imported torch already, but a GPU's driver does not work in a fork of its caller.
    for method in methods:
        with process_events(_probe, (script, options), method=method) as events:
            try:
                return next(value for _, value in events)
            except BadForkError:
                continue
            except Exception:  # noqa: BLE001  the capture runs into it again, and reports it
                return None
    return None


def _probe(script: Script, options: Options, report: Callable[[object], None]) -> None:
    """Run the script up to its first process group or training forward, and report which."""
    end_process = os._exit  # the script may replace os._exit

    def finish(*, created: bool) -> NoReturn:
        report(created)
        end_process(0)

    def create_group(*_: Any, **__: Any) -> NoReturn:
        finish(created=True)

    def before_forward(module: nn.Module, _: Any) -> None:
        if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
            finish(created=False)

    # The capture runs the script again and shows its output then. Descriptors, because libraries in
    # C write to them directly.
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silence, stream)
    sys.stdout = sys.stderr = os.fdopen(1, "w")
    # A forked process has lost the threads of its parent's pool.
    torch.set_num_threads(1)
    register_module_forward_pre_hook(before_forward)
    routing = parse_routing(options.moe_routing)
    with contextlib.ExitStack() as stack:
        stack.enter_context(emulated(options.emulated_gpu, script.path, routing))
        # Before the launch, whose `group_from_init` wraps the function that is in place by then.
        stack.enter_context(
            rebound("torch.distributed.distributed_c10d", {"init_process_group": create_group})
        )
        stack.enter_context(emulated_launch(options, options.rank))
        stack.enter_context(skip_checkpoints())
        stack.enter_context(FewerLayers(options.depth).installed())
        play_script(script)


def sender_runner(script: Script, options: Options) -> RunAsRank:
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

        # A forked process has lost the threads of its parent's pool.
        torch.set_num_threads(1)
        recorder.start()
        fewer_layers = FewerLayers(options.depth)
        with contextlib.ExitStack() as stack:
            routing = parse_routing(options.moe_routing)
            stack.enter_context(emulated(options.emulated_gpu, script.path, routing, recorder))
            stack.enter_context(emulated_launch(options, rank))
            stack.enter_context(skip_checkpoints())
            stack.enter_context(fewer_layers.installed())
            stack.enter_context(after_step(count_step))
            if options.emulated_gpu is not None:
                # Messages do not depend on how kernels are fused, and compiling takes longest.
                stack.enter_context(after_import("torch._dynamo", _eager))
            play_script(script)

    return run_rank


def _eager() -> contextlib.AbstractContextManager[None]:
    """Run compiled functions eager inside the context."""
    return torch.compiler.set_stance("force_eager")


@contextlib.contextmanager
def emulated_launch(options: Options, rank: int) -> Generator[None]:
    """Run the script as a rank that torchrun started.

    The script sees the environment and GPU count of its node. Where it starts one process per
    rank, this rank runs in this process, and the others do not run.
    """
    size = options.world.size
    per_node = ranks_per_node(size, options.nproc_per_node)
    local = rank % per_node if options.true_local_rank else 0
    variables = torchrun_variables(rank, size, per_node, local)
    if size == 1 and not options.torchrun:
        # No variables: a script that sees RANK in its environment uses several GPUs.
        variables = {}
    with contextlib.ExitStack() as stack:
        for context in (
            environment(variables),
            node_sized_groups(per_node),
            report_node_gpus(per_node, rank % per_node),
            start_in_process(),
            block_launchers(),
            group_from_init(),
        ):
            stack.enter_context(context)
        yield


def torchrun_variables(rank: int, size: int, per_node: int, local: int = 0) -> dict[str, str]:
    """Return the environment variables that torchrun sets for a rank.

    `local` is LOCAL_RANK: 0 is the index of the only GPU.
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
        # torch and Lightning detect torchrun by this variable. Without it Lightning takes any rank
        # for rank 0, and starts the others as processes.
        "TORCHELASTIC_RUN_ID": "onerank",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
