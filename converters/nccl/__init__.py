"""Predict what NCCL launches for a call: algorithm, protocol, channels, threads and latency.

Follows NCCL 2.28.9: `topology` has the channel search and the interconnect by GPU name,
`select_algorithm` the cost model and the choice of the fastest algorithm.

Assumes equal GPUs behind NVSwitch or on PCIe (through the host beyond a pair), one NIC per GPU
between nodes, the LL limits of an Intel host, no tuner plugin, no environment overrides and no
CollNet (SHARP).

Validation:
- On four H200 with NCCL 2.28.9 and NVLS off, grid and block agree for all 132 calls of six kinds
  from 1 KiB to 256 MiB.
- NCCL's search and cost model, run for A100, H100 and B200 with 1, 2, 4 and 8 GPUs on each of 1 to
  128 nodes, five collectives from 1 KiB to 3 GiB, with and without NVLS, give the same algorithm,
  protocol, grid and block in 52,500 of 52,500 cases.
- On PCIe they agree in 31,186 of 31,500 cases; all differences are between several nodes.
"""

from onerank.converters.nccl.select_algorithm import Choice, choose, wire_bytes
from onerank.converters.nccl.topology import H100, Interconnect, Topology, interconnect_of

__all__ = ["H100", "Choice", "Interconnect", "Topology", "choose", "interconnect_of", "wire_bytes"]
