"""Attention: the canonical description that patterns give and kernels take, its mask, its facts, its words."""
