"""Communication beside compute: as far as the data allow, or not at all."""

CHOICES = ("as-captured", "on", "off")
"""Whether communication runs beside compute: where it did, as far as the data allow, nowhere."""
