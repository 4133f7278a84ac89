"""How a kernel's time goes over to another GPU: the cost models, their coefficients and errors."""
