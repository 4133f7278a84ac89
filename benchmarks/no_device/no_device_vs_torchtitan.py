"""Hold captures without a device against torchtitan's published throughput and memory.

    python -m benchmarks.no_device.no_device_vs_torchtitan TORCHTITAN [--table NAME]
        [--captures DIRECTORY] [--rows NAME ...] [--order FILE]

The published tables are in benchmarks/ of pytorch/torchtitan. TORCHTITAN is a checkout at the
table's commit. It runs in this interpreter, which needs torchdata, tiktoken, datasets, triton, tyro
and tensorboard, and for float8 rows torchao at the table's commit.

    --table     file                                     torchtitan  torchao
    2024-12     llama3_h100_202412_torchtitan.md         9dec370     eab345c
    async-tp    asyncTP_llama3_h100_2025-06_torchtitan   820504e     6243040
    h200        llama3-8b_h200_202506_trainy-whitefiber  e7c0cae     0afa4c1

- The job is torchtitan's train.py with its own configurations. Tokenizer and text are made here:
  128,256 tokens, random words. TORCH_CUDNN_SDPA_DEPRIORITIZED=1: torch of December 2024 ran
  FlashAttention 2 on an H100.
- Compiled rows: torchtitan compiles each block, and Inductor of this torch schedules it, without
  loop ordering after fusion: torch has it by default since September 2025 (pytorch/pytorch 162030).
  Also without reductions of mixed order. That the torch of the published runs did not have them is
  an assumption by the dates: pytorch/pytorch 165737 and 166053, which extend them, are of October
  2025.
- Time: `annotate --nvlink-active` for examples/gpus/torchtitan-h100.toml or the H200, then
  `onerank replay --cluster`: hosts of 8 GPUs, each with a network interface of 50 GB/s; both links
  reach 75% of their rates; latencies by NCCL's model.
- Memory: the allocator's reserved memory, as torchtitan reports; simulated with the pools of the
  job's streams. The rows of context parallelism have expandable segments, which torchtitan's script
  for one host sets: with them the four rows are within 0.4%, without them two are 2.8 and 5.4%
  short. The other rows of one host are within 0.3% without them, and 2 to 4% short with them.
  Published is the fullest rank of a pipeline, and otherwise rank 0, which the scripts print.
- Pipelines of 405B: 8 micro-batches, torchtitan's own number. Of 1F1B three ranks are captured: the
  first stage's, the second's for all inner ones, and the last's. Of the interleaved schedule all
  eight are, and replayed together. It runs as in torch of 2024, where ranks exchange all messages
  of a time step at once (`IN_TIME_STEPS`).
- Async TP: copies between GPUs take the time of copy engines, barriers 6.8 us (measured).
- Context parallelism: all ranks of a ring are captured, because Inductor orders the graph of each
  by the sizes of its tensors, and replayed together. The order is that of this torch, or by
  `--order`, the torch/_inductor/memory.py of another one. Runs of December 2024 had that of torch
  2.6, which is in its wheel.
- `--captures` keeps captures and uses those that are there. `--rows` names some rows.
"""

import base64
import itertools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

import onerank
from benchmarks.harness import order_agreement, parser_of, print_conditions, version_of
from onerank.annotate import load_gpu
from onerank.converters.expand.pipeline import PipelineSchedule
from onerank.ir import Pipeline, RankClass
from onerank.plan.cluster import network_of
from onerank.plan.config import read_cluster
from onerank.plan.job_replay import replay_job

H100 = str(Path(__file__).parents[2] / "examples" / "gpus" / "torchtitan-h100.toml")

# All-reduces among four H200s reached 338 GB/s of NVLink's 450 (results of 2026-11-26, slices
# against real jobs). Eight GPUs of a host, and networks between hosts, are assumed to reach the
# same share.
REACHED = 338 / 450
NVLINK_GB_PER_S = 450
NIC_GB_PER_S = 50
GPUS_PER_HOST = 8

# Defaults of the torch of the published runs.
OLDER_TORCH = {
    "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
    "TORCHINDUCTOR_LOOP_ORDERING_AFTER_FUSION": "0",
    "TORCHINDUCTOR_MIX_ORDER_REDUCTION": "0",
}

