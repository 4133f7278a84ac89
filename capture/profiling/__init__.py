"""Measurement windows: the observed steps of a script and their instruments."""
