"""Fused attention taken apart into the kernels of eager attention."""
