"""Energy of a step: what each node takes, and what a reader should know of it."""
