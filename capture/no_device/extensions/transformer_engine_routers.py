"""TransformerEngine's fused routers: scores, choice and weights of experts in one kernel.

Signatures and results are those of version 2.20 (pytorch/csrc/extensions/router.cpp).
`--moe-routing` chooses the experts. FLOPs: `annotate/op_costs/library_operators/`.
"""

from typing import Any

import torch
from torch import Tensor

from onerank.capture.no_device.extensions.emulated_modules import Function, Launch
from onerank.capture.no_device.extensions.transformer_engine_tensors import arguments_by_name
from onerank.capture.no_device.operators.router_choices import ChoiceForm, FusedChoice

# Values of the launches' operands, which the formula of their FLOPs reads.
_SCORE_FUNCTIONS = {"sigmoid": 0, "softmax": 1, "sqrtsoftplus": 2}

_BITMAP = 1  # of NVTERoutingMapFormat


def _routing_map(logits: Tensor, layout: Any) -> tuple[Tensor, ChoiceForm]:
    """Allocate a map of the experts of each token, of bools or of bits."""
    *tokens, experts = logits.shape
    if int(layout) == _BITMAP:
        shape = (*tokens, -(-experts // 8))
        return torch.empty(shape, dtype=torch.uint8, device="cuda"), ChoiceForm.BITS
    return torch.empty(logits.shape, dtype=torch.bool, device="cuda"), ChoiceForm.MAP


_FORWARD = (
    "logits topk use_pre_softmax num_groups group_topk scaling_factor score_function expert_bias "
    "routing_map_format topk_indices"
).split()


def _topk_forward(launch: Launch, *args: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights of the experts, 0 for those not chosen, the choice, and the scores."""
    given = arguments_by_name(_FORWARD, args, named)
    logits = given.logits
    if given.topk_indices is not None:
        chosen, form = given.topk_indices, ChoiceForm.INDICES
    else:
        chosen, form = _routing_map(logits, given.routing_map_format)
    probabilities = torch.empty_like(logits)
    intermediate = torch.empty(logits.shape, dtype=torch.float32, device="cuda")
    values = _values(given.topk, given.score_function, given.use_pre_softmax, given.scaling_factor)
    launch(
        "fused_topk_with_score_function_fwd",
        [logits, given.expert_bias, *values],
        [probabilities, chosen, intermediate],
        FusedChoice(logits, given.topk, chosen, form),
    )
    return probabilities, chosen, intermediate


_BACKWARD = (
    "routing_map intermediate_output grad_probs grad_logits topk use_pre_softmax scaling_factor "
    "score_function use_dense_indices routing_map_format"
).split()


def _topk_backward(launch: Launch, *args: Any, **named: Any) -> None:
    """Write the gradient of the logits."""
    given = arguments_by_name(_BACKWARD, args, named)
    values = _values(given.topk, given.score_function, given.use_pre_softmax, given.scaling_factor)
    reads = [given.grad_probs, given.routing_map, *values, given.intermediate_output]
    launch("fused_topk_with_score_function_bwd", reads, [given.grad_logits])


def _values(top_k: int, function: str, pre_softmax: bool, scale: float | None) -> list[int]:
    pre = pre_softmax and function == "softmax"
    return [top_k, _SCORE_FUNCTIONS[function], int(pre), int(scale is not None)]


def _scores_forward(
    launch: Launch, logits: Tensor, topk: int, score_function: str, routing_map_format: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores of all experts for an auxiliary loss, the choice, and what it saves."""
    chosen, form = _routing_map(logits, routing_map_format)
    scores, intermediate = (
        torch.empty(logits.shape, dtype=torch.float32, device="cuda") for _ in range(2)
    )
    launch(
        "fused_score_for_moe_aux_loss_fwd",
        [logits, _SCORE_FUNCTIONS[score_function]],
        [scores, chosen, intermediate],
        FusedChoice(logits, topk, chosen, form),
    )
    return scores, chosen, intermediate


_SCORES_BACKWARD = "intermediate_output grad_scores grad_logits topk score_function".split()


def _scores_backward(launch: Launch, *args: Any, **named: Any) -> None:
    """Write the gradient of the logits."""
    given = arguments_by_name(_SCORES_BACKWARD, args, named)
    function = _SCORE_FUNCTIONS[given.score_function]
    reads = [given.grad_scores, function, given.intermediate_output]
    launch("fused_score_for_moe_aux_loss_bwd", reads, [given.grad_logits])


def _loss_forward(
    launch: Launch,
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: Any,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, Tensor]:
    """Return the auxiliary loss of balanced experts, and its factor for the backward."""
    loss = torch.empty((), dtype=probs.dtype, device="cuda")
    factor = torch.empty(2, dtype=torch.float32, device="cuda")
    total = total_num_tokens if isinstance(total_num_tokens, Tensor) else None
    launch("fused_moe_aux_loss_fwd", [probs, tokens_per_expert, total], [loss, factor])
    return loss, factor


_LOSS_BACKWARD = "Const_buf tokens_per_expert num_rows num_cols grad_aux_loss".split()


def _loss_backward(launch: Launch, *args: Any, **named: Any) -> Tensor:
    """Return the gradient of the scores."""
    given = arguments_by_name(_LOSS_BACKWARD, args, named)
    dtype = given.grad_aux_loss.dtype
    gradient = torch.empty((given.num_rows, given.num_cols), dtype=dtype, device="cuda")
    reads = [given.Const_buf, given.tokens_per_expert, given.grad_aux_loss]
    launch("fused_moe_aux_loss_bwd", reads, [gradient])
    return gradient


ROUTERS: dict[str, Function] = {
    "fused_topk_with_score_function_fwd": _topk_forward,
    "fused_topk_with_score_function_bwd": _topk_backward,
    "fused_score_for_moe_aux_loss_fwd": _scores_forward,
    "fused_score_for_moe_aux_loss_bwd": _scores_backward,
    "fused_moe_aux_loss_fwd": _loss_forward,
    "fused_moe_aux_loss_fwd_graph_safe": _loss_forward,
    "fused_moe_aux_loss_bwd": _loss_backward,
}
"""Name of a function of the extension -> counterpart."""
