"""Collectives and point-to-point calls of a trace."""
