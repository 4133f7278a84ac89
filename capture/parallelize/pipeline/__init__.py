"""Pipeline parallelism: a stage of the model, and what passes between stages."""
