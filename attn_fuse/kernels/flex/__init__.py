"""flex: torch's FlexAttention."""
