"""Link kernels, host operators and execution-trace nodes."""
