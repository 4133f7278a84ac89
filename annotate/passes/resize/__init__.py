"""Resize a step to another sequence length or micro-batch."""
