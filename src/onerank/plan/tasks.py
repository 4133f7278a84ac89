"""Units of work of a plan: run in local processes or on Ray, with results that survive a kill.

A result is stored under a key of everything that decides it, and appears there only when complete.
A run that is killed at any point therefore resumes with what is missing. A worker that dies is
replaced once.
"""

import contextlib
import functools
import hashlib
import importlib
import inspect
import multiprocessing
import os
import socket
import sys
import time
import traceback
import typing
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

import msgspec

from onerank.capture.isolation import end_process, sigterm_interrupts, unseen_by_spawned_processes
from onerank.ir.errors import OneRankError, first_line
from onerank.ir.output_files import remove_abandoned, replace_file
from onerank.plan.layouts import PlanError

# Time in which a Ray cluster has to answer, in seconds.
_ANSWER_S = 10

# Ending of the files of results that later runs do not use. A run does not delete its files, since
# its workers read them until it ends; later runs delete those that are older than any run lasts.
_OF_ONE_RUN = ".of-run"
_LONGEST_RUN_S = 7 * 24 * 3600

ATTEMPTS = 2
"""Processes that may die of a task before the plan fails."""


class TaskResult(msgspec.Struct, kw_only=True):
    """What a task returns if later runs may have to call it again.

    Attributes:
        lasts: whether later runs use the result; otherwise it is one of this run alone.
    """

    lasts: bool = True


@dataclass(frozen=True, slots=True)
class Task:
    """A function call whose result is stored.

    Attributes:
        key: content of the call, by `content_key`: equal keys have equal results, also in later
            runs.
        label: what it does, for errors.
        function: "module:callable", importable by name. msgspec encodes its result, and decodes it
            as the type of its return annotation. A result that may hold for one run alone is a
            `TaskResult`.
        arguments: its arguments, which pickle. Paths are relative to the plan's directory.
        needs: keys of stored results. The function takes them before its arguments, in a dict by
            key, decoded as the annotation of its first parameter says; None: it takes no dict.
        amount: what it adds to the progress bar.
    """

    key: str
    label: str
    function: str
    arguments: tuple[Any, ...]
    needs: tuple[str, ...] | None = None
    amount: int = 1


