"""What NCCL would launch for a call: algorithm, protocol, channels, threads, and its latency.

After NCCL 2.28.9: what is found of a topology (`topology`), the cost model (`tuning`) and what is
chosen by it (`choice`).

Held for: GPUs of one kind behind NVSwitch, one NIC per GPU between nodes, the LL limits of an
Intel host, no tuner plugin, no environment overrides. NVLS and CollNet are not modelled: where they
are on, NCCL may take them for large reductions, with fewer channels than are given here. On four
H200 with NCCL 2.28.9 and NVLS off, grid and block of 132 calls of six kinds from 1 KiB to 256 MiB
were those given here.
"""

from onerank.converters.nccl.choice import Choice, choose
from onerank.converters.nccl.topology import Topology

__all__ = ["Choice", "Topology", "choose"]
