"""Bundles in the formats of simulators of serving, a module each."""
