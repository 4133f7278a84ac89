"""Select the events that become nodes: GPU operations, host calls, leaf operators on a CPU.

A CPU trace has no kernels, so the leaf operator is the unit of work. Some operators do their work
themselves but call helpers first: `aten::addmm` copies its bias, `aten::mul` its scalar,
`aten::sum` fills its output. A plain leaf rule would keep the helper and lose the work. Such
operators count as leaves and absorb their callees: by rule if they call only copies and fills,
otherwise by name. A grouped convolution that a CPU runs group by group (in 16 bits) also counts
once, as on a GPU. Views and allocations do no work and are not nodes.

Wrappers are not leaves. Autocast casts the inputs and calls the operator again: the casts and the
second call are nodes. Under vmap a product has the sizes of one sample and calls products of the
whole batch: those are the nodes. A tensor subclass (DTensor) or dispatch mode calls operators on
the tensors that it wraps: those are the nodes, because the outer sizes are not those of the work.
Fake tensors that DTensor runs to infer result shapes are no work.
"""

import re
from dataclasses import dataclass

import numpy as np

from onerank.converters.sources.kineto.gloo import GlooCalls
from onerank.converters.sources.kineto.link.host_timeline import MODULE_SCOPE, HostTimeline
from onerank.converters.sources.kineto.link.link_kernels import GpuOps
from onerank.converters.sources.kineto.read.trace_columns import OWN_CALL
from onerank.ir import Phase
from onerank.ir.arrays import I64, Mask
from onerank.ir.enums import DATA_LOADING

_WHOLE = frozenset(
    "mm addmm bmm baddbmm _addmm_activation addbmm addmv mv dot _grouped_mm _scaled_mm "
    "_scaled_mm_v2 "
    "convolution_overrideable mkldnn_convolution _slow_conv2d_forward _slow_conv2d_backward "
    "thnn_conv2d convolution_backward mkldnn_convolution_backward "
    "_scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_flash_attention_for_cpu_backward "
    "native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward "
    "_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data "
    "embedding_dense_backward nll_loss_forward nll_loss_backward cat index index_put_ "
    "nll_loss2d_forward nll_loss2d_backward mse_loss smooth_l1_loss huber_loss "
    "mkldnn_rnn_layer mkldnn_rnn_layer_backward slow_conv3d_forward slow_conv_transpose2d "
    "slow_conv_transpose3d slow_conv_dilated2d slow_conv_dilated3d _embedding_bag "
    "_embedding_bag_dense_backward unfold_backward sort _unique2 glu_backward linalg_lu_solve "
    "_fused_adamw_ _fused_adam_ _fused_adagrad_ _fused_sgd_".split()
)

_MULTIPLIES = frozenset("mm bmm addmm baddbmm addmv mv dot".split())

_CONVOLVES = frozenset(
    "_slow_conv2d_forward thnn_conv2d slow_conv3d slow_conv3d_forward slow_conv_transpose2d "
    "slow_conv_transpose3d slow_conv_dilated2d slow_conv_dilated3d".split()
)

_GROUPED_CONVOLUTION = "_convolution"  # calls one of these for each group

_HELPERS = frozenset("copy_ fill_ zero_ clone".split())

_COPIES = frozenset(  # nothing but copies and fills: these are nodes themselves
    "clone copy zero_ zero zeros zeros_like new_zeros ones ones_like new_ones full full_like "
    "new_full scalar_tensor fill eye repeat constant_pad_nd pad select_backward slice_backward "
    "diagonal_backward numpy_T type_as".split()
)

_NO_WORK = frozenset(
    "view _unsafe_view _reshape_alias reshape expand expand_as as_strided as_strided_ alias t "
    "transpose permute swapaxes movedim squeeze squeeze_ unsqueeze unsqueeze_ select slice narrow "
    "split split_with_sizes chunk unbind unflatten flatten detach detach_ view_as unfold diagonal "
    "empty empty_like empty_permuted empty_strided new_empty new_empty_strided resize_ resize_as_ "
    "set_ lift_fresh result_type is_nonzero _local_scalar_dense item to contiguous requires_grad_ "
    "_to_copy _version data record_stream is_same_size broadcast_tensors numpy_T mT lift conj "
    "_conj _neg_view resolve_conj resolve_neg view_as_real view_as_complex real imag chunk_cat "
    "_has_compatible_shallow_copy_type unsafe_split unsafe_split_with_sizes mH matrix_H adjoint "
    "cudnn_is_acceptable output_nr can_cast promote_types size stride tensor_split unsafe_chunk "
    "transpose_ t_ _indices _values _sparse_coo_tensor_unsafe "
    "_sparse_coo_tensor_with_dims_and_tensors".split()
)

