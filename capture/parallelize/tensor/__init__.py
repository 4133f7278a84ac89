"""Tensor parallelism: a model cut to one rank's slice, with the collectives between."""
