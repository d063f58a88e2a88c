"""Attentions as people write them, at the sizes people run, and the kernels that suit an H200, with the reason why.

Each program takes query [batch, heads, q_len, head_dim], key and value [batch, kv_heads, kv_len, head_dim] and what
else it reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.h200 import dynamic
from tests.models.grouped import repeat_kv

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Program = Callable[..., Tensor]
AS_WRITTEN = frozenset({None})


@dataclass(frozen=True)
class Want:
    """One case. program: makes it anew. inputs: makes what it is called with.

    best: the kernels that suit it, None for the program as written, among those that may run without a self-check;
    ours: where others join them once ours have passed theirs, all that then suit it. why: in one clause.
    """

    name: str
    why: str
    program: Callable[[], Program]
    inputs: Callable[[], tuple[Any, ...]]
    best: frozenset[str | None]
    ours: frozenset[str | None]
    training: bool = False
    tf32: bool = False
    deterministic: bool = False

    def __str__(self) -> str:
        return self.name


# ---- operands


def qkv(
    batch: int, heads: int, q_len: int, head_dim: int, dtype: torch.dtype = BF16, kv_len: int = 0, kv_heads: int = 0,
    value_dim: int = 0, grad: bool = False, moving: tuple[str, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """moving: which of "batch", "q_len" and "kv_len" may change from call to call."""
    sizes = {"q_len": q_len, "kv_len": kv_len or q_len}
    made = []
    for count, length, width in (
        (heads, "q_len", head_dim), (kv_heads or heads, "kv_len", head_dim),
        (kv_heads or heads, "kv_len", value_dim or head_dim),
    ):  # fmt: skip
        x = torch.empty(batch, count, sizes[length], width, dtype=dtype).requires_grad_(grad)
        moves = {name: 2 if name == length else 0 for name in moving if name in (length, "batch")}
        made.append(dynamic(x, *moves.values()))
    query, key, value = made
    return query, key, value


def words(batch: int, length: int) -> Tensor:
    """What Hugging Face calls an attention mask: 1 for a token, 0 for padding."""
    seen = torch.ones(batch, length, dtype=torch.long)
    seen[1:, length // 2 :] = 0
    return seen


# ---- programs


def scaled(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) * (1.0 / math.sqrt(k.size(-1)))


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(scaled(q, k), dim=-1) @ v


class NanoGPT(nn.Module):
    """nanoGPT's, with its buffer."""

    def __init__(self, length: int, p: float = 0.0) -> None:
        super().__init__()
        self.attn_dropout = nn.Dropout(p)
        self.register_buffer("bias", torch.tril(torch.ones(length, length)).view(1, 1, length, length))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        t = q.shape[2]
        att = scaled(q, k).masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        return self.attn_dropout(F.softmax(att, dim=-1)) @ v


def nanogpt(length: int, p: float = 0.0) -> Callable[[], Program]:
    return lambda: NanoGPT(length, p)


def gpt2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Hugging Face's GPT-2: the fill is a tensor of the lowest number."""
    scores = q @ k.transpose(-1, -2) / torch.full([], v.size(-1) ** 0.5, dtype=q.dtype)
    causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    least = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype)
    return F.softmax(torch.where(causal, scores, least), dim=-1) @ v


def llama(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, grouped, in float32 between the products."""
    groups, t = q.shape[1] // k.shape[1], q.shape[2]
    k, v = repeat_kv(k, groups), repeat_kv(v, groups)
    mask = torch.full((t, t), float("-inf"), dtype=q.dtype).triu(1)
    return F.softmax(scaled(q, k) + mask, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every key is seen, and repeated for the queries that share it."""
    groups = q.shape[1] // k.shape[1]
    k, v = repeat_kv(k, groups), repeat_kv(v, groups)
    return F.softmax(scaled(q, k), dim=-1, dtype=torch.float32).to(q.dtype) @ v


def chunked_prefill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2], torch.arange(k.shape[2])[None, :]
    return F.softmax(scaled(q, k).masked_fill(j > i, float("-inf")), dim=-1) @ v


def padded(causal: bool) -> Program:
    """transformers' eager attention: one additive mask, the lowest number where a key is hidden."""

    def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        least = torch.finfo(q.dtype).min
        keep = (seen[:, None, None, :] != 0).expand(-1, 1, q.shape[2], -1)
        if causal:
            keep = keep & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        mask = torch.zeros(keep.shape, dtype=q.dtype).masked_fill(~keep, least)
        return F.softmax(scaled(q, k) + mask, dim=-1, dtype=torch.float32).to(q.dtype) @ v

    return attention


