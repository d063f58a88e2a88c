"""The attentions that evidence is gathered of on a GPU in a few minutes, those first that wait for it most.

tests/graph/test_gpu_cases.py holds what is recognised in the program of each against its name.

Our Triton kernels are picked where they were measured: what torch has no kernel for, or none that is fast on Hopper,
comes first. A GiB of scores at most, so that each runs as written, and is compiled beside others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attn_fuse.picker.case import Case, visible_share


def cases() -> Iterator[tuple[str, Case]]:
    """Each with what it is, in words."""
    usual = Case("bfloat16", True, 4, 16, 2048, 2048, 64)

    def causal(case: Case) -> Case:
        return replace(case, mask="causal", visible=visible_share(case.q_len, case.kv_len, 0, None))

    def at(length: int, batch: int, **other: object) -> Case:
        return replace(usual, q_len=length, kv_len=length, batch=batch, **other)  # type: ignore[arg-type]

    def window(length: int, batch: int, reach: int) -> Case:
        return at(length, batch, mask="window", visible=visible_share(length, length, 0, reach))

    def padded(case: Case) -> Case:
        return replace(causal(case), mask="padding")

    def wide(case: Case) -> Case:
        return replace(case, head_dim=128, value_dim=128)

    def huge(case: Case) -> Case:
        return replace(case, heads=8, kv_heads=8, head_dim=256, value_dim=256)

    def sized(batch: int, heads: int, length: int, dim: int, **other: object) -> Case:
        case = at(length, batch, heads=heads, kv_heads=heads, head_dim=dim, value_dim=dim)
        return replace(case, **other)  # type: ignore[arg-type]

    def inference(case: Case) -> Case:
        return replace(case, training=False)

    def documents(case: Case) -> Case:
        return replace(causal(case), mask="documents")

    def decode(length: int, batch: int, kv_heads: int, **other: object) -> Case:
        case = replace(usual, heads=32, training=False, q_len=1, kv_len=length, batch=batch, kv_heads=kv_heads)
        return replace(wide(case), **other)  # type: ignore[arg-type]

    plain, short = at(2048, 4), at(512, 16)
    yield "causal and padded, as Hugging Face trains", padded(plain)
    yield "T5's table", replace(short, function=True, table=True)
    yield "Evoformer's pair bias", sized(128, 8, 256, 32, bias="gradient")
    yield "ALiBi", replace(causal(plain), bias="positions")
    yield "softcap", replace(causal(wide(plain)), function=True)
    yield "sinks", replace(causal(plain), sink=True)
    yield "window", window(4096, 1, 512)
    yield "documents", documents(plain)
    yield "Graphormer's bias", sized(64, 32, 128, 24, bias="gradient", bias_by_entry=True)
    yield "Swin's stored index", sized(1024, 6, 49, 32, bias="indexed")
    yield "softcap, grouped decode", decode(4096, 16, 8, function=True)
    yield "ALiBi, decode", decode(4096, 16, 32, bias="positions")
    yield "causal, D 256", huge(causal(plain))
    yield "grouped decode", decode(4096, 16, 8)
    yield "causal", causal(plain)
    yield "causal, dropout", replace(causal(plain), dropout=True)
    yield "dense bias with its gradient", replace(short, bias="gradient")
    yield "causal and padded, short", padded(short)
    yield "causal, short", causal(short)
    yield "causal, D 128", wide(causal(plain))
    yield "causal and padded, D 128", padded(wide(plain))
    yield "sinks and window", replace(window(4096, 1, 512), sink=True)
    yield "softcap, inference", inference(replace(causal(wide(plain)), function=True))
    yield "ALiBi, inference", inference(replace(causal(plain), bias="positions"))
    yield "grouped decode, one sequence", decode(16384, 1, 8)
    yield "grouped, D 128", replace(wide(causal(plain)), kv_heads=4)
    yield "causal, long", causal(at(8192, 1, heads=8, kv_heads=8))
    yield "causal and padded, inference", inference(padded(plain))
    yield "window, inference", inference(window(4096, 1, 512))
    yield "T5's table, longer", replace(plain, function=True, table=True)
    yield "dense bias with its gradient, longer", replace(plain, bias="gradient")
    yield "causal, D 256, inference", inference(huge(causal(plain)))
    yield "causal, inference", inference(causal(plain))
    yield "documents, inference", inference(documents(plain))
    yield "constant bias, causal", replace(causal(plain), bias="constant")
    yield "constant bias, causal, inference", inference(replace(causal(plain), bias="constant"))
    yield "softcap without a mask", replace(short, function=True)
    yield "softcap without a mask, longer", replace(plain, function=True)
    yield "padding", replace(short, mask="padding")
    yield "no mask", short
    yield "dropout", replace(short, dropout=True)
    yield "grouped decode, padded", decode(4096, 16, 8, mask="padding")
    yield "decode, one key head", decode(4096, 16, 1)
    yield "decode, no groups", decode(4096, 16, 32)
    yield "sinks, inference", inference(replace(causal(plain), sink=True))
    yield "dense mask", replace(short, mask="dense")
    yield "causal, D 128, inference", inference(wide(causal(plain)))
    yield "causal, float32", replace(causal(at(1024, 4)), dtype="float32")
    yield "window, long", replace(window(8192, 1, 1024), heads=8, kv_heads=8)
    yield "values of 128, causal", replace(causal(plain), value_dim=128)
    yield "grouped decode, four sequences", decode(8192, 4, 8)
    yield "causal, head_dim 80", replace(causal(plain), head_dim=80, value_dim=80)
