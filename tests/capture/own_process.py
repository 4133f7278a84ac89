"""Commands of ours and Python code in a separate process, on the CPU.

The process is forked from one that has imported what a capture needs and done nothing else: a fresh
interpreter takes seconds for that. What a user calls, a fresh one, is in `test_imports`.
"""

import functools
import gc
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

from onerank.capture.isolation import process_events as _process_events

_T = TypeVar("_T")

CPU_ONLY = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "6"}  # read when torch is imported
COMPILED_IN_TURN = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""Else Inductor starts a process that imports torch too, to compile kernels in parallel.

Inductor reads this when it is imported, which the server of `forkserver_context` does.
"""

_TIMEOUT_S = 600


def run_command(
    *args: object, environment: Mapping[str, str] | None = None, forks: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run `onerank ARGS` and return its exit code and what it printed.

    With `forks`, the command forks where it would start a fresh interpreter (`run_isolated`) or the
    server of a pool, so each saves the seconds in which torch and transformers are imported.
    """
    return _run_forked(functools.partial(_command, forks), [str(arg) for arg in args], environment)


def run_code(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Run `python -c CODE ARGS` and return its exit code and what it printed."""
    return _run_forked(functools.partial(_code, code), [str(arg) for arg in args], None)


def call(function: Callable[..., _T], *args: Any, **options: Any) -> _T:
    """Return `function(*args, **options)` of a forked process, or raise what it raises there.

    Captures in it fork where they would start a fresh interpreter.
    """
    receiver, sender = forkserver_context().Pipe(duplex=False)
    process = new_process(_answer, sender, functools.partial(function, *args, **options))
    process.start()
    sender.close()  # only when the process alone holds this end does its death end the `recv`
    try:
        if not receiver.poll(_TIMEOUT_S):
            raise TimeoutError(f"{function.__qualname__} took more than {_TIMEOUT_S} s")
        returned, value = receiver.recv()
    finally:
        process.kill()
        process.join()
    if not returned:
        raise value
    return value


def new_process(target: Callable[..., None], *args: Any) -> Any:
    """Return the process, not yet started, that calls `target(*args)`.

    Captures in it fork where they would start a fresh interpreter.
    """
    setting = (target, args, {**os.environ, **CPU_ONLY, **_QUIET})
    return forkserver_context().Process(target=_act_with_forks, args=setting)


def _run_forked(
    target: Callable[[list[str]], None], args: list[str], environment: Mapping[str, str] | None
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as directory:
        printed = [Path(directory, name) for name in ("out", "err")]
        variables = {**os.environ, **CPU_ONLY, **_QUIET, **(environment or {})}
        call = (target, args, variables, os.getcwd(), printed)
        process = forkserver_context().Process(target=_act, args=call)
        process.start()
        process.join(_TIMEOUT_S)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"{args} took more than {_TIMEOUT_S} s")
        texts = [path.read_text(errors="replace") for path in printed]
        return subprocess.CompletedProcess(args, process.exitcode, *texts)


@functools.cache
def forkserver_context() -> Any:
    """Return the start method whose server has imported what commands and ranks of tests need.

    A process has one such server, so all tests share the list of modules.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "without_collector",
            "torch._dynamo",
            "torch._functorch.aot_autograd",
            "torch._inductor.compile_fx",
            "torch.distributed.fsdp",
            "transformers.models.llama.modeling_llama",
            "transformers.models.mixtral.modeling_mixtral",
            "onerank.annotate",
            "onerank.capture.compile_compare",
            "onerank.capture.isolated_capture",
            "onerank.capture.serving.measure_grid",
            "onerank.capture.verify.slice_check",
            "onerank.cli.commands.annotate",
            "onerank.cli.commands.capture",
            "onerank.cli.commands.convert",
            "onerank.cli.commands.export",
            "onerank.cli.commands.plan",
            "onerank.cli.commands.serve",
            "onerank.cli.commands.show",
            "onerank.cli.bundle_tables",
            "onerank.cli.summary_tables",
            "onerank.converters.targets.astra_sim.exporter",
            "onerank.plan.make_plan",
            "onerank.serving.build_bundle",
            "rich.progress",
            "rich.table",
            "indexed_bindings",
        ]
    )
    path = [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, path)), **COMPILED_IN_TURN}
    with mock.patch.dict(os.environ, {**CPU_ONLY, **_QUIET, **variables}):
        forkserver.ensure_running()
    return context


def _act(
    target: Callable[[list[str]], None],
    args: list[str],
    environment: dict[str, str],
    place: str,
    printed: list[Path],
) -> None:
    gc.freeze()  # what was imported: a collection would copy the pages that it lies in
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # the next use reads TMPDIR again
    os.chdir(place)
    for number, path in enumerate(printed, start=1):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    target(args)


def _act_with_forks(
    target: Callable[..., None], args: Sequence[Any], environment: dict[str, str]
) -> None:
    gc.freeze()  # as in `_act`
    os.environ.clear()
    os.environ.update(environment)
    with _forking():
        target(*args)


def _answer(sender: Any, call: Callable[[], Any]) -> None:
    try:
        answer = True, call()
    except Exception as error:  # noqa: BLE001  raised again by `call`
        error.add_note(traceback.format_exc())
        answer = False, error
    sender.send(answer)


def _code(code: str, args: list[str]) -> None:
    sys.argv = ["-c", *args]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


def _command(forks: bool, args: list[str]) -> None:
    from onerank.cli import onerank

    sys.argv = ["onerank", *args]
    with _forking() if forks else nullcontext():
        onerank()


@contextmanager
def _forking() -> Generator[None]:
    """Let captures, and the workers of a plan, be forks of this process.

    A torch with CUDA cannot run in a fork of a process that has looked for a GPU, even if it found
    none. There captures and workers start fresh interpreters, as for a user.
    """
    import torch

    if torch.version.cuda is not None:
        yield
        return
    from onerank.capture import isolation
    from onerank.plan import tasks

    forks = SimpleNamespace(get_context=lambda _: multiprocessing.get_context("fork"))
    with (
        mock.patch.object(isolation, "process_events", _forked),
        mock.patch.object(tasks, "multiprocessing", forks),
    ):
        yield


@contextmanager
def _forked(*call: Any, environment: Mapping[str, str] | None = None, **options: Any) -> Any:
    """Stand for `process_events`, with a fork in which the variables of a new process hold."""
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config

    # Variables that torch reads when it is imported, and the settings that they decide.
    variables = environment or {}
    disabled = variables.get("TORCH_COMPILE_DISABLE") == "1"
    cached = variables.get("TORCHINDUCTOR_FX_GRAPH_CACHE") != "0"
    cached_backward = variables.get("TORCHINDUCTOR_AUTOGRAD_CACHE") != "0"
    options["method"] = "fork"
    with (
        torch._dynamo.config.patch(disable=disabled),
        torch._inductor.config.patch(fx_graph_cache=cached),
        torch._functorch.config.patch(enable_autograd_cache=cached_backward),
        _process_events(*call, environment=environment, **options) as events,
    ):
        yield events
