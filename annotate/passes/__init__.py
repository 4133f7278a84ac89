"""Passes over a graph: changes a user asks for, each a frozen dataclass with `apply`."""
