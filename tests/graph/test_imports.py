"""What `import attn_fuse.…` needs beside torch: nothing, for what comes with `pip install attn_fuse`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What the extras bring, which a plain installation may lack.
EXTRAS = ("numpy", "matplotlib", "tqdm", "triton", "yaml", "expecttest", "hypothesis", "pytest", "transformers")
# Each is imported for a kernel or a command that its package is an extra of.
APART = ("kernels/triton",)
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "attn_fuse").rglob("*.py"))
    if path.name not in ("__init__.py", "__main__.py")
    and not path.relative_to(ROOT / "attn_fuse").as_posix().startswith(APART)
]

PROGRAM = """
import importlib, importlib.machinery, sys

class Without(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {extras!r} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Without
for module in {modules!r}:
    importlib.import_module(module)
assert not any(name.partition(".")[0] in {extras!r} for name in sys.modules)
"""


def test_the_modules_are_found() -> None:
    assert len(MODULES) > 100 and "attn_fuse.explain.command" in MODULES and "attn_fuse.bench.model" in MODULES


def test_every_module_needs_torch_alone() -> None:
    program = PROGRAM.format(extras=EXTRAS, modules=MODULES)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-1500:]
