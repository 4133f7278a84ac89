"""Rewrite attention between eager and fused kernels."""
