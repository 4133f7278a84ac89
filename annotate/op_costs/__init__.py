"""FLOPs and bytes of operators, independent of the kernels that run them."""
