"""Plan a job: layouts of a model on a cluster, with predicted step, memory, energy and price."""
