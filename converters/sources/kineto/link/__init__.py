"""Link host events, execution-trace nodes and GPU operations; attribute them; resolve waits."""
