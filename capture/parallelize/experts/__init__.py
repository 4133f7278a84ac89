"""Expert parallelism: which ranks hold which experts, and which tokens go to them."""
