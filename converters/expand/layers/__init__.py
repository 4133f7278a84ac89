"""Extrapolate layers: from captures with a few layers, the graph of the whole model."""

from onerank.converters.expand.layers.extrapolate import check_depths, extrapolate
from onerank.converters.expand.layers.layer_period import Pattern

__all__ = ["Pattern", "check_depths", "extrapolate"]
