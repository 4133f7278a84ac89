"""Run operators on fake tensors as the GPU would, and record them.

- `fake_operators`: the dispatch mode through which every operator of the script goes.
- `operator_calls`: properties of operators, and their calls.
- `fake_results`: results of operators on fake tensors, and which are refused.
- `fake_kernels`: shapes of results where torch has no fake implementation, or a wrong one.
- `gpu_operators`: operators that a CUDA implementation calls inside another one.
- `known_results`: small numbers, computed from known operands.
- `router_choices`: experts that a script's router chooses.
- `block_masks`: blocks that flex attention computes.
- `functional_collectives`: DTensor's collectives, and products fused with them.
- `triton_kernels`: Triton kernels that a script launches.
"""
