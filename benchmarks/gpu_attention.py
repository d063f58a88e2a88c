"""Attention on a GPU, measured: the device's ceilings, SDPA's kernels, ours beside them, FlexAttention, decoding.

Each function yields rows for a table, the most telling first, and goes on until nobody asks for another. The queries,
keys and values are [batch, heads, len, head_dim] with the heads last in memory, as models have them. Operations are
counted as 4 * batch * heads * q_len * kv_len * head_dim, half of that where the mask is causal, 2.5 times backward.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attn_fuse.kernels.score_program import ScoreProgram
from attn_fuse.torch_internals import sdpa_choice
from harness import interleaved
from tests.grid.operators import Call, Operator, operators

Row = dict[str, Any]
Calls = Mapping[str, Callable[[], Any]]
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# Processes that compile, or check, at once.
WORKERS = 12
I, J, H = ["i"], ["j"], ["h"]  # noqa: E741
CAUSAL = ["le", J, I]


@dataclass(frozen=True)
class Bench:
    """Where it runs. tiny: at sizes that mean nothing, to see that it runs. seconds: of measuring, for a row."""

    device: torch.device
    tiny: bool = False
    seconds: float = 0.6

    def times(self, calls: Calls) -> tuple[dict[str, float], dict[str, str]]:
        """Microseconds of each call, medians of interleaved rounds; and why those that do not run do not."""
        able, failed = {}, {}
        for name, call in calls.items():
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                try:
                    call()
                    able[name] = call
                except Exception as error:
                    if "CUDA error" in str(error):
                        raise
                    # SDPA's own reasons are warnings.
                    lines = [str(error).strip(), *(str(w.message) for w in said)]
                    failed[name] = f"{type(error).__name__}: " + " / ".join(x.partition("\n")[0][:120] for x in lines)
        shortest = 0.0 if self.tiny else 2e-3
        found = interleaved(able, self.device, 2 if self.tiny else 9, self.seconds, shortest) if able else {}
        return {name: round(timing.median * 1e6, 2) for name, timing in found.items()}, failed

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16, learned: bool = False) -> Tensor:
        """[batch, heads, len, dim], the heads last in memory."""
        drawn = torch.randn(shape, device=self.device, dtype=dtype)
        drawn = drawn.transpose(1, 2).contiguous().transpose(1, 2) if len(shape) == 4 else drawn
        return drawn.requires_grad_(learned)


def ceilings(bench: Bench) -> Iterator[Row]:
    """What a large matrix product and a large copy reach."""
    for n in (256,) if bench.tiny else (8192, 16384):
        a, b = bench.random(n, n), bench.random(n, n)
        (us,) = bench.times({"us": lambda a=a, b=b: a @ b})[0].values()
        yield {"what": f"bf16 matmul {n}", "us": us, "tflops": round(2e-6 * n**3 / us, 1)}
    size = 2**20 if bench.tiny else 2**32
    source = torch.empty(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    (us,) = bench.times({"us": lambda: target.copy_(source)})[0].values()
    yield {"what": f"copy of {size >> 20} MiB", "us": us, "tb_per_s": round(2e-6 * size / us, 3)}


def sdpa(bench: Bench) -> Iterator[Row]:
    """Each of SDPA's kernels, and which one it picks by itself."""
    dims, lengths = ((16,), (64,)) if bench.tiny else ((128, 64, 256, 96), (4096, 1024, 16384, 2048, 512, 8192))
    for length, head_dim, causal in itertools.product(lengths, dims, (True, False)):
        yield from _beside(bench, length, head_dim, causal, [*BACKENDS])


def ours(bench: Bench) -> Iterator[Row]:
    """Our kernels beside what SDPA picks and its fastest kernels, plain and causal."""
    dims, lengths = ((16,), (64,)) if bench.tiny else ((128, 64, 256, 80, 96), (4096, 1024, 16384, 512))
    own = [name for name in operators(bench.device) if name != "triton_decode"]
    _compile_beside(bench, [(name, dim, causal) for dim in dims for causal in (True, False) for name in own])
    for length, head_dim, causal in itertools.product(lengths, dims, (True, False)):
        # chunked is no rival at these lengths on a GPU; one shape says how far off it is.
        shown = [name for name in own if name != "chunked" or bench.tiny or (length, head_dim) == (4096, 64)]
        yield from _beside(bench, length, head_dim, causal, ["cudnn", "flash", *shown])


