"""Checkpoints and FSDP1 states in a world whose other ranks do not exist."""
