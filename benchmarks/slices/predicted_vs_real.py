"""Compare the step of a real job with simulations of slices captured on one GPU.

    python -m benchmarks.slices.predicted_vs_real capture -o DIR --gpus 4 [--forms sp,fsdp]
        [--minutes 9]
    python -m benchmarks.slices.predicted_vs_real compare DIR
    python -m benchmarks.slices.predicted_vs_real kernels DIR

`capture` needs a host with two GPUs or more (or none: --tiny runs all of it on the CPU with gloo).
It measures the link between them (`onerank bench link`); then for each form the real job under
torchrun, one GPU a rank, and the slices, each on one GPU in its own process: rank r on GPU r, all
at once, which excludes differences between GPUs of one host (--one-gpu makes all on GPU 0, in
turn). Slices with collectives emulate them, on a network fitted to the measured link.
Each form is written as soon as it is done, so a run that is cut off loses one form. A second run
into the same DIR takes forms without results first. --torchtitan CHECKOUT adds torchtitan's
train.py (its commit 9dec370), which needs GPUs, torchdata, tiktoken and datasets.

`compare` needs no GPU. It hands the slices to ASTRA-sim (if ASTRA_SIM_BIN is set), LogGOPSim (if
LOGGOPSIM_DIR is) and `onerank replay`, each with the link as measured, and prints their steps
next to the real one. `kernels` compares the slices with the real ranks,
each on the same GPU, as slice_vs_real.py does.
"""

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import parser_of

EXAMPLES = Path(__file__).parents[2] / "examples"
WINDOWS = ("--warm-up", "10", "--timed-steps", "20", "--repeat", "3")
# A step of a pipeline, or of a whole model, lasts long enough to settle the clocks in fewer steps.
LONG_STEPS = ("--warm-up", "4", "--timed-steps", "10", "--repeat", "2")
MICRO_BATCHES = 8


@dataclass(frozen=True)
class Form:
    """A real job, and the slices that predict it.

    Attributes:
        real: script and options of the real job, "--", arguments of the script; or the name of
            another form with the same real job.
        slices: likewise for the slices.
        ranks: rank of each slice.
        schedule: pipeline schedule of the export; "" for none.
        one_job: whether the slices of all ranks are simulated as one job. It is set where the
            script itself decides which ranks do the same work.
        windows: options for the measured steps.
    """

    real: list[str] | str
    slices: list[str] | str
    ranks: range
    schedule: str = ""
    one_job: bool = False
    windows: tuple[str, ...] = WINDOWS


@dataclass(frozen=True)
class _Sizes:
    """Models for `n` GPUs, and their forms; `tiny` ones run on a CPU."""

    n: int
    tiny: bool

    def shaped(self, shape: str, layers: int, seq: int) -> list[str]:
        """Return the arguments of a script for a model."""
        small = ["--layers", str(layers), "--seq", "32"]
        large = ["--shape", shape, "--layers", str(layers), "--seq", str(seq)]
        # The windows end the script.
        return [*(small if self.tiny else large), "--batch", "1", "--steps", "200"]

    @property
    def llama(self) -> list[str]:
        """Four layers of Llama."""
        return self.shaped("8b", 4, 4096)

    @property
    def deep(self) -> list[str]:
        """A Llama with four layers for each GPU."""
        return self.shaped("8b", (2 if self.tiny else 4) * self.n, 4096)

    def symmetric(self, script: str, shape: list[str], *options: str) -> Form:
        """Return a form whose ranks all do the same work."""
        run = [script, *options, "--", *shape]
        return Form(run, run, range(self.n))

    def parallel(self, sizes: str, shape: list[str], *arguments: str) -> Form:
        """Return a form of a script that uses torch's own parallelism."""
        run = ["../benchmarks/jobs/llama_parallel.py", *sizes.split(), "--", *shape, *arguments]
        windows = LONG_STEPS if "--pp" in arguments else WINDOWS
        return Form(run, run, range(self.n), one_job=True, windows=windows)

    def piped(self, *args: str) -> list[str]:
        """Return the real job of a pipeline."""
        options = ["--micro-batches", str(MICRO_BATCHES), *args]
        return ["train_llama_pp.py", "--pp", str(self.n), "--", *self.deep, *options]

    def stages(self, chunks: int) -> list[str]:
        """Return the slices of a pipeline with `chunks` stages of each rank."""
        pp = ("--pp", str(self.n * chunks))
        return ["train_llama.py", *pp, "--", *self.deep, "--accumulate", "3"]