# In torch of 2024 interleaved schedules were of the class PipelineScheduleMulti: after each action
# a rank exchanges the messages of that time step in one batch, and a stage's last backward reduces
# its gradients. Newer torch posts each message when its sender has computed it, in an order in
# which a receive can hold back later sends.
IN_TIME_STEPS = """\
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import _PipelineStageBase
in_time_steps = schedules.PipelineScheduleMulti._step_microbatches
schedules.ScheduleInterleaved1F1B._step_microbatches = in_time_steps
backward = _PipelineStageBase.backward_one_chunk
def backward_one_chunk(self, *args, last_backward=False, **options):
    backward(self, *args, last_backward=last_backward, **options)
    if last_backward:
        self.perform_reduce_grad(1)
_PipelineStageBase.backward_one_chunk = backward_one_chunk
"""

# Inductor orders a graph by the function of another torch, whose file replaces {file}.
IN_ORDER = """\
import importlib.util
import sys
from torch._inductor import memory
spec = importlib.util.spec_from_file_location("torch._inductor.another_memory", {file!r})
of_file = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = of_file
spec.loader.exec_module(of_file)
memory.reorder_for_peak_memory = of_file.reorder_for_peak_memory
"""

RUN = """\
import runpy
runpy.run_path({script!r}, run_name="__main__")
"""

# torchtitan's run_llama_train.sh, which starts one host.
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

CLUSTER = """\
[cluster]
gpu = "{gpu}"
nodes = {nodes}
gpus_per_node = {node}
intra_node = {{ busbw_gb_per_s = {intra:.1f} }}
inter_node = {{ busbw_gb_per_s = {inter:.1f} }}
"""

# The commands of the async TP page leave all other options of float8 at their defaults, so weights
# are gathered in 16 bits and converted after.
FLOAT8_ASYNC_TP = ("--model.converters=float8",)
FLOAT8_ROWWISE = (*FLOAT8_ASYNC_TP, "--float8.recipe_name=rowwise")
FLOAT8_H200 = (
    *("--model.converters=float8", "--float8.enable_fsdp_float8_all_gather"),
    "--float8.precompute_float8_dynamic_scale_for_fsdp",
)
PER_OPERATOR = (
    *("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"),
    "--parallelism.tensor_parallel_degree=8",
)

FLOAT8 = (
    *("--float8.enable_float8_linear", "--float8.enable_fsdp_float8_all_gather"),
    "--float8.precompute_float8_dynamic_scale_for_fsdp",
)
ASYNC_TP = ("--parallelism.enable_async_tensor_parallel",)
ASYNC_TP_2024 = ("--experimental.enable_async_tensor_parallel",)
# The page gives no number of micro-batches. torchtitan's own is the number of stages.
PIPELINE = ("--experimental.pipeline_parallel_degree", "8")
SCHEDULE = "--experimental.pipeline_parallel_schedule"
LAYERS_OF_STAGES = (15, *[16] * 6, 15)
FULL = ("--activation_checkpoint.mode", "full")


