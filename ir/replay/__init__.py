"""Replay a graph by its edges: scheduler, start delays and the steady-state step."""
