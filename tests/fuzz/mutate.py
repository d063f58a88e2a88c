"""One step away from an attention: what each mutation does, and where. Some are attentions still, of other operands."""

from __future__ import annotations

from tests.fuzz.source import Source


def before_product(out: Source) -> None:
    p = out.program
    s = p.sizes
    heads = s.kv_heads * s.groups
    exchanged = "k" if heads == s.kv_len else "k.reshape(B, M, H, D)"
    line = {
        "heads_rolled": "k = k.roll(1, 1)",
        "heads_flipped_value": "v = v.flip(1)",
        "batch_flipped": "k = k.flip(0)",
        "batch_shared": "k, v = k[:1], v",
        "value_of_other_head": "v = v[:, torch.arange(H - 1, -1, -1)]",
        "rows_shifted": "q = q.roll(1, 2)",
        "keys_shifted": "k = k.roll(1, 2)",
        "value_shifted": "v = v.roll(1, 2)",
        "key_and_query_swapped": "q, k = k, q" if s.q_len == s.kv_len else "q = q.flip(2)",
        "heads_and_rows_swapped": f"k = {exchanged}.transpose(1, 2)",
        "value_transposed": "v = v.mT.reshape(B, H, M, E)",
        "product_of_three": "q = 0.2 * (q @ (k.mT @ k))",
        "masked_value": "v = v * (v > 0)",
    }.get(p.mutation or "")  # fmt: skip
    if line is not None:
        out.say(line)


def product_of(out: Source, written: str) -> str:
    if out.program.mutation == "key_not_transposed":
        same = out.program.sizes.kv_len == out.program.sizes.head_dim
        return "a @ c" if same else "a @ c.reshape(B, H, D, M)"
    return written


def after_product(out: Source) -> None:
    p = out.program
    cut = p.sizes.kv_len > 1
    line = {
        "two_products": "s = s + 0.5 * (q @ k.flip(2).mT)",
        "chosen_between_products": "s = torch.where(torch.ones(N, M).tril().bool(), s, q @ k.flip(2).mT)",
        "cumulative_scores": "s = s.cumsum(-1) * 0.3",
        "sorted": "s = s.sort(-1).values",
        "score_times_score": "s = 0.2 * s * (s.mT if N == M else s.flip(-1))",
        "minus_row_mean": "s = s - s.mean(-2, keepdim=True)",
        "bias_of_scores": "s = s + s.roll(1, -1)",
        "key_edited_by_scores": "u = u + s.mean(-2).unsqueeze(-1)",
        "keys_cut": "s, u, M = s[..., :-1], u[..., :-1, :], M - 1" if cut else "",
    }.get(p.mutation or "")  # fmt: skip
    if p.mutation == "talking_heads":
        line = f's = torch.einsum("bhij, hg -> bgij", s, {out.parameter("mix", "H", "H")})'
    if line:
        out.say(line)


def before_softmax(out: Source) -> None:
    p = out.program
    line = {
        "mask_moved": "s = s.roll(1, -1)",
        "mask_of_scores": "s = s.masked_fill(s < 0, -1e9)",
        "top_scores": f"s = s.masked_fill(s < s.topk({min(2, p.sizes.kv_len)}, -1).values[..., -1:], float('-inf'))",
    }.get(p.mutation or "")
    if line is not None:
        out.say(line)


def softmax(out: Source) -> bool:
    """Whether the mutation writes the softmax."""
    line = {
        "softmax_rows": "p = s.softmax(-2)",
        "softmax_heads": "p = s.softmax(1)",
        "softmax_batch": "p = s.softmax(0)",
        "softmax_twice": "p = s.softmax(-1).softmax(-1)",
        "sum_of_rows": "e = s.clamp(max=9).exp(); p = e / e.sum(-2, keepdim=True)",
        "sum_without_last": "e = s.clamp(max=9).exp(); p = e / (e.sum(-1, keepdim=True) - 0.5 * e[..., -1:])",
        "sigmoid": "p = s.sigmoid()",
        "reversed_softmax": "p = (-s).softmax(-1)",
        "other_sum": "e = s.clamp(max=9).exp(); p = e / (e * e).sum(-1, keepdim=True)",
    }.get(out.program.mutation or "")
    if line is not None:
        out.say(*line.split("; "))
    return line is not None


def weights(out: Source) -> None:
    square = out.program.sizes.q_len == out.program.sizes.kv_len
    line = {
        "mask_of_weights": "p = p.masked_fill(p < 0.1, 0.0)",
        "cumulative_weights": "p = p.cumsum(-1)",
        "weights_transposed": "p = p.mT" if square else "p = p.flip(-1)",
        "mean_of_weights": "p = p.mean(1, keepdim=True)",
    }.get(out.program.mutation or "")
    if line is not None:
        out.say(line)


def output(out: Source) -> None:
    if out.program.mutation == "two_values":
        out.say("out = out + 0.5 * (p @ u.flip(-2))")
