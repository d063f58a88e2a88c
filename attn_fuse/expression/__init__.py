"""Element expressions: the language that says what one element of a tensor is, its simplification, its proofs."""
