"""What waits for what in a trace: recorded synchronisations, inferred waits, full launch queues."""
