"""Passes over a graph that a user requests, each a frozen dataclass with `apply`."""
