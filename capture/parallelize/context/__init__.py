"""Context parallelism: each rank runs all of the model on a part of the sequence."""
