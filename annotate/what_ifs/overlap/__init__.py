"""Communication beside compute: as far as the data allow, or not at all."""
