"""Doors: other ways in than ``backend="attn_fuse"``, for tools of PyTorch that take no backend's name."""
