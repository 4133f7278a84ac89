"""Commands of ours in a process of their own, on the CPU.

The process is forked from one that has imported what a capture needs and done nothing else: a fresh
interpreter takes seconds for that. What a user calls, a fresh one, is in `test_run`.
"""

import functools
import gc
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import contextmanager, nullcontext
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

from onerank.capture.isolation import process_events as _process_events

CPU_ONLY = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "6"}  # read when torch is imported
_TIMEOUT_S = 600


def run_command(
    *args: object, environment: Mapping[str, str] | None = None, forks: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run `onerank ARGS` and return its exit code and what it printed.

    With `forks`, the command forks where it would start a fresh interpreter (`run_isolated`), so
    each of its runs saves the seconds in which torch and transformers are imported.
    """
    given = [str(arg) for arg in args]
    with tempfile.TemporaryDirectory() as directory:
        printed = [Path(directory, name) for name in ("out", "err")]
        variables = {**os.environ, **CPU_ONLY, **_QUIET, **(environment or {})}
        call = (given, variables, os.getcwd(), printed, forks)
        process = _server().Process(target=_act, args=call)
        process.start()
        process.join(_TIMEOUT_S)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"{given} took more than {_TIMEOUT_S} s")
        texts = [path.read_text(errors="replace") for path in printed]
        return subprocess.CompletedProcess(given, process.exitcode, *texts)


@functools.cache
def _server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "torch._dynamo",
            "transformers.models.llama.modeling_llama",
            "transformers.models.mixtral.modeling_mixtral",
            "onerank.capture.capture_script",
            "onerank.cli.commands.capture",
        ]
    )
    with mock.patch.dict(os.environ, {**CPU_ONLY, **_QUIET}):
        forkserver.ensure_running()
    return context


def _act(
    args: list[str], environment: dict[str, str], place: str, printed: list[Path], forks: bool
) -> None:
    gc.freeze()  # what was imported: a collection would copy the pages that it lies in
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # TMPDIR is asked anew
    os.chdir(place)
    for number, path in enumerate(printed, start=1):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    from onerank.capture import isolation
    from onerank.cli import onerank

    sys.argv = ["onerank", *args]
    with mock.patch.object(isolation, "process_events", _forked) if forks else nullcontext():
        onerank()


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
