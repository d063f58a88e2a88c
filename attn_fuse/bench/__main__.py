"""The entry of ``python -m attn_fuse.bench``."""

import logging
import os
import sys

from attn_fuse.bench.command import main

logging.basicConfig(level=logging.WARNING, format="%(message)s")
try:
    sys.exit(main())
except BrokenPipeError:  # the reader has seen enough: `| head`
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
