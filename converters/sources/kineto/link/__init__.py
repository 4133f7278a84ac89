"""Link kernels, operators and execution-trace nodes; attribute them to modules and phases."""
