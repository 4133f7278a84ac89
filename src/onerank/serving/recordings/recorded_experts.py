"""Work of experts in a recording whose operator does not have the weights as operands.

`vllm::moe_forward` and its counterpart in SGLang name a layer, and Triton kernels that they launch
run the experts. Operands show the tokens; the model's configuration and the parallel size show the
rest. An operator that takes the weights as operands, such as `vllm::inplace_fused_experts`, has a
formula in `engine_operators`.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from onerank.annotate.op_costs.cost_record import Work
from onerank.annotate.op_costs.engine_operators import OPAQUE_EXPERTS
from onerank.annotate.op_costs.operands import Call, UnknownDtypeError
from onerank.ir import UNKNOWN, Graph
from onerank.ir.arrays import I64
from onerank.ir.notes import Note

# Kernels of the two GEMMs: vLLM's and SGLang's Triton kernel, OpenAI's triton_kernels (gpt-oss),
# CUTLASS's and FlashInfer's, DeepGEMM, Marlin.
_GEMMS = re.compile(
    r"fused_moe_kernel|_?matmul_ogs|moe_?gemm|group(?:ed)?_?gemm|gemm.*moe|deep_gemm|marlin_moe|moe_wna16",
    re.IGNORECASE,
)

_ITEM_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}

# Bytes of a weight by `quant_method`, if it is multiplied with activations in 16 bits: MXFP4 has a
# scale of one byte for each 32 weights of four bits.
_QUANTISED_BYTES: Mapping[str, float] = {"mxfp4": 17 / 32}

# vLLM pads tokens to a multiple of this many elements where a kernel of 4 bits needs it.
_PADDING = 256


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of a model's MoE layers, as its configuration describes them.

    Attributes:
        chosen: experts of a token.
        experts: experts of a layer.
        hidden: width of a token.
        inner: inner size of an expert, of all ranks.
        item_bytes: bytes of a weight, with its share of a scale.
        ranks: GPUs that share the experts, as slices or as whole experts.
        matrices: weight matrices of an expert: 3 with a gated activation, else 2.
    """

    chosen: int
    experts: int
    hidden: int
    inner: int
    item_bytes: float
    ranks: int
    matrices: int

    @classmethod
    def of(cls, config: Mapping[str, Any], tp: int | None) -> "ExpertLayer | None":
        """Return the experts; None if a figure is missing, or not known of quantised weights.

        Args:
            config: configuration of the model; empty if not known.
            tp: tensor-parallel size of the run; None if not known.
        """
        text: Mapping[str, Any] = config.get("text_config") or config
        quantisation = config.get("quantization_config") or text.get("quantization_config")
        experts = next(
            (text[name] for name in ("num_local_experts", "num_experts", "n_routed_experts")
             if name in text), None,
        )  # fmt: skip
        inner = text.get("moe_intermediate_size") or text.get("intermediate_size")
        sizes = (text.get("num_experts_per_tok"), experts, text.get("hidden_size"), inner)
        named = (of.get(name) for of in (text, config) for name in ("dtype", "torch_dtype"))
        dtype = next(filter(None, named), None)
        item_bytes = _ITEM_BYTES.get(str(dtype))
        if quantisation is not None:
            item_bytes = _QUANTISED_BYTES.get(str(quantisation.get("quant_method")))
        known = [size for size in sizes if isinstance(size, int) and size > 0]
        if len(known) < len(sizes) or item_bytes is None or tp is None:
            return None
        # Nemotron-H squares its activation and has no gate.
        gated = text.get("mlp_hidden_act", text.get("hidden_act")) != "relu2"
        chosen, experts, hidden, inner = known
        return cls(chosen, experts, hidden, inner, item_bytes, tp, 3 if gated else 2)

    def work(self, call: Call) -> Work:
        """Return the mean work of a rank in a call; unknown if the tokens have another width.

        With fewer choices than experts, each goes to a different one. A rank has 1 / `ranks` of the
        FLOPs and the weights, whether it has slices of all experts or some whole ones. Padding
        counts no FLOPs.
        """
        tokens = call.tensor(0)
        if tokens is None or not 0 <= tokens.shape[-1] - self.hidden < _PADDING:
            return Work()
        rows = prod(tokens.shape[:-1]) * self.chosen
        expert = self.matrices * self.hidden * self.inner
        weights = int(min(self.experts, rows) * expert * self.item_bytes)
        return Work(
            flops=2 * rows * expert // self.ranks,
            bytes_read=tokens.nbytes + weights // self.ranks,
            bytes_written=tokens.nbytes,
            matmul=True,
            dtype=tokens.dtype,
        )


def with_expert_work(graph: Graph, layer: ExpertLayer | None) -> Graph:
    """Return the graph with the work of the GEMMs of experts whose operator has no weights.

    The GEMMs of a call share its work in proportion to their durations.

    Args:
        graph: a step of an engine, with its operators.
        layer: the experts; None leaves the work unknown.
    """
    gemms = _opaque_gemms(graph)
    if layer is None or not len(gemms):
        return graph
    nodes, strings, launcher = graph.nodes, graph.strings, graph.launchers()[gemms]
    # Without a launch edge, as in a recording of a CPU, an operator is its own call.
    call_of = np.where(launcher >= 0, launcher, gemms)
    columns = {
        name: getattr(nodes, name).copy() for name in ("flops", "bytes_read", "bytes_written")
    }
    for call in np.unique(call_of):
        members = gemms[call_of == call]
        first = members[0]
        op, shapes, types = (
            strings[int(getattr(nodes, name)[first])]
            for name in ("op", "input_shapes", "input_types")
        )
        try:
            work = layer.work(Call.parse(op, (shapes, types), ("", ""), "", ""))
        except UnknownDtypeError:
            continue
        ends = np.cumsum(np.maximum(nodes.duration_ns[members], 1))
        for name, column in columns.items():
            total = getattr(work, name)
            if total == UNKNOWN:
                continue
            # Differences of rounded sums, so that the parts add up to the total.
            until = np.rint(total * (ends / ends[-1])).astype(np.int64)
            column[members] = np.diff(until, prepend=0)
    return graph.with_columns(**columns)


def _opaque_gemms(graph: Graph) -> I64:
    """Return the GEMMs of experts with unknown FLOPs whose operator has no weights, int64[n]."""
    nodes, strings = graph.nodes, graph.strings
    ops, names = np.unique(nodes.op).tolist(), np.unique(nodes.name).tolist()
    of_experts = [code for code in ops if strings[code].split(".", 1)[0] in OPAQUE_EXPERTS]
    gemms = [code for code in names if _GEMMS.search(strings[code])]
    mask = np.isin(nodes.op, of_experts) & np.isin(nodes.name, gemms)
    return np.flatnonzero(mask & graph.compute & (nodes.flops == UNKNOWN))


def unknown_experts(graphs: Sequence[Graph]) -> Note | None:
    """Return a note that counts GEMMs of experts whose work is not known, by operator."""
    counts: Counter[str] = Counter()
    for graph in graphs:
        counts.update(graph.strings[int(code)] for code in graph.nodes.op[_opaque_gemms(graph)])
    if not counts:
        return None
    text = ", ".join(f"{count} of {op}" for op, count in counts.most_common())
    return Note(
        f"FLOPs and bytes of {sum(counts.values())} GEMMs of experts are not known ({text}): the "
        "weights are no operands. They follow from --config, for experts in 16 or 32 bits or "
        "MXFP4, and --tp",
        code="recording-experts-unknown",
    )
