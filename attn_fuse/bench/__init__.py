"""Bench: measurements of attention on this device, for the kernel picker and for its user."""
