"""Convert recordings and models to graphs, expand them to all ranks, export them."""
