"""Building: which class of a file is its model, and an instance of it."""
