"""Score programs: the function from a raw score to the final score, its gradient, and the blocks that it hides."""
