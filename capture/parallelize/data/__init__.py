"""Data parallelism for scripts that know nothing of it: replicas, sharded states and models."""
