"""Overlap of communication and compute: maximal, or none."""

CHOICES = ("as-captured", "on", "off")
"""Whether communication runs beside compute: where it did, as far as the data allow, nowhere."""
