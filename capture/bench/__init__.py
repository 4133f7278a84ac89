"""Measure how long calls take on the GPU at hand, and what the GPU itself sustains."""
