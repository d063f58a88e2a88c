"""How query, key and value come about: the layout of the arguments, copies on the way, shared heads, the products."""

from __future__ import annotations

import itertools

from tests.fuzz.description import Program
from tests.fuzz.source import Source

_HEADS = {"q": "H", "k": "KV", "v": "KV"}
_LENGTH = {"q": "N", "k": "M", "v": "M"}
_DIM = {"q": "D", "k": "D", "v": "E"}
_PERMUTATIONS = tuple(itertools.permutations(range(4)))


def write_operands(out: Source) -> None:
    """q (B, H, N, D), k (B, KV, M, D) and v (B, KV, M, E)."""
    match out.program.layout:
        case "three_bshd":
            _one(out, "B", "N", "3", "H", "D", at=(0, 1))
            out.say("q, k, v = x.permute(2, 0, 3, 1, 4).unbind(0)")
        case "three_first":
            _one(out, "3", "B", "H", "N", "D", at=(1, 3))
            out.say("q, k, v = x[0], x[1], x[2]")
        case "three_in_head":
            _one(out, "B", "N", "H * 3 * D", at=(0, 1))
            out.say("q, k, v = (t.transpose(1, 2) for t in x.view(B, N, H, 3 * D).chunk(3, -1))")
        case "three_last":
            _one(out, "B", "N", "H", "D", "3", at=(0, 1))
            out.say("q, k, v = x.permute(0, 2, 1, 3, 4).unbind(-1)")
        case "split":
            _one(out, "B", "N", "3 * H * D", at=(0, 1))
            out.say("q, k, v = (t.view(B, N, H, D).transpose(1, 2) for t in x.split(H * D, 2))")
        case "all_same":
            _one(out, "B", "H", "N", "D", at=(0, 2))
            out.say("q = k = v = x")
        case "two_bshd":
            out.argument("q", "B", "N", "H", "D")
            out.argument("kv", "B", "M", "2", "KV", "D")
            _lengths(out, "q.shape[0]", "q.shape[1]", "kv.shape[1]")
            out.say("q = q.transpose(1, 2)", "k, v = kv.permute(2, 0, 3, 1, 4)")
        case "key_is_value":
            out.argument("q", "B", "H", "N", "D")
            out.argument("k", "B", "KV", "M", "D")
            _lengths(out, "q.shape[0]", "q.shape[2]", "k.shape[2]")
            out.say("v = k")
        case layout:
            _apart(out, layout)
    for name, touch in zip("qkv", out.program.touched, strict=True):
        if touch != "none":
            out.say(f"{name} = {_touched(name, touch)}")


def _one(out: Source, *shape: str, at: tuple[int, int]) -> None:
    out.argument("x", *shape)
    _lengths(out, f"x.shape[{at[0]}]", f"x.shape[{at[1]}]", f"x.shape[{at[1]}]")


def _lengths(out: Source, batch: str, q_len: str, kv_len: str) -> None:
    if out.program.dynamic:
        out.say(f"B, N, M = {batch}, {q_len}, {kv_len}")


def _apart(out: Source, layout: str) -> None:
    """Each of the three is an argument, or two."""
    written = []
    for name in "qkv":
        heads, length, dim = _HEADS[name], _LENGTH[name], _DIM[name]
        shape, made = {
            "bhsd": (("B", heads, length, dim), ""),
            "rotated": (("B", heads, length, dim), "" if name == "v" else f"rotated({name})"),
            "concatenated": (("B", heads, length, dim), ""),
            "bshd": (("B", length, heads, dim), f"{name}.transpose(1, 2)"),
            "joined": (
                ("B", length, f"{heads} * {dim}"), f"{name}.view(B, {length}, {heads}, {dim}).transpose(1, 2)",
            ),
            "joined_inner": (
                ("B", length, f"{dim} * {heads}"), f"{name}.view(B, {length}, {dim}, {heads}).permute(0, 3, 1, 2)",
            ),
            "sbhd": ((length, "B", heads, dim), f"{name}.permute(1, 2, 0, 3)"),
            "transposed": (("B", heads, dim, length), f"{name}.mT"),
            "linear": (("B", length, "6"), ""),
        }[layout]  # fmt: skip
        if layout == "linear":
            weight = out.parameter("w", f"{heads} * {dim}", "6")
            made = f"F.linear({name}, {weight}).view(B, {length}, {heads}, {dim}).transpose(1, 2)"
        if layout == "concatenated" and name != "q":
            out.argument(f"{name}_past", "B", heads, "M - 1", dim)
            shape, made = ("B", heads, "1", dim), f"torch.cat([{name}_past, {name}], 2)"
        out.argument(name, *shape)
        if made:
            written.append(f"{name} = {made}")
    batch, length = {"sbhd": (1, 0), "transposed": (0, 3)}.get(
        layout, (0, 1 if layout in ("bshd", "joined", "joined_inner", "linear") else 2)
    )
    more = "k_past.shape[2] + 1" if layout == "concatenated" else f"k.shape[{length}]"
    _lengths(out, f"q.shape[{batch}]", f"q.shape[{length}]", more)
    if layout == "rotated":
        out.say(
            "def rotated(t):",
            "    angle = torch.outer(torch.arange(t.shape[2]), 0.5 ** torch.arange(2)).repeat(1, 2).to(t.dtype)",
            "    return t * angle.cos() + torch.cat([-t[..., 2:], t[..., :2]], -1) * angle.sin()",
        )
    out.say(*written)


