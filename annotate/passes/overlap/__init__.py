"""Maximize or serialize the overlap of communication and compute."""

CHOICES = ("as-captured", "on", "off")
"""Overlap of communication and compute: as captured, as far as data allow, or none."""
