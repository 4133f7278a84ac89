"""Lower linked events to the nodes and edges of a graph."""
