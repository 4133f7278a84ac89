"""Maximise or serialise the overlap of communication and compute."""

CHOICES = ("as-captured", "on", "off")
"""Whether communication runs beside compute: where it did, as far as the data allow, nowhere."""
