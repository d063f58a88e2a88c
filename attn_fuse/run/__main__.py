"""The entry of ``python -m attn_fuse.run train.py``."""

import sys

from attn_fuse.run.command import main

sys.exit(main(sys.argv[1:]))
