"""Kernels of the gated delta rule, measured on a GPU and predicted by their shapes.

    python -m benchmarks.predictions.state_kernels --gpu H100

Needs a GPU and `pip install flash-linear-attention`. Prefills of 64 to 16,384 tokens and decodes of
1 to 256 sequences, with 16 and 32 heads of 128 and half as many key heads (Qwen3-Next with tp 2 and
1); bfloat16, states in float32. The time is the sum of the kernels of a call under the profiler,
the mean of five calls after three that tune Triton's kernels: that takes most of the run, 20 to 30
s for each number of heads. The prediction is that of `capture serve`
without a device: the kernel with the FLOPs, and those that it shares buffers with.
"""

import importlib
import json
from typing import Any

import numpy as np

from benchmarks.harness import gpus_and_torch, parser_of, print_conditions
from onerank.annotate import load_gpu
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.features import kernels_of
from onerank.annotate.models.roofline import predict_from_datasheet
from onerank.annotate.op_costs.node_costs import work_of_call
from onerank.annotate.op_costs.operands import Call
from onerank.annotate.passes.launch_rules import launches_of
from onerank.annotate.passes.operators_to_kernels import launch_times

_PREFILLS = ((1, 64), (1, 256), (1, 1000), (1, 1024), (1, 4096), (1, 16384), (4, 1024), (16, 256))
_DECODES = ((1, 1), (8, 1), (64, 1), (256, 1))
_CALLS = 5


def main() -> None:
    """Print the measured and predicted times."""
    parser = parser_of(__doc__)
    parser.add_argument("--gpu", default="H100", help="description of the GPU that measures")
    gpu = load_gpu(parser.parse_args().gpu)
    print_conditions(*gpus_and_torch())
    print(f"{'sequences':>9} {'tokens':>7} {'heads':>6} {'measured':>10} {'predicted':>10}  us")
    errors: list[float] = []
    for heads in (32, 16):
        for sequences, tokens in (*_PREFILLS, *_DECODES):
            measured = _measured_us(sequences, tokens, heads)
            predicted = _predicted_us(gpu, sequences, tokens, heads)
            errors.append(abs(predicted / measured - 1))
            sizes = f"{sequences:>9} {tokens:>7} {heads:>6}"
            print(f"{sizes} {measured:10.1f} {predicted:10.1f}  {predicted / measured - 1:+.1%}")
    print(f"mean error {np.mean(errors):.1%}, largest {max(errors):.1%}")


def _measured_us(n: int, t: int, heads: int) -> float:
    """Return the summed kernels of a call; prefills of several sequences are packed."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    batch, length = (1, n * t) if t > 1 else (n, 1)

    def draw(*shape: int) -> Any:
        return torch.randn(batch, length, *shape, device="cuda", dtype=torch.bfloat16)

    q, k, v = draw(heads // 2, 128), draw(heads // 2, 128), draw(heads, 128)
    decay, rate = -draw(heads).float().abs(), draw(heads).sigmoid()
    state = torch.randn(n, heads, 128, 128, device="cuda")
    rules: Any = importlib.import_module("fla.ops.gated_delta_rule")
    rule = rules.chunk_gated_delta_rule if t > 1 else rules.fused_recurrent_gated_delta_rule
    packed = {"cu_seqlens": torch.arange(n + 1, device="cuda") * t} if t > 1 and n > 1 else {}

    def call() -> None:
        rule(
            *(q, k, v),
            g=decay,
            beta=rate,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            **packed,
        )

    with torch.no_grad():
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(_CALLS):
                call()
            torch.cuda.synchronize()
    events: Any = profiled.events()
    return sum(event.device_time for event in events if event.device_type.name == "CUDA") / _CALLS


def _predicted_us(gpu: Gpu, n: int, t: int, heads: int) -> float:
    """Return the time of the operator of such a call."""
    name = "chunk_gated_delta_rule" if t > 1 else "recurrent_gated_delta_rule"
    keys, values, state = [n, t, heads // 2, 128], [n, t, heads, 128], [n, heads, 128, 128]
    short, long = "Tensor(c10::BFloat16)", "Tensor(float)"
    shapes = [keys, keys, values, [n, t, heads], [n, t, heads], state]
    results = [values, state] if t > 1 else [values]
    call = Call.parse(
        name,
        (json.dumps(shapes), json.dumps([short, short, short, long, short, long])),
        (json.dumps(results), json.dumps([short, long][: len(results)])),
        "",
        "",
    )
    op = f"onerank_serving::{name}"
    kernel_ns, _ = predict_from_datasheet(kernels_of([work_of_call(op, call)], np.zeros(1)), gpu)
    launches = list(launches_of(op, call, gpu))
    others_ns = launch_times(op, launches, gpu)[1] if len(launches) > 1 else 0.0
    return float(kernel_ns[0] + others_ns) / 1e3


if __name__ == "__main__":
    main()
