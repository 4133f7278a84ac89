"""Cost models: how a kernel's time transfers to another GPU, with coefficients and errors."""
