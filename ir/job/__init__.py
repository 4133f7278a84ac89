"""The job that a graph was captured from: its world, process groups, device and measurements."""
