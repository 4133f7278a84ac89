"""Check the options of a capture against each other and against the script's text.

The command line calls `validate_early` before it imports torch, so that a wrong option is reported
within a second. This module and its imports use torch only in annotations.
"""

import ast
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

from onerank.capture.options import Options, SeveralCaptures, ranks_per_node
from onerank.capture.parallelize.experts.routing import BY_MODEL, parse_routing
from onerank.ir import World
from onerank.ir.errors import CaptureError, DepthError

_ONE_CAPTURE = SeveralCaptures()


def validate_early(
    script: Path,
    options: Options,
    in_turn: SeveralCaptures = _ONE_CAPTURE,
) -> None:
    """Check all that can be checked before the script runs.

    Args:
        script: path of the script.
        options: what to capture.
        in_turn: what to capture in turn.

    Raises:
        CaptureError: there is no such script, it is not Python, or options contradict each other,
            the world or the script.
        DepthError: the depths cannot be extrapolated from.
    """
    distributed = distributes_itself(script, options)
    _check_language(script)
    _check(script, options, distributed)
    if in_turn.ranks is not None:
        check_ranks(script, options, in_turn.named_ranks, distributed=distributed)
    if in_turn.capture_layers is not None:
        check_layers(in_turn.capture_layers, options)
        _check_stages(script, options, distributed)


