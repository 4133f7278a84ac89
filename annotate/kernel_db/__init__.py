"""The kernel database: measured calls, their keys, and interpolation between them."""
