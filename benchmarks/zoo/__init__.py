"""Published models, unmodified: what attn_fuse makes of code that nobody here wrote. `../published.py` runs them."""
