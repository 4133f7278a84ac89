"""A world with one real rank: process groups, collectives and their results."""
