"""The GPU that a script sees in a capture without a device. This module does not import torch."""

from dataclasses import dataclass

from onerank.annotate.gpus.registry import load_gpu

MOST_FLASH_HEAD = 256
"""Elements of a head that FlashAttention 2 supports (`check_head_dim_size_flash` in torch)."""


@dataclass(frozen=True)
class EmulatedGpu:
    """Properties of a GPU as `torch.cuda` reports them.

    Attributes:
        name: as the driver names it.
        capability: compute capability, major and minor.
        memory_bytes: device memory.
        sm_count: streaming multiprocessors.
        l2_bytes: size of the L2 cache, 0 if not known.
        flops_per_s: sustained rate of GEMMs in bfloat16.
        bandwidth_bytes_per_s: sustained rate of memory.
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    sm_count: int
    l2_bytes: int
    flops_per_s: float
    bandwidth_bytes_per_s: float

    @property
    def workspace_bytes(self) -> int:
        """Bytes of a cuBLAS workspace: 32 MiB from Hopper on, as cuBLAS recommends.

        Measured on an H100 and an H200 (`resident_bytes` of captures there). Before Hopper torch
        takes 2 blocks of 4 MiB and 8 of 16 KiB (CublasHandlePool.cpp).
        """
        return 32 << 20 if self.capability >= (9, 0) else 2 * (4 << 20) + 8 * (16 << 10)


def emulated_gpu(name_or_path: str) -> EmulatedGpu:
    """Return the properties that `torch.cuda` reports for a described GPU.

    Raises:
        TargetError: there is no such description, or it is malformed.
    """
    gpu = load_gpu(name_or_path)
    drivers = (alias for alias in gpu.aliases if alias.startswith(gpu.vendor))
    # A GPU without a compute capability is another vendor's; torch on ROCm reports 9.x for MI300.
    major, _, minor = (gpu.compute_capability or "9.0").partition(".")
    return EmulatedGpu(
        name=next(drivers, f"{gpu.vendor} {gpu.name}"),
        capability=(int(major), int(minor or 0)),
        memory_bytes=gpu.memory_bytes,
        sm_count=gpu.sm_count,
        l2_bytes=gpu.l2_bytes or 0,
        flops_per_s=gpu.tensor_flops_per_s("bfloat16") or gpu.tensor_flops_per_s("float16") or 0.0,
        bandwidth_bytes_per_s=gpu.bandwidth_bytes_per_s,
    )
