"""Validate a script against the options, before it runs and during its first steps."""

import ast
import re
from pathlib import Path

from torch import nn

from onerank.capture.fake_world.device_remap import ranks_per_node
from onerank.capture.options import Options
from onerank.capture.parallelize.tensor.plan_file import without_plan
from onerank.capture.profiling.raw_traces import check_raw_dir
from onerank.ir.errors import CaptureError


def local_imports(script: Path, root: Path) -> list[Path]:
    """Return the files below `root` that a script imports, and that these import, and so on."""
    found: list[Path] = [script]
    for path in found:  # grows
        for names, level in _imports(path):
            place = path.resolve().parents[level - 1] if level else root
            for end in range(1, len(names) + 1):
                stem = place.joinpath(*names[:end])
                for file in (stem.with_suffix(".py"), stem / "__init__.py"):
                    if file.is_file() and file not in found and file != script.resolve():
                        found.append(file)
    return found[1:]


def _imports(path: Path) -> list[tuple[list[str], int]]:
    """Return the dotted names that a file imports, and how many dots stand before each."""
    try:
        tree = ast.parse(path.read_text(errors="replace"))
    except (SyntaxError, ValueError):  # told when it is run
        return []
    named: list[tuple[list[str], int]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named += [(alias.name.split("."), 0) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = node.module.split(".") if node.module else []
            named += [([*start, alias.name], node.level) for alias in node.names]
    return named


_DISTRIBUTES_ITSELF = re.compile(r"torch\.distributed|init_process_group|init_device_mesh")

_SETS_UP = re.compile(r"\b(init_process_group|init_device_mesh)\(")


def validate(script: Path, options: Options) -> bool:
    """Check the options before any work; return whether the script distributes itself.

    Raises:
        CaptureError: there is no such script, or an option is not for it or for the world.
    """
    if not script.is_file():
        raise CaptureError(f"{script}: no such script", code="script-missing")
    world = options.world
    if not 0 <= options.rank < world.size:
        raise CaptureError(
            f"--rank {options.rank}: the world has {world}; expected 0 to {world.size - 1}",
            code="rank-out-of-range",
        )
    check_raw_dir(options.raw_dir)
    itself = uses_torch_distributed(script, options)
    if options.torchrun and not itself:
        raise CaptureError(
            "--torchrun runs a script as it is, and --sharding-plan slices its models: give one "
            "of them",
            code="torchrun-with-plan",
        )
    if options.nproc_per_node is not None and (options.real_job or not itself):
        why = (
            "under --record-real-job it is"
            if options.real_job
            else f"{script.name} is none that it starts"
        )
        raise CaptureError(
            f"--nproc-per-node {options.nproc_per_node} is what torchrun would be given, and "
            f"{why}: "
            "leave it out",
            code="nproc-unused",
        )
    if options.true_local_rank and (options.real_job or not itself):
        why = (
            "under --record-real-job they have it"
            if options.real_job
            else f"{script.name} has none"
        )
        raise CaptureError(
            f"--true-local-rank tells ranks that torchrun would start their LOCAL_RANK, and {why}: "
            "leave it out",
            code="local-rank-unused",
        )
    ranks_per_node(world.size, options.nproc_per_node)
    if options.sequence_parallel and (itself or world.sizes.get("tp", 1) < 2):
        raise CaptureError(
            f"--sp shards the sequence over the ranks of --tp, but {script.name} distributes itself"
            if itself
            else f"--sp shards the sequence over the ranks of --tp, and the world has {world}",
            code="sp-unused",
        )
    if options.cp_comm != "all_gather" and (itself or "cp" not in world.sizes):
        raise CaptureError(
            f"--cp-comm {options.cp_comm} says how keys and values travel between the ranks of "
            f"--cp, but {script.name} distributes itself"
            if itself
            else f"--cp-comm {options.cp_comm} says how keys and values travel between the ranks "
            f"of --cp, and the world has {world}",
            code="cp-comm-unused",
        )
    if options.pp_layers and (itself or "pp" not in world.sizes):
        why = f"{script.name} distributes itself" if itself else f"the world has {world}"
        raise CaptureError(
            f"--pp-layers says how many layers each stage of --pp has, and {why}: leave it out",
            code="pp-layers-unused",
        )
    if itself and options.data_parallel is not None:
        raise CaptureError(
            f"{script} creates process groups of its own, so it runs as it is, and --ddp, --fsdp "
            "and --zero are for scripts that do not\n"
            "  leave them out (--dp then gives the world's shape only), or give --no-torchrun",
            code="dp-strategy-unused",
        )
    return itself


def uses_torch_distributed(script: Path, options: Options) -> bool:
    """Return whether a script distributes itself, and no plan says what of it to slice."""
    if options.sharding_plan is not None:
        return False
    if options.torchrun is not None:
        return options.torchrun
    return names_torch_distributed(script, options)


def names_torch_distributed(script: Path, options: Options) -> bool:
    """Return whether a script names torch.distributed, or imports a local module that sets it up.

    A script whose text names neither distributes itself only if --torchrun is given.
    """
    if _DISTRIBUTES_ITSELF.search(script.read_text(errors="replace")):
        return True
    root = Path.cwd() if options.module else script.resolve().parent
    own = local_imports(script, root)
    return any(_SETS_UP.search(one.read_text(errors="replace")) for one in own)


def nothing_parallel_error(
    script: Path, options: Options, found: str, passed_over: nn.Module | None
) -> CaptureError:
    """Return the error of a script that did a first step, and a world of several ranks unused.

    Args:
        script: what ran.
        options: what was asked for.
        found: what was missed.
        passed_over: the first model that was called and not sliced.
    """
    if options.torchrun:
        why = (
            "The script ran as torchrun would start it, and communicated nothing. To slice its "
            "models instead, give --no-torchrun. Where there is no GPU, accelerate and the HF "
            "Trainer communicate only when told to take the CPU: --use_cpu, or "
            "ACCELERATE_USE_CPU=true"
        )
    elif passed_over is None:
        why = (
            "onerank slices Hugging Face models (transformers.PreTrainedModel) and, with "
            "--sharding-plan FILE, a class of the script's own. If the script distributes itself, "
            "give --torchrun"
        )
    elif options.sharding_plan is None:
        why = without_plan(passed_over)
    else:
        why = (
            f"The plan slices the class {' or '.join(options.sharding_plan.classes)}; the script "
            "called "
            f"a {type(passed_over).__name__}"
        )
    return CaptureError(
        f"{script}: in its first steps in a world of {options.world} {found}. "
        f"To capture it whole, leave the sizes out. {why}",
        code="nothing-parallel",
    )


def nothing_routed_error(script: Path, options: Options) -> CaptureError:
    """Return the error of a script whose tokens are to be routed, and none of whose models is."""
    return CaptureError(
        f"--moe-routing {options.moe_routing}: it holds for models that onerank slices "
        f"(--tp, --ep), and in a world of {options.world} it sliced none of {script}: leave it out",
        code="routing-unused",
    )
