"""Fit the learned model's coefficients to measurements: `python -m onerank.annotate.fit DATA`."""

from onerank.annotate.fit.data import Attention, Products, family, read_attention, read_products
from onerank.annotate.fit.fitting import fit_gemm, hull_of

__all__ = [
    "Attention",
    "Products",
    "family",
    "fit_gemm",
    "hull_of",
    "read_attention",
    "read_products",
]
