"""Analyses of a graph as data; the command line renders them."""
