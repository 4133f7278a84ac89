"""Workloads of SimAI: rows of compute and communication, one file for all ranks of a job."""
