"""From a region to an element expression: a normal form in few operations, and the meaning of each operation."""
