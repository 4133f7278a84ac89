"""Latency tables of an inference engine's rank: measured, interpolated, re-costed, exported."""
