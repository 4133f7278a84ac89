"""FLOPs and bytes of operators, whatever runs them."""