def _beside(bench: Bench, length: int, head_dim: int, causal: bool, names: Sequence[str]) -> Iterator[Row]:
    batch, heads = (2, 2) if bench.tiny else (max(1, 16384 // length), max(1, 2048 // head_dim))
    forward, operands = _plain(bench, batch, heads, length, head_dim, causal, names)
    flops = 4 * batch * heads * length**2 * head_dim / (2 if causal else 1)
    head = {"head_dim": head_dim, "causal": causal, "length": length, "batch": batch, "heads": heads}
    head["picked"] = (
        SDPBackend(sdpa_choice(*operands, None, 0.0, causal, False)).name.removesuffix("_ATTENTION").lower()
    )
    for row in _both_ways(bench, head, forward, operands, bench.random(batch, heads, length, head_dim)):
        factor = flops * (2.5 if row["pass"] == "backward" else 1)
        yield row | {"tflops": {name: round(factor / us * 1e-6, 1) for name, us in row["us"].items()}}


def _plain(
    bench: Bench, batch: int, heads: int, length: int, head_dim: int, causal: bool, names: Sequence[str]
) -> tuple[Calls, list[Tensor]]:
    """What SDPA picks and each of `names`, its backends' or our operators'; and query, key and value."""
    q, k, v = (bench.random(batch, heads, length, head_dim, learned=True) for _ in range(3))
    score = _scaled(head_dim**-0.5)
    program = _masked(score, CAUSAL, upper=["const", 0]) if causal else ScoreProgram(score)

    def picked() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    known = operators(bench.device)
    calls: dict[str, Callable[[], Tensor]] = {"sdpa": picked}
    for name in names:
        calls[name] = _on(BACKENDS[name], picked) if name in BACKENDS else _own(known[name], program, q, k, v)
    return calls, [q, k, v]


def _compile_beside(bench: Bench, asked: Sequence[tuple[Any, ...]]) -> None:
    """Compile our kernels in several processes at once; Triton keeps what is compiled on disk, and finds it there."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(2 if bench.tiny else WORKERS) as pool:
        for _ in pool.imap_unordered(_compiled_once, [(bench, *task) for task in asked]):
            pass


def _compiled_once(task: tuple[Any, ...]) -> None:
    bench, name, *rest = task
    # What fails here fails again where it is measured, and is said there.
    with contextlib.suppress(Exception):
        if len(rest) == 2:
            # The number of heads is as it will be: Triton compiles anew where it is no multiple of 16, or 1.
            heads = 2 if bench.tiny else max(1, 2048 // rest[0])
            calls, operands = _plain(bench, 2, heads, 64 if bench.tiny else 512, *rest, [name])
        else:
            calls, operands, _ = _feature_calls(bench, rest[0], 64 if bench.tiny else 512, [name])
        out = calls[name]()
        if out.requires_grad:
            torch.autograd.grad(out, operands, torch.ones_like(out))


def _both_ways(
    bench: Bench, head: Row, forward: Calls, wanted: list[Tensor], gradient: Tensor, backward: bool = True
) -> Iterator[Row]:
    """A row for the forward pass, as it is in training where the operands have gradients, and one for the backward."""
    times, failed = bench.times(forward)
    yield head | {"pass": "forward", "us": times, "failed": failed}
    if not backward:
        return
    calls = {name: _pulled(call, wanted, gradient) for name, call in forward.items() if name in times}
    times, failed = bench.times(calls)
    yield head | {"pass": "backward", "us": times, "failed": failed}


def _pulled(call: Callable[[], Tensor], wanted: list[Tensor], gradient: Tensor) -> Callable[[], Any]:
    made: list[Tensor] = []

    def run() -> Any:
        if not made:
            made.append(call())
        return torch.autograd.grad(made[0], wanted, gradient, retain_graph=True)

    return run


def flex(bench: Bench) -> Iterator[Row]:
    """What SDPA takes only as a tensor or not at all: FlexAttention, SDPA with that tensor, and ours."""
    on_gpu = bench.device.type == "cuda"
    own = [name for name in operators(bench.device) if name != "triton_decode"]
    _compile_beside(bench, [(name, feature) for feature in _FEATURES for name in own if on_gpu])
    for feature in _FEATURES:
        length = 64 if bench.tiny else _LENGTHS.get(feature, 8192)
        shown = [name for name in own if name != "chunked" or length <= 4096]
        calls, wanted, head = _feature_calls(bench, feature, length, ["flex", "sdpa", *shown])
        gradient = bench.random(head["batch"], head["heads"], length, head["head_dim"])
        # On the CPU FlexAttention has no backward.
        yield from _both_ways(bench, head, calls, wanted, gradient, backward=on_gpu)


def _feature_calls(bench: Bench, name: str, length: int, names: Sequence[str]) -> tuple[Calls, list[Tensor], Row]:
    """The call of each of `names` that has this feature, what has a gradient, and what the row is of."""
    on_gpu = bench.device.type == "cuda"
    batch, heads, dim = (2, 2, 16) if bench.tiny else (max(1, 16384 // length), 16, 128)
    q, k, v = (bench.random(batch, heads, length, dim, learned=on_gpu) for _ in range(3))
    feature = _FEATURES[name](bench, batch, heads, length)
    known = operators(bench.device)
    calls: dict[str, Callable[[], Tensor]] = {}
    for kernel in names:
        if kernel == "flex":
            if feature.score_mod or feature.keep:
                calls[kernel] = _flex_call(bench, feature, q, k, v)
        elif kernel == "sdpa":
            if feature.sdpa is not None:
                calls[kernel] = functools.partial(feature.sdpa, q, k, v)
        else:
            program = feature.program(dim**-0.5)
            calls[kernel] = _own(known[kernel], program, q, k, v, feature.tensors, feature.dropout_p)
            if kernel.startswith("triton_flash_hopper") and name in ("learned bias", "dropout"):
                del calls[kernel]
    wanted = [t for t in (q, k, v, *feature.tensors) if t.requires_grad]
    return calls, wanted, {"feature": name, "length": length, "batch": batch, "heads": heads, "head_dim": dim}


def _flex_call(bench: Bench, feature: Feature, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    # Past a few programs compiled as one function, torch would run it unfused; on the CPU it is unfused in any case.
    torch.compiler.reset()
    call = torch.compile(flex_attention, dynamic=False) if bench.device.type == "cuda" else flex_attention
    length = q.shape[2]
    mask = None
    if feature.keep is not None:
        mask = create_block_mask(feature.keep, None, None, length, length, device=bench.device.type)
    return functools.partial(call, q, k, v, score_mod=feature.score_mod, block_mask=mask)


def decoding(bench: Bench) -> Iterator[Row]:
    """One query to a long cache, grouped heads: bytes of key and value read in a second."""
    for batch, length in ((2, 65),) if bench.tiny else ((32, 4096), (1, 32768), (8, 16384), (64, 1024)):
        heads, kv_heads, dim = (4, 2, 16) if bench.tiny else (32, 8, 128)
        q = bench.random(batch, heads, 1, dim)
        k, v = (bench.random(batch, kv_heads, length, dim) for _ in range(2))
        program = ScoreProgram(["mul", ["score"], ["const", dim**-0.5]])
        calls: dict[str, Callable[[], Tensor]] = {
            "sdpa": lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        }
        calls |= {name: _own(operator, program, q, k, v) for name, operator in operators(bench.device).items()}
        with torch.no_grad():
            times, failed = bench.times(calls)
        read = 2 * k.numel() * k.itemsize
        rates = {name: round(read / us * 1e-6, 3) for name, us in times.items()}
        yield {"batch": batch, "cache": length, "us": times, "tb_per_s": rates, "failed": failed}


def _on(backend: SDPBackend, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with sdpa_kernel(backend):
            return call()

    return run


def _own(
    operator: Operator,
    program: ScoreProgram,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inputs: tuple[Tensor, ...] = (),
    dropout_p: float = 0.0,
) -> Callable[[], Tensor]:
    seed = torch.tensor([1], device=q.device) if dropout_p else None
    return operator.bind(Call(q, k, v, list(inputs), [q.shape[2], k.shape[2]], seed, dropout_p, program.dumps()))


def _masked(score: Any, keep: Any, **bounds: Any) -> ScoreProgram:
    return ScoreProgram(["where", keep, score, ["const", -math.inf]], visible=keep, **bounds)


# ---- what FlexAttention is measured on


@dataclass(frozen=True)
class Feature:
    """One thing said to each: score_mod and keep to FlexAttention, sdpa by a tensor, program by our kernels' tree."""

    program: Callable[[float], ScoreProgram]
    tensors: tuple[Tensor, ...] = ()
    score_mod: Callable[..., Any] | None = None
    keep: Callable[..., Any] | None = None
    sdpa: Callable[..., Tensor] | None = None
    dropout_p: float = 0.0


def _scaled(scale: float) -> Any:
    return ["mul", ["score"], ["const", scale]]


def _positions(bench: Bench, length: int) -> tuple[Tensor, Tensor]:
    n = torch.arange(length, device=bench.device)
    return n[:, None], n


def _window(bench: Bench, batch: int, heads: int, length: int) -> Feature:
    reach = min(1024, length // 4)
    i, j = _positions(bench, length)
    keep = (j <= i) & (i - j < reach)
    inside = ["and", CAUSAL, ["lt", ["sub", I, J], ["const", reach]]]
    return Feature(
        program=lambda scale: _masked(_scaled(scale), inside, upper=["const", 0], lower=["const", 1 - reach]),
        keep=lambda b, h, i, j: (j <= i) & (i - j < reach),
        sdpa=lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=keep),
    )


def _documents(bench: Bench, batch: int, heads: int, length: int) -> Feature:
    # Eight of unequal lengths.
    ends = torch.tensor([0.05, 0.1, 0.2, 0.35, 0.5, 0.6, 0.9], device=bench.device) * length
    ids = torch.bucketize(torch.arange(length, device=bench.device), ends.long(), right=True)
    i, j = _positions(bench, length)
    keep = (j <= i) & (ids[:, None] == ids)
    same = ["and", CAUSAL, ["eq", ["gather", 0, I], ["gather", 0, J]]]
    return Feature(
        program=lambda scale: _masked(_scaled(scale), same, upper=["const", 0]),
        tensors=(ids,),
        keep=lambda b, h, i, j: (j <= i) & (ids[i] == ids[j]),
        sdpa=lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=keep),
    )


def _bias(bench: Bench, batch: int, heads: int, length: int) -> Feature:
    bias = bench.random(1, heads, length, length, learned=bench.device.type == "cuda")
    bias = bias.detach().contiguous().requires_grad_(bias.requires_grad)
    return Feature(
        program=lambda scale: ScoreProgram(["add", _scaled(scale), ["input", 0]]),
        tensors=(bias,),
        score_mod=lambda score, b, h, i, j: score + bias[0, h, i, j],
        sdpa=lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(batch, -1, -1, -1)),
    )


