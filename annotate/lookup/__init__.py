"""Kernels that were measured: the database, what names a call in it, and what lies between rows."""
