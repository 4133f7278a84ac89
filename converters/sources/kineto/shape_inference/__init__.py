"""Result shapes and dtypes of operators from their inputs, as PyTorch documents them.

`results_of` is the entry point; each module holds the rules of one class of operators.
"""

from onerank.converters.sources.kineto.shape_inference.rules import results_of

__all__ = ["results_of"]
