"""Run: a user's program, unmodified, with its attention fused or only analysed: ``python -m attn_fuse.run train.py``.

Nothing here imports torch before the program does, because the program may set environment variables for torch.
"""
