"""attn_fuse.export: fused programs that are saved, loaded and compiled ahead of time, with the sizes they had."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import attn_fuse
from attn_fuse.report import SiteReport

FUSED = {"pick": "fused", "check": True}
SDPA = torch.ops.aten.scaled_dot_product_attention.default


class GPT(nn.Module):
    """A block whose mask is a buffer."""

    def __init__(self, width: int = 32, heads: int = 2, length: int = 64) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("mask", torch.tril(torch.ones(length, length)))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(width, 2))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.mask[:length, :length] == 0, float("-inf"))
        att = self.drop(F.softmax(att, dim=-1))
        return self.out((att @ v).transpose(1, 2).contiguous().view(batch, length, width))


class Llama(nn.Module):
    """Grouped queries, a float32 softmax cast back, a padding mask as a keyword, and a dictionary as the result."""

    def __init__(self, width: int = 32, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, width // heads
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = nn.Linear(width, kv_heads * self.dim), nn.Linear(width, kv_heads * self.dim)

    def forward(self, hidden: Tensor, scale: float = 1.0, *, attention_mask: Tensor | None = None) -> dict[str, Any]:
        batch, length, width = hidden.shape
        q = self.q(hidden).view(batch, length, self.heads, self.dim).transpose(1, 2)
        k, v = (w(hidden).view(batch, length, self.kv_heads, self.dim).transpose(1, 2) for w in (self.k, self.v))
        shape = (batch, self.kv_heads, self.heads // self.kv_heads, length, self.dim)
        k, v = (t[:, :, None].expand(shape).reshape(batch, self.heads, length, self.dim) for t in (k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) * self.dim**-0.5 * scale
        seen = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        if attention_mask is not None:
            seen = seen & (attention_mask[:, None, None, :] != 0)
        scores = scores + torch.where(seen, 0.0, torch.finfo(scores.dtype).min)
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        out = self.o((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return {"hidden": out, "length": length}


class Flips(GPT):
    """The program changes its own mask: the second call sees every key."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.mask.fill_(1.0)
        return out


def exported(*args: Any, **kwargs: Any) -> ExportedProgram:
    with torch.no_grad():
        return attn_fuse.export(*args, **{"options": FUSED, **kwargs})


def stored(program: ExportedProgram) -> nn.Module:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


def sites() -> tuple[SiteReport, ...]:
    return attn_fuse.reports()[-1].sites


def calls(program: ExportedProgram) -> int:
    return len(program.graph.find_nodes(op="call_function", target=SDPA))


FREE = {0: Dim.AUTO, 1: Dim.AUTO}


@pytest.mark.parametrize(
    ("dynamic_shapes", "others"),
    [
        (None, []),
        ((FREE,), [(1, 1), (3, 63), (5, 7)]),
        pytest.param(({1: Dim("length", min=2, max=63)},), [(2, 63)], marks=pytest.mark.thorough),
        pytest.param({"x": {0: Dim("batch", min=1, max=9)}}, [(1, 24), (9, 24)], marks=pytest.mark.thorough),
    ],
    ids=["fixed", "free", "length", "batch"],
)
@pytest.mark.parametrize("as_program", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_saved_program_computes_the_same(dynamic_shapes: Any, others: list[Any], as_program: bool) -> None:
    model, x = GPT().eval(), torch.randn(2, 24, 32)
    plain = torch.export.export(model, (x,), dynamic_shapes=dynamic_shapes)
    fused = exported(plain) if as_program else exported(model, (x,), dynamic_shapes=dynamic_shapes)
    assert calls(fused) == 1 and [site.kernel for site in sites()] == ["cpu_flash"]
    assert list(fused.state_dict) == list(plain.state_dict)
    run = stored(fused)
    for shape in [(2, 24), *others]:
        values = torch.randn(*shape, 32)
        torch.testing.assert_close(run(values), model(values))


def test_sizes_beyond_those_of_the_program_stay_refused() -> None:
    """Nothing in the fused program reads the mask any longer, which bounded the length."""
    fused = exported(GPT().eval(), (torch.randn(2, 24, 32),), dynamic_shapes=(FREE,))
    with pytest.raises(Exception, match="64"):
        stored(fused)(torch.randn(2, 65, 32))


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.thorough)])
def test_keywords_padding_and_a_tree_of_results(dtype: torch.dtype) -> None:
    model, mask = Llama().eval().to(dtype), torch.ones(2, 24, dtype=torch.long)
    mask[0, 20:] = 0
    free = {"hidden": FREE, "scale": None, "attention_mask": FREE}
    kwargs = {"attention_mask": mask}
    fused = exported(model, (torch.randn(2, 24, 32, dtype=dtype), 0.5), kwargs, dynamic_shapes=free)
    assert calls(fused) == 1
    mask = torch.ones(3, 40, dtype=torch.long)
    mask[1, 30:] = 0
    values = torch.randn(3, 40, 32, dtype=dtype)
    got = stored(fused)(values, 0.5, attention_mask=mask)
    expected = model(values, 0.5, attention_mask=mask)
    assert got["length"] == 40
    atol = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got["hidden"], expected["hidden"], atol=atol, rtol=1e-2)


