"""A graph for another GPU: of a measured step, a CPU capture, or the counts of a generator."""
