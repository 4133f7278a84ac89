"""Expand captured ranks to all ranks, more replicas, pipeline schedules, all layers."""