class Padded(nn.Module):
    """Hides the keys of padding from all queries alike, as BERT does."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = x.unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / 8**0.5 + (1.0 - mask[:, None, None]) * torch.finfo(x.dtype).min
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("dynamic_shapes", [None, pytest.param({"x": FREE, "mask": FREE}, marks=pytest.mark.thorough)])
def test_a_mask_has_a_row_for_each_query(dynamic_shapes: Any) -> None:
    """onnxruntime takes no other."""
    x, mask = torch.randn(3, 11, 48), torch.ones(3, 11)
    mask[0, 7:] = 0
    program = exported(Padded(), (x, mask), dynamic_shapes=dynamic_shapes)
    (call,) = program.graph.find_nodes(op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default)
    query, given = call.args[0], call.args[3] if len(call.args) > 3 else call.kwargs["attn_mask"]
    assert given.meta["val"].shape[-2] == query.meta["val"].shape[-2]
    for n in (11,) if dynamic_shapes is None else (11, 5):
        args = (x[:, :n], mask[:, :n])
        torch.testing.assert_close(program.module()(*args), Padded()(*args))


def test_a_decomposed_program_is_fused() -> None:
    model, x = GPT().eval(), torch.randn(2, 24, 32)
    with torch.no_grad():
        plain = torch.export.export(model, (x,), dynamic_shapes=(FREE,)).run_decompositions()
    fused = exported(plain)
    assert calls(fused) == 1
    torch.testing.assert_close(stored(fused)(x), model(x))


def test_a_buffer_that_the_program_writes_proves_nothing() -> None:
    model, x = Flips().eval(), torch.randn(2, 24, 32)
    fused = exported(model, (x,), dynamic_shapes=(FREE,))
    (site,) = sites()
    assert site.attention["mask"] == "a mask kept as a tensor" and not attn_fuse.reports()[-1].notes
    run, model = stored(fused), Flips().eval()
    model.load_state_dict(fused.state_dict)
    for _ in range(2):
        torch.testing.assert_close(run(x), model(x))
    assert not torch.allclose(run(x), stored(fused)(x))


def test_a_baked_proof_is_said() -> None:
    exported(GPT().eval(), (torch.randn(2, 24, 32),))
    (note,) = attn_fuse.reports()[-1].notes
    assert note == "the program relies on the contents of mask at the export, and does not check them when it runs"


def test_a_tensor_that_is_no_buffer_brings_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.randn(9, 9)

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return (q @ k.mT / 4 + self.bias).softmax(-1) @ v

    given = tuple(torch.randn(2, 3, 9, 16) for _ in range(3))
    model = Biased()
    with torch.no_grad():
        program = attn_fuse.export(model, given, options={"pick": "fused"})
    torch.testing.assert_close(program.module()(*given), model(*given))
    assert attn_fuse.reports()[-1].sites[0].fused
    assert not [str(w.message) for w in recwarn if "get_attr" in str(w.message)]


def test_look_alikes_stay_as_torch_exports_them() -> None:
    class OverQueries(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.softmax(q @ k.transpose(-2, -1) / 4, -2) @ v

    values = tuple(torch.randn(3, 1, 2, 16, 16))
    fused = exported(OverQueries(), values)
    assert calls(fused) == 0 and [site.status for site in sites()] == ["refused"]
    torch.testing.assert_close(fused.module()(*values), OverQueries()(*values))


def test_an_autocast_around_the_export_changes_nothing() -> None:
    model, x = GPT().eval(), torch.randn(2, 24, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain, fused = torch.export.export(model, (x,)), exported(model, (x,))
    torch.testing.assert_close(fused.module()(x), plain.module()(x), atol=2e-2, rtol=2e-2)
    assert fused.module()(x).dtype == plain.module()(x).dtype


def test_a_program_exported_with_gradients_on_can_be_trained() -> None:
    model, x = GPT().eval(), torch.randn(2, 24, 32)
    run = attn_fuse.export(model, (x,), options=FUSED).module()
    assert sites()[0].fused
    run(x).square().sum().backward()
    model(x).square().sum().backward()
    wanted = dict(model.named_parameters())
    for name, parameter in run.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad, atol=1e-4, rtol=1e-4)


def test_what_cannot_be_exported_again_stays_as_it_was(monkeypatch, caplog) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no second time")

    monkeypatch.setattr("attn_fuse.doors.export._again", fails)
    model, x = GPT().eval(), torch.randn(2, 24, 32)
    program = exported(model, (x,))
    assert calls(program) == 0 and "no second time" in caplog.text
    torch.testing.assert_close(program.module()(x), model(x))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: exported(GPT()), "a module needs example inputs"),
        (lambda: exported(GPT(), (torch.randn(2, 24, 32),), options={"pik": 1}), "no option 'pik'"),
        (
            lambda: exported(torch.export.export(GPT(), (torch.randn(2, 24, 32),)), dynamic_shapes=({0: Dim.AUTO},)),
            "a program keeps its dynamic_shapes",
        ),
        (
            lambda: exported(GPT().train(), (torch.randn(2, 24, 32),), options={"strict": True}),
            "torch has no fused attention with dropout on CPU",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(make: Any, said: str) -> None:
    with pytest.raises(attn_fuse.AttnFuseError) as raised:
        make()
    assert said in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.thorough
def test_aot_inductor_runs_a_loaded_program(tmp_path: Path) -> None:
    model, x = GPT().eval(), torch.randn(2, 24, 32)
    fused = exported(model, (x,), dynamic_shapes=(FREE,))
    file = str(tmp_path / "saved.pt2")
    torch.export.save(fused, file)
    with torch.no_grad():
        package = torch._inductor.aoti_compile_and_package(
            torch.export.load(file), package_path=str(tmp_path / "compiled.pt2")
        )
        run = torch._inductor.aoti_load_package(package)
        for shape in [(2, 24), (3, 61)]:
            values = torch.randn(*shape, 32)
            torch.testing.assert_close(run(values), model(values))


class Averaged(nn.Module):
    """The weights are averaged, and read or thrown away; random numbers are drawn, and read or thrown away."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.attention, self.reads = nn.MultiheadAttention(32, 2, batch_first=True), reads

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, weights = self.attention(x, x, x)
        torch.rand(4)
        return (out, weights) if self.reads else (out, torch.rand(4))


@pytest.mark.parametrize("reads", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_weights_that_nobody_reads_are_not_in_the_program(reads: bool) -> None:
    model, x = Averaged(reads).eval(), torch.randn(2, 9, 32)
    with torch.no_grad():
        program = attn_fuse.export(model, (x,), options=FUSED)
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert (torch.ops.aten.softmax.int in called) is reads
    torch.manual_seed(3)
    expected = model(x)
    torch.manual_seed(3)
    for got, wanted in zip(program.module()(x), expected, strict=True):
        assert torch.allclose(got, wanted, atol=1e-5)
