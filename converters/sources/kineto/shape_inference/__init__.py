"""Results of operators, told by their inputs, as PyTorch's documentation has them.

`results_of` is the whole of it; modules have the rules of one sort of operator each.
"""

from onerank.converters.sources.kineto.shape_inference.rules import results_of

__all__ = ["results_of"]
