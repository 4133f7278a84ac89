"""Verify a capture's numerics against reference runs."""
