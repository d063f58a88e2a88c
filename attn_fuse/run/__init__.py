"""Run: one's own program, unmodified, with its attention fused or only looked at: ``python -m attn_fuse.run train.py``.

Nothing here imports torch before the program does: what a program sets in the environment first must still count.
"""
