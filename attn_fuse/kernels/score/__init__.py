"""Score programs: what becomes of one raw score, as kernels compute it, its gradient, and which blocks it hides."""
