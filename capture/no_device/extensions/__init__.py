"""C++ extensions of libraries, whose functions a capture without a device records as operators.

- `emulated_modules`: modules that stand in for extensions, and functions that users register.
- `install`: which extensions there are, and what their packages need to import without a GPU.
- `transformer_engine`: the functions of TransformerEngine's extension; its quantised tensors,
  attention and routers are in `transformer_engine_tensors`, `..._attention` and `..._routers`.
- `fused_kernels`: those of apex, DeepSpeed and Mamba 1, and multi-tensor functions of any library.
- `expert_exchange`: DeepEP and HybridEP, which move tokens between ranks.
- `products`: those of grouped_gemm and DeepGEMM.
"""