def _alibi(bench: Bench, batch: int, heads: int, length: int) -> Feature:
    slopes = 0.5 ** (8 * torch.arange(1, heads + 1, device=bench.device) / heads)
    away = ["mul", ["gather", 0, H], ["sub", J, I]]
    return Feature(
        program=lambda scale: _masked(["add", _scaled(scale), away], CAUSAL, upper=["const", 0]),
        tensors=(slopes,),
        score_mod=lambda score, b, h, i, j: score + slopes[h] * (j - i),
        keep=lambda b, h, i, j: j <= i,
    )


def _softcap(bench: Bench, batch: int, heads: int, length: int) -> Feature:
    def capped(scale: float) -> ScoreProgram:
        score = ["mul", ["const", 30.0], ["tanh", ["div", _scaled(scale), ["const", 30.0]]]]
        return _masked(score, CAUSAL, upper=["const", 0])

    return Feature(
        program=capped,
        score_mod=lambda score, b, h, i, j: 30.0 * torch.tanh(score / 30.0),
        keep=lambda b, h, i, j: j <= i,
    )


def _dropout(bench: Bench, batch: int, heads: int, length: int) -> Feature:
    return Feature(
        program=lambda scale: _masked(_scaled(scale), CAUSAL, upper=["const", 0]),
        sdpa=lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.125),
        dropout_p=0.125,
    )


_FEATURES: dict[str, Callable[[Bench, int, int, int], Feature]] = {
    "window": _window,
    "documents": _documents,
    "learned bias": _bias,
    "alibi": _alibi,
    "softcap": _softcap,
    "dropout": _dropout,
}
_LENGTHS = {"window": 16384, "learned bias": 4096}
