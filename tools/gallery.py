"""Write docs/masks.md and its pictures from the programs of tools/masks.py: python tools/gallery.py"""

from __future__ import annotations

import inspect
import itertools
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from attn_fuse.emit.picture import NONE
from attn_fuse.explain import explanation_of
from attn_fuse.explain.inputs import Inputs
from attn_fuse.report import SiteReport
from tools import masks

DOCS = Path(__file__).resolve().parents[1] / "docs"
HEAD = f"""# Gallery of masks

Attention as people write it by hand: its picture, the program, the report on it, and the code to write
[by hand](by-hand.md) in its place. `make docs` runs each program on a CPU, with {masks.LENGTH} tokens, and writes this
page. On a GPU `--code` prefers FlexAttention for a mask of positions, because it skips the blocks that the mask hides.

In a picture the keys j go to the right and the queries i downwards; blue is seen. The programs with a bias are shaded
by the weights that the first head gives to equal scores.
"""
# What the report says of every attention, or only in its sizes.
_EVERYWHERE = ("heads", "head_dim", "q_len", "kv_len", "scale", "dropout", "dtype", "picked")


def files() -> dict[Path, str]:
    """The text of each file of the gallery."""
    texts: dict[Path, str] = {}
    parts = [HEAD]
    for program in masks.PROGRAMS:
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", program.__name__).lower()
        torch.manual_seed(0)
        model = program().eval() if isinstance(program, type) else program
        args = masks.inputs_of(program)
        site = _site(model, args)
        texts[DOCS / "masks" / f"{name}.svg"] = _svg(_shades(model, args, site))
        parts += _entry(program, name, site)
    # As `make lint` wants the code in it.
    formatted = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--stdin-filename", "masks.md", "-"],
        input="\n".join(parts), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return {DOCS / "masks.md": formatted.stdout, **texts}


@torch.no_grad()
def _site(model: Callable[..., Any], args: tuple[torch.Tensor, ...]) -> SiteReport:
    explained = explanation_of(model, Inputs(args, {}), lambda run: run(*args), {"pick": "fused"}, codes=True)
    (site,) = explained.sites
    assert site.fused and site.code is not None, site
    return site


def _entry(program: Callable[..., Any], name: str, site: SiteReport) -> Iterator[str]:
    title, _, text = (inspect.getdoc(program) or "").partition(".\n\n")
    source = re.sub(r'\n *""".*?"""\n*', "\n", inspect.getsource(program), count=1, flags=re.DOTALL)
    facts = {key: fact for key, fact in site.attention.items() if key not in _EVERYWHERE}
    said = [f"{key + ':':<10}{fact}" for key, fact in facts.items()]
    assert site.code is not None
    yield f"## {title}\n\n{text}\n\n![The keys that each query sees](masks/{name}.svg)\n"
    yield f"```python\n{source.strip()}\n```\n"
    yield "\n".join(["The report says:\n", "```", *said, (site.expression or "").partition("\n")[0], "```\n"])
    yield "\n".join(["`--code` writes:\n", "```python", *site.code.imports, "", *site.code.text, "```\n"])
    yield from (f"{note[0].upper()}{note[1:]}.\n" for note in site.code.notes)


def _shades(model: Callable[..., Any], args: tuple[torch.Tensor, ...], site: SiteReport) -> list[list[float]]:
    """How strongly each query sees each key, from 0 to 1: from the report, or for a bias from the weights."""
    if "bias" not in site.attention:
        return [[float(cell != NONE) for cell in row] for row in site.picture]
    q, k, _, *others = args
    with torch.no_grad():
        weights = model(0 * q, 0 * k, torch.eye(k.size(-2)).expand(*k.shape[:2], -1, -1), *others)[0, 0]
    # Eight shades, so that equal neighbours become one rectangle.
    return (weights / weights.amax(-1, keepdim=True) * 8).round().div(8).tolist()


def _svg(rows: Sequence[Sequence[float]]) -> str:
    """The picture: a path of rectangles for each shade."""
    paths: dict[float, str] = {}
    for i, row in enumerate(rows):
        first = 0
        for shade, run in itertools.groupby(row):
            count = len([*run])
            if shade:
                paths[shade] = paths.get(shade, "") + f"M{first} {i}h{count}v1h-{count}z"
            first += count
    drawn = "\n".join(f'<path fill-opacity="{shade:g}" d="{path}"/>' for shade, path in sorted(paths.items()))
    size = len(rows)
    return textwrap.dedent(f"""\
        <svg xmlns="http://www.w3.org/2000/svg" width="192" height="192" viewBox="0 0 {size} {size}">
        <rect width="{size}" height="{size}" fill="#8883"/>
        <g fill="#1f6feb" shape-rendering="crispEdges">
        {{}}
        </g>
        </svg>
        """).format(drawn)


def main() -> None:
    (DOCS / "masks").mkdir(exist_ok=True)
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
