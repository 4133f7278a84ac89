"""Extrapolate layers: from captures with a few layers, the graph of the whole model."""

from onerank.converters.expand.layers.captured_layers import Pattern
from onerank.converters.expand.layers.extrapolate import (
    DepthCaptures,
    check_depths,
    extrapolate,
)

__all__ = ["DepthCaptures", "Pattern", "check_depths", "extrapolate"]
