"""A world whose other ranks do not exist: its groups, its collectives, and their results."""
