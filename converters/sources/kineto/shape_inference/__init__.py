"""Operand shapes and dtypes of a trace without an execution trace."""
