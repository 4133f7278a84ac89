"""Data parallelism for scripts that do not implement it: replicas, sharded states and models."""
