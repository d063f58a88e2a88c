"""Attention on a GPU, measured: the device's ceilings, our kernels beside SDPA's, FlexAttention, decoding.

Each function yields the rows of one shape, and is called in a worker with the names of what to measure: SDPA's kernels,
FlexAttention and our operators. What one of them computes is held against torch's before it is timed. The queries, keys
and values are [batch, heads, len, head_dim] with the heads last in memory, as models have them. Operations are counted
as 4 * batch * heads * q_len * kv_len * head_dim, half of that where the mask is causal, 2.5 times backward.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attn_fuse.kernels.score.program import ScoreProgram
from attn_fuse.picker.timing import interleaved, synchronize
from attn_fuse.picker.workers import note
from attn_fuse.torch_internals import sdpa_choice
from tests.grid.operators import Call, operators

Row = dict[str, Any]
Calls = Mapping[str, Callable[[], Any]]
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# Whose results the others' are held against, the first that there is; and by how much they may differ, as the norm of
# the difference over the norm: bfloat16 is off by 0.001 to 0.01.
REFERENCES, LIMIT = ("sdpa", "flex", "chunked"), 0.02
I, J, H = ["i"], ["j"], ["h"]  # noqa: E741
CAUSAL = ["le", J, I]


@dataclass(frozen=True)
class Bench:
    """Where it runs. tiny: at sizes that mean nothing, to see that it runs. seconds: of measuring, for a row.

    dry: everything runs once, so that it is compiled, and no more. emulated: as on a GPU, which is not there.
    """

    device: torch.device
    tiny: bool = False
    seconds: float = 0.5
    dry: bool = False
    emulated: bool = False

    @property
    def on_gpu(self) -> bool:
        return self.emulated or self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        # Triton's interpreter computes bfloat16 wrongly.
        return torch.float16 if self.tiny else torch.bfloat16

    def able(self, calls: Calls) -> tuple[dict[str, Any], dict[str, str]]:
        """What each call gives, and why those that do not run do not."""
        given, failed = {}, {}
        for name, call in calls.items():
            note(name)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                try:
                    given[name] = call()
                    synchronize(self.device)
                except Exception as error:
                    synchronize(self.device)  # raises where the device is broken
                    # SDPA's own reasons are warnings.
                    lines = [str(error).strip(), *(str(w.message) for w in said)]
                    failed[name] = f"{type(error).__name__}: " + " / ".join(x.partition("\n")[0][:120] for x in lines)
        note("")
        return given, failed

    def times(self, calls: Calls) -> dict[str, float]:
        """Microseconds of each call, medians of interleaved rounds."""
        if not calls:
            return {}
        found = interleaved(calls, self.device, 2 if self.tiny else 9, self.seconds, 0.0 if self.tiny else 2e-3)
        return {name: round(timing.median * 1e6, 2) for name, timing in found.items()}

    def graph_times(self, calls: Calls) -> tuple[dict[str, float], dict[str, str]]:
        """The same of CUDA graphs that replay the calls: without what the host takes; and why some make no graph."""
        graphs, failed = {}, {}
        for name, call in calls.items() if self.device.type == "cuda" else ():
            note(name)
            try:
                graphs[name] = captured(call).replay
            except Exception as error:
                synchronize(self.device)
                failed[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"
                break  # torch's random numbers take this process to be capturing from here on
        note("")
        return ({} if failed else self.times(graphs)), failed

    def random(self, *shape: int, learned: bool = False) -> Tensor:
        """[batch, heads, len, dim], the heads last in memory."""
        make = torch.empty if self.emulated else torch.randn
        drawn = make(shape, device=self.device, dtype=self.dtype)
        drawn = drawn.transpose(1, 2).contiguous().transpose(1, 2) if len(shape) == 4 else drawn
        return drawn.requires_grad_(learned)


def in_worker(rows: Callable[..., Iterator[Row]]) -> Callable[..., list[Row]]:
    """`rows` as one call of a worker, from the same random numbers on."""

    @functools.wraps(rows)
    def made(*arguments: Any) -> list[Row]:
        torch.manual_seed(0)
        return [*rows(*arguments)]

    return made


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """`call` as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph


