"""Context parallelism: each rank runs the whole model on a part of the sequence."""
