"""Measure calls and sustained rates of the current GPU."""
