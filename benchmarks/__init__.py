"""Benchmarks: run one from the root of the checkout, as `python -m benchmarks.FOLDER.NAME`."""
