"""Hosts: how long a CPU takes to dispatch and launch operators, by kind of operator."""
