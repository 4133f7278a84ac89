"""What NCCL would launch for a call: algorithm, protocol, channels, threads, and its latency.

After NCCL 2.28.9: the search of channels and the interconnect by GPU name (`topology`), the cost
model (`tuning`), and the choice of the fastest (`select_algorithm`).

Held for: GPUs of one kind, behind NVSwitch or on PCIe (through the host beyond a pair), one NIC per
GPU between nodes, the LL limits of an Intel host, no tuner plugin, no environment overrides, no
CollNet (SHARP). On four H200 with NCCL 2.28.9 and NVLS off, grid and block of 132 calls of six
kinds from 1 KiB to 256 MiB were those given here. NCCL's own search and cost model, asked for A100,
H100 and B200, groups of 1, 2, 4 and 8 GPUs on each of 1 to 128 nodes, five collectives from 1 KiB
to 3 GiB, with NVLS and without, answered with this algorithm, protocol, grid and block in 52,500 of
52,500 cases; on PCIe in 31,186 of 31,500: it differs among several nodes alone.
"""

from onerank.converters.nccl.select_algorithm import Choice, choose
from onerank.converters.nccl.topology import H100, Interconnect, Topology, interconnect_of

__all__ = ["H100", "Choice", "Interconnect", "Topology", "choose", "interconnect_of"]
