"""chunked: our memory-efficient attention in plain torch operations."""
