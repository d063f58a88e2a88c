"""Our flash attention in Triton. Triton is imported where a kernel is launched, and not before."""
