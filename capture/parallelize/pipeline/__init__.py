"""Pipeline parallelism: one stage of a model, and the messages between stages."""
