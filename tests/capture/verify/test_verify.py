"""`capture verify`: matching steps and slices, detected differences, and the threaded world."""

import json
import subprocess
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from notes import note_of
from own_process import run_command
from raised import raises_code

from onerank.capture import Options
from onerank.capture.parallelize import autograd_collectives as regions
from onerank.capture.parallelize.tensor import linear
from onerank.capture.script.runner import Script
from onerank.capture.verify import numerics
from onerank.capture.verify.comparison import compare_reordered
from onerank.capture.verify.slice_check import compare_slices, rounding_noise, run_step
from onerank.capture.verify.threaded_world import ThreadedPeers, ThreadedWorld

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_llama.py"

# torch 2.13 renamed them and warns about the names that 2.11 has
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def test_notes_of_the_comparison_of_steps(tmp_path, monkeypatch):
    """Both runs of the script are replaced; the first reports a nondeterministic kernel."""
    monkeypatch.setattr(numerics, "run_isolated", lambda *_, **__: (1, ["index_put"]))
    monkeypatch.setattr(numerics, "load_steps", lambda _: [])
    _, notes = numerics._instruments(Script(tmp_path / "train.py"), Options(), lambda _: None)
    note_of(notes, "verify-tolerance", f"atol {numerics.ABSOLUTE:g}")
    note_of(notes, "verify-nondeterministic", "index_put")


def collectives(peers: ThreadedPeers) -> dict[str, Any]:
    """What each collective leaves on a rank of three."""
    rank, group = peers.rank, peers.new_group("tp", range(3))
    total = torch.full((2,), rank + 1.0)
    dist.all_reduce(total, group=group)
    highest = torch.tensor([float(rank)])
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    gathered = torch.empty(6)
    all_gather(gathered, torch.full((2,), float(rank)), group=group)
    share = torch.empty(1)
    reduce_scatter(share, torch.arange(3.0) * (rank + 1), group=group)
    exchanged = torch.empty(3)
    dist.all_to_all_single(exchanged, torch.arange(3.0) + 10 * rank, group=group)
    uneven = torch.empty(1 if rank == 0 else 2)  # rank 1 sends two to rank 1, the others none
    dist.all_to_all_single(
        uneven,
        torch.arange(2.0) + 10 * rank if rank else torch.tensor([5.0]),
        output_split_sizes=[1, 0, 0] if rank == 0 else [0, 2 * (rank == 1), 2 * (rank == 2)],
        input_split_sizes=[1, 0, 0] if rank == 0 else [0, 2 * (rank == 1), 2 * (rank == 2)],
        group=group,
    )
    received = torch.empty(1)
    around = [
        dist.P2POp(dist.irecv, received, (rank - 1) % 3, group),  # all receive before all send
        dist.P2POp(dist.isend, torch.tensor([float(rank)]), (rank + 1) % 3, group),
    ]
    for work in dist.batch_isend_irecv(around):
        work.wait()
    root = torch.tensor([float(rank)])
    dist.broadcast(root, 1)
    dist.barrier()
    return {
        "rank": (dist.get_rank(), dist.get_rank(group), dist.get_world_size()),
        "total": total.tolist(),
        "highest": highest.item(),
        "gathered": gathered.tolist(),
        "share": share.item(),
        "exchanged": exchanged.tolist(),
        "uneven": uneven.tolist(),
        "received": received.item(),
        "root": root.item(),
    }


def test_ranks_in_one_process_exchange_what_they_hold():
    found = ThreadedWorld(3).run(collectives)
    for rank in range(3):
        assert found[rank] == {
            "rank": (rank, rank, 3),
            "total": [6.0, 6.0],  # 1 + 2 + 3
            "highest": 2.0,
            "gathered": [0.0, 0.0, 1.0, 1.0, 2.0, 2.0],
            "share": 6.0 * rank,  # rank * (1 + 2 + 3)
            "exchanged": [rank, 10.0 + rank, 20.0 + rank],
            "uneven": [5.0] if rank == 0 else [10.0 * rank, 10.0 * rank + 1],
            "received": (rank - 1) % 3,
            "root": 1.0,
        }
    assert not dist.is_initialized()


def test_a_deadlock_between_ranks_is_an_error():
    def body(peers: ThreadedPeers) -> None:
        group = peers.new_group("tp", range(2))
        if peers.rank == 0:
            dist.all_reduce(torch.ones(1), group=group)
        else:
            dist.recv(torch.ones(1), 0, group=group)

    with raises_code(
        "verify-deadlock",
        naming=("rank 0 in all_reduce of group 'tp'", "rank 1 in recv from rank 0"),
    ):
        ThreadedWorld(2).run(body)


