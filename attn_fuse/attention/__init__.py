"""Attention: the canonical description that patterns give and kernels take; its mask, facts and words."""
