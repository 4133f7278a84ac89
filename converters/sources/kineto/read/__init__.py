"""Read the profiler's files: Kineto traces, execution traces, allocator histories."""