def test_a_failed_rank_ends_the_others():
    def body(peers: ThreadedPeers) -> None:
        if peers.rank == 1:
            raise ValueError("rank 1 alone")
        dist.barrier()

    with pytest.raises(ValueError, match="rank 1 alone"):
        ThreadedWorld(2).run(body)


SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 16,
}


def compare_tensor_parallel(
    kind: str = "Llama", *, tp: int = 2, tp_style: Any = "megatron", **changes: Any
):
    torch.manual_seed(0)
    config = getattr(transformers, kind + "Config")(**{**SHAPE, **changes})
    model = getattr(transformers, kind + "ForCausalLM")(config).bfloat16()
    return compared(model, Options(tp=2, tp_style=tp_style))


def compared(model: Any, options: Options) -> Any:
    dtype = model.dtype
    tokens = torch.randint(0, SHAPE["vocab_size"], (2, 16))
    batch = {"input_ids": tokens, "labels": tokens}
    rows, skip_reason, notes = compare_slices(model, (), batch, options, lambda _: None)
    assert not skip_reason
    note_of(notes, "verify-slices", "fp32")
    assert model.dtype == dtype  # the script's model stays unchanged
    return rows


@pytest.mark.parametrize("tp_style", ["megatron", "hf"])
@pytest.mark.parametrize("kind", ["Llama", "Phi3"])
def test_slices_agree_with_the_whole_model(kind, tp_style):
    changes = {"pad_token_id": 5, "tie_word_embeddings": kind == "Llama"}
    rows = compare_tensor_parallel(kind, tp_style=tp_style, **changes)
    assert {row.what for row in rows} == {"loss", "logits", "weights", "gradients"}
    assert sum(row.breaches for row in rows) == 0
    weights = next(row for row in rows if row.what == "weights")
    assert weights.equal == weights.tensors
    assert all(0 < row.max_rel < 1e-4 for row in rows if row.what == "gradients")
    named = {row.module: row.tensors for row in rows if row.what == "gradients"}
    assert named[f"{kind}Attention.o_proj"] == 4  # two layers on two ranks
    assert (f"{kind}ForCausalLM.lm_head" in named) == (kind != "Llama")  # tied: the embedding's


class Steep(torch.nn.Linear):
    """A model whose gradient is the remainder of sums that nearly cancel."""

    def forward(self, input):  # noqa: A002
        return SimpleNamespace(loss=(super().forward(input) ** 2).sum(), logits=None)


def test_the_rounding_noise_of_the_weights_is_allowed():
    steep, inputs = Steep(4, 1, bias=False), torch.tensor([1000.0, 500, 250, -1749])
    torch.nn.init.ones_(steep.weight)
    weight, whole = steep.weight.clone(), run_step(steep, (inputs,), {}, what="loss")
    found = rounding_noise(steep, (inputs,), {}, whole)
    assert torch.equal(steep.weight, weight)
    change, gradient = float(found.gradients["weight"]), whole.gradients["weight"]
    assert 1e-5 < change / float(gradient.abs().max()) < 4e-4

    def breaches(changes: float, rounding: float = 0.0) -> bool:
        moved = gradient + changes * change
        return compare_reordered("gradients", "", "", moved, gradient, rounding=rounding).breach

    assert [breaches(1.5), breaches(1.5, change), breaches(2.5, change)] == [True, False, True]
    assert breaches(40, 20 * change)  # above a thousandth of the largest


def test_a_slice_that_uses_another_ranks_group_is_an_error():
    groups: dict[int, Any] = {}

    def body(peers: ThreadedPeers) -> None:
        groups[peers.rank] = peers.new_group("tp", range(2))
        dist.barrier()
        dist.all_reduce(torch.ones(1), group=groups[0])

    with raises_code("verify-shared-state"):
        ThreadedWorld(2).run(body)


