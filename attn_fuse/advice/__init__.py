"""Advice: the code to write by hand in place of an attention."""
