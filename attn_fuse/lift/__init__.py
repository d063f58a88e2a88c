"""From a region to an element expression: a normal form in few operations, and what each of them does to an element."""