FORMS = {
    "sequence parallel": ("Llama", {"tp": 2, "sp": True}),
    "tensor-parallel experts": ("Mixtral", {"tp": 2}),
    "expert parallel": ("Mixtral", {"dp": 2, "ep": 2}),
    "both": ("Mixtral", {"tp": 2, "dp": 2, "ep": 2}),
    "pipeline, tied embeddings": ("Llama", {"pp": 2}),
    "pipeline of tensor-parallel stages": ("Llama", {"tp": 2, "pp": 2}),
    "experts, tensors and stages": ("Mixtral", {"tp": 2, "dp": 2, "pp": 2, "ep": 2}),
    "sequence parallel experts": ("Mixtral", {"tp": 2, "sp": True}),
    "sequence parallel, shared-out experts": (
        "Mixtral",
        {"tp": 2, "dp": 2, "ep": 2, "sp": True},
    ),
    "sequence parallel stages": (
        "Qwen2",
        {"tp": 2, "pp": 2, "sp": True},
    ),
    "the model's own router": (
        "Mixtral",
        {"dp": 2, "ep": 2, "moe_routing": "model"},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_parallelism_agrees_with_the_whole_model(form):
    kind, options = FORMS[form]
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2} if kind == "Mixtral" else {}
    torch.manual_seed(0)
    tied = {"tie_word_embeddings": "tied" in form}
    config = getattr(transformers, kind + "Config")(**SHAPE, **experts, **tied)
    rows = compared(getattr(transformers, kind + "ForCausalLM")(config), Options(**options))
    assert sum(row.breaches for row in rows) == 0
    assert all(row.max_rel < 1e-4 for row in rows if row.what == "gradients")
    if kind == "Mixtral":
        held = next(row for row in rows if row.module == "MixtralSparseMoeBlock.experts")
        layers = 2 // options.get("pp", 1)
        assert held.tensors == 2 * layers * Options(**options).world.size  # two matrices a layer


def test_a_boundary_without_its_all_reduce_is_detected(monkeypatch):
    monkeypatch.setattr(
        regions.CopyToGroup, "backward", staticmethod(lambda ctx, *grads: (grads[0], None))
    )
    rows = compare_tensor_parallel()
    wrong = {row.module for row in rows if row.what == "gradients" and row.breaches}
    assert "LlamaDecoderLayer.input_layernorm" in wrong
    assert "LlamaForCausalLM.lm_head" not in wrong  # nothing flows back through a border to it
    assert next(row for row in rows if row.what == "loss").breaches == 0


def test_slicing_that_changes_values_is_refused(monkeypatch):
    cut = linear.row_linear

    def halve(linear: Any, *args: Any, **kwargs: Any) -> None:
        linear.weight.data = linear.weight.data / 4
        cut(linear, *args, **kwargs)

    monkeypatch.setattr(
        "onerank.capture.parallelize.tensor.apply_tensor_parallel.row_linear", halve
    )
    with raises_code("slice-changes-values", naming="model.layers.0.self_attn.o_proj.weight"):
        compare_tensor_parallel()


def script(directory: Path, body: str) -> Path:
    path = directory / "train.py"
    path.write_text(
        textwrap.dedent(
            """
            import time
            import torch
            model = torch.nn.Linear(8, 8)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            while True:
                data, factor = torch.randn(4, 8), 1.0
            """
        )
        + textwrap.indent(textwrap.dedent(body), "    ")
        + textwrap.indent(
            "(factor * model(data)).square().sum().backward()\n"
            "optimizer.step()\n"
            "optimizer.zero_grad()\n",
            "    ",
        )
    )
    return path


def verify(*args: str | Path, forks: bool = True) -> subprocess.CompletedProcess[str]:
    return run_command("capture", "verify", *args, forks=forks)


def test_a_script_that_computes_otherwise_under_a_profiler_is_a_breach(tmp_path):
    body = "factor = 1.001 if torch.autograd.profiler._is_profiler_enabled else 1.0\n"
    # In fresh interpreters, as users run it; the other tests fork, which saves their imports.
    done = verify(script(tmp_path, body), "--json", forks=False)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    rows = {(row["check"], row["what"]): row for row in report["comparisons"]}
    assert rows["plain", "loss"]["breaches"] == 0
    assert rows["plain", "gradients"]["equal"] == rows["plain", "gradients"]["tensors"] == 10
    profiled = rows["profiled", "gradients"]
    assert (profiled["tensors"], profiled["breaches"]) == (6, 6)  # 3 steps of 2 parameters
    assert profiled["worst"].startswith(("weight, step", "bias, step"))
    assert report["not_checked"] == [
        "slices against the whole model: in a world of 1 rank no model is sliced"
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["train.py"]


def test_a_script_whose_data_does_not_repeat_cannot_be_verified(tmp_path):
    done = verify(script(tmp_path, "data = data + time.time_ns() % 1000\n"))
    assert done.returncode == 2
    assert "error[verify-inputs-differ]" in done.stderr


def test_the_example_agrees_with_itself_and_its_slices(tmp_path):
    options = [
        "--tp",
        "2",
        "--rank",
        "1",
        "--",
        "--layers",
        "1",
        "--seq",
        "16",
        "--batch",
        "1",
    ]
    done = verify(EXAMPLE, *options)
    assert done.returncode == 0, done.stderr
    assert "Steps under a profiler, against those of a plain run" in done.stdout
    assert "not checked" not in done.stdout, done.stdout
    assert "Slices that communicate, against the whole model" in done.stdout
    assert "no tensor differs by more than the tolerance" in done.stdout


def test_a_sharded_model_agrees_with_itself(tmp_path):
    """The probe and FSDP both patch backward, in this order."""
    done = verify(script(tmp_path, ""), "--dp", "2", "--zero", "3", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["comparisons"]
    assert {row["what"] for row in rows} >= {"loss", "gradients"}
    assert not any(row["breaches"] for row in rows)
