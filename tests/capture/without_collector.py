"""Imported first by the process that tests fork from: imports leave nothing to collect.

Searching for it is a sixth of their CPU time. `indexed_bindings`, imported last, enables it again.
"""

import gc

gc.disable()
