"""Into the graph: kineto. Out of it: astra_sim."""