HOST_READS = ("aten::_local_scalar_dense",)
"""Operators that copy a number to the host if it is on a GPU, and else do no work. A capture
without a device states the stream of such a copy; a CPU capture cannot contain one."""

_SUBCLASS, _MODE = "PythonSubclass", "PythonDispatchMode"

_DISPATCHERS = frozenset((_SUBCLASS, _MODE))

_NO_COMPUTE_PREFIXES = (
    "autograd::",
    "torch::",
    "c10d::",
    "_c10d_functional::",
    "_dtensor::",
    "profiler::",
    "onerank::",
)

_GENERATED = re.compile(r"(graph_\d+_)?cpp_|triton_")  # a kernel that Inductor wrote


def leaves(timeline: HostTimeline) -> list[int]:
    """Return the indices of the compute operators, in call order per thread."""
    count = len(timeline)
    parents: list[int] = timeline.parent.tolist()
    is_operator: list[bool] = timeline.rows.is_operator.tolist()
    works, names = _compute_names(timeline)
    fake = _fake(parents, names)
    whole = [False] * count
    # Properties of the callees: copied or filled, computed, forwarded to a subclass or mode,
    # called the same operator again (autocast), multiplied matrices (vmap).
    helped, worked = [False] * count, [False] * count
    forwarded, called_again = [False] * count, [False] * count
    multiplied = [False] * count
    groups = [0] * count
    for index in range(count - 1, -1, -1):  # callees come after their callers
        base = names[index]
        passes = forwarded[index] or called_again[index]
        passes |= multiplied[index] and base in _MULTIPLIES
        if works[index] and is_operator[index] and not passes and not fake[index]:
            leaf = not worked[index] and (not helped[index] or base not in _COPIES)
            grouped = base == _GROUPED_CONVOLUTION and groups[index] > 1
            whole[index] = base in _WHOLE or leaf or grouped
        parent = parents[index]
        if parent < 0:
            continue
        # In 16 bits a CPU calls the convolution of each group; a GPU runs one kernel for all
        # groups.
        groups[parent] += whole[index] and base in _CONVOLVES
        if whole[index] and base not in _HELPERS:
            worked[parent] = True
        worked[parent] |= worked[index]
        multiplied[parent] |= multiplied[index] or (whole[index] and base in _MULTIPLIES)
        # A tensor subclass also dispatches views: only a call that leads to work is forwarded.
        forwards = base in _DISPATCHERS and (worked[index] or helped[index] or fake[index])
        forwarded[parent] |= forwards or forwarded[index]
        # Under autocast the outer call has float32 operands and the casts are inside. As a node it
        # cost a GPT-2 step twice its time, and hid the casts.
        called_again[parent] |= works[index] and names[parent] == base
        helped[parent] |= whole[index] or helped[index]
    operators: list[int] = []
    absorbed = [False] * count
    in_mark: list[int] = timeline.in_mark.tolist()
    for index, parent in enumerate(parents):
        if parent >= 0:
            absorbed[index] = absorbed[parent] or whole[parent]
        if whole[index] and not absorbed[index] and in_mark[index] < 0:
            operators.append(index)
    return operators


# torch 2.11 infers the result of a DTensor operator on fake tensors each time a scalar argument
# changes; on a CPU those operators look like work.
def _fake(parents: list[int], names: list[str]) -> list[bool]:
    """Return the events inside a dispatch mode of a tensor subclass, the mode included."""
    inside, fake = [False] * len(parents), [False] * len(parents)
    for index, parent in enumerate(parents):  # callers come first
        if parent >= 0:
            inside[index] = inside[parent] or names[parent] == _SUBCLASS
            fake[index] = fake[parent] or (inside[index] and names[index] == _MODE)
    return fake


