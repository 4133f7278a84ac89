"""Tensor parallelism: a model sliced to one rank, with the collectives between modules."""