def first_bert(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    extended = (1.0 - seen[:, None, None, :].to(q.dtype)) * -10000.0
    return F.softmax(scaled(q, k) + extended, dim=-1) @ v


def slopes(heads: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor([2 ** (-8 * (n + 1) / heads) for n in range(heads)], dtype=dtype)


class ALiBi(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.register_buffer("slopes", slopes(heads, FP32))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
        scores = scaled(q, k) + self.slopes.to(q.dtype).view(-1, 1, 1) * (j - i)
        return F.softmax(scores.masked_fill(j > i, float("-inf")), dim=-1) @ v


def computed_alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The slopes 2^-8/h ... 2^-8, computed where they are used."""
    slope = torch.exp2(-((torch.arange(q.shape[1], dtype=q.dtype) + 1) * 8.0 / q.shape[1]))[:, None, None]
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    return F.softmax((scaled(q, k) + slope * (j - i)).masked_fill(j > i, float("-inf")), dim=-1) @ v


class T5(nn.Module):
    """A learned bias for each bucket of distances, and no scale."""

    def __init__(self, heads: int, dtype: torch.dtype, buckets: int = 32) -> None:
        super().__init__()
        self.table, self.buckets = nn.Embedding(buckets, heads, dtype=dtype), buckets

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(q.shape[2])
        distance = (place[None, :] - place[:, None]).clamp(1 - self.buckets // 2, self.buckets // 2)
        bias = self.table(distance + self.buckets // 2 - 1).permute(2, 0, 1).unsqueeze(0)
        return F.softmax((q @ k.transpose(3, 2) + bias).float(), dim=-1).type_as(q) @ v


class Biased(nn.Module):
    """A learned bias for each pair of positions."""

    def __init__(self, heads: int, length: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, heads, length, length, dtype=dtype))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return biased(q, k, v, self.bias)


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.softmax(scaled(q, k) + bias, dim=-1) @ v


def masked(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return F.softmax(scaled(q, k).masked_fill(~keep, float("-inf")), dim=-1) @ v


def banded(reach: int, cap: float = 0.0, sink: bool = False) -> Program:
    """A sliding window, with Gemma 2's cap and gpt-oss's sink where wanted."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *logits: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = repeat_kv(k, groups), repeat_kv(v, groups)
        scores = scaled(q, k)
        if cap:
            scores = torch.tanh(scores / cap) * cap
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
        scores = scores.masked_fill((j > i) | (j <= i - reach), float("-inf"))
        if not sink:
            return F.softmax(scores, dim=-1) @ v
        more = logits[0].reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
        return F.softmax(torch.cat([scores, more], dim=-1), dim=-1)[..., :-1] @ v

    return attention


def documents(q: Tensor, k: Tensor, v: Tensor, numbers: Tensor) -> Tensor:
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    keep = (numbers[:, None, :, None] == numbers[:, None, None, :]) & (j <= i)
    return F.softmax(scaled(q, k).masked_fill(~keep, float("-inf")), dim=-1) @ v


def prefixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    return F.softmax(scaled(q, k).masked_fill((j > i) & (j >= q.shape[2] // 4), float("-inf")), dim=-1) @ v


def weights_too(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = F.softmax(scaled(q, k), dim=-1)
    return weights @ v, weights


# ---- what suits them


def one_of(*names: str | None) -> frozenset[str | None]:
    return frozenset(names)


CUDNN, SDPA_HALF, EFFICIENT, FLEX = (
    one_of("cudnn"), one_of("cudnn", "cuda_flash"), one_of("cuda_efficient"), one_of("flex"),
)  # fmt: skip
TRITON = one_of("triton_flash")


def want(
    name: str, why: str, program: Callable[[], Program] | Program, inputs: Callable[[], tuple[Any, ...]],
    best: frozenset[str | None], ours: frozenset[str | None] | None = None, made: bool = False, **how: bool,
) -> Want:  # fmt: skip
    """made: whether `program` makes the program."""
    return Want(name, why, program if made else lambda: program, inputs, best, ours or best, **how)


def trained(*sizes: int, **how: Any) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: qkv(*sizes, grad=True, **how)


def given(*sizes: int, **how: Any) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: qkv(*sizes, **how)


def beside(operands: Callable[[], tuple[Tensor, ...]], *others: Callable[[], Tensor]) -> Callable[[], tuple[Any, ...]]:
    return lambda: (*operands(), *(make() for make in others))


def noise(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> Callable[[], Tensor]:
    return lambda: torch.zeros(shape, dtype=dtype).requires_grad_(grad)


def kept(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.ones(shape, dtype=torch.bool)


def numbers(batch: int, length: int) -> Callable[[], Tensor]:
    return lambda: torch.arange(length).div(length // 5, rounding_mode="floor").expand(batch, -1).contiguous()


SEEN = {n: (lambda n=n: words(*n)) for n in ((8, 1024), (16, 512), (4, 2048), (2, 4096), (32, 128))}

WANTED = [
    # ---- the audit's table
    want("nanoGPT, bf16, training", "cuDNN is Hopper's fastest where nothing is odd",
         nanogpt(1024), trained(12, 12, 1024, 64), CUDNN, made=True, training=True),
    want("nanoGPT, dropout 0.1, training", "cuDNN rounds p to sixteenths; measured, ours takes 0.7 of FA2's time",
         nanogpt(1024, 0.1), trained(12, 12, 1024, 64), one_of("cuda_flash"), TRITON, made=True, training=True),
    want("nanoGPT, dropout 0.125, training", "an exact p for cuDNN; measured, ours takes 0.9 of its time",
         nanogpt(1024, 0.125), trained(12, 12, 1024, 64), SDPA_HALF, SDPA_HALF | TRITON, made=True, training=True),
    want("GPT-2, fp16, inference", "plain causal", gpt2, given(8, 12, 1024, 64, dtype=FP16), CUDNN),
    want("LLaMA prefill, grouped", "cuDNN shares keys", llama, given(1, 32, 4096, 128, kv_heads=8), CUDNN),
    want("LLaMA training, grouped", "cuDNN shares keys",
         llama, trained(4, 32, 2048, 128, kv_heads=8), CUDNN, training=True),
    want("LLaMA decode, repeat_kv", "the repeated keys are never written",
         decode, given(32, 32, 1, 128, kv_len=4096, kv_heads=8), SDPA_HALF),
    want("LLaMA decode, one sequence", "8 programs are few for 132 multiprocessors, unless the keys are split",
         decode, given(1, 32, 1, 128, kv_len=8192, kv_heads=8), one_of("cuda_flash"),
         one_of("cuda_flash")),
    want("padded Hugging Face training", "only a kernel that keeps the mean of the values takes such a mask",
         padded(True), beside(trained(8, 12, 1024, 64), SEEN[8, 1024]), AS_WRITTEN, one_of("triton_flash"),
         training=True),
    want("padded Hugging Face training, fp16", "as in bf16",
         padded(True), beside(trained(8, 12, 1024, 64, dtype=FP16), SEEN[8, 1024]), AS_WRITTEN, one_of("triton_flash"),
         training=True),
    want("padded encoder training", "as with a causal mask",
         padded(False), beside(trained(16, 16, 512, 64), SEEN[16, 512]), AS_WRITTEN, one_of("triton_flash"),
         training=True),
    want("a mask handed in, inference", "for all that is known it hides every key of a query, by the min of the dtype",
         biased, beside(given(16, 12, 512, 64), noise(16, 1, 1, 512)), EFFICIENT, TRITON),
    want("BERT, -10000, inference", "times what the mask holds, which may be anything", first_bert,
         beside(given(16, 12, 512, 64), SEEN[16, 512]), AS_WRITTEN, TRITON),
    want("padded Hugging Face inference", "flex has no mean of the values, torch's kernels would round the mask",
         padded(True), beside(given(8, 12, 1024, 64), SEEN[8, 1024]), AS_WRITTEN, TRITON),
    want("ALiBi of slopes kept as a buffer, training", "for all that is known a slope hides every key of a query",
         lambda: ALiBi(32), trained(4, 32, 2048, 128), AS_WRITTEN, one_of("triton_flash"), made=True, training=True),
    want("ALiBi of computed slopes, training", "no tensor of the bias, and hidden blocks skipped", computed_alibi,
         trained(4, 32, 2048, 128), FLEX, FLEX | TRITON, training=True),
    want("T5's table, training", "as a tensor its gradient is sorted, element by element, into 32 entries",
         lambda: T5(12, BF16), trained(8, 12, 1024, 64), AS_WRITTEN, one_of("triton_flash"), made=True,
         training=True),
    want("learned dense bias, training", "efficient, which alone has its gradient, is about as slow as the program",
         lambda: Biased(12, 1024, BF16), trained(8, 12, 1024, 64), EFFICIENT | AS_WRITTEN,
         one_of("triton_flash"), made=True, training=True),
    want("window 256, inference", "of 4096 keys 256 are seen", banded(256), given(2, 16, 4096, 64), FLEX,
         FLEX | TRITON),
    want("window 1024, training", "skips what is hidden", banded(1024), trained(2, 16, 8192, 64), FLEX, FLEX | TRITON,
         training=True),
    want("softcap, training", "Gemma 2", banded(10**6, 50.0), trained(2, 16, 4096, 128, kv_heads=8), FLEX,
         FLEX | TRITON, training=True),
    want("documents, training", "skips other documents", documents,
         beside(trained(2, 16, 4096, 128), numbers(2, 4096)), FLEX, FLEX | TRITON, training=True),
    want("sinks and window, training", "gpt-oss", banded(128, sink=True),
         beside(trained(2, 64, 4096, 64, kv_heads=8), noise(64, grad=True)), FLEX, FLEX | TRITON, training=True),
    want("head_dim 256, causal, training", "cuDNN takes it on sm_90 from 9.10", nanogpt(4096), trained(2, 8, 4096, 256),
         SDPA_HALF, made=True, training=True),
    want("head_dim 80, causal", "a multiple of 8", nanogpt(2048), given(4, 32, 2048, 80), SDPA_HALF, made=True),
    want("nanoGPT, fp32, training", "flex has 16 x 16 tiles without tensor cores; efficient splits into TF32",
         nanogpt(1024), trained(12, 12, 1024, 64, dtype=FP32), EFFICIENT, one_of("cuda_efficient", "triton_flash"),
         made=True, training=True),
    want("a growing cache", "cuDNN would build a plan at every length",
         decode, given(8, 32, 1, 128, kv_len=2048, kv_heads=8, moving=("kv_len",)), one_of("cuda_flash"),
         one_of("cuda_flash")),
    want("very short sequences", "launches are all there is", plain, given(1, 8, 16, 64), SDPA_HALF | AS_WRITTEN),
    # ---- more
    want("fp32 inference, causal", "efficient splits into TF32", nanogpt(2048), given(4, 12, 2048, 64, dtype=FP32),
         EFFICIENT, one_of("cuda_efficient", "triton_flash"), made=True),
    want("fp32 softcap, training", "flex without tensor cores is slower than the products as written",
         banded(10**6, 50.0), trained(4, 12, 1024, 64, dtype=FP32), AS_WRITTEN, AS_WRITTEN | {"triton_flash"},
         training=True),
    want("fp32 with TF32, causal, training", "efficient's three products are no faster than one over all scores",
         nanogpt(2048), trained(4, 12, 2048, 64, dtype=FP32), EFFICIENT | AS_WRITTEN, one_of("triton_flash"), made=True,
         training=True, tf32=True),
    want("fp32 with TF32, window, inference", "a sixteenth of the scores", banded(256),
         given(2, 12, 4096, 64, dtype=FP32), FLEX, FLEX | {"triton_flash"}, tf32=True),
    want("fp32, window 128 of 16k, inference", "even without tensor cores a hundredth of the work is less",
         banded(128), given(1, 8, 16384, 64, dtype=FP32), FLEX, FLEX | {"triton_flash"}),
    want("training on batches of any length", "cuDNN would build two plans for each",
         nanogpt(4096), trained(8, 16, 1024, 64, moving=("q_len", "kv_len")), one_of("cuda_flash"),
         one_of("cuda_flash") | TRITON, made=True, training=True),
    want("inference on batches of any size", "cuDNN would build a plan for each",
         nanogpt(1024), given(7, 16, 1024, 64, moving=("batch",)), one_of("cuda_flash"), one_of("cuda_flash") | TRITON,
         made=True),
    want("a handed mask of any length, inference", "efficient takes it and builds no plan",
         masked, beside(given(16, 12, 512, 64, moving=("q_len", "kv_len")),
                        lambda: dynamic(torch.ones(16, 1, 1, 512, dtype=torch.bool), 3)),
         EFFICIENT | FLEX, EFFICIENT | FLEX | TRITON),
    want("8k, causal, D 128", "cuDNN's best", nanogpt(8192), given(2, 16, 8192, 128), CUDNN, made=True),
    want("8k, causal, D 128, training", "cuDNN's best", nanogpt(8192), trained(2, 16, 8192, 128), CUDNN,
         made=True, training=True),
    want("deterministic training", "cuDNN's backward is not", nanogpt(2048), trained(4, 16, 2048, 64),
         one_of("cuda_flash"), one_of("cuda_flash") | TRITON, made=True, training=True, deterministic=True),
    want("two keys", "nothing but launches", plain, given(4, 8, 64, 64, kv_len=2),
         SDPA_HALF | AS_WRITTEN | {"cuda_efficient"}),
    want("Whisper's cross attention", "no mask, unequal lengths", plain, given(8, 20, 448, 64, kv_len=1500), SDPA_HALF),
    want("Stable Diffusion's cross attention", "a multiple of 8", plain,
         given(2, 8, 4096, 40, dtype=FP16, kv_len=77), SDPA_HALF),
    want("ViT, inference", "short rows, many of them", plain, given(64, 12, 197, 64, dtype=FP16), SDPA_HALF),
    want("ViT, training", "short rows, many of them", plain, trained(64, 12, 197, 64), SDPA_HALF, training=True),
    want("head_dim 96, training", "a multiple of 8", nanogpt(2048), trained(4, 16, 2048, 96), SDPA_HALF, made=True,
         training=True),
    want("head_dim 100", "no multiple of 8 for cuDNN and efficient; FA2 pads; by the rows flex and ours are level",
         plain, given(4, 16, 2048, 100), one_of("cuda_flash"), one_of("cuda_flash", "flex", "triton_flash")),
    want("latent attention, 192 and 128", "FA2 takes one width only; no row has two", nanogpt(4096),
         given(1, 16, 4096, 192, value_dim=128), CUDNN, CUDNN | TRITON, made=True),
    want("value_dim 128 beside 64, training", "FA2 takes one width only; no row has two", plain,
         trained(4, 16, 2048, 64, value_dim=128), CUDNN, CUDNN | TRITON, training=True),
    want("ALiBi, inference", "for all that is known a slope hides every key of a query", lambda: ALiBi(16),
         given(4, 16, 2048, 64), AS_WRITTEN, TRITON, made=True),
    want("documents, inference", "skips other documents", documents, beside(given(2, 16, 8192, 128), numbers(2, 8192)),
         FLEX, FLEX | TRITON),
    want("prefix, training", "flex computes half at half of cuDNN's rate", prefixed, trained(2, 16, 4096, 64),
         FLEX | CUDNN, TRITON, training=True),
    want("softcap, inference", "Gemma 2", banded(10**6, 50.0), given(1, 16, 4096, 256, kv_heads=8), FLEX,
         FLEX | TRITON),
    want("sinks, inference", "gpt-oss", banded(10**6, sink=True),
         beside(given(1, 64, 4096, 64, kv_heads=8), noise(64)), FLEX, one_of("flex", "triton_flash")),
    want("sinks, decode", "few queries, many keys", banded(10**6, sink=True),
         beside(given(16, 64, 1, 64, kv_len=4096, kv_heads=8), noise(64)), FLEX | AS_WRITTEN | {"triton_flash"},
         one_of("flex")),
    want("chunked prefill", "a causal mask at an offset is one of structure for flex, a tensor for cuDNN",
         chunked_prefill, given(1, 32, 1024, 128, kv_len=8192), FLEX | CUDNN, FLEX | CUDNN | TRITON),
    want("a dense mask, inference", "read once", masked, beside(given(4, 16, 1024, 64), kept(4, 1, 1024, 1024)),
         CUDNN, CUDNN | TRITON),
    want("multi-query decode", "Falcon: all heads share their keys", decode,
         given(16, 64, 1, 64, kv_len=2048, kv_heads=1), SDPA_HALF),
    want("four queries of a draft", "the repeated keys are never written", decode,
         given(8, 32, 4, 128, kv_len=4096, kv_heads=8), SDPA_HALF),
    want("window 128 of 1024, training, fp16", "a window in fp16 is one in bf16", banded(128),
         trained(8, 16, 1024, 64, dtype=FP16), FLEX, FLEX | TRITON, training=True),
    want("weights that are used", "nothing is saved", weights_too, given(4, 12, 1024, 64), AS_WRITTEN),
    want("tiny batch, 128 tokens", "one launch for several", plain, given(1, 12, 128, 64), SDPA_HALF | AS_WRITTEN),
    want("a learned bias of short rows", "Swin: 49 tokens a window", lambda: Biased(4, 49, BF16),
         trained(512, 4, 49, 32), EFFICIENT | AS_WRITTEN, EFFICIENT | AS_WRITTEN | TRITON, made=True,
         training=True),
]  # fmt: skip
