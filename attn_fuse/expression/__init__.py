"""What one element of a tensor is: the language, its simplification, and what can be proved in it."""
