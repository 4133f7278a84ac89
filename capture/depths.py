"""Capture a script at several depths, each in a process of its own, and extrapolate to its own.

In a fresh process no memory, cache or tuned kernel of another depth remains.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from onerank.capture.run import Capture, Options, capture, keep, refuse_filled
from onerank.capture.shallow import Depth
from onerank.capture.windows import Progress
from onerank.converters.depths import extrapolate
from onerank.ir.errors import CaptureError, DepthError, OneRankError, ScriptError

_GRACE_S = 30
_MAIN = "import sys; from onerank.capture.depths import main; main(sys.argv[1])"


@dataclass(frozen=True)
class _Request:
    """What a process is to capture, and where it leaves the `Capture`, or the error."""

    script: Path
    args: tuple[str, ...]
    options: Options
    result: Path
    progress: int


def capture_at_depths(
    script: Path,
    args: Sequence[str],
    options: Options,
    layers: Sequence[int],
    progress: Progress = lambda _: None,
) -> Capture:
    """Capture `script` with its Hugging Face model built at several depths, and extrapolate.

    Args:
        script: a training script that steps a torch.optim optimizer.
        args: the script's own arguments.
        options: what to capture; raw traces are kept in a directory per depth.
        layers: depths to capture, ascending.
        progress: told in a few words what goes on.

    Returns:
        The graph at the model's own depth, with what the deepest capture tells of itself.

    Raises:
        DepthError: the depths are not fit, or the model's layers cannot be extrapolated.
        CaptureError: the script cannot be captured as asked.
    """
    _check(layers, options)
    if options.keep_raw is not None and options.keep_raw.exists():
        refuse_filled(options.keep_raw)
    captures: dict[int, Capture] = {}
    with tempfile.TemporaryDirectory(prefix="onerank-") as directory:
        raw = Path(directory) / "raw"
        for count in layers:
            asked = replace(
                options,
                depth=Depth(count, tuple(layers)),
                keep_raw=options.keep_raw and raw / f"{count}-layers",
            )
            result = Path(directory) / f"{count}.pickle"
            captures[count] = _elsewhere(script, args, asked, result, progress)
        deepest = captures[layers[-1]]
        assert deepest.layers is not None
        progress("extrapolating")
        graphs = {count: one.graph for count, one in captures.items()}
        graph = extrapolate(graphs, deepest.layers.depth, deepest.layers.pattern)
        if options.keep_raw is not None:
            keep(raw, options.keep_raw)
    return replace(deepest, graph=graph)


def _check(layers: Sequence[int], options: Options) -> None:
    asked = ",".join(map(str, layers))
    if any(count < 1 for count in layers):
        raise DepthError(f"--layers {asked}: a model has at least 1 layer")
    if sorted(set(layers)) != list(layers):
        raise DepthError(f"--layers {asked}: expected ascending depths, each once")
    if len(layers) < 2:
        raise DepthError(
            f"--layers {asked}: one depth does not tell what a layer adds: name two, "
            f"such as --layers {max(2, int(asked or 2) // 2)},{max(4, int(asked or 4))}"
        )
    if options.real:
        raise DepthError("--layers with --real: real ranks train the model they have; choose one")
    if options.world.sizes.get("pp", 1) > 1:
        raise DepthError(
            f"--layers {asked} with --pp {options.world.sizes['pp']}: a pipeline stage has a part "
            "of the layers already; capture the stage whole, or leave --pp out"
        )


def _elsewhere(
    script: Path, args: Sequence[str], options: Options, result: Path, progress: Progress
) -> Capture:
    """Capture in a process of its own."""
    assert options.depth is not None
    at = f"{options.depth.layers} layer" + ("" if options.depth.layers == 1 else "s")
    reading, writing = os.pipe()
    request = result.with_suffix(".request")
    request.write_bytes(
        pickle.dumps(_Request(script, tuple(args), options, result, progress=writing))
    )
    command = [sys.executable, "-P", "-c", _MAIN, str(request)]
    try:
        process = subprocess.Popen(command, pass_fds=(writing,))
    finally:
        os.close(writing)
    teller = threading.Thread(target=_tell, args=(reading, at, progress), daemon=True)
    teller.start()
    try:
        status = process.wait()
    finally:
        _end(process)
    teller.join(timeout=1)  # a process that the script left behind may hold the pipe
    if not result.exists():
        told = f"signal {-status}" if status < 0 else f"status {status}"
        raise CaptureError(f"at {at}: the capturing process ended with {told} and no result")
    found = pickle.loads(result.read_bytes())
    if isinstance(found, ScriptError):
        raise ScriptError(f"at {at}: {found}", found.script_traceback)
    if isinstance(found, DepthError):
        raise found
    if isinstance(found, OneRankError):
        raise type(found)(f"at {at}: {found}")
    assert isinstance(found, Capture)
    return found


def _tell(reading: int, at: str, progress: Progress) -> None:
    with os.fdopen(reading) as lines:
        for line in lines:
            progress(f"{at}: {line.rstrip()}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process that was not waited for: it removes its files when it is interrupted."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main(path: str) -> None:
    """Capture what a request asks for, and leave the result; what the new process runs."""
    with contextlib.suppress(KeyboardInterrupt):  # the one who waits tells of it
        _serve(Path(path))


def _serve(path: Path) -> None:
    request = pickle.loads(path.read_bytes())
    assert isinstance(request, _Request)
    with os.fdopen(request.progress, "w") as told:

        def progress(text: str) -> None:
            with contextlib.suppress(OSError):
                told.write(f"{text}\n")
                told.flush()

        result: Capture | OneRankError
        try:
            result = capture(request.script, request.args, request.options, progress)
        except OneRankError as error:
            result = error.with_traceback(None)
        beside = request.result.with_suffix(".part")
        beside.write_bytes(pickle.dumps(result))
        beside.rename(request.result)
