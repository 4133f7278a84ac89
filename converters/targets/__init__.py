"""Export targets: network simulators, timelines and tables."""
