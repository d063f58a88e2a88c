"""Picker: which kernel runs an attention, by measured times, a cost model and self-checks."""
