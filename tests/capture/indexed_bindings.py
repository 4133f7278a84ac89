"""Imported last by the process that tests fork from: does once what each fork would repeat."""

import gc

from onerank.annotate.gpus.registry import gpu_names
from onerank.annotate.models.coefficients import shipped
from onerank.capture.fake_world.c10d_patches import group_operators
from onerank.capture.no_device.torch_without_gpu import operators_of_a_gpu
from onerank.capture.patches import index_bindings
from onerank.plan.tasks import _installed_code

index_bindings()
group_operators()
operators_of_a_gpu()
# Both read TOML files once per process.
gpu_names()
shipped()
# Digests of onerank's files, which each plan and bundle is stored under.
_installed_code()
gc.enable()
