"""The products in 16 bits whose mean rates calibrate a GPU, each as (m, n, k).

One product tells of others by some 10%: libraries have better kernels for some sizes. The mean over
several tells of all.
"""

from itertools import product

_SIZES = 4096, 8192, 16384
LARGE = tuple(product(_SIZES, _SIZES, _SIZES))
"""What they reach is the matrix units', under the power limit."""
SKINNY = tuple(product((16, 64), (8192, 16384), (8192, 16384)))
"""What they reach is the memory's: their weights are in no cache."""
