"""Repairing: what the error that a model raised asks for, and the search from what failed to what works."""
