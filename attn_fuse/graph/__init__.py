"""Dynamo's graph, made ready to be read: functional, expanded, cut into regions."""
