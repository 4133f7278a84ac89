"""Explain a prediction: its arithmetic, term by term."""
