"""The entry of ``python -m attn_fuse.bench``."""

import logging
import sys

from attn_fuse.bench.command import main

logging.basicConfig(level=logging.WARNING, format="%(message)s")
sys.exit(main())
