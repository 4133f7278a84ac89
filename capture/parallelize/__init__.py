"""Slice and wrap a script's models for one rank of a parallel job."""
