"""Compare the step of a real job with simulations of slices captured on one GPU.

    python benchmarks/predicted_vs_real.py capture -o DIR [--forms pp,tp] [--minutes 7]
    python benchmarks/predicted_vs_real.py compare DIR
    python benchmarks/predicted_vs_real.py kernels DIR

`capture` needs a host with two GPUs or more (or none: --tiny runs all of it on the CPU with gloo).
It measures the link between them (`onerank bench link`); then for each form the real job under
torchrun, one GPU a rank, and the slices, each on one GPU in its own process: rank r on GPU r, all
at once, which excludes differences between GPUs of one host (--one-gpu makes all on GPU 0, in
turn). Slices with collectives emulate them, on a network fitted to the measured link.
Each form is written as soon as it is done.

`compare` needs no GPU. It hands the slices to ASTRA-sim (if ASTRA_SIM_BIN is set), LogGOPSim (if
LOGGOPSIM_DIR is) and `onerank replay`, each with the link as measured, and prints their steps
next to the real one. `kernels` compares the slices with the real ranks,
each on the same GPU, as slice_vs_real.py does.
"""

import argparse
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
WINDOWS = ["--warm-up", "10", "--timed-steps", "20", "--repeat", "3"]
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
        together: whether one run captures all slices, because the script communicates by itself
            and its ranks refer to each other.
    """

    real: list[str] | str
    slices: list[str] | str
    ranks: range
    schedule: str = ""
    together: bool = False


def forms(n: int, *, tiny: bool) -> dict[str, Form]:
    """Return the forms for `n` GPUs, the most informative first."""
    llama = ["--shape", "8b", "--layers", "4", "--seq", "4096", "--batch", "1"]
    deep = ["--shape", "8b", "--layers", str(4 * n), "--seq", "4096", "--batch", "1"]
    mixtral = ["--shape", "8x7b", "--layers", "2", "--seq", "4096", "--batch", "1"]
    if tiny:
        llama, deep = (["--layers", str(k), "--seq", "32", "--batch", "1"] for k in (2, 2 * n))
        mixtral = ["--layers", "1", "--seq", "32", "--batch", "1"]

    for shape in (llama, deep, mixtral):
        shape += ["--steps", "200"]  # the windows end it

    def piped(*args: str) -> list[str]:
        script_options = ["--micro-batches", str(MICRO_BATCHES), *args]
        return ["train_llama_pp.py", "--pp", str(n), "--", *deep, *script_options]

    def stages(chunks: int) -> list[str]:
        return ["train_llama.py", "--pp", str(n * chunks), "--", *deep, "--accumulate", "3"]

    def alike(script: str, shape: list[str], *options: str) -> Form:
        run = [script, *options, "--", *shape]
        return Form(run, run, range(n))

    return {
        "pp-1f1b": Form(piped(), stages(1), range(n), "1f1b"),
        "tp": alike("train_llama.py", llama, "--tp", str(n)),
        "ddp": alike("train_llama.py", llama, "--dp", str(n)),
        "fsdp": alike("train_llama.py", llama, "--dp", str(n), "--fsdp"),
        "pp-gpipe": Form(piped("--schedule", "gpipe"), "pp-1f1b", range(n), "gpipe"),
        "sp": alike("train_llama.py", llama, "--tp", str(n), "--sp"),
        "cp": alike("train_llama.py", llama, "--cp", str(n)),
        "ep": alike("train_mixtral.py", mixtral, "--ep", str(n)),
        "fsdp-compiled": alike(
            *("train_llama_fsdp.py", [*llama, "--mixed", "--recompute", "--compile"]),
            *("--dp", str(n)),
        ),
        "pp-script": Form("pp-1f1b", piped(), range(n), together=True),
        "pp-interleaved": Form(piped("--chunks", "2"), stages(2), range(2 * n), "interleaved:2"),
    }


def main() -> None:
    """Run one of the phases."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    phases = parser.add_subparsers(dest="phase", required=True)
    capturing = phases.add_parser("capture")
    capturing.add_argument("-o", "--output", type=Path, required=True)
    capturing.add_argument("--gpus", type=int, default=2)
    capturing.add_argument("--forms", default="", help="of these names alone, as pp-1f1b,tp")
    capturing.add_argument("--minutes", type=float, default=7, help="begin no form after these")
    capturing.add_argument("--form-seconds", type=float, default=120, help="limit of each run")
    capturing.add_argument("--one-gpu", action="store_true", help="all slices on GPU 0, in turn")
    capturing.add_argument("--tiny", action="store_true", help="on the CPU")
    comparing = phases.add_parser("compare")
    comparing.add_argument("directory", type=Path)
    holding = phases.add_parser("kernels")
    holding.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    if arguments.phase == "capture":
        Capturing(arguments).run()
        return
    import simulated_steps as predicted

    (predicted.compare if arguments.phase == "compare" else predicted.kernels)(arguments.directory)


class Capturing:
    """The phase that needs GPUs."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.out: Path = arguments.output.resolve()
        self.begun = time.monotonic()
        self.forms = forms(arguments.gpus, tiny=arguments.tiny)
        self.results: dict[str, Any] = {}

    def run(self) -> None:
        """Measure the link and each form; write the results after each."""
        arguments = self.arguments
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / "results.json"
        if path.exists():  # a second run for more forms
            self.results = json.loads(path.read_text())
        names = arguments.forms.split(",") if arguments.forms else [*self.forms]
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
        result: dict[str, Any] = {"schedule": form.schedule, "errors": []}
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
        command += [*self.windows(), "-o", str(directory / "real.et")]
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
        command = [sys.executable, "-m", "onerank", "capture", "run", *self.windows()]
        if not self.arguments.tiny:
            command += ["--network", str(self.out / "network.toml")]
        result["slice_command"] = " ".join(form.slices)
        lanes: dict[int, list[int]] = {}
        for rank in form.ranks:
            gpu = 0 if self.arguments.one_gpu else rank % self.arguments.gpus
            lanes.setdefault(gpu, []).append(rank)

        def lane(gpu: int) -> None:
            if form.together:  # on each GPU
                ranks = ",".join(map(str, form.ranks))
                gpu_directory = directory / f"gpu{gpu}"
                options = ["--ranks", ranks, "-o", str(gpu_directory / "slice.et")]
                gpu_directory.mkdir(exist_ok=True)
                self.quietly(f"{name}.slices.{gpu}", [*command, *options, *run], gpu)
                for rank in lanes[gpu]:
                    (gpu_directory / f"slice.{rank}.et").replace(directory / f"slice.{rank}.et")
                shutil.rmtree(gpu_directory)
                return
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

    def windows(self) -> list[str]:
        """Return the options for the measured steps."""
        return ["--warm-up", "3", "--timed-steps", "4"] if self.arguments.tiny else WINDOWS

    def quietly(self, log: str, command: list[str], gpu: int | None = None) -> None:
        """Run a command, if requested with only one GPU visible; its output goes to a log."""
        visible = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
        path = self.out / "logs" / f"{log.replace('/', '.')}.txt"
        path.parent.mkdir(exist_ok=True)
        with path.open("w") as file:
            file.write(f"{' '.join(command)}\n\n")
            file.flush()
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **visible},
                start_new_session=True,
            )
            try:
                code = process.wait(self.arguments.form_seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise RuntimeError(f"{log}: over {self.arguments.form_seconds} s") from None
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