@in_worker
def ceilings(bench: Bench) -> Iterator[Row]:
    """What a large matrix product and a large copy reach."""
    for n in (256,) if bench.tiny else (8192, 16384):
        a, b = bench.random(n, n), bench.random(n, n)
        (us,) = bench.times({"us": lambda a=a, b=b: a @ b}).values()
        yield {"what": f"bf16 matmul {n}", "us": us, "tflops": round(2e-6 * n**3 / us, 1)}
    size = 2**20 if bench.tiny else 2**32
    source = torch.randint(255, (size,), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    (us,) = bench.times({"us": lambda: target.copy_(source)}).values()
    yield {"what": f"copy of {size >> 20} MiB, read and written", "us": us, "tb_per_s": round(2e-6 * size / us, 3)}


@in_worker
def plain(names: Sequence[str], bench: Bench, length: int, head_dim: int, causal: bool) -> Iterator[Row]:
    """Plain and causal attention: a row forward, as it is in training, and one backward."""
    batch, heads = (2, 2) if bench.tiny else (max(1, 16384 // length), max(1, 2048 // head_dim))
    q, k, v = (bench.random(batch, heads, length, head_dim, learned=True) for _ in range(3))
    forward = _calls(bench, FEATURES["causal" if causal else "full"](bench, batch, heads, length), names, q, k, v)
    flops = 4 * batch * heads * length**2 * head_dim / (2 if causal else 1)
    head = {"head_dim": head_dim, "causal": causal, "length": length, "batch": batch, "heads": heads}
    choice = SDPBackend(sdpa_choice(q, k, v, None, 0.0, causal, False))
    head["sdpa picks"] = choice.name.removesuffix("_ATTENTION").lower()
    for row in _both_ways(bench, head, forward, [q, k, v], bench.random(batch, heads, length, head_dim)):
        factor = flops * (2.5 if row["pass"] == "backward" else 1)
        yield row | {"tflops": {name: round(factor / us * 1e-6, 1) for name, us in row["us"].items()}}


def _calls(
    bench: Bench, feature: Feature, names: Sequence[str], q: Tensor, k: Tensor, v: Tensor
) -> dict[str, Callable[[], Tensor]]:
    """The call of each of `names` that has this feature."""
    known, calls = operators(bench.device), dict[str, Callable[[], Tensor]]()
    for name in names:
        if name == "flex":
            if feature.score_mod or feature.keep:
                calls[name] = _flex_call(bench, feature, q, k, v)
        elif name == "sdpa" or name in BACKENDS:
            if feature.sdpa is not None:
                picked = functools.partial(feature.sdpa, q, k, v)
                calls[name] = _on(BACKENDS[name], picked) if name in BACKENDS else picked
        elif name in known:
            numbers = [q.shape[2], k.shape[2]]
            seed = torch.tensor([1], device=q.device) if feature.dropout_p else None
            tree = feature.program(q.shape[3] ** -0.5).dumps()
            call = Call(q, k, v, list(feature.tensors), numbers, seed, feature.dropout_p, tree)
            calls[name] = known[name].bind(call)
    return calls


def _both_ways(
    bench: Bench,
    head: Row,
    forward: Calls,
    wanted: list[Tensor],
    gradient: Tensor,
    backward: bool = True,
    compare: bool = True,
) -> Iterator[Row]:
    """A row for the forward pass, as it is in training where the operands have gradients, and one for the backward.

    compare: the results are to be equal; with dropout they only are finite.
    """
    if bench.dry:
        for call in forward.values():
            out = call()
            if backward:
                torch.autograd.grad(out, wanted, gradient)
        return
    right = [*forward]
    for which in ("forward", "backward") if backward else ("forward",):
        calls = dict(forward)
        if which == "backward":
            calls = {name: _pulled(call, wanted, gradient) for name, call in calls.items() if name in right}
        given, failed = bench.able(calls)
        off = _off(given, compare)
        right = [name for name in given if off.get(name, 0.0) <= LIMIT]
        failed |= {name: f"wrong: off by {off[name]:.3g}" for name in given if name not in right}
        del given
        timed = {name: calls[name] for name in right}
        times = bench.times(timed)
        # What adds to the leaves' gradients runs on the stream on which these were made, which no graph captures.
        graph_times, not_captured = bench.graph_times(timed) if which == "forward" else ({}, {})
        yield head | {
            "pass": which, "us": times, "graph_us": graph_times, "failed": failed, "not_captured": not_captured,
            "off": {name: round(by, 5) for name, by in off.items() if math.isfinite(by)},
        }  # fmt: skip


def _off(given: Mapping[str, Any], compare: bool) -> dict[str, float]:
    """The max relative distance of each result from the reference's; infinite where it is not finite."""
    reference = next((name for name in REFERENCES if name in given), None)
    off = {}
    for name, result in given.items():
        tensors = result if isinstance(result, tuple) else (result,)
        if not all(bool(t.isfinite().all()) for t in tensors):
            off[name] = math.inf
        elif compare and reference is not None and name != reference:
            other = given[reference]
            others = other if isinstance(other, tuple) else (other,)
            off[name] = max(map(distance, tensors, others))
    return off


def distance(found: Tensor, reference: Tensor) -> float:
    a, b = found.detach().float(), reference.detach().float()
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def _pulled(call: Callable[[], Tensor], wanted: list[Tensor], gradient: Tensor) -> Callable[[], Any]:
    made: list[Tensor] = []

    def run() -> Any:
        if not made:
            made.append(call())
        return torch.autograd.grad(made[0], wanted, gradient, retain_graph=True)

    return run


@in_worker
def features(names: Sequence[str], bench: Bench, feature: str) -> Iterator[Row]:
    """What SDPA takes only as a tensor or not at all: FlexAttention, SDPA with that tensor, and ours."""
    length = 64 if bench.tiny else _LENGTHS.get(feature, 8192)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(feature == "deterministic")
    try:
        batch, heads, dim = (2, 2, 16) if bench.tiny else (max(1, 16384 // length), 16, 128)
        q, k, v = (bench.random(batch, heads, length, dim, learned=bench.on_gpu) for _ in range(3))
        made = FEATURES[feature](bench, batch, heads, length)
        calls = _calls(bench, made, [name for name in names if name != "chunked" or length <= 4096], q, k, v)
        wanted = [t for t in (q, k, v, *made.tensors) if t.requires_grad]
        head = {"feature": feature, "length": length, "batch": batch, "heads": heads, "head_dim": dim}
        gradient = bench.random(batch, heads, length, dim)
        # On the CPU FlexAttention has no backward.
        yield from _both_ways(bench, head, calls, wanted, gradient, backward=bench.on_gpu, compare=feature != "dropout")
    finally:
        torch.use_deterministic_algorithms(before)


def _flex_call(bench: Bench, feature: Feature, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    # Past a few programs compiled as one function, torch would run it unfused; on the CPU it is unfused in any case.
    torch.compiler.reset()
    torch._functorch.config.donated_buffer = False  # the backward pass runs again and again
    call = torch.compile(flex_attention, dynamic=False) if bench.device.type == "cuda" else flex_attention
    length = q.shape[2]
    mask = None
    if feature.keep is not None:
        mask = create_block_mask(feature.keep, None, None, length, length, device=bench.device.type)
    return functools.partial(call, q, k, v, score_mod=feature.score_mod, block_mask=mask)


@in_worker
def decoding(names: Sequence[str], bench: Bench, batch: int, length: int) -> Iterator[Row]:
    """One query to a long cache, grouped heads: bytes of key and value read in a second."""
    heads, kv_heads, dim = (4, 2, 16) if bench.tiny else (32, 8, 128)
    q = bench.random(batch, heads, 1, dim)
    k, v = (bench.random(batch, kv_heads, length, dim) for _ in range(2))
    grouped = functools.partial(F.scaled_dot_product_attention, enable_gqa=True)
    calls = _calls(bench, replace(_full(bench, batch, heads, length), sdpa=grouped), names, q, k, v)
    read = 2 * k.numel() * k.itemsize
    with torch.no_grad():
        for row in _both_ways(bench, {"batch": batch, "cache": length}, calls, [], q, backward=False):
            times = row["us"] | row["graph_us"]
            yield row | {"tb_per_s": {name: round(read / us * 1e-6, 3) for name, us in times.items()}}


def _on(backend: SDPBackend, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with sdpa_kernel(backend):
            return call()

    return run


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
        sdpa=functools.partial(F.scaled_dot_product_attention, attn_mask=keep),
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
        sdpa=functools.partial(F.scaled_dot_product_attention, attn_mask=keep),
    )


def _bias(bench: Bench, batch: int, heads: int, length: int) -> Feature:
    bias = bench.random(1, heads, length, length, learned=bench.on_gpu)
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
    causal = _causal(bench, batch, heads, length)
    assert causal.sdpa is not None
    return replace(causal, sdpa=functools.partial(causal.sdpa, dropout_p=0.125), dropout_p=0.125)


def _sinks(bench: Bench, batch: int, heads: int, length: int) -> Feature:
    logits = bench.random(heads, learned=bench.on_gpu)

    def with_sink(scale: float) -> ScoreProgram:
        score = ["where", CAUSAL, _scaled(scale), ["const", -math.inf]]
        return ScoreProgram(score, visible=CAUSAL, upper=["const", 0], sink=["gather", 0, H])

    return Feature(program=with_sink, tensors=(logits,))


def _full(bench: Bench, batch: int, heads: int, length: int) -> Feature:
    return Feature(program=lambda scale: ScoreProgram(_scaled(scale)), sdpa=F.scaled_dot_product_attention)


def _causal(bench: Bench, batch: int, heads: int, length: int) -> Feature:
    return Feature(
        program=lambda scale: _masked(_scaled(scale), CAUSAL, upper=["const", 0]),
        sdpa=functools.partial(F.scaled_dot_product_attention, is_causal=True),
    )


FEATURES: dict[str, Callable[[Bench, int, int, int], Feature]] = {
    "full": _full,
    "causal": _causal,
    "window": _window,
    "documents": _documents,
    "learned bias": _bias,
    "alibi": _alibi,
    "softcap": _softcap,
    "dropout": _dropout,
    "sinks": _sinks,
    "deterministic": _causal,
}
# Those that are no plain attention.
BEYOND_PLAIN = [name for name in FEATURES if name not in ("full", "causal")]
_LENGTHS = {"window": 16384, "learned bias": 4096}
