"""From captures of a model built with a few layers, the graph of the model with all of them."""

from onerank.converters.depths.extrapolate import check_depths, extrapolate
from onerank.converters.depths.pattern import Pattern

__all__ = ["Pattern", "check_depths", "extrapolate"]
