"""The README's first steps with the attn_fuse that is installed here; tools/package.sh runs it beside a model.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import attn_fuse


class Attention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.mT / 8).softmax(-1) @ value


def said(*command: str) -> str:
    """What `python -m command` prints. Raises CalledProcessError where it fails; its errors go to stderr."""
    done = subprocess.run([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout)
    return done.stdout


def main() -> None:
    home = Path(attn_fuse.__file__).parent
    assert home.is_relative_to(sys.prefix), f"{home} is not the attn_fuse that was installed into {sys.prefix}"
    assert (home / "py.typed").exists(), "type checkers would not read the package's types"
    information = said("attn_fuse", "info")
    assert attn_fuse.__version__ in information and "attentions on" in information, "no evidence came along"
    assert "FUSED on" in said("attn_fuse.explain", "model.py", "--html", "report.html")
    assert Path("report.html").stat().st_size

    inputs = [torch.randn(2, 4, 100, 64) for _ in range(3)]
    model = Attention()
    compiled = torch.compile(model, backend="attn_fuse", options={"pick": "fused"})
    torch.testing.assert_close(compiled(*inputs), model(*inputs))
    print(attn_fuse.last_report())
    assert [site.status for site in attn_fuse.last_report().sites] == ["fused"]


if __name__ == "__main__":
    main()
