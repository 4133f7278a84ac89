"""What a capture refuses in models, options and environments: each check by its code, uncaptured.

Every case calls the function that checks, with the smallest input that it must refuse.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from raised import raises_code
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig

from onerank.capture import Options, capture_script, run_as_rank, validate_options
from onerank.capture.bench import measure_link
from onerank.capture.bench.bench_call import BenchCall, BenchOperand
from onerank.capture.bench.bench_runner import Bench
from onerank.capture.bench.gpu_limits import microbenchmarks
from onerank.capture.bench.random_operands import overload_of, with_random_operands
from onerank.capture.collective_kernels import kernels
from onerank.capture.fake_world import message_payloads, sender_processes
from onerank.capture.fake_world.message_payloads import MessageRequest
from onerank.capture.fake_world.recorder import RealPeers, Recorder
from onerank.capture.isolated_capture import loading_capture
from onerank.capture.no_device import cuda_stubs
from onerank.capture.no_device.operators.functional_collectives import FunctionalCollectives
from onerank.capture.parallelize.context import context_model, sharded_batch
from onerank.capture.parallelize.context.partial_attention import check_widths
from onerank.capture.parallelize.data.zero import ShardedOptimizers
from onerank.capture.parallelize.experts import aux_loss, routing
from onerank.capture.parallelize.experts.expert_parallel import gather_tokens
from onerank.capture.parallelize.fewer_layers import FewerLayers
from onerank.capture.parallelize.pipeline.stage import stage_model
from onerank.capture.parallelize.pipeline.stage_boundary import StageBoundary
from onerank.capture.parallelize.shard_model import ModelSlicing
from onerank.capture.parallelize.tensor import (
    apply_tensor_parallel,
    lora,
    mla,
    resolved_plan,
    sequence_parallel,
)
from onerank.capture.parallelize.tensor.linear import with_hidden_states
from onerank.capture.parallelize.tensor.lm_head import HeadSharding, parallel_head
from onerank.capture.parallelize.tensor.moe import cut_experts
from onerank.capture.parallelize.tensor.plan_file import ModuleRule
from onerank.capture.parallelize.tensor.shard_parameters import origin_of
from onerank.capture.script.runner import Script
from onerank.capture.verify import threaded_world
from onerank.ir import RankClass

TWO: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
"""Stands for a process group of two ranks."""

TINY = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 16,
}


def bare(kind: type[Any], **attributes: Any) -> Any:
    """Return an object of a class without its `__init__`, with these attributes."""
    made = object.__new__(kind)
    vars(made).update(attributes)
    return made


class Batches(nn.Module):
    """Takes images next to tokens."""

    def forward(self, input_ids: Any = None, labels: Any = None, pixel_values: Any = None) -> None:
        """Compute nothing."""


class WithoutPositions(LlamaForCausalLM):
    """A forward without `position_ids`."""

    def forward(self, input_ids: Any = None, labels: Any = None) -> None:
        """Compute nothing."""


class Adapted(nn.Module):
    """A linear layer with A, B and, as an extra, one parameter more."""

    def __init__(self, *, extra: bool = True) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.A, self.B = nn.Parameter(torch.zeros(2, 4)), nn.Parameter(torch.zeros(4, 2))
        if extra:
            self.scale = nn.Parameter(torch.zeros(1))


def attending(*, eager: bool) -> nn.Module:
    """Return an attention layer that context parallelism took over."""
    module = nn.Module()
    vars(module)["_onerank_context"] = SimpleNamespace(eager=eager)
    return module


def tied() -> nn.Sequential:
    """Return two linear layers with one weight."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


def of_other_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share a balancing loss that is not Mixtral's."""
    module = SimpleNamespace(load_balancing_loss_func=of_other_loss)
    monkeypatch.setattr(aux_loss, "_modeling_module", lambda _: module)
    aux_loss.share_balancing_loss(nn.Module())


