"""Launch floors of a GPU: the shortest duration of a kernel, by class of work."""

from onerank.annotate.op_costs.op_classes import OpClass

_LAUNCHES = {
    OpClass.MEMSET: 0.27,
    OpClass.INDEX: 0.33,
    OpClass.ELEMENTWISE: 0.35,
    OpClass.EMBEDDING: 0.38,
    OpClass.COPY: 0.45,
    OpClass.SOFTMAX: 0.47,
    OpClass.RANDOM: 0.54,
    OpClass.REDUCTION: 0.77,
}
"""The shortest kernels of a class over those of products, by which a description tells its floor;
1 of those that are not here. Measured on an H200 (2640 ns of a product): medians of calls of up to
300 kB in the shipped kernel database, of copies and embeddings in captured steps.

Of NVIDIA's GPUs alone. On an MI300X no class is shorter than the others: of public Kineto traces
(AMD-AGI/TraceLens, kernels of up to 200 kB) the median trace has elementwise kernels of 4.3 us,
copies of 4.5, fills of 4.6, reductions of 5.5, products of 2.2 and 6.1."""


def launches_of(sort: OpClass) -> float:
    """Return the part of a description's launch floor that the shortest kernels of a class take."""
    return _LAUNCHES.get(sort, 1.0)