def forms(n: int, *, tiny: bool) -> dict[str, Form]:
    """Return the forms for `n` GPUs, the most informative first."""
    by = _Sizes(n, tiny)
    one_axis = _forms_of_one_axis(by)
    if n < 4:
        return one_axis
    first = ("sp", "fsdp")
    return {name: one_axis[name] for name in first} | _forms_of_several_axes(by) | one_axis


def _forms_of_one_axis(by: _Sizes) -> dict[str, Form]:
    n, llama, long = by.n, by.llama, by.shaped("8b", 4, 16384)
    mixtral = by.shaped("8x7b", 1 if by.tiny else 2, 4096)
    tp, fsdp = ("--tp", str(n)), ("--dp", str(n), "--fsdp")
    recomputed = [*llama, "--mixed", "--recompute", "--compile"]
    return {
        "sp": by.symmetric("train_llama.py", llama, *tp, "--sp"),
        "fsdp": by.symmetric("train_llama.py", llama, *fsdp),
        "pp-interleaved": Form(
            *(by.piped("--chunks", "2"), by.stages(2), range(2 * n), "interleaved:2"),
            windows=LONG_STEPS,
        ),
        "ep": by.symmetric("train_mixtral.py", mixtral, "--ep", str(n)),
        "cp": by.symmetric("train_llama.py", llama, "--cp", str(n)),
        "fsdp-compiled": by.symmetric("train_llama_fsdp.py", recomputed, "--dp", str(n)),
        "sp-16k": by.symmetric("train_llama.py", long, *tp, "--sp"),
        "fsdp-16k": by.symmetric("train_llama.py", long, *fsdp),
        "cp-16k": by.symmetric("train_llama.py", long, "--cp", str(n)),
        "pp-1f1b": Form(by.piped(), by.stages(1), range(n), "1f1b", windows=LONG_STEPS),
        "tp": by.symmetric("train_llama.py", llama, *tp),
        "ddp": by.symmetric("train_llama.py", llama, "--dp", str(n)),
        "pp-gpipe": Form(by.piped("--schedule", "gpipe"), "pp-1f1b", range(n), "gpipe"),
        "pp-script": Form("pp-1f1b", by.piped(), range(n), one_job=True, windows=LONG_STEPS),
    }


def _forms_of_several_axes(by: _Sizes) -> dict[str, Form]:
    n, llama, half = by.n, by.llama, by.n // 2
    pipelined = by.shaped("8b", 4 if by.tiny else 8, 4096)
    several = {
        "tp-dp": by.symmetric("train_llama.py", llama, "--tp", str(half), "--dp", "2"),
        "hsdp": by.parallel(f"--dp {n}", llama, "--shard", str(half)),
        "tp-pp": by.parallel(f"--tp {half} --pp 2", pipelined, *("--tp", str(half), "--pp", "2")),
        "tp-fsdp-compiled": by.parallel(
            f"--tp {half} --dp 2",
            llama,
            *("--tp", str(half), "--shard", "2", "--recompute", "--compile"),
        ),
    }
    if n >= 8:
        quarter = n // 4
        several["tp-pp-dp"] = by.parallel(
            f"--tp {quarter} --pp 2 --dp 2",
            pipelined,
            *("--tp", str(quarter), "--pp", "2", "--shard", "2"),
        )
    return several