def late_parameter() -> None:
    """Give an optimizer a parameter after its first step."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3))])
    bare(ShardedOptimizers, _buckets={optimizer: []}).before_step(optimizer)


def used_model() -> None:
    """Visit a model of which only a part was sliced."""
    part = nn.Linear(2, 2)
    model = nn.Sequential(part)
    sliced = bare(
        ModelSlicing, _loading=False, _done=set(), _inside=set(), _failure=None,
        _whole=lambda _: model, slices=lambda module: isinstance(module, nn.Linear),
    )  # fmt: skip
    vars(part)["_onerank_sliced"] = True
    sliced._visit(model)


ZEROS = torch.zeros(1, 1, 1, 1)

MODELS: dict[str, Callable[[], Any]] = {
    "cp-unknown-mask": lambda: sharded_batch.part_mask(mask_function=None),
    "cp-other-inputs": lambda: sharded_batch.shard_batch(
        Batches(),
        (),
        {"input_ids": torch.zeros(1, 4, dtype=torch.long), "pixel_values": ZEROS},
        None,  # type: ignore[arg-type]
    ),
    "cp-forward-signature": lambda: context_model._check(WithoutPositions(LlamaConfig(**TINY)), 2),
    "cp-eager-function": lambda: context_model._attention(
        attending(eager=True), ZEROS, ZEROS, ZEROS, None
    ),
    "cp-attention-bias": lambda: context_model._attention(
        attending(eager=False), ZEROS, ZEROS, ZEROS, None, softcap=30.0
    ),
    "cp-head-width": lambda: check_widths(
        *[SimpleNamespace(shape=(1, 1, 1, 12), is_cuda=True)] * 2  # type: ignore[list-item]
    ),
    "zero-late-parameter": late_parameter,
    "moe-loss-mask": lambda: aux_loss._counted_tokens(ZEROS),
    "ep-block-inputs": lambda: gather_tokens(
        nn.ModuleDict({"mlp": nn.ModuleDict({"experts": nn.Identity()})}), "mlp.experts", TWO
    ),
    "routing-too-few-experts": lambda: routing._apportion_tokens([Fraction(1), Fraction(0)], 4, 2),
    "layers-no-config-key": lambda: bare(FewerLayers)._shrink(
        None,
        "Model",
        SimpleNamespace(get_text_config=SimpleNamespace, is_encoder_decoder=False),
    ),
    "layers-unknown-config": lambda: bare(FewerLayers)._meta_layers("Model", PretrainedConfig(), 2),
    "layers-no-list": lambda: bare(FewerLayers)._meta_layers("Model", LlamaConfig(**TINY), 3),
    "pp-not-transformers": lambda: stage_model(nn.Linear(2, 2), TWO, (0, 1), None),  # type: ignore[arg-type]
    "pp-work-after-layer": lambda: bare(StageBoundary, stage=0, output_address=-1).send(ZEROS),
    "pp-hidden-dtype": lambda: bare(
        StageBoundary, stage=0, output_address=ZEROS.data_ptr(), _dtype=lambda: torch.bfloat16
    ).send(ZEROS),
    "slice-model-used": used_model,
    "tp-module-type": lambda: apply_tensor_parallel._Slicer._cut_embedding(
        None,  # type: ignore[arg-type]
        nn.Linear(2, 2),
        "embed",
        "embedding_rowwise",
    ),
    "tp-not-linear": lambda: apply_tensor_parallel._checked_linear(nn.Embedding(2, 2), "embed"),
    "tp-no-hidden-states": lambda: with_hidden_states(nn.Identity(), (), {}, lambda x: x),
    "tp-experts-type": lambda: cut_experts(nn.Linear(2, 2), "experts", TWO),
    "lora-extra-parameters": lambda: lora.lora_linear_of(Adapted(), "layer", ("A", "B")),
    "lora-shape": lambda: lora._with_dimension(Adapted(), "scale", 4, 1, "layer's A"),
    "mla-no-rope-width": lambda: mla.rotary_width(nn.Sequential(nn.Linear(2, 2)), "0"),
    "mla-no-norm": lambda: mla.LatentSequence(nn.Module(), "attention", 2, TWO),
    "mla-split": lambda: mla._without_rotary(
        SimpleNamespace(shape=(1, 2, 6), rotary=2),  # type: ignore[arg-type]
        [3, 3],
        -1,
    ),
    "plan-adapter-unplanned": lambda: resolved_plan._adapted(
        nn.Sequential(Adapted(extra=False)), {}, {"0": ModuleRule(adapter=("A", "B"))}
    ),
    "plan-tied-parameters": lambda: resolved_plan._check_tied(tied(), {"0": "colwise"}),
    "sp-module-style": lambda: resolved_plan._stack(
        nn.Sequential(nn.Linear(2, 2)), {"0": "colwise_gather_output"}, "", "megatron"
    ),
    "sp-hidden-shape": lambda: sequence_parallel._shard_length(torch.zeros(4), TWO),
    "slice-mixes-parameters": lambda: origin_of("b", torch.tensor([2.0, 6.0]), {"a": 1, "b": 5}),
}


@pytest.mark.parametrize("code", MODELS)
def test_models_that_cannot_be_sliced(code: str) -> None:
    with raises_code(code):
        MODELS[code]()


def test_a_loss_that_passes_by_the_loss_function() -> None:
    class OwnLoss(LlamaForCausalLM):
        def forward(self, input_ids: Any = None, labels: Any = None) -> Any:
            logits = self.lm_head(self.model(input_ids).last_hidden_state)
            return SimpleNamespace(logits=logits, loss=logits.sum())

    model = OwnLoss(LlamaConfig(**TINY))
    parallel_head(model, model.lm_head, HeadSharding(TWO, peers_absent=True))
    with raises_code("tp-loss-from-logits", naming="OwnLoss"):
        model(torch.zeros(1, 4, dtype=torch.long))


def test_a_balancing_loss_that_is_not_mixtrals(monkeypatch: pytest.MonkeyPatch) -> None:
    with raises_code("moe-loss-unknown"):
        of_other_loss(monkeypatch)


VERIFIED: dict[str, Callable[[], Any]] = {
    "verify-reduction": lambda: threaded_world._reduced([ZEROS], dist.ReduceOp.BAND),
    "verify-collective": lambda: threaded_world.ThreadedGroup.gather(None),  # type: ignore[arg-type]
    "verify-group-exists": lambda: threaded_world.ThreadedWorld(1).run(lambda _: None),
}


@pytest.mark.parametrize("code", VERIFIED)
def test_slices_that_cannot_be_verified(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with raises_code(code):
        VERIFIED[code]()


CALLS: dict[str, Callable[[], Any]] = {
    "bench-no-arguments": lambda: BenchCall.parse("aten::mm", "[]", "[]", ""),
    "bench-unknown-dtype": lambda: BenchCall.parse(
        "aten::mm", "[[2,2]]", json.dumps(["Tensor(c10::BFloat32)"]), '[[1,2,0,4,2,"cuda:0"]]'
    ),
    "bench-unknown-operator": lambda: overload_of(BenchCall("aten::no_such_operator", ())),
    "bench-no-overload": lambda: overload_of(BenchCall("aten::mm", (BenchOperand((2, 2)),) * 5)),
    "bench-unknown-range": lambda: with_random_operands(
        BenchCall("aten::bincount", (BenchOperand((4,), "int64"),)),
        torch.device("cpu"),
    ),
}


def test_a_call_that_fails() -> None:
    bench = bare(Bench, device=torch.device("cpu"), on_gpu=False)
    with raises_code("bench-call-failed", naming="aten::mm"):
        bench._warm(BenchCall("aten::mm", (BenchOperand((2, 3)), BenchOperand((2, 3)))))


def test_ranks_of_a_link_that_cannot_communicate(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_: object, **__: object) -> None:
        raise dist.DistNetworkError("no route to rank 0")

    monkeypatch.setattr(measure_link, "_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(dist, "init_process_group", refusing)
    with raises_code("link-failed", naming="no route to rank 0"):
        measure_link.measure_link([], lambda: None)


@pytest.mark.parametrize("code", CALLS)
def test_calls_that_cannot_be_measured(code: str) -> None:
    with raises_code(code):
        CALLS[code]()


OPTIONS: dict[str, Callable[[], Any]] = {
    "no-device-real-job": lambda: validate_options._check_device(
        Path("train.py"), Options(device="none", record_real_job=True), distributed=False
    ),
    "layers-with-real-job": lambda: validate_options.check_layers(
        (2, 4), Options(record_real_job=True)
    ),
    "heads-replicated": lambda: run_as_rank._StepChecks(
        run_as_rank._RankJob(Script(Path("train.py")), Options(), distributed=False),
        SimpleNamespace(  # type: ignore[arg-type]
            peers=Recorder(0, 1),
            models=SimpleNamespace(
                sliced=[(None, SimpleNamespace(modules=(run_as_rank.REPLICATED_HEADS,)))]
            ),
            fewer_layers=FewerLayers(None),
        ),
        training := SimpleNamespace(steps=0),
        emulated=None,
    ).at_step(training),
    "ranks-classes-differ": lambda: capture_script._check_classes(
        1, [RankClass(1, {"ep": (0,)})], 0, [RankClass(0, {"ep": (0, 1)})]
    ),
    "no-device-collective": lambda: FunctionalCollectives(id).run("no_such_call", ()),
}


@pytest.mark.parametrize("code", OPTIONS)
def test_options_and_ranks_that_exclude_each_other(code: str) -> None:
    with raises_code(code):
        OPTIONS[code]()


def test_torchrun_that_launched_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "RANK", "0")
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "4")
    with raises_code("real-job-rank-count", naming=("rank 0 of 4", "rank 0 of 2")):
        RealPeers(0, 2)


def test_a_library_of_the_capture_extra_is_missing() -> None:
    with raises_code("capture-not-installed", naming="transformers"), loading_capture():
        raise ModuleNotFoundError("no transformers", name="transformers")
    # Another module is the script's business.
    with pytest.raises(ModuleNotFoundError), loading_capture():
        raise ModuleNotFoundError("no pandas", name="pandas")


def test_a_machine_that_runs_no_fake_cuda_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_stubs, "_MachineCode", lambda: {}["x86_64"])
    with raises_code("no-device-unsupported", naming=torch.__version__):
        cuda_stubs.install.__wrapped__()


REQUEST = MessageRequest(src=1, to=0, index=0, receiver=0)


@pytest.mark.parametrize(
    ("waiting", "code"),
    [([MessageRequest(0, 1, 0, 1)], "sender-cycle"), ([], "sender-sent-nothing")],
)
def test_senders_that_never_send(
    waiting: list[MessageRequest], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_processes._Senders, "_run", lambda *_: None)
    with raises_code(code, naming="rank 1"):
        sender_processes._Senders(lambda *_: None).resolve(REQUEST, waiting)


def test_a_message_more_than_in_the_step_that_repeats() -> None:
    senders = bare(
        sender_processes.SenderProcesses, _rank=0, _repeated_counts=Counter(), _received={}
    )
    with raises_code("sender-not-repeated", naming=("rank 0", "rank 1")):
        senders._repeated((1, 0))


def test_payloads_of_another_size() -> None:
    with raises_code("payload-size", naming=("rank 1", "[2]", "[4]")):
        message_payloads._check(1, [b"12"], [torch.zeros(1)])


def test_gpus_that_run_no_collective_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = SimpleNamespace()
    monkeypatch.setattr(kernels, "_CUDA", compiler)
    with raises_code("collective-old-torch", naming=torch.__version__):
        kernels._compile("ring")

    def failing(source: str, name: str) -> None:
        raise RuntimeError("no NVRTC")

    compiler._compile_kernel = failing
    with raises_code("collective-compile-failed", naming=("ring", "no NVRTC")):
        kernels._compile("ring")
    driver = SimpleNamespace(cuGetErrorString=lambda *_: 0, cuMemAlloc_v2=lambda *_: 2)
    with raises_code("collective-launch-failed"):
        bare(kernels.CollectiveKernels, _driver=driver)._check(700)
    monkeypatch.setattr(kernels, "driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5, 10))
    with raises_code("collective-memory", naming=("9 bytes", "5 free", "fewer ranks")):
        kernels.allocate(9, "buffers", "capture fewer ranks")


def test_a_machine_without_a_cuda_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: not found")

    monkeypatch.setattr(kernels.ctypes, "CDLL", missing)
    with raises_code("collective-no-driver", naming="not found"):
        kernels.driver.__wrapped__()


def test_a_gpu_without_16_bit_products(monkeypatch: pytest.MonkeyPatch) -> None:
    from onerank.capture.bench import gpu_limits

    def refusing(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(gpu_limits, "_idle", lambda _: None)
    monkeypatch.setattr(gpu_limits, "_sustain", refusing)
    with raises_code("bench-no-16-bit", naming="no such kernel"):
        microbenchmarks(None)  # type: ignore[arg-type]
