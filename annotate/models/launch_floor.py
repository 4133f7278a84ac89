"""The launch floor by class of kernel: the shortest time that a kernel takes, whatever its work.

`launch_floor_ns` in the description of a GPU is that of a GEMM; other classes have a share of it.
"""

from onerank.annotate.op_costs.op_classes import OpClass

# Time of a class's shortest kernels over that of the shortest GEMMs, the launch floor. Absent
# classes have 1. Measured on an H200 (2640 ns for a GEMM): medians of calls of up to 300 kB in the
# shipped kernel database; copies and embeddings in captured steps. With one floor for all, the
# datasheet model was 85% off for elementwise kernels under 10 us there, and 156% for fills.
#
# For NVIDIA GPUs only. On an MI300X no class is shorter than the others: in public Kineto traces
# (AMD-AGI/TraceLens, kernels of up to 200 kB) the median trace has elementwise kernels of 4.3 us,
# copies of 4.5, fills of 4.6, reductions of 5.5, GEMMs of 2.2 and 6.1.
_FLOOR_SHARES = {
    OpClass.MEMSET: 0.27,
    OpClass.INDEX: 0.33,
    OpClass.ELEMENTWISE: 0.35,
    OpClass.EMBEDDING: 0.38,
    OpClass.COPY: 0.45,
    OpClass.SOFTMAX: 0.47,
    OpClass.RANDOM: 0.54,
    OpClass.REDUCTION: 0.77,
}


def floor_share_of(op_class: OpClass) -> float:
    """Return the time of a class's shortest kernels as a share of the launch floor."""
    return _FLOOR_SHARES.get(op_class, 1.0)
