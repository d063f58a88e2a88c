"""The recipes of CONTRIBUTING.md, followed as they are written."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import attn_fuse
from attn_fuse import options
from attn_fuse.attention import mask
from attn_fuse.backend import attn_fuse as backend
from attn_fuse.kernels.kernel import Kernel
from attn_fuse.picker import pick as picker
from tests.grid.backend import Grid
from tests.grid.case import Case

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"


def block(path: str) -> str:
    """The code block of CONTRIBUTING.md that begins with the comment naming `path`."""
    text = CONTRIBUTING.read_text()
    found = re.search(rf"```python\n( *# {re.escape(path)}\n.*?)```", text, re.DOTALL)
    assert found is not None
    return textwrap.dedent(found[1])


@pytest.fixture
def dense(tmp_path, monkeypatch) -> Kernel:
    """The kernel of the recipe, in its one file and on its one line."""
    file = tmp_path / "dense.py"
    file.write_text(block("attn_fuse/kernels/dense.py"))
    spec = importlib.util.spec_from_file_location("dense", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for reader in (picker, options):
        monkeypatch.setattr(reader, "KERNELS", (module.DENSE, *reader.KERNELS))
    return module.DENSE


def test_the_kernel_recipe(dense) -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        hidden = torch.triu(torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool), 1)
        return torch.einsum("bhqk,bhkd->bhqd", ((q @ k.mT) / 4).masked_fill(hidden, float("-inf")).softmax(-1), v)

    q, k, v = torch.randn(3, 2, 4, 7, 16)
    fused = torch.compile(attention, backend=backend, options={"inner_backend": "eager", "pick": "fused"})
    torch.testing.assert_close(fused(q, k, v), attention(q, k, v))
    assert attn_fuse.reports()[-1].sites[0].kernel == "dense"

    torch._dynamo.reset()
    fused = torch.compile(attention, backend=backend, options={"inner_backend": "eager", "pick": "fused"})
    fused(q.double(), k.double(), v.double())
    (site,) = attn_fuse.reports()[-1].sites
    assert site.kernel == "cpu_flash" and site.why_not["dense"] == ("does not take float64",)


@pytest.mark.thorough
@pytest.mark.parametrize("training", [False, True])
def test_the_kernel_of_the_recipe_on_the_grid(dense, training) -> None:
    grid = Grid(dense, torch.device("cpu"), training)
    answers = {str(Case.of(row)): grid.answer(row) for row in grid.alone()}
    assert not {row: answer.wrong for row, answer in answers.items() if answer.wrong}
    reasons = {reason for answer in answers.values() for reason in answer.reasons}
    assert "takes no grouped queries" in reasons and not all(answer.reasons for answer in answers.values())


def test_the_pattern_recipe_shows_the_pattern_as_it_is() -> None:
    code = "\n".join(block("attn_fuse/patterns/floors.py").splitlines()[1:])
    assert code.strip() in (Path(attn_fuse.__file__).parent / "patterns" / "floors.py").read_text()


@pytest.mark.parametrize("fill", ["-inf", "lowest"])
def test_the_pattern_of_the_recipe(fill) -> None:
    def attention(q: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        scores = q @ q.mT
        value = float("-inf") if fill == "-inf" else torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~keep, value)
        return torch.max(scores, torch.tensor(torch.finfo(scores.dtype).min)).softmax(-1) @ q

    q, keep = torch.randn(2, 4, 7, 16), torch.rand(2, 1, 7, 7) > 0.4
    keep[:, :, 2] = False
    fused = torch.compile(attention, backend=backend, options={"inner_backend": "eager", "pick": "fused"})
    torch.testing.assert_close(fused(q, keep), attention(q, keep))
    assert attn_fuse.reports()[-1].sites[0].fused


PROGRAMS = """
import torch, attn_fuse

def attention(scores, q, k, v):
    return (scores(q @ k.mT / 4) / 2).softmax(-1) @ v

other = torch.randn(1, 1, 9, 9)
for scores in (lambda x: torch.hypot(x, other), lambda x: torch.addcmul(x, other, other, value=0.5)):
    q, k, v = (torch.randn(2, 4, 9, 16, requires_grad=True) for _ in range(3))
    options = {"inner_backend": "eager", "pick": "fused"}
    fused = torch.compile(lambda *x: attention(scores, *x), backend="attn_fuse", options=options)
    results = []
    for run in (fused, lambda *x: attention(scores, *x)):
        out = run(q, k, v)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    torch.testing.assert_close(*results)
    (site,) = attn_fuse.last_report().sites
    print(site.status if site.fused else site.blocker.reason)
"""


def test_the_recipes_of_a_function_and_of_an_operation(tmp_path: Path, capsys) -> None:
    """Each is one edit of one file, in a copy of the package; without them neither program is fused."""
    exec(PROGRAMS, {})
    lacking = ["hypot has no element expression", "addcmul has no element expression"]
    assert capsys.readouterr().out.splitlines() == lacking
    package = Path(attn_fuse.__file__).parent
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    functions = tmp_path / package.name / "expression" / "functions.py"
    row = block("attn_fuse/expression/functions.py, in _BINARY")
    functions.write_text(functions.read_text().replace("_BINARY = (\n", f"_BINARY = (\n{row.rstrip()},\n", 1))
    operations = tmp_path / package.name / "lift" / "elementwise.py"
    operations.write_text(operations.read_text() + block("attn_fuse/lift/elementwise.py"))
    program = tmp_path / "programs.py"
    program.write_text(PROGRAMS)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines() == ["fused", "fused"], done.stderr


class TestTheMaskRecipe:
    @pytest.fixture(autouse=True)
    def dilated(self, monkeypatch: pytest.MonkeyPatch) -> None:
        names = vars(mask).copy()
        exec("from __future__ import annotations\n" + block("attn_fuse/attention/mask.py"), names)
        parts = [part for part in mask.PARTS if part is not mask.PositionMask]
        at = mask.PARTS.index(mask.PositionMask)
        monkeypatch.setattr(mask, "PARTS", (*parts[:at], names["Dilated"], mask.PositionMask, *parts[at:]))

    def site(self, seen) -> attn_fuse.SiteReport:
        def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            i, j = torch.arange(9)[:, None], torch.arange(9)
            return (q @ k.mT / 4).masked_fill(~seen(i, j), float("-inf")).softmax(-1) @ v

        q, k, v = torch.randn(3, 2, 4, 9, 16)
        fused = torch.compile(program, backend=backend, options={"inner_backend": "eager", "pick": "fused"})
        torch.testing.assert_close(fused(q, k, v), program(q, k, v))
        return attn_fuse.reports()[-1].sites[0]

    def test_it_is_named(self) -> None:
        site = self.site(lambda i, j: (i - j) % 2 == 0)
        assert site.fused and site.attention["mask"].startswith("dilated by 2, since query i sees key")

    @pytest.mark.parametrize(
        "seen", [lambda i, j: (i + j) % 2 == 0, lambda i, j: (i - 2 * j) % 3 != 1], ids=["sum", "another step"]
    )
    def test_what_looks_like_it_is_a_formula_of_positions(self, seen) -> None:
        assert self.site(seen).attention["mask"] == "a mask computed from positions"
