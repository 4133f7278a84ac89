"""Qualified names of modules, such as `model.layers.3.mlp`; without torch."""

import re


def parent_of(name: str) -> str:
    """Return the qualified name of the module that a module is in; "" at the top."""
    return name.rpartition(".")[0]


def layer_list_of(name: str) -> str | None:
    """Return the outermost list of layers that a module is in; None outside of lists."""
    layers, *inside = re.split(r"\.\d+\.", name, maxsplit=1)
    return layers if inside else None


def name_pattern(pattern: str) -> re.Pattern[str]:
    """Return the expression for names of a plan, in which * stands for a number."""
    return re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