def _check_language(script: Path) -> None:
    """Refuse a file that Python cannot compile, before torch is imported."""
    if script.suffix == ".ipynb":
        raise CaptureError(
            f"{script}: a notebook is no script\n"
            f"  convert it first: jupyter nbconvert --to script {script}",
            code="script-notebook",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python repeats them when it runs the script
            compile(script.read_bytes(), script, "exec")
    except (SyntaxError, ValueError) as error:
        place, line = f"{script}", ""
        if isinstance(error, SyntaxError) and error.lineno:
            place, line = f"{script} line {error.lineno}", f"\n  {(error.text or '').strip()}"
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise CaptureError(
            f"{place} is not Python: {reason}{line.rstrip()}", code="script-not-python"
        ) from None


def check_in_turn(options: Options, in_turn: SeveralCaptures, *, names_rank: bool) -> None:
    """Refuse combinations of options of which each captures several times.

    Args:
        options: what to capture.
        in_turn: what to capture in turn.
        names_rank: whether the user gave the rank in `options`.

    Raises:
        CaptureError: two of them exclude each other.
    """
    if in_turn.compile is not None and options.record_real_job:
        raise CaptureError(
            "--compile captures twice, but the ranks of --record-real-job start only once: leave "
            "one out",
            code="compile-with-real-job",
        )
    if in_turn.compile is not None and options.device == "none":
        raise CaptureError(
            "--compile measures what fusion gains, and --device none measures nothing: leave one "
            "out",
            code="no-device-compile",
        )
    if in_turn.compile is not None and in_turn.capture_layers is not None:
        raise CaptureError(
            "--compile and --capture-layers each capture in turn: leave one out",
            code="compile-with-layers",
        )
    if in_turn.ranks is not None and in_turn.compile is not None:
        raise CaptureError(
            "--ranks and --compile each capture in turn: leave out --compile, or name one rank "
            "with --rank",
            code="ranks-with-compile",
        )
    if in_turn.ranks is not None and names_rank:
        raise CaptureError(
            f"--ranks captures ranks in turn: leave out --rank {options.rank}",
            code="ranks-with-rank",
        )
    if in_turn.ranks is not None and options.record_real_job:
        raise CaptureError(
            "--ranks captures ranks in turn: leave out --record-real-job\n"
            "  without --ranks, --record-real-job captures every real rank",
            code="ranks-with-real-job",
        )


def validate(script: Path, options: Options) -> bool:
    """Check the options; return whether the script distributes itself.

    `options` went through `emulate_torchrun.decide_torchrun`.

    Raises:
        CaptureError: as `validate_early`.
    """
    distributed = uses_torch_distributed(script, options)
    _check(script, options, distributed)
    return distributed


def _check(script: Path, options: Options, distributed: bool | None) -> None:
    """Check the options; `distributed` is None while it is not known."""
    check_job(options)
    world = options.world
    check_raw_dir(options.raw_dir)
    _check_steps(options)
    parse_routing(options.moe_routing)
    if options.torchrun and options.plan is not None:
        raise CaptureError(
            "--torchrun runs a script unchanged, --sharding-plan slices its models: give one",
            code="torchrun-with-plan",
        )
    _check_launch(script, options, distributed)
    _check_device(script, options, distributed)
    ranks_per_node(world.size, options.nproc_per_node)
    if distributed:
        _check_whole(script, options)
    if options.depth is not None:
        _check_stages(script, options, distributed)
    if distributed and options.data_parallel is not None:
        raise CaptureError(
            f"--ddp, --fsdp and --zero have no effect: {script} creates process groups itself\n"
            "  leave them out (--dp then sets only the shape of the world), or give --no-torchrun",
            code="dp-strategy-unused",
        )


def check_job(options: Options) -> None:
    """Check the sizes of a job, the rank, and the settings of the slicer.

    Raises:
        OneRankError: options exclude each other, have no effect, or a file is invalid.
    """
    options.resolve()
    world = options.world
    if not 0 <= options.rank < world.size:
        raise CaptureError(
            f"--rank {options.rank}: the world has {world}; expected 0 to {world.size - 1}",
            code="rank-out-of-range",
        )
    if options.plan is not None and world.size == 1:
        raise unused_plan_error(options)
    for option, axis, code in _slicing_settings(options):
        if world.sizes.get(axis, 1) < 2:
            raise CaptureError(
                f"{option} has no effect: the world has {world}\n"
                f"  give --{axis} N with N above 1, or leave {option.split()[0]} out",
                code=code,
            )


def unused_plan_error(options: Options) -> CaptureError:
    """Return the error of a plan for a world that slices no model by it."""
    given = options.sharding_plan
    name = f" {given}" if isinstance(given, Path) else ""
    return CaptureError(
        f"--sharding-plan{name} has no effect: the world has {options.world}\n"
        "  give --tp N with N above 1, or leave --sharding-plan out",
        code="sharding-plan-unused",
    )


def _check_steps(options: Options) -> None:
    """Check the steps to capture of a script that infers."""
    steps = options.steps or ()
    text = ",".join(map(str, steps))
    if any(isinstance(step, int) and step < 1 for step in steps):
        raise CaptureError(
            f"--steps {text}: forwards are numbered from 1; expected prefill, decode, draft, "
            "verify or numbers of at least 1",
            code="steps-below-one",
        )
    if len(set(steps)) < len(steps):
        raise CaptureError(f"--steps {text}: expected each step once", code="steps-repeated")
    if options.step_of is not None and not all(
        part.isidentifier() for part in ["", *options.step_of.split(".")][-2:]
    ):
        raise CaptureError(
            f"--step-of {options.step_of}: expected CLASS.METHOD, such as ModelRunner.execute; "
            "module.CLASS.METHOD if several classes have the name",
            code="step-of-malformed",
        )


def _check_device(script: Path, options: Options, distributed: bool | None) -> None:
    """Refuse what needs a device in a capture without one."""
    if options.device != "none":
        return
    if options.record_real_job:
        raise CaptureError(
            "--device none with --record-real-job: the ranks of a real job run on their devices\n"
            "  give one of the two",
            code="no-device-real-job",
        )
    if options.emulation.network is not None:
        raise CaptureError(
            "--device none with --network or --busbw-gb-s: no kernel occupies a device for the "
            "time of a collective\n  leave the network out; a simulator gets it later",
            code="no-device-network",
        )
    if options.moe_routing == BY_MODEL and options.world.ep > 1 and not distributed:
        raise CaptureError(
            f"--device none with --moe-routing {BY_MODEL}: the router's choice depends on numbers "
            f"that no device computes ({script.name})\n"
            "  route by balanced, zipf:S or a FILE",
            code="no-device-routing",
        )


def check_raw_dir(directory: Path | None) -> None:
    """Check that raw traces can be kept in a directory; None keeps none.

    Raises:
        CaptureError: the directory is not empty, or is the working directory.
    """
    if directory is None or not directory.exists():
        return
    if any(directory.iterdir()):
        raise CaptureError(
            f"--raw-dir {directory}: the directory is not empty: name another",
            code="raw-directory-not-empty",
        )
    if directory.samefile(Path.cwd()):
        raise CaptureError(
            f"--raw-dir {directory}: the working directory; name one in it",
            code="raw-directory-is-cwd",
        )


def _check_launch(script: Path, options: Options, distributed: bool | None) -> None:
    """Refuse options of torchrun for a script that is not started as torchrun would."""
    if options.record_real_job:
        why = "--record-real-job leaves this to the torchrun that launched the ranks"
    elif distributed is False:
        why = f"{script.name} does not distribute itself"
    else:
        return
    if options.nproc_per_node is not None:
        raise CaptureError(
            f"--nproc-per-node {options.nproc_per_node} has no effect: {why}\n  leave it out",
            code="nproc-unused",
        )
    if options.true_local_rank:
        raise CaptureError(
            f"--true-local-rank has no effect: {why}\n  leave it out", code="local-rank-unused"
        )


def _slicing_settings(options: Options) -> list[tuple[str, str, str]]:
    """Return each given setting of the slicer with its axis, and the code of its errors."""
    settings = (
        ("--sp", options.sp, "tp", "sp-unused"),
        (f"--tp-style {options.tp_style}", options.tp_style != "megatron", "tp", "tp-style-unused"),
        (f"--cp-comm {options.cp_comm}", options.cp_comm != "all_gather", "cp", "cp-comm-unused"),
        ("--pp-layers", bool(options.pp_layers), "pp", "pp-layers-unused"),
    )
    return [(option, axis, code) for option, given, axis, code in settings if given]


def _check_whole(script: Path, options: Options) -> None:
    """Refuse settings of the slicer for a script whose models are not sliced."""
    for option, _, code in _slicing_settings(options):
        raise CaptureError(
            f"{option} has no effect: {script.name} distributes itself and is not sliced\n"
            "  leave it out, or give --no-torchrun",
            code=code,
        )


def check_ranks(
    script: Path, options: Options, ranks: Sequence[int] | None, *, distributed: bool | None
) -> None:
    """Check the ranks to capture in turn; None selects one of each class of equivalent ranks.

    Raises:
        CaptureError: a rank is outside the world or repeated, or the classes are not known.
    """
    world = options.world
    if ranks is None:
        _check_distinct(script, options, distributed=distributed)
        return
    text = ",".join(map(str, ranks))
    outside = [rank for rank in ranks if not 0 <= rank < world.size]
    if outside:
        raise CaptureError(
            f"--ranks {text}: the world has {world}; expected 0 to {world.size - 1}, found "
            f"{', '.join(map(str, outside))}",
            code="ranks-out-of-range",
        )
    if len(set(ranks)) < len(ranks):
        raise CaptureError(f"--ranks {text}: expected each rank once", code="ranks-repeated")


def _check_distinct(script: Path, options: Options, *, distributed: bool | None) -> None:
    """Check that the classes of equivalent ranks are known, for `--ranks distinct`."""
    world = options.world
    if world.size == 1:
        raise CaptureError(
            "--ranks distinct: the world has 1 rank; name its axes (--tp, --pp, ...), or "
            "leave --ranks out",
            code="ranks-of-one",
        )
    if distributed:
        raise CaptureError(
            f"--ranks distinct: {script} uses torch.distributed itself, so only the script "
            f"determines which ranks do the same work: {_ranks_to_name(world)}",
            code="ranks-classes-unknown",
        )
    if world.ep > 1 and options.moe_routing == BY_MODEL:
        raise CaptureError(
            f"--ranks distinct: with --moe-routing {BY_MODEL} the model's router decides which "
            "ranks receive how many tokens, so equivalent ranks are not known\n"
            "  name the ranks, as --ranks 0,1, or route by balanced, zipf:S or a FILE",
            code="ranks-model-routing",
        )


def _ranks_to_name(world: World) -> str:
    """Return the advice on ranks to name instead of `distinct`."""
    stages = [world.first({"pp": stage}) for stage in range(world.sizes.get("pp", 1))]
    if len(stages) > 1:
        text = ",".join(map(str, stages))
        return (
            f"name one of each class, such as --ranks {text}, the first rank of each stage if the "
            f"script numbers its ranks as {world}, innermost first"
        )
    return "if all do, capture one (--rank 0); else name one of each class, as --ranks 0,1"


def check_layers(layers: Sequence[int], options: Options) -> None:
    """Check the depths of `--capture-layers`.

    Raises:
        DepthError: they cannot be extrapolated from, or exclude another option.
    """
    text = ",".join(map(str, layers))
    if any(count < 1 for count in layers):
        raise DepthError(
            f"--capture-layers {text}: a model has at least 1 layer", code="layers-below-one"
        )
    if sorted(set(layers)) != list(layers):
        raise DepthError(
            f"--capture-layers {text}: expected ascending depths, each once",
            code="layers-not-ascending",
        )
    if len(layers) < 2:
        raise DepthError(
            f"--capture-layers {text}: one depth does not show what a layer adds: name two, "
            f"such as --capture-layers {max(2, int(text or 2) // 2)},{max(4, int(text or 4))}",
            code="layers-one-depth",
        )
    if options.record_real_job:
        raise DepthError(
            "--capture-layers with --record-real-job: real ranks train the model they have; "
            "choose one",
            code="layers-with-real-job",
        )


def _check_stages(script: Path, options: Options, distributed: bool | None) -> None:
    """Refuse `--capture-layers` for a script that creates its pipeline stages itself."""
    if distributed and options.world.sizes.get("pp", 1) > 1:
        raise DepthError(
            f"--capture-layers with --pp {options.world.sizes['pp']}: {script.name} distributes "
            "itself, so --pp does not cut its stages\n"
            "  configure fewer layers in the script, or leave --capture-layers out",
            code="layers-with-own-pipeline",
        )


def distributes_itself(script: Path, options: Options) -> bool | None:
    """Return whether the script distributes itself; None if only a run of it decides.

    Raises:
        CaptureError: there is no such script.
    """
    if not script.is_file():
        raise CaptureError(f"{script}: no such script", code="script-missing")
    # A plan slices the script's models, so a script with one counts as not distributing itself.
    if options.plan is not None or options.torchrun is not None:
        return bool(options.torchrun)
    if not names_torch_distributed(script, options):
        return False
    return True if options.record_real_job or options.world.size == 1 else None


def uses_torch_distributed(script: Path, options: Options) -> bool:
    """Return whether the script distributes itself, by its text where no option decides."""
    return distributes_itself(script, options) is not False


# Names in the text of a script that trains. `model.train()` and `model.train(False)` only set a
# flag, and `YOLO(...).train(data=...)` trains.
_TRAINS = re.compile(
    r"\.backward\(|\boptim\b|Optimizer\b|Trainer\b|\.(fit|learn)\("
    r"|\.train\((?!\s*(\)|True\b|False\b|mode\b))"
)


def names_training(script: Path, options: Options) -> bool:
    """Return whether the text of a script, or of a local module that it imports, trains."""
    root = Path.cwd() if options.module else script.resolve().parent
    return any(
        _TRAINS.search(path.read_text(errors="replace"))
        for path in (script, *local_imports(script, root))
    )


# By text: importing the script, or a run of it, takes seconds and has effects.
_NAMES_DISTRIBUTED = re.compile(r"torch\.distributed|init_process_group|init_device_mesh")

_CREATES_GROUPS = re.compile(r"\b(init_process_group|init_device_mesh)\(")


def names_torch_distributed(script: Path, options: Options) -> bool:
    """Return whether a script names torch.distributed, or imports a local module that sets it up.

    A script whose text names neither distributes itself only if --torchrun is given.
    """
    if _NAMES_DISTRIBUTED.search(script.read_text(errors="replace")):
        return True
    # As Python resolves imports: `-m` from the working directory, a script from its directory.
    root = Path.cwd() if options.module else script.resolve().parent
    # A local module may name torch.distributed only for its types: there only calls that create
    # groups count.
    return any(
        _CREATES_GROUPS.search(path.read_text(errors="replace"))
        for path in local_imports(script, root)
    )


def local_imports(script: Path, root: Path) -> list[Path]:
    """Return the files below `root` that a script imports, directly or through other such files."""
    files = [script]
    for path in files:  # the loop appends to the list
        for names, level in _imports(path):
            place = path.resolve().parents[level - 1] if level else root
            for end in range(1, len(names) + 1):
                stem = place.joinpath(*names[:end])
                for file in (stem.with_suffix(".py"), stem / "__init__.py"):
                    if file.is_file() and file not in files and file != script.resolve():
                        files.append(file)
    return files[1:]


def _imports(path: Path) -> list[tuple[list[str], int]]:
    """Return the dotted names that a file imports, and the number of dots before each."""
    try:
        tree = ast.parse(path.read_text(errors="replace"))
    except (SyntaxError, ValueError):  # reported when Python runs it
        return []
    imports: list[tuple[list[str], int]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [(alias.name.split("."), 0) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = node.module.split(".") if node.module else []
            imports += [([*start, alias.name], node.level) for alias in node.names]
    return imports
