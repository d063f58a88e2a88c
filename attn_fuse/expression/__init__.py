"""Element expressions: a language for one element of a tensor, with its simplification and proofs."""