@dataclass(frozen=True)
class Published:
    """A row of the table.

    Attributes:
        name: of the row.
        capture: name of its capture, which rows share.
        model: "8b", "70b" or "405b".
        sizes: of the world, as options of `capture run`.
        batch: sequences of a rank.
        length: tokens of a sequence.
        compiled: whether the published run compiled the blocks.
        tokens_per_s: published, of a GPU.
        memory_gib: published; None if it was not.
        options: of torchtitan.
        gpus_per_sequence: GPUs that share a sequence (TP and CP).
        table: a key of `TABLES`.
        expandable: whether the allocator's segments grow.
    """

    name: str
    capture: str
    model: str
    sizes: str
    batch: int
    length: int
    compiled: bool
    tokens_per_s: float
    memory_gib: float | None
    options: tuple[str, ...] = ()
    gpus_per_sequence: int = 1
    table: str = "2024-12"
    expandable: bool = False

    @property
    def tokens(self) -> float:
        """Tokens of a step for each GPU."""
        return self.batch * self.length / self.gpus_per_sequence

    @property
    def float8(self) -> bool:
        """Whether it multiplies in float8; the configuration of the 405B does."""
        return self.model == "405b" or "float8" in " ".join(self.options)

    @property
    def interleaved(self) -> bool:
        """Whether each rank of the pipeline has two stages."""
        return "Interleaved1F1B" in self.options

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks to capture.

        Of a pipeline one of each stage, or of the first two and the last; of a ring all, because
        Inductor orders the graph of each by the sizes of its tensors.
        """
        words = self.sizes.split()
        sizes = dict(zip(words[::2], words[1::2], strict=True))
        if "--pp" not in sizes:
            return tuple(range(int(sizes.get("--cp", 1))))
        stages = range(8) if self.interleaved else (0, 1, 7)
        return tuple(stage * self.gpus // len(LAYERS_OF_STAGES) for stage in stages)

    def traces(self, directory: Path) -> list[Path]:
        """Return the files of its captures."""
        if len(self.ranks) == 1:
            return [directory / f"{self.capture}.et"]
        return [directory / f"{self.capture}.{rank}.et" for rank in self.ranks]

    @property
    def gpus(self) -> int:
        """GPUs of the job."""
        return math.prod(map(int, self.sizes.split()[1::2]))


ROWS = (
    Published("8B, FSDP 8", "fsdp8", "8b", "--dp 8", 2, 8192, False, 5762, 82.4),
    Published("8B, FSDP 8, compile", "fsdp8-c", "8b", "--dp 8", 2, 8192, True, 6667, 77.0),
    Published(
        *("8B, FSDP 8, compile, float8", "fsdp8-f8-c", "8b", "--dp 8", 2, 8192, True, 8532, 76.8),
        options=FLOAT8,
    ),
    Published(
        *("8B, FSDP 128", "fsdp128", "8b", "--dp 128", 2, 8192, False, 5605, 67.0),
    ),
    Published(
        *("8B, FSDP 128, compile", "fsdp128-c", "8b", "--dp 128", 2, 8192, True, 6514, 62.0),
    ),
    Published(
        *("8B, FSDP 128, compile, float8", "fsdp128-f8-c", "8b", "--dp 128", 2, 8192, True),
        *(8380, 61.8, FLOAT8),
    ),
    Published(
        *("8B, FSDP 8, 32K, full, compile, f8", "cp1-c", "8b", "--dp 8", 1, 32768, True),
        *(3890, 83.9, (*FULL, *FLOAT8)),
        expandable=True,
    ),
    Published(
        *("8B, FSDP 4 CP 2, 64K, compile, f8", "cp2-c", "8b", "--dp 4 --cp 2", 1, 65536, True),
        *(2540, 84.2, (*FULL, *FLOAT8, "--experimental.context_parallel_degree", "2"), 2),
        expandable=True,
    ),
    Published(
        *("8B, FSDP 2 CP 4, 128K, compile, f8", "cp4-c", "8b", "--dp 2 --cp 4", 1, 131072, True),
        *(1071, 84.0, (*FULL, *FLOAT8, "--experimental.context_parallel_degree", "4"), 4),
        expandable=True,
    ),
    Published(
        *("8B, CP 8, 256K, compile, f8", "cp8-c", "8b", "--cp 8", 1, 262144, True),
        *(548, 84.5, (*FULL, *FLOAT8, "--experimental.context_parallel_degree", "8"), 8),
        expandable=True,
    ),
    Published(
        *("70B, FSDP 32 TP 8, compile, f8", "70b-c", "70b", "--tp 8 --dp 32", 16, 8192, True),
        *(829, 71.9, (*FULL, *FLOAT8), 8),
    ),
    Published(
        *(
            "70B, FSDP 32 TP 8, async, compile, f8",
            "70b-a",
            "70b",
            "--tp 8 --dp 32",
            16,
            8192,
            True,
        ),
        *(876, 67.6, (*FULL, *FLOAT8, *ASYNC_TP_2024), 8),
    ),
    *(
        Published(
            *(f"405B, FSDP 8 TP 8 PP 8, {schedule}", f"405b-{schedule}", "405b"),
            *("--tp 8 --dp 8 --pp 8", 32, 8192, True, tokens_per_s, memory_gib),
            *((*PIPELINE, SCHEDULE, schedule), 64),
        )
        for schedule, tokens_per_s, memory_gib in (
            ("1F1B", 100, 82.5),
            ("Interleaved1F1B", 128, 72.7),
        )
    ),
    *(
        Published(
            *(f"405B, FSDP {8 // cp} CP {cp} TP 8 PP 8, {32 * cp}K", f"405b-cp{cp}", "405b"),
            *(f"--tp 8 --cp {cp} --dp {8 // cp} --pp 8", 8, 32768 * cp, True),
            *(tokens_per_s, memory_gib),
            (*PIPELINE, SCHEDULE, "1F1B", "--experimental.context_parallel_degree", str(cp)),
            64 * cp,
        )
        for cp, tokens_per_s, memory_gib in (
            (1, 76, 75.3),
            (2, 47, 75.9),
            (4, 31, 77.1),
            (8, 16, 84.9),
        )
    ),
    *(
        Published(
            *(f"{name}{kind}{text}", f"{capture}{kind_key}{key}", model, sizes, batch, 8192, True),
            *(tokens_per_s, None, (*options, *recipe, *overlap), 8),
            table="async-tp",
        )
        for name, capture, model, sizes, batch, options, published in (
            (
                "8B, FSDP 8 TP 8, compile",
                "tp8b",
                "8b",
                "--tp 8 --dp 8",
                12,
                PER_OPERATOR,
                (4378, 4809.4, 5078.1, 5570.1, 3708.5, 3914.9),
            ),
            (
                "70B, FSDP 32 TP 8, compile",
                "tp70b",
                "70b",
                "--tp 8 --dp 32",
                16,
                FULL,
                (597.3, 652.4, 809.8, 942.4, 599.6, 624.8),
            ),
        )
        for (kind, kind_key, recipe, text, key, overlap), tokens_per_s in zip(
            (
                (kind, kind_key, recipe, text, key, overlap)
                for kind, kind_key, recipe in (
                    ("", "", ()),
                    (", float8", "-f8", FLOAT8_ASYNC_TP),
                    (", rowwise", "-rw", FLOAT8_ROWWISE),
                )
                for text, key, overlap in (("", "", ()), (", async", "-a", ASYNC_TP))
            ),
            published,
            strict=True,
        )
    ),
    *(
        Published(
            *(f"8B, FSDP {gpus}, compile, float8", f"h200-{gpus}", "8b", f"--dp {gpus}", 2, 8192),
            *(True, tokens_per_s, memory_gib),
            options=(*FLOAT8_H200, "--float8.force_recompute_fp8_weight_in_bwd"),
            table="h200",
        )
        for gpus, tokens_per_s, memory_gib in ((32, 10938, 47.96), (64, 10753, 46.97))
    ),
)


@dataclass(frozen=True)
class Table:
    """How to start the runs of a published table.

    Attributes:
        gpu: name or path of the GPU's description.
        script: in the checkout.
        config: of a model, in the checkout; "{}" stands for the model.
        batch: option for the sequences of a rank.
        config_option: option for the configuration.
    """

    gpu: str
    script: str = "torchtitan/train.py"
    config: str = "torchtitan/models/llama3/train_configs/llama3_{}.toml"
    batch: str = "--training.local_batch_size"
    config_option: str = "--job.config-file"


TABLES = {
    "2024-12": Table(
        H100,
        *("train.py", "train_configs/llama3_{}.toml", "--training.batch_size"),
        "--job.config_file",
    ),
    "async-tp": Table(H100),
    "h200": Table("H200"),
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("torchtitan", type=Path)
    parser.add_argument("--table", choices=TABLES, default="2024-12")
    parser.add_argument("--captures", type=Path)
    parser.add_argument("--rows", nargs="*", default=[])
    parser.add_argument("--order", type=Path)
    args = parser.parse_args()
    print_conditions(version_of("torch"))
    print((__doc__ or "").split("\n\n", 2)[2])
    print(f"{'':36s}{'tokens/s per GPU':^27s}{'reserved memory, GiB':^27s}")
    columns = f"{'published':>9s}{'predicted':>10s}{'error':>8s}"
    print(f"{'Llama 3.1':36s}{columns}{columns}", flush=True)
    errors: dict[str, list[float]] = {"bf16": [], "float8": [], "memory": []}
    times: dict[str, list[tuple[float, float]]] = {}
    chosen = [row for row in ROWS if row.table == args.table]
    rows = [row for row in chosen if not args.rows or row.name in args.rows]
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        captures: Path = args.captures or work
        captures.mkdir(parents=True, exist_ok=True)
        for row in rows:
            traces = row.traces(captures.resolve())
            if not all(trace.exists() for trace in traces):
                capture(args.torchtitan.resolve(), row, captures.resolve(), work, args.order)
            tokens_per_s = row.tokens / step_s(traces, row, work)
            error = tokens_per_s / row.tokens_per_s - 1
            # Only rows of one model, length and number of GPUs are layouts to choose from.
            kind = f"{row.model}, {row.length} tokens, {row.gpus} GPUs"
            times.setdefault(kind, []).append((1 / tokens_per_s, 1 / row.tokens_per_s))
            errors["float8" if row.float8 else "bf16"].append(error)
            digits = 1 if tokens_per_s < 200 else 0
            line = (
                f"{row.name:36s}{row.tokens_per_s:9,.0f}{tokens_per_s:10,.{digits}f}{error:+8.1%}"
            )
            # Footnote 1 of the page of December 2024: "We take the maximum across all GPUs", of
            # pipelines. Other runs print rank 0.
            of_ranks = traces if "--pp" in row.sizes else traces[:1]
            memory_gib = max(map(reserved_gib, of_ranks))
            if row.memory_gib is not None:
                errors["memory"].append(memory_gib / row.memory_gib - 1)
                line += f"{row.memory_gib:9.1f}{memory_gib:10.1f}{errors['memory'][-1]:+8.1%}"
            else:
                line += f"{'-':>9s}{memory_gib:10.1f}{'-':>8s}"
            print(line, flush=True)
    for kind, values in errors.items():
        if values:
            mean = sum(map(abs, values)) / len(values)
            print(f"{kind}: mean absolute error {mean:.1%}, largest {max(map(abs, values)):.1%}")
    for kind, pairs in times.items():
        if len(pairs) > 1:
            print(f"order of {len(pairs)} rows of {kind}: {order_agreement(pairs)}")


def capture(
    torchtitan: Path, row: Published, captures: Path, work: Path, order: Path | None = None
) -> None:
    """Capture torchtitan's train.py in a row's configuration; several ranks get their numbers.

    Args:
        torchtitan: the checkout.
        row: the row.
        captures: directory of the captures.
        work: directory of other files.
        order: Inductor's memory.py of another torch, which orders the graphs.
    """
    inputs = work / "inputs"
    if not inputs.exists():
        write_inputs(inputs)
    table = TABLES[row.table]
    script = [
        *(table.config_option, table.config.format(row.model)),
        *("--job.dump_folder", str(work / "out")),
        *("--model.tokenizer_path", str(inputs / "tokenizer.model")),
        *("--training.dataset", "c4_test", "--training.dataset_path", str(inputs / "text")),
        *(table.batch, str(row.batch), "--training.seq_len", str(row.length)),
        *(("--training.compile",) if row.compiled else ()),
        *row.options,
    ]
    program = table.script
    changes = [IN_TIME_STEPS] if row.interleaved else []
    if order is not None:
        changes.append(IN_ORDER.format(file=str(order.resolve())))
    if changes:
        changed = work / f"{row.capture}.py"
        changed.write_text("".join([*changes, RUN.format(script=program)]), encoding="utf-8")
        program = str(changed)
    command = ["capture", "run", program, "--torchrun", "--device", "none"]
    command += ["--like", table.gpu]
    if len(row.ranks) > 1:
        command += ["--ranks", ",".join(map(str, row.ranks))]
    command += [*row.sizes.split(), "-o", str(captures / f"{row.capture}.et")]
    allocator = EXPANDABLE if row.expandable else {}
    output_of(*command, "--", *script, cwd=torchtitan, variables=allocator)


def write_inputs(directory: Path) -> None:
    """Write a tokenizer of Llama 3's size and a text: their content does not change the step."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += map(bytes, itertools.product(range(256), range(256)))
    triples = itertools.product(range(32, 127), repeat=3)
    tokens += map(bytes, itertools.islice(triples, 128_000 - len(tokens)))
    (directory / "text").mkdir(parents=True)
    lines = (f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(tokens))
    (directory / "tokenizer.model").write_text("".join(lines), encoding="utf-8")
    letters = random.Random(0)
    texts = ("".join(letters.choices("abcdefghij klmno", k=2000)) for _ in range(2000))
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    (directory / "text" / "data.json").write_text("".join(lines), encoding="utf-8")


