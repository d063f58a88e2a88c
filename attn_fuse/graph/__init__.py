"""Dynamo's graph before its meaning: functional, expanded, cut into regions."""