def _compute_names(timeline: HostTimeline) -> tuple[list[bool], list[str]]:
    """Return which events are named like a compute operator, and all base names."""
    distinct, places = np.unique(timeline.rows.name, return_inverse=True)
    names = timeline.strings.decode(distinct)
    bases = [_base_name(name) for name in names]
    works = [
        ("::" in name or _GENERATED.match(name) is not None)
        and not name.startswith(_NO_COMPUTE_PREFIXES)
        and base not in _NO_WORK
        for name, base in zip(names, bases, strict=True)
    ]
    at: list[int] = places.tolist()
    copied = np.isin(places, [i for i, name in enumerate(names) if name in HOST_READS])
    copied &= timeline.rows.stream >= 0
    works_at = [works[place] for place in at]
    for index in np.flatnonzero(copied).tolist():
        works_at[index] = True
    return works_at, [bases[place] for place in at]


def _base_name(name: str) -> str:
    return name.removeprefix("aten::")


@dataclass(frozen=True, slots=True)
class SelectedNodes:
    """The events that become nodes.

    Attributes:
        host: indices of the host events, ascending, int64[n].
        gpu: rows of the GPU operations, by start, int64[m].
        dropped: operators that are no nodes, by reason.
    """

    host: I64
    gpu: I64
    dropped: dict[str, int]


def _count_dropped(
    timeline: HostTimeline, kept: I64, interrupted: I64, in_gloo: Mask, *, with_operators: bool
) -> dict[str, int]:
    unselected = timeline.rows.is_operator.copy()
    unselected[kept] = unselected[interrupted] = False
    recorder = unselected & ((timeline.in_mark >= 0) | timeline.is_wait)
    other = "no execution trace given"
    if with_operators:
        other = "they call other operators, or do no work, as views"
    counts = {
        other: int((unselected & ~recorder & ~in_gloo).sum()),
        "emulates communication": int(recorder.sum()),
        "part of a call by Gloo": int((unselected & ~recorder & in_gloo).sum()),
        "started only: the recomputation of a checkpoint ended early": len(interrupted),
    }
    return {reason: count for reason, count in counts.items() if count}


def unattributed_calls(timeline: HostTimeline) -> Mask:
    """Return which host events are runtime calls outside of any operator, bool[n]."""
    return timeline.rows.event_index == OWN_CALL


def _select_operators(timeline: HostTimeline, *, cpu_only: bool) -> I64:
    loading = np.flatnonzero(timeline.named(lambda name: name.startswith(DATA_LOADING)))
    if cpu_only:
        return np.union1d(np.array(leaves(timeline), dtype=np.int64), loading)
    # No annotations: `## backward ##` spans the wait for another thread, and would count it twice.
    chosen = timeline.rows.is_operator | unattributed_calls(timeline)
    chosen &= (timeline.in_mark < 0) & ~timeline.is_wait
    return np.union1d(np.flatnonzero(chosen), loading)


def _find_interrupted(timeline: HostTimeline, kept: I64) -> Mask:
    """Return the kept operators that only began, bool[n].

    torch.utils.checkpoint ends a recomputation with an exception once it has what backward needs.
    The operator that was beginning leaves an event and no record in the execution trace.
    """
    unrecorded = (timeline.et[kept] < 0) & (timeline.phase[kept] == Phase.BACKWARD)
    if not unrecorded.any():
        return unrecorded
    scope = timeline.nearest(timeline.named(lambda name: name.startswith(MODULE_SCOPE)))
    return unrecorded & (scope[kept] >= 0)


def select_nodes(
    timeline: HostTimeline, gpu: GpuOps, gloo: GlooCalls, *, with_operators: bool
) -> SelectedNodes:
    """Select the nodes: all GPU operations that do not emulate a collective, and operators.

    If nothing ran on a GPU, the operators that compute are selected: the leaves.

    Args:
        timeline: the host events.
        gpu: the GPU operations.
        gloo: the calls that Gloo ran; operators within them are not nodes.
        with_operators: whether operators are nodes.
    """
    # Kernels within a mark emulate a collective, which is a separate node.
    ran = np.flatnonzero(gpu.in_mark < 0)
    ran = ran[np.argsort(gpu.rows.start_ns[ran], kind="stable")]
    cpu_only = not len(ran)
    kept = _select_operators(timeline, cpu_only=cpu_only)
    if not with_operators:
        kept = kept[:0]
    interrupted = kept[_find_interrupted(timeline, kept)] if cpu_only else kept[:0]
    inside = gloo.within(timeline)
    # Callers of Gloo stay even if they are no leaves: they issue the calls.
    kept = np.union1d(np.setdiff1d(kept[~inside[kept]], interrupted), gloo.callers())
    dropped = _count_dropped(timeline, kept, interrupted, inside, with_operators=with_operators)
    return SelectedNodes(kept, ran, dropped)
