"""The entry of ``python -m attn_fuse.explain model.py``."""

import os
import sys

from attn_fuse.explain.watched import watch

watch("attn_fuse.explain")

from attn_fuse.explain.command import main  # noqa: E402

try:
    sys.exit(main())
except BrokenPipeError:  # the reader has seen enough: `| head`
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
