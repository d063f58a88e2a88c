"""Repro: one script for each attention on which attn_fuse fails, which shows the failure by itself."""
