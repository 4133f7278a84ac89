"""Fit the learned model's coefficients to measurements: `python -m tools.fit DATA`."""

from tools.fit.fit_tiles import fit_gemm, hull_of
from tools.fit.measured_kernels import Attention, Products, family, read_attention, read_products

__all__ = [
    "Attention",
    "Products",
    "family",
    "fit_gemm",
    "hull_of",
    "read_attention",
    "read_products",
]