@dataclass(frozen=True)
class Store:
    """Results on disk, by key. Several runs may use a store at the same time.

    Attributes:
        directory: where the results are; the first result creates it.
        run: name of this run, which its workers share.
    """

    directory: Path
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    _complete: set[str] = field(default_factory=set[str], repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.directory.is_dir():
            return
        # A killed run may have left unfinished files; those of running ones are locked.
        remove_abandoned(self.directory)
        for path in self.directory.glob(f"*{_OF_ONE_RUN}"):
            # Another process may remove it at the same time.
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _LONGEST_RUN_S:
                    path.unlink()

    def __contains__(self, key: str) -> bool:
        # Each round of a plan lists the captures of all rounds before it, which take megabytes.
        if key not in self._complete and self.read(key) is not None:
            self._complete.add(key)
        return key in self._complete

    def read(self, key: str) -> bytes | None:
        """Return an encoded result; None if it is absent or its file is damaged."""
        for lasts in (True, False):
            with contextlib.suppress(FileNotFoundError, zlib.error):
                return zlib.decompress(self._path(key, lasts=lasts).read_bytes())
        return None

    def write(self, key: str, result: bytes, *, lasts: bool = True) -> None:
        """Store an encoded result, for later runs too if it lasts.

        Raises:
            OSError: the file cannot be written.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        # zlib's checksum shows damage, such as that of a machine that lost power.
        replace_file(self._path(key, lasts=lasts), zlib.compress(result, level=1))

    def _path(self, key: str, *, lasts: bool) -> Path:
        return self.directory / (f"{key}.result" if lasts else f"{key}-{self.run}{_OF_ONE_RUN}")


class Executor(Protocol):
    """Runs tasks in any order, on this machine or on others."""

    def run(self, tasks: Sequence[Task], store: Store) -> Iterator[Task]:
        """Run tasks; yield each when its result is in the store."""
        ...


def complete_tasks(
    tasks: Sequence[Task],
    store: Store,
    executor: Executor,
    progress: Callable[[int], None] = lambda amount: None,
) -> None:
    """Run the tasks whose results are not stored; those with equal keys run once.

    Args:
        tasks: the tasks.
        store: results of this run and of earlier ones.
        executor: runs what is missing.
        progress: receives the `amount` of tasks that are complete.

    Raises:
        Exception: what a task raised. Results of the others are stored.
        PlanError: a worker died `ATTEMPTS` times, or cannot run onerank.
        OSError: a result cannot be stored.
    """
    missing = [task for task in {task.key: task for task in tasks}.values()
               if task.key not in store]  # fmt: skip
    progress(sum(task.amount for task in tasks) - sum(task.amount for task in missing))
    for task in executor.run(missing, store):
        progress(task.amount)


def run_tasks(
    tasks: Sequence[Task],
    store: Store,
    executor: Executor,
    progress: Callable[[int], None] = lambda amount: None,
) -> dict[str, Any]:
    """Return the result of each task by its key.

    Arguments and errors are those of `complete_tasks`.
    """
    complete_tasks(tasks, store, executor, progress)
    return {task.key: _result(task.function, store.read(task.key)) for task in tasks}


def content_key(*content: object) -> str:
    """Return a key of what decides a result: `content`, onerank's code, and torch's version."""
    # Sorted, because the order of a dict or set must not change the key.
    encoded = msgspec.json.encode((*content, _code()), enc_hook=str, order="sorted")
    return hashlib.sha256(encoded).hexdigest()[:32]


@functools.cache
def _code() -> tuple[str, ...]:
    """Return `_installed_code` as it was when this process first called this function.

    All keys of a run contain the same code. `_check_unchanged` finds changes during the run.
    """
    return _installed_code()


def _installed_code() -> tuple[str, ...]:
    """Return the versions of torch and transformers, and a digest of onerank's files.

    A checkout changes without a new version, and a result of other code is not one of this code.
    """
    digest = hashlib.sha256()
    # src/onerank links to the packages at the root, so links are followed.
    for folder, folders, names in os.walk(Path(__file__).parents[1], followlinks=True):
        # `os.walk` lists folders in the file system's order.
        folders.sort()
        for name in sorted(names):
            if name.endswith((".py", ".toml", ".parquet")):
                path = Path(folder) / name
                status = path.stat()
                digest.update(name.encode())
                digest.update(_file_digest(path, status.st_mtime_ns, status.st_size))
    versions: list[str] = []
    for library in ("torch", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            versions.append(version(library))
    return (*versions, digest.hexdigest())


@functools.cache
def _file_digest(path: Path, mtime_ns: int, size: int) -> bytes:
    """Return a digest of a file; the time and size of its last change make a changed file new."""
    del mtime_ns, size
    return hashlib.sha256(path.read_bytes()).digest()


def _check_unchanged(code: tuple[str, ...]) -> None:
    """Check that this process runs the code that a run began with.

    Args:
        code: `_code` of the process that names the results.

    Raises:
        PlanError: the code changed, so a result would be stored under the key of other code.
    """
    if not code == _code() == _installed_code():
        raise PlanError(
            "onerank's files, or the versions of torch or transformers, changed while the plan ran"
            "\n  run it again; results of the files before the change are stored, and not used",
            code="plan-code-changed",
        )


def _function(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _result(function: str, encoded: bytes | None) -> Any:
    assert encoded is not None, "a task is yielded when its result is stored"
    kind = typing.get_type_hints(_function(function))["return"]
    return msgspec.msgpack.decode(encoded, type=kind)


def _needed_results(
    function: Callable[..., Any], needed: Iterable[tuple[str, bytes]]
) -> dict[str, Any]:
    """Decode results that a function takes, as the values of its first parameter."""
    first = next(iter(inspect.signature(function).parameters))
    _, kind = typing.get_args(typing.get_type_hints(function)[first])
    return {key: msgspec.msgpack.decode(encoded, type=kind) for key, encoded in needed}


def _call(task: Task, needed: Sequence[bytes]) -> tuple[bytes, bool]:
    """Return the encoded result of a task, and whether it lasts.

    Args:
        task: the task.
        needed: encoded results of the keys in `task.needs`.
    """
    function, arguments = _function(task.function), task.arguments
    if task.needs is not None:
        by_key = zip(task.needs, needed, strict=True)
        arguments = (_needed_results(function, by_key), *arguments)
    result = function(*arguments)
    lasts = result.lasts if isinstance(result, TaskResult) else True
    return msgspec.msgpack.encode(result), lasts


# This machine -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalPool:
    """Processes of this machine. Each runs one task after another.

    They are forks of a server that has imported what the tasks need, and keep what they import.

    Attributes:
        workers: number of processes.
        directory: working directory of the tasks.
        preload: modules that the server imports.
    """

    workers: int
    directory: Path = field(default_factory=Path.cwd)
    preload: tuple[str, ...] = ()

    def run(self, tasks: Sequence[Task], store: Store) -> Iterator[Task]:
        """Run tasks; yield each when its result is in the store.

        A worker writes its result itself, so that a kill of this process alone loses nothing: its
        workers end with their tasks.
        """
        waiting = deque((task, 1) for task in tasks)
        workers: list[_Worker] = []
        try:
            with sigterm_interrupts():
                while waiting or any(worker.task for worker in workers):
                    idle = [worker for worker in workers if worker.task is None]
                    while waiting and (idle or len(workers) < self.workers):
                        if not idle:
                            workers.append(self._start(store))
                        worker = idle.pop() if idle else workers[-1]
                        worker.task, worker.attempt = waiting.popleft()
                        # It fails if the worker died while it was idle.
                        with contextlib.suppress(OSError):
                            worker.connection.send(worker.task)
                    for worker in _answering(workers):
                        task = worker.task
                        assert task is not None, "an idle worker answers nothing"
                        if worker.completed():
                            yield task
                            continue
                        workers.remove(worker)
                        if worker.attempt == ATTEMPTS:
                            raise _died(task, worker.cause())
                        waiting.appendleft((task, worker.attempt + 1))
        finally:
            for worker in workers:
                end_process(worker.process)

    def _start(self, store: Store) -> "_Worker":
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, *self.preload])
        connection, other = context.Pipe()
        run = _Run(store.directory.absolute(), store.run, _code(), self.directory, dict(os.environ))
        process = context.Process(target=_work, args=(run, other))
        sys.stdout.flush()
        sys.stderr.flush()
        with unseen_by_spawned_processes(dict(os.environ)):
            process.start()
        # Only when the worker alone holds this end does its death end a `recv` here.
        other.close()
        return _Worker(process, connection)


@dataclass
class _Worker:
    """A process that runs tasks, and the one that it runs now.

    It answers a task with None when the result is stored, or with the error that the task raised.
    """

    process: Any
    connection: "Connection[Any, Any]"
    task: Task | None = None
    attempt: int = 0

    def completed(self) -> bool:
        """Return whether the task is complete; False if the process died.

        Raises:
            Exception: what the task raised.
        """
        answered = self.connection.poll()
        error: Exception | None = None
        try:
            error = self.connection.recv() if answered else None
        except (EOFError, ConnectionError):
            answered = False
        if not answered:
            # Sets `exitcode`, which `cause` reads.
            self.process.join()
            return False
        self.task = None
        if error is not None:
            raise error
        return True

    def cause(self) -> str:
        """Return how the process ended."""
        code = self.process.exitcode
        return f"signal {-code}" if code < 0 else f"status {code}"


def _answering(workers: Sequence[_Worker]) -> list[_Worker]:
    """Wait until workers have answered or died; return those.

    A process that a task started may outlive the worker and hold the pipe open, so the end of the
    worker is awaited too.
    """
    busy = [worker for worker in workers if worker.task is not None]
    ready = wait([item for worker in busy for item in (worker.connection, worker.process.sentinel)])
    return [worker for worker in busy if {worker.connection, worker.process.sentinel} & {*ready}]


@dataclass(frozen=True)
class _Run:
    """What the workers of a run share with the process that started them.

    Attributes:
        store: directory of the results.
        name: name of the run.
        code: `_code` of the process that names the results.
        directory: working directory of the tasks.
        environment: environment of the process that started the run.
    """

    store: Path
    name: str
    code: tuple[str, ...]
    directory: Path
    environment: dict[str, str]


def _work(run: _Run, connection: "Connection[Any, Any]") -> None:
    """Run the tasks that arrive in a new process, and store their results."""
    # The fork server keeps the environment of the moment it started.
    os.environ.clear()
    os.environ.update(run.environment)
    results = Store(run.store, run.name)
    with contextlib.suppress(
        EOFError, KeyboardInterrupt
    ):  # the command ended, or ends this process
        while True:
            task = connection.recv()
            error: Exception | None = None
            try:
                os.chdir(run.directory)
                needed = [_stored(results, key) for key in task.needs or ()]
                _check_unchanged(run.code)
                try:
                    result, lasts = _call(task, needed)
                finally:
                    # Also if the task raised: a module of the changed code may be the cause.
                    _check_unchanged(run.code)
                results.write(task.key, result, lasts=lasts)
            except Exception as raised:  # noqa: BLE001  raised again by the command
                error = raised
                if not isinstance(error, (OneRankError, OSError)):
                    # A traceback does not pickle; an error that the user can correct needs none.
                    error.add_note(traceback.format_exc())
            connection.send(error)


def _stored(store: Store, key: str) -> bytes:
    result = store.read(key)
    assert result is not None, f"{key} is needed, and no task ran for it"
    return result


def _died(task: Task, cause: str) -> PlanError:
    return PlanError(
        f"{task.label}: the worker died {ATTEMPTS} times, at last with {cause}\n"
        "  results so far are stored: give it more memory, or use fewer --workers, and run again",
        code="plan-worker-died",
    )


# Ray ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RayCluster:
    """Workers of a Ray cluster, which need onerank and no shared file system.

    Ray copies the plan's directory to the workers. Results return as bytes, and this process stores
    them.

    Attributes:
        directory: the plan's directory, which tasks run in.
        address: of the cluster; None starts one on this machine, or joins that of RAY_ADDRESS.
        excluded: directories that workers do not need.
    """

    directory: Path
    address: str | None = None
    excluded: tuple[Path, ...] = ()

    def run(self, tasks: Sequence[Task], store: Store) -> Iterator[Task]:
        """Run tasks; yield each when its result is in the store.

        Raises:
            PlanError: Ray is not installed or not reachable, or a worker cannot run onerank.
        """
        if not tasks:
            return
        ray = self._connected()
        call = ray.remote(num_cpus=1, max_retries=ATTEMPTS - 1)(_call_on_ray)
        # Put once, because several tasks need the same capture.
        needs = {key: ray.put(_stored(store, key)) for task in tasks for key in task.needs or ()}
        waiting: dict[Any, Task] = {}
        for task in tasks:
            waiting[call.remote(task, _code(), *(needs[key] for key in task.needs or ()))] = task
        while waiting:
            (done, *_), _ = ray.wait([*waiting], num_returns=1)
            task = waiting.pop(done)
            with _ray_errors(ray, task):
                result, lasts = ray.get(done)
            store.write(task.key, result, lasts=lasts)
            yield task

    def _connected(self) -> Any:
        try:
            ray: Any = importlib.import_module("ray")
        except ImportError as error:
            raise PlanError(
                "--ray needs Ray: pip install 'onerank[ray]'", code="plan-ray-not-installed"
            ) from error
        if ray.is_initialized():
            return ray
        # The pattern ".*" would match the directory itself.
        excluded = [".git", ".venv", "__pycache__", *self._excluded()]
        environment = {"working_dir": str(self.directory), "excludes": excluded}
        try:
            # Ray itself waits for minutes for a cluster that does not answer.
            host, _, port = (self.address or "").removeprefix("ray://").rpartition(":")
            if port.isdecimal():
                socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
            ray.init(address=self.address, runtime_env=environment, log_to_driver=False)
        except (OSError, ValueError, RuntimeError) as error:
            raise PlanError(
                f"Ray at {self.address or 'this machine'}: {first_line(error)}\n"
                "  check the address; the directory of the configuration is sent to all workers, "
                "so keep large files elsewhere",
                code="plan-ray-unreachable",
            ) from error
        return ray

    def _excluded(self) -> Iterator[str]:
        for path in self.excluded:
            with contextlib.suppress(ValueError):  # outside of the directory
                yield f"/{path.absolute().relative_to(self.directory)}"


def _call_on_ray(task: Task, code: tuple[str, ...], *needed: bytes) -> tuple[bytes, bool]:
    # A result of other code would be stored under the key of this one.
    if code != _code():
        raise PlanError(
            f"a worker has another onerank, torch or transformers than this machine "
            f"({', '.join(_code()[:-1])} against {', '.join(code[:-1])}); install the same",
            code="plan-ray-version",
        )
    return _call(task, needed)


@contextlib.contextmanager
def _ray_errors(ray: Any, task: Task) -> Generator[None]:
    """Raise a task's own error as in a local process, and the loss of its worker as ours."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise _died(task, first_line(error)) from error