def step_s(traces: Sequence[Path], row: Published, work: Path) -> float:
    """Return the predicted steady-state step of a row in seconds, communication included."""
    directory = work / row.capture
    directory.mkdir(exist_ok=True)
    gpu = TABLES[row.table].gpu
    for trace in traces:
        output_of("annotate", "--target", gpu, "--nvlink-active", str(trace),
                  "-o", str(directory / trace.name))  # fmt: skip
    cluster = work / "cluster.toml"
    cluster.write_text(
        CLUSTER.format(
            gpu=gpu,
            nodes=row.gpus // GPUS_PER_HOST,
            node=GPUS_PER_HOST,
            intra=REACHED * NVLINK_GB_PER_S,
            inter=REACHED * NIC_GB_PER_S,
        ),
        encoding="utf-8",
    )
    if "--pp" in row.sizes and len(traces) < len(LAYERS_OF_STAGES):
        return stages_step_s([directory / trace.name for trace in traces], cluster)
    step: dict[str, Any] = json.loads(
        output_of("replay", str(directory), "--cluster", str(cluster), "--json")
    )
    return step["step_ns"] / 1e9


def stages_step_s(traces: Sequence[Path], cluster: Path) -> float:
    """Return the step of 1F1B in seconds, by the ranks of the first two stages and of the last.

    The inner stages are equal but for the order of their micro-batches, which the schedule gives.
    """
    graphs = [onerank.read(trace) for trace in traces]
    world, last = graphs[0].job.world, len(LAYERS_OF_STAGES) - 1
    inner = tuple(range(1, last))
    ranks = [graph.job.rank for graph in graphs]
    classes = tuple(
        RankClass(rank, {"pp": stages})
        for rank, stages in zip(ranks, ((0,), inner, (last,)), strict=True)
    )
    stages = [
        replace(
            graph,
            job=msgspec.structs.replace(
                graph.job,
                pipeline=Pipeline(world.point(rank)["pp"], LAYERS_OF_STAGES),
                classes=classes,
            ),
        )
        for graph, rank in zip(graphs, ranks, strict=True)
    ]
    described = read_cluster(cluster)
    network = network_of(described, load_gpu(described.gpu))
    return replay_job(stages, network, PipelineSchedule.parse("1f1b"), None).step_ns / 1e9


def reserved_gib(trace: Path) -> float:
    memory: dict[str, Any] = json.loads(output_of("memory", str(trace), "--json"))
    return memory["simulated_reserved_bytes"] / 2**30


def output_of(
    *command: str, cwd: Path | None = None, variables: Mapping[str, str] | None = None
) -> str:
    """Run an onerank command and return what it prints; exit with its errors if it fails."""
    environment = {**os.environ, **OLDER_TORCH, **(variables or {})}
    if cwd is not None:
        path = os.pathsep.join([str(cwd), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment["PYTHONPATH"] = path
    result = subprocess.run(
        [sys.executable, "-m", "onerank", *command],
        check=False,
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
    )
    if result.returncode:
        raise SystemExit(f"onerank {' '.join(command)}\n{result.stderr}")
    return result.stdout


if __name__ == "__main__":
    main()
