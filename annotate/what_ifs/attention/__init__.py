"""Fused attention taken apart into the kernels of eager attention, and these put together."""
