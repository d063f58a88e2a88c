"""Imports a Python file on a machine that lacks its packages, its GPU, or their versions."""
