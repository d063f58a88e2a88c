"""Our own kernels in Triton. Nothing here is imported before one of them is to run."""
