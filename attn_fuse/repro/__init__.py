"""Repro: a script that shows the failure, for each attention on which attn_fuse fails."""
