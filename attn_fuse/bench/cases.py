"""Cases: the attentions that a calibration measures, those that tell most first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from attn_fuse.picker.case import Case, visible_share
from attn_fuse.picker.regression import distance


def grid(device_type: str, lengths: Sequence[int] = (), heads: int = 0) -> list[Case]:
    """The cases of a calibration, those that tell most first.

    The first is the most usual one; each next one is the farthest, by `regression.apart`, from all before it. So
    wherever a calibration ends, no attention is far from a measured one.
    lengths, heads: of the sequences and of each case; () and 0 for the usual ones.
    """
    on_gpu = device_type == "cuda"
    lengths = lengths or ((256, 1024, 4096, 8192) if on_gpu else (64, 256, 1024, 2048))
    dtypes = ("bfloat16", "float32") if on_gpu else ("float32", "bfloat16")
    usual = Case(dtypes[0], True, 4 if on_gpu else 1, heads or (16 if on_gpu else 8), max(lengths), max(lengths), 64)
    left = list(dict.fromkeys(_cases(usual, lengths, dtypes)))
    ordered = [left.pop(0)]
    distances = [distance(ordered[0], case, device_type) for case in left]
    while left:
        farthest = max(range(len(left)), key=distances.__getitem__)
        ordered.append(left.pop(farthest))
        distances.pop(farthest)
        distances = [min(d, distance(ordered[-1], case, device_type)) for d, case in zip(distances, left, strict=True)]
    return ordered


def _cases(usual: Case, lengths: Sequence[int], dtypes: Sequence[str]) -> Iterator[Case]:
    for dtype in dtypes:
        for length in sorted(lengths, reverse=True):
            square = replace(usual, dtype=dtype, q_len=length, kv_len=length)
            causal = replace(square, mask="causal", visible=visible_share(length, length, 0, None))
            window = max(2, length // 8)
            narrow = replace(square, mask="window", visible=visible_share(length, length, 0, window))
            for training in (True, False):
                for case in (
                    causal,
                    square,
                    narrow,
                    replace(square, mask="dense"),
                    replace(square, mask="documents"),
                    replace(square, bias="constant"),
                    replace(causal, function=True),
                    replace(causal, sink=True),
                    replace(causal, kv_heads=max(1, usual.heads // 4)),
                    replace(causal, head_dim=128, value_dim=128),
                    replace(square, value_dim=128),
                ):
                    yield replace(case, training=training)
            yield replace(causal, dropout=True)
            yield replace(square, dropout=True)
            yield replace(square, bias="gradient")
            yield replace(square, training=False, q_len=1)
            yield replace(square, training=False, q_len=1, kv_heads=max(1, usual.heads // 4))
            yield replace(square, training=False, q_len=1, kv_heads=1)
