"""Our split-KV attention in Triton, which is imported only where a kernel is launched."""
