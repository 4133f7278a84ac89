"""Kinds of parameters, by the ranks that hold a copy; without torch."""

DENSE = "dense"
"""Replicated on all data-parallel ranks."""

EXPERT = "edp"
"""Replicated on the ranks with the same experts; the name of their axis."""

KIND_ATTRIBUTE = "_onerank_axis"
"""Attribute of a parameter with its kind; without it, the parameter is DENSE."""
