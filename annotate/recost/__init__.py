"""Re-cost a graph for another GPU, from a GPU capture, a CPU capture or operator counts."""