def _touched(name: str, touch: str) -> str:
    heads, length, dim = _HEADS[name], _LENGTH[name], _DIM[name]
    return {
        "contiguous": f"{name}.contiguous()",
        "clone": f"{name}.clone()",
        "there_and_back": f"{name}.transpose(1, 2).reshape(B, {length}, {heads} * {dim})"
        f".view(B, {length}, {heads}, {dim}).transpose(1, 2)",
        "shifted": f"{name} + 0.1",
        "normalised": f"F.normalize({name}, dim=-1)",
        "viewed": f"{name}.reshape(B * {heads}, {length}, {dim}).view(B, {heads}, {length}, {dim})",
    }[touch]


def write_groups(out: Source) -> None:
    """k and v with as many heads as q has, if there is no other way to bring them together."""
    p = out.program
    if p.rank in ("grouped", "rows_folded") or p.sizes.groups == 1:
        return
    for name, how in (("k", p.key_groups), ("v", p.value_groups)):
        length, dim = _LENGTH[name], _DIM[name]
        if how == "tile_last" and p.sizes.kv_heads == 1 and p.rank == "four" and p.mutation is None:
            continue  # the product broadcasts
        made = {
            "expand": f"{name}[:, :, None].expand(B, KV, G, {length}, {dim}).reshape(B, H, {length}, {dim})",
            "repeat_interleave": f"{name}.repeat_interleave(G, 1)",
            "repeat": f"{name}.repeat(1, G, 1, 1)",
            "tile_last": f"{name}.unsqueeze(1).expand(B, G, KV, {length}, {dim}).reshape(B, H, {length}, {dim})",
            "indexed": f"{name}[:, torch.arange(H) // G]",
        }[how]
        out.say(f"{name} = {made}")


def write_rank(out: Source) -> None:
    """a, c, u: query, key and value in the rank that they are multiplied in."""
    match out.program.rank:
        case "four":
            out.say("a, c, u = q, k, v")
        case "three":
            out.say("a, c, u = q.reshape(B * H, N, D), k.reshape(B * H, M, D), v.reshape(B * H, M, E)")
        case "grouped":
            out.say("a, c, u = q.unflatten(1, (KV, G)), k.unsqueeze(2), v.unsqueeze(2)")
        case "rows_folded":
            out.say("a, c, u = q.reshape(B, KV, G * N, D), k, v")


def product(p: Program, how: str, x: str, y: str, letters: int, alpha: str = "") -> str:
    """The sum over the last axis of both: x (.., n, d), y (.., m, d) -> (.., n, m)."""
    match how:
        case "matmul":
            return f"torch.matmul({x}, {y}.mT)"
        case "einsum" | "einsum_swapped":
            return _einsum(p, x, y, "id", "jd", letters, how == "einsum_swapped")
        case "swapped":
            return f"({y} @ {x}.mT).mT"
        case "summed":
            return f"({x}.unsqueeze(-2) * {y}.unsqueeze(-3)).sum(-1)"
        case "bmm" if p.rank == "three":
            return f"torch.bmm({x}, {y}.transpose(1, 2))"
        case "baddbmm" if p.rank == "three":
            shape = f"{x}.shape[0], {x}.shape[1], {y}.shape[1]"
            return f"torch.baddbmm(torch.zeros({shape}, dtype={x}.dtype), {x}, {y}.mT, beta=0{alpha})"
    return f"{x} @ {y}.transpose(-2, -1)"


def value_product(p: Program, how: str, weights: str, value: str, letters: int) -> str:
    """weights (.., n, m), value (.., m, e) -> (.., n, e)."""
    match how:
        case "matmul":
            return f"torch.matmul({weights}, {value})"
        case "einsum" | "einsum_swapped":
            return _einsum(p, weights, value, "ij", "jd", letters, how == "einsum_swapped", result="id")
        case "swapped":
            return f"({value}.mT @ {weights}.mT).mT"
        case "summed":
            return f"({weights}.unsqueeze(-1) * {value}.unsqueeze(-3)).sum(-2)"
        case "bmm" if p.rank == "three":
            return f"torch.bmm({weights}, {value})"
    return f"{weights} @ {value}"


def _einsum(p: Program, x: str, y: str, of_x: str, of_y: str, number: int, swapped: bool, result: str = "ij") -> str:
    """An einsum whose operands were permuted, in letters that say nothing."""
    lead = {"four": "bh", "three": "b", "grouped": "bhg", "rows_folded": "bh"}[p.rank]
    of_x, of_y, result = lead + of_x, lead + of_y, lead + result
    if p.rank == "four":
        first, second = _PERMUTATIONS[number], _PERMUTATIONS[(number * 7 + 5) % 24]
        x, of_x = f"{x}.permute{first}", "".join(of_x[n] for n in first)
        y, of_y = f"{y}.permute{second}", "".join(of_y[n] for n in second)
    if swapped:
        x, of_x, y, of_y = y, of_y, x, of_x
    names = "bhgijd" if number % 3 == 0 else "nxayzc" if number % 3 == 1 else "dijhbk"
    equation = f"{of_x}, {of_y} -> {result}".translate(str.maketrans("bhgijd", names))
    return f'torch.einsum("{equation}", {x}, {y})'
