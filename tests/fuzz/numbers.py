"""Whole numbers made of lengths and of arguments that may be below zero, and the masks and cuts that they move.

A program with dynamic sizes is compiled once and called at other sizes and numbers. `calls` says which.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import replace

from tests.fuzz.description import Masked, Program
from tests.fuzz.source import Source

# n and m stand for arguments, t for one in a tensor, x for a fraction.
WHOLES = {
    "argument": "{n}", "item": "{t}.item()", "negated": "-{n}", "item_negated": "-{t}.item()", "less_three": "{n} - 3",
    "from_end": "M - {n}", "beyond_rows": "{n} - N", "difference": "M - N", "arguments": "{n} - {m}",
    "centred": "(6 - M) // 2", "centred_rows": "(5 - N) // 2", "halved": "(M - N) // 2", "third": "(N - M) // 3",
    "room": "(M - {n}) // 2", "argument_halved": "{n} // 2", "minus_half": "-({n} // 2)", "bits": "{n} >> 1",
    "modulo": "M % 3", "argument_modulo": "{n} % M", "by_argument": "N % {n}", "less_modulo": "M % 4 - 2",
    "least": "min({n}, M)", "least_of_lengths": "min(N, M) - {n}", "most": "max({n}, 0)",
    "most_rows": "max({n}, N) - 3",
    "overhang": "max(M - 6, 0)", "inside": "max(min({n}, M - 1), -N)", "absolute": "abs({n})",
    "ceil": "math.ceil(M / 2)", "ceil_share": "math.ceil(M * 0.3) - 2", "ceil_quotient": "-(-M // {n})",
    "quotient": "M // {n}", "share": "int(0.5 * M)", "share_of_difference": "int(0.5 * (M - N))",
    "fraction": "int({x} * M)", "root": "int(math.sqrt(M))", "twice": "2 * {n} - M", "product": "{n} * {m}",
    "rounded": "round(M / 4) - 1", "minus_length": "-M", "either": "({n} if N > M else M - N)",
}  # fmt: skip

# What is seen; w is a whole number. The expression follows the lines that it needs.
KEPT = {
    "triangle_at": "",
    "keys_from": "j >= {w}",
    "keys_before": "j < {w}",
    "hidden_below": "~(j + {w} < 0)",
    "hidden_rows": "~(i - {w} >= N)",
    "near": "(i - j).abs() <= {w}",
    "window_at": "(j <= i) & (j > i - {w})",
    "rows_from": "(i >= {w}) | (j == 0)",
    "both_from": "(i >= {w}) & (j >= {w})",
    "all_but_one": "(j != {w}).expand(N, M)",
    "tril": "torch.ones(N, M).tril({w}).bool()",
    "triu": "torch.ones(N, M, dtype=torch.bool).triu({w})",
    "not_triu": "~torch.ones(N, M, dtype=torch.bool).triu({w})",
    "columns_from": "seen = torch.ones(N, M, dtype=torch.bool); seen[:, {w} :] = False; seen",
    "columns_until": "seen = torch.ones(N, M, dtype=torch.bool); seen[:, : {w}] = False; seen",
    "columns_last": "seen = torch.ones(N, M, dtype=torch.bool); seen[:, -({w}) :] = False; seen",
    "columns_but_last": "seen = torch.ones(N, M, dtype=torch.bool); seen[:, : -({w})] = False; seen",
    "rows_set": "seen = torch.ones(N, M, dtype=torch.bool); seen[{w} :] = False; seen",
    "column_set": "seen = torch.ones(N, M, dtype=torch.bool); seen[:, {w}] = False; seen",
    "corner_set": "seen = torch.ones(N, M, dtype=torch.bool); seen[{w} :, : {w}] = False; seen",
    "column_numbers": "seen = torch.arange(M).repeat(N, 1); seen[:, {w} :] = -1; seen >= 0",
    "narrow_filled": "seen = torch.ones(N, M, dtype=torch.bool); seen.narrow(1, {w}, 1).fill_(False); seen",
    "rolled": "(j <= i).roll({w}, -1)",
    "rolled_rows": "(j <= i).roll({w}, 0)",
    "other_range": "torch.arange({w}, {w} + M)[None, :] <= torch.arange(N)[:, None]",
    "range_of_rows": "j <= torch.arange({w}, {w} + N)[:, None]",
    "range_down": "torch.arange({w}, {w} - M, -1)[None, :] < i",
    "sliced": "torch.ones(N + 9, M + 9).tril().bool()[{w} :, : M][:N]",
    "sliced_end": "torch.ones(N + 9, M + 9).tril().bool()[: N, {w} :][:, :M]",
    "narrowed": "torch.ones(2 * N + 5, M).tril().bool().narrow(0, {w}, N)",
    "padded": "F.pad(torch.ones(N, M, dtype=torch.bool), ({w}, -({w})))",
    "joined": "torch.cat([torch.ones(N, {w}), torch.zeros(N, M - ({w}))], 1).bool()",
    "grouped": "(i // {w}) == (j // {w})",
    "shifted_groups": "((i + {w}) // 4) == ((j + {w}) // 4)",
    "strided": "(i - j) % {w} == 0",
    "shifted_stride": "(j + {w}) % 4 != 0",
    "product_below": "i * {w} >= j",
    "clamped": "j <= (i + {w}).clamp(min=0)",
    "clamped_keys": "(j - {w}).clamp(0, 3) < 2",
    "clamped_most": "j <= i.clamp(max={w})",
    "prefix": "(j <= i) | (j < {w})",
    "first_and_near": "(j < 1) | (i - j < {w})",
    "chosen": "(j <= i) if {w} > 0 else (j >= i)",
    "in_floats": "(j.float() - i.float()) * 0.5 <= {w}",
}
CUTS = {
    "none": "",
    "from": "k, v = k[:, :, {w} :], v[:, :, {w} :]",
    "until": "k, v = k[:, :, : {w}], v[:, :, : {w}]",
    "last": "k, v = k[:, :, -({w}) :], v[:, :, -({w}) :]",
    "but_last": "k, v = k[:, :, : -({w})], v[:, :, : -({w})]",
    "narrow": "k, v = k.narrow(2, {w}, 2), v.narrow(2, {w}, 2)",
    "rolled": "k, v = k.roll({w}, 2), v.roll({w}, 2)",
    "key_rolled": "k = k.roll({w}, 2)",
    "written_at": "longer = k.new_zeros(B, KV, M + 6, D); longer[:, :, {w} : {w} + M] = k; k = longer[:, :, :M]",
    "keys_zeroed": "k = k * 1; k[:, :, {w} :] = 0",
    "value_set": "v = v * 1; v[:, :, : {w}] = 0.5",
    "value_zeroed": "v = v * 1; v[:, :, {w}] = 0",
    "query_from": "q = q.roll({w}, 2)",
}
NUMBERS = tuple(WHOLES)
MOVED = tuple(KEPT)


def whole(out: Source, word: str, example: int) -> str:
    """A whole number in parentheses, on arguments of its own."""
    names = {}
    for letter in "nmtx":
        written = WHOLES[word]
        if f"{{{letter}}}" in written:
            names[letter] = _argument(out, letter, example)
            example = 7 - example
    return f"({WHOLES[word].format(**names)})"


def _argument(out: Source, letter: str, example: int) -> str:
    name = out.fresh("n")
    out.numbers[name] = example
    made = {"t": f"torch.tensor({name})", "x": f"{name} / 9"}.get(letter, name)
    return out.given(name, made)


def kept(out: Source, layer: Masked) -> str:
    """The expression of a Boolean tensor that is True where the key is seen."""
    *lines, last = KEPT[layer.kind].format(w=whole(out, layer.number, layer.reach + 1)).split("; ")
    seen = out.fresh("seen")
    out.say(*(line.replace("seen", seen) for line in lines))
    return last.replace("seen", seen)


def cut(out: Source) -> None:
    """Cuts or moves the keys, the values or the query by a whole number."""
    p = out.program
    if p.cut != "none":
        out.say(*CUTS[p.cut].format(w=whole(out, p.number, 2 + p.seed % 3)).split("; "), "M = k.shape[2]")


def moved(p: Program, r: random.Random) -> Program:
    """`p` with masks and cuts at whole numbers."""
    masks = tuple(
        Masked(
            kind=r.choice(MOVED),
            form=r.choice(["arange", "arange_swapped", "difference", "cumulative", "vmapped", "tril", "triu"]),
            applied=r.choice(["masked_fill", "where", "where_not", "added", "added_numbers", "in_place"]),
            fill=r.choice(["-inf", "-inf", "-1e9", "lowest"]),
            reach=r.randrange(1, 5),
            reversed=r.random() < 0.2,
            number=r.choice(NUMBERS),
        )
        for _ in range(r.choice([1, 1, 1, 2]))
    )
    others = tuple(x for x in p.layers if not isinstance(x, Masked))
    cut = r.choice(tuple(CUTS)) if r.random() < 0.2 else "none"
    return replace(p, dynamic=True, layers=(*others, *masks), cut=cut, number=r.choice(NUMBERS))


def calls(p: Program, defaults: Mapping[str, int]) -> list[dict[str, int]]:
    """What to call `inputs` of the source with after the first call; its parameters are `defaults`."""
    s, r = p.sizes, random.Random(p.seed)
    batch, q_len, kv_len = s.batch + 1, s.q_len, s.kv_len
    lengths = [
        (q_len, kv_len), (kv_len, q_len), (q_len + 9, kv_len + 9), (q_len, kv_len + 11), (q_len + 11, kv_len),
        (max(q_len // 2, 2), max(kv_len // 2, 2)), (q_len, 2), (kv_len + 3, kv_len + 3),
    ]  # fmt: skip
    r.shuffle(lengths)
    numbers = {name: _numbers(n, r) for name, n in defaults.items() if name not in ("B", "N", "M")}
    if q_len == kv_len:  # it may have to stay so
        lengths = [x for pair in zip(lengths, ((n, n) for n in (3, 13, 2, 6, 9, 4, 15, 7)), strict=False) for x in pair]
    found = []
    for (n, m), b in zip(lengths, itertools.cycle([batch, 2, 3]), strict=False):
        found.append({"B": b, "N": n, "M": m, **{name: next(values) for name, values in numbers.items()}})
    return found


def _numbers(example: int, r: random.Random) -> itertools.cycle[int]:
    others = [-example, 19, -19, example + 1, 0, -2, 9, -1, 1]
    first, *rest = others
    r.shuffle(rest)
    return itertools.cycle([first, *rest])
