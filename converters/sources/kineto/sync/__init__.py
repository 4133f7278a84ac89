"""Synchronization: stream order, CUDA events, waits, and the dependency edges they become."""