def torchtitan_forms(n: int, checkout: Path, work: Path) -> dict[str, Form]:
    """Return forms of torchtitan's train.py: Llama 3 8B, as its configuration says.

    Args:
        n: number of GPUs.
        checkout: the checkout.
        work: directory for tokenizer, text, and the configuration without torchtitan's profiler.
    """
    if not work.exists():
        from benchmarks.no_device import no_device_vs_torchtitan

        no_device_vs_torchtitan.write_inputs(work)
        preset = (checkout / "train_configs" / "llama3_8b.toml").read_text()
        for switch in ("enable_profiling", "enable_tensorboard"):
            preset = preset.replace(f"{switch} = true", f"{switch} = false")
        (work / "llama3_8b.toml").write_text(preset)
    common = [
        *("--job.config_file", str(work / "llama3_8b.toml")),
        *("--job.dump_folder", str(work / "out")),
        *("--model.tokenizer_path", str(work / "tokenizer.model")),
        *("--training.dataset", "c4_test", "--training.dataset_path", str(work / "text")),
    ]

    def titan(sizes: str, *options: str, windows: tuple[str, ...] = LONG_STEPS) -> Form:
        run = [str(checkout / "train.py"), "--torchrun", *sizes.split(), "--", *common, *options]
        return Form(run, run, range(n), one_job=bool(options), windows=windows)

    parallel = {"titan-fsdp": titan(f"--dp {n}")}
    if n >= 4:
        # With ten steps and two profiles the real jobs took more than 110 s on four H100s.
        few = ("--warm-up", "2", "--timed-steps", "6")
        piped = [
            *("--experimental.pipeline_parallel_degree", "2"),
            *("--experimental.pipeline_parallel_schedule", "1F1B"),
        ]
        parallel["titan-fsdp-pp"] = titan(
            *(f"--dp {n // 2} --pp 2", *piped),
            *("--experimental.pipeline_parallel_microbatches", str(MICRO_BATCHES)),
            *("--training.batch_size", str(MICRO_BATCHES), "--training.seq_len", "4096"),
            windows=few,
        )
        # Without FSDP torchtitan computes in float32: a step of 8 micro-batches takes 11 s on H100.
        parallel["titan-tp-pp"] = titan(
            *(f"--tp {n // 2} --pp 2", *piped),
            *("--training.tensor_parallel_degree", str(n // 2)),
            *("--experimental.pipeline_parallel_microbatches", "4"),
            *("--training.batch_size", "4", "--training.seq_len", "4096"),
            windows=few,
        )
    return parallel


def main() -> None:
    """Run one of the phases."""
    parser = parser_of(__doc__)
    phases = parser.add_subparsers(dest="phase", required=True)
    capturing = phases.add_parser("capture")
    capturing.add_argument("-o", "--output", type=Path, required=True)
    capturing.add_argument("--gpus", type=int, default=2)
    capturing.add_argument("--forms", default="", help="of these names alone, as pp-1f1b,tp")
    capturing.add_argument("--minutes", type=float, default=9, help="begin no form after these")
    capturing.add_argument("--form-seconds", type=float, default=150, help="limit of each run")
    capturing.add_argument("--one-gpu", action="store_true", help="all slices on GPU 0, in turn")
    capturing.add_argument("--torchtitan", type=Path, help="a checkout: adds forms of its script")
    capturing.add_argument("--tiny", action="store_true", help="on the CPU")
    comparing = phases.add_parser("compare")
    comparing.add_argument("directory", type=Path)
    holding = phases.add_parser("kernels")
    holding.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    if arguments.phase == "capture":
        Capturing(arguments).run()
        return
    from benchmarks.slices import simulated_steps as predicted

    (predicted.compare if arguments.phase == "compare" else predicted.kernels)(arguments.directory)


def processes_under(pid: int) -> list[int]:
    """Return the ids of a process and of all processes that it started, directly or not."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended since
            # The process's name is in parentheses and may contain spaces and parentheses.
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    pids = [pid]
    for parent in pids:  # grows while it is traversed, down to the last descendants
        pids += children.get(parent, [])
    return pids


def end(process: subprocess.Popen[bytes], *, patience_s: float = 5) -> None:
    """End a process and all that it started: SIGTERM first, then SIGKILL.

    torchrun starts each worker in a new session, so a signal to torchrun's process group does not
    reach the workers. On SIGTERM torchrun ends its workers, but a worker that waits in NCCL
    survives.
    """
    # List the tree first: when a process ends, its children get another parent and leave the tree.
    before = processes_under(process.pid)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)
    for pid in {below for root in before for below in processes_under(root)}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)


class Capturing:
    """The phase that needs GPUs."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.out: Path = arguments.output.resolve()
        self.begun = time.monotonic()
        self.forms = forms(arguments.gpus, tiny=arguments.tiny)
        if arguments.torchtitan is not None:
            checkout = arguments.torchtitan.resolve()
            self.forms |= torchtitan_forms(arguments.gpus, checkout, self.out / "torchtitan")
        self.results: dict[str, Any] = {}
        self.running: set[subprocess.Popen[bytes]] = set()

    def stop(self, signum: int, _frame: object) -> None:
        """Handle SIGTERM and SIGINT: end the processes of the current form, then this one."""
        for process in [*self.running]:
            end(process)
        self.say(f"ended by signal {signum}; a second run into {self.out} continues")
        # Not sys.exit, which waits for the threads of other slices: they would start new captures.
        os._exit(128 + signum)

    def run(self) -> None:
        """Measure the link and each form; write the results after each."""
        arguments = self.arguments
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self.stop)
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / "results.json"
        if path.exists():  # a second run for more forms
            self.results = json.loads(path.read_text())
        done = self.results.get("forms", {})
        names = arguments.forms.split(",") if arguments.forms else [*self.forms]
        names.sort(key=lambda name: name in done and not done[name]["errors"])
        if unknown := [name for name in names if name not in self.forms]:
            sys.exit(f"no form {', '.join(unknown)}: there are {', '.join(self.forms)}")
        self.results.setdefault("forms", {})
        self.results |= {
            "date": str(datetime.date.today()),
            "gpus": arguments.gpus,
            "python": sys.version.split()[0],
            "micro_batches": MICRO_BATCHES,
            "slices_on": "GPU 0" if arguments.one_gpu else "the GPU of their real rank",
        }
        if "link" not in self.results:
            self.link()
            self.write()
        self.write()
        for name in names:
            if self.elapsed > 60 * arguments.minutes:
                self.say(f"{name}: left out, {arguments.minutes} minutes are over")
                continue
            self.form(name, self.forms[name])
            self.write()
        self.say("done")

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.begun

    def say(self, text: str) -> None:
        """Print progress."""
        print(f"[{self.elapsed:6.1f} s] {text}", flush=True)

    def write(self) -> None:
        """Write the results so far."""
        part = self.out / "results.json.part"
        part.write_text(json.dumps(self.results, indent=1) + "\n")
        part.replace(self.out / "results.json")

    def link(self) -> None:
        """Measure the link, and write the network file of the emulated collectives."""
        self.say("link")
        network = self.out / "network.toml"
        command = [*self.torchrun(), "-m", "onerank", "bench", "link", "-o", str(network)]
        self.quietly("link", [*command, *(["--most-mib", "1"] if self.arguments.tiny else [])])
        # The first line names the ranks, their device and the versions.
        self.results["link"] = network.read_text().split("\n", 1)[0].removeprefix("# ")
        from onerank.capture.collective_kernels.network import load_network

        for ranks, link in load_network(network).sizes.items():
            latency_us = link.latency_us
            self.say(f"link of {ranks} ranks: {link.busbw_gb_per_s:.2f} GB/s, {latency_us} us")

    def form(self, name: str, form: Form) -> None:
        """Measure the real job and capture the slices; a failure is recorded in the results."""
        directory = self.out / name
        directory.mkdir(exist_ok=True)
        result: dict[str, Any] = {
            "schedule": form.schedule,
            "one_job": form.one_job,
            "errors": [],
        }
        self.results["forms"][name] = result
        for phase, task in (("real", self.real), ("slices", self.slices)):
            begun = time.monotonic()
            try:
                task(name, form, directory, result)
            except Exception as error:  # noqa: BLE001, the other forms are still of use
                result["errors"].append(f"{phase}: {error}")
                self.say(f"{name}: {phase} FAILED: {error}")
            self.say(f"{name}: {phase} took {time.monotonic() - begun:.1f} s")

    def real(self, name: str, form: Form, directory: Path, result: dict[str, Any]) -> None:
        """Run the real job, and record each rank's steps."""
        if isinstance(form.real, str):
            result["real_of"] = form.real
            return
        command = [*self.torchrun(), "-m", "onerank", "capture", "run", "--record-real-job"]
        command += [*self.windows(form), "-o", str(directory / "real.et")]
        result["real_command"] = " ".join(form.real)
        self.quietly(f"{name}.real", [*command, str(EXAMPLES / form.real[0]), *form.real[1:]])
        result["real"] = [
            self.record_of(directory / f"real.{r}.et") for r in range(self.arguments.gpus)
        ]
        step = max(rank["step_ns"] for rank in result["real"])
        self.say(f"{name}: real step {step / 1e6:.3f} ms")

    def slices(self, name: str, form: Form, directory: Path, result: dict[str, Any]) -> None:
        """Capture the slices: one after another on each GPU, all GPUs at the same time."""
        if isinstance(form.slices, str):
            result["slices_of"] = form.slices
            return
        script, *script_options = form.slices
        run = [str(EXAMPLES / script), *script_options]
        command = [sys.executable, "-m", "onerank", "capture", "run", *self.windows(form)]
        if not self.arguments.tiny:
            command += ["--network", str(self.out / "network.toml")]
        result["slice_command"] = " ".join(form.slices)
        lanes: dict[int, list[int]] = {}
        for rank in form.ranks:
            gpu = 0 if self.arguments.one_gpu else rank % self.arguments.gpus
            lanes.setdefault(gpu, []).append(rank)

        def lane(gpu: int) -> None:
            for rank in lanes[gpu]:
                options = ["--rank", str(rank), "-o", str(directory / f"slice.{rank}.et")]
                self.quietly(f"{name}.slice.{rank}", [*command, *options, *run], gpu)

        with ThreadPoolExecutor(len(lanes)) as pool:
            for done in [pool.submit(lane, gpu) for gpu in lanes]:
                done.result()
        result["slices"] = [self.record_of(directory / f"slice.{rank}.et") for rank in form.ranks]
        steps = ", ".join(f"{record['step_ns'] / 1e6:.3f}" for record in result["slices"])
        self.say(f"{name}: slices' own steps {steps} ms")

    def torchrun(self) -> list[str]:
        """Return the command that starts a process for each rank."""
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*launch, "--nproc-per-node", str(self.arguments.gpus)]

    def windows(self, form: Form) -> tuple[str, ...]:
        """Return the options for the measured steps."""
        return ("--warm-up", "3", "--timed-steps", "4") if self.arguments.tiny else form.windows

    def quietly(self, log: str, command: list[str], gpu: int | None = None) -> None:
        """Run a command, if requested with only one GPU visible; its output goes to a log."""
        visible = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
        path = self.out / "logs" / f"{log.replace('/', '.')}.txt"
        path.parent.mkdir(exist_ok=True)
        with path.open("w") as file:
            file.write(f"{' '.join(command)}\n\n")
            file.flush()
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **visible}
            )
            self.running.add(process)
            try:
                code = process.wait(self.arguments.form_seconds)
            except subprocess.TimeoutExpired:
                end(process)
                raise RuntimeError(f"{log}: over {self.arguments.form_seconds} s") from None
            finally:
                self.running.discard(process)
        if code:
            tail = path.read_text(errors="replace")[-1500:]
            raise RuntimeError(f"{log}: exit status {code}: ...{tail}")

    def record_of(self, trace: Path) -> dict[str, Any]:
        """Return a trace's steps, device, versions and sensor readings."""
        import onerank

        job = onerank.read(trace).job
        measured = job.measurement
        read = job.device.sensors
        sensors = {}
        if read is not None:
            for name in ("sm_clock_mhz", "power_mw", "temperature_c"):
                reading = getattr(read, name)
                sensors[name] = reading and [reading.low, reading.median, reading.high]
        return {
            "rank": job.rank,
            "trace": trace.name,
            "step_ns": measured.median_step_ns,
            "steps_ns": [*measured.step_ns],
            "profiled_step_ns": measured.profiled_step_ns,
            "device": job.device.name,
            "versions": dict(measured.versions),
            "sensors": sensors,
        }


if __name__ == "__main__":
    main()
