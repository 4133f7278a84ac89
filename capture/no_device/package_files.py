"""Which files are torch's and this package's: their frames lie between a script and an operator.

By directory, not by a name in the path: a script may lie in a checkout that is called onerank.
"""

import os
from pathlib import Path

import torch

ONERANK = str(Path(__file__).parents[2]) + os.sep
"""Directory of this package, as in the file names of its code."""

TORCH = str(Path(torch.__file__).parent) + os.sep
"""Directory of torch."""


def is_package_file(file: str) -> bool:
    """Return whether a file, as its code names it, is torch's or this package's."""
    return file.startswith((TORCH, ONERANK))
