"""Another sequence length or micro-batch: how each tensor of a step grows, call by call."""
