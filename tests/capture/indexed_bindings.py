"""The last import of the process that test processes are forked from: see `index_bindings`."""

from onerank.capture.patches import index_bindings

index_bindings()
