"""The last import of the process that test processes are forked from: what each would do anew."""

from onerank.annotate.gpus.registry import gpu_names
from onerank.annotate.models.coefficients import shipped
from onerank.capture.patches import index_bindings

index_bindings()
# Both read TOML files once per process.
gpu_names()
shipped()
