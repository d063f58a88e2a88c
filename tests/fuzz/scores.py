"""The layers of the scores: scales, masks, biases and functions, as terms that meet `s`."""

from __future__ import annotations

from tests.fuzz import numbers
from tests.fuzz.description import NARROW, OFFSETS, Biased, Layer, Masked, Modified, Program
from tests.fuzz.source import LONGEST, Source

_LOWEST = "torch.finfo(s.dtype).min"
# Of whole numbers that wrap around.
_ASKED = (
    "{0} != -1",
    "{0} * 100 > 50",
    "-{0} > 5",
    "{0} + 100 > 0",
    "{0} * {0} > 0",
    "({0} - 7).float() > 3",
    "~{0} > 7",
)


def write_scale_before(out: Source) -> str:
    """Scales query or key. What the product takes as alpha, if it does."""
    match out.program.scale:
        case "query":
            out.say("q = q * D**-0.5")
        case "key":
            out.say("k = k / math.sqrt(D)")
        case "both":
            out.say("q, k = q * D**-0.25, k * D**-0.25")
        case "alpha":
            return ", alpha=0.6"
    return ""


def write_scale_after(out: Source) -> None:
    number = {
        "times": "s * 0.5", "number_first": "0.25 * s", "divided": "s / 1.7",
        "root_of_size": "s / math.sqrt(q.size(-1))", "twice": "2.0 * (s / 3.0)", "negative": "s * -0.5",
        "tensor": "s * torch.tensor(D**-0.5, dtype=s.dtype)",
        "rsqrt": "s * torch.rsqrt(torch.tensor(float(D), dtype=s.dtype))",
    }.get(out.program.scale)  # fmt: skip
    if number is not None:
        out.say(f"s = {number}")
    match out.program.scale:
        case "in_place":
            out.say("s *= 0.5")
        case "alpha" if out.program.product != "baddbmm" or out.program.rank != "three":
            out.say("s = torch.mul(s, 0.6)")
        case "per_head":
            out.say(f"s = s * {out.per_head(out.parameter('scale', 'H'))}")
        case "per_row":
            out.say(f"s = s * {out.term('(torch.arange(N) + 1).to(s.dtype)[:, None] * 0.2', 'i')}")
        case "per_key":
            out.say(f"s = s * {out.term('(torch.arange(M) + 1).to(s.dtype)[None, :] * 0.2', 'j')}")


def write_layer(out: Source, layer: Layer) -> str | None:
    """The name of the mask that the layer made, where it made one."""
    match layer:
        case Masked():
            return _masked(out, layer)
        case Biased():
            _biased(out, layer)
        case Modified(kind):
            _modified(out, kind)
    return None


# ---- masks


def _masked(out: Source, layer: Masked) -> str:
    made, over = keep(out, layer)
    if layer.reversed:
        made = f"~({made})"
    keeping = out.term(made, over)
    out.say(apply(out.program, layer, keeping))
    return keeping


def keep(out: Source, layer: Masked) -> tuple[str, str]:
    """(a Boolean tensor that is True where the key is seen, the axes it differs along)"""
    out.positions()
    r, o = layer.reach, layer.offset
    match layer.kind:
        case "triangle":
            return triangle(out, layer.form, o)
        case "triangle_at":
            return triangle(out, layer.form, numbers.whole(out, layer.number, r + 1))
        case kind if kind in numbers.KEPT:
            return f"({numbers.kept(out, layer)}).expand(N, M)", "ij"
        case "window" if layer.form == "tril":
            return f"torch.ones(N, M).tril().triu(-{r}).bool()", "ij"
        case "window":
            return f"(j <= i) & (j > i - {r})", "ij"
        case "band":
            return f"(i - j).abs() <= {r}", "ij"
        case "padding":
            name = out.given(out.fresh("keep"), "torch.rand(B, 1, 1, M, generator=g) > 0.3")
            return name, "bj"
        case "lengths":
            name = out.given(out.fresh("lengths"), "torch.randint(1, M + 1, (B,), generator=g)")
            return f"(torch.arange(M) < {name}[:, None])[:, None, None, :]", "bj"
        case "numbers":
            name = out.given(out.fresh("mask"), "torch.randint(0, 3, (B, M), generator=g)")
            return f"({name} != 0)[:, None, None, :]", "bj"
        case "documents":
            of_query = out.given(out.fresh("ids"), "torch.randint(0, 2, (B, N), generator=g)")
            of_key = out.given(out.fresh("ids"), "torch.randint(0, 2, (B, M), generator=g)")
            return f"{of_query}[:, None, :, None] == {of_key}[:, None, None, :]", "bij"
        case "chunks":
            return f"(i // {r}) == (j // {r})", "ij"
        case "prefix":
            return f"(j <= i + {o}) | (j < {r})", "ij"
        case "strided":
            return f"(i - j) % {r + 1} == 0", "ij"
        case "dense":
            heads = "H" if r % 2 else "1"
            return out.given(out.fresh("keep"), f"torch.rand(B, {heads}, N, M, generator=g) > 0.4"), "bhij"
        case "dense_buffer":
            return out.buffer("keep", f"torch.rand({LONGEST}, {LONGEST}, generator=g) > 0.3") + "[:N, :M]", "ij"
        case "triangle_and_padding":
            name = out.given(out.fresh("keep"), "torch.rand(B, 1, 1, M, generator=g) > 0.3")
            return f"({triangle(out, layer.form, o)[0]}) & {name}", "bij"
        case "window_or_prefix":
            return f"((j <= i) & (j > i - {r})) | (j < 1)", "ij"
        case "almost":
            return "(j <= i) ^ ((i == N // 2) & (j == M - 1))", "ij"
        case "own_rows":
            return "i != j", "ij"
        case "heads_differ":
            return "(j <= i + torch.arange(H)[:, None, None])[None]", "hij"
        case "narrow_ids":
            dtype = NARROW[r - 1]
            low, high = {"uint8": (0, 256), "int8": (-128, 128)}.get(dtype, (-(2**15), 2**15))
            name = out.given(out.fresh("ids"), f"torch.randint({low}, {high}, (B, M), generator=g).to(torch.{dtype})")
            asked = _ASKED[OFFSETS.index(o) % len(_ASKED)].format(name)
            return f"({asked})[:, None, None, :]", "bj"
        case "narrow_positions":
            dtype = NARROW[r - 1]
            return f"((i * 37).to(torch.{dtype}) - (j * 37).to(torch.{dtype})) < 50", "ij"
        case "cut_out":
            return f"(j < {r}) | (i > {r})", "ij"
    raise ValueError(layer.kind)


def triangle(out: Source, form: str, offset: str) -> tuple[str, str]:
    """j <= i + offset."""
    out.positions()
    o = f"({offset})"
    size = f"{LONGEST}, {LONGEST}"
    match form:
        case "tril":
            return f"torch.tril(torch.ones(N, M), {offset}) == 1", "ij"
        case "triu":
            return f"~torch.triu(torch.ones(N, M, dtype=torch.bool), {o} + 1)", "ij"
        case "arange_swapped":
            return f"i >= j - {o}", "ij"
        case "difference":
            return f"(j - i) < {o} + 1", "ij"
        case "buffer" if offset.lstrip("-").isdigit():
            return out.buffer("seen", f"torch.ones({size}).tril({offset}).bool()") + "[:N, :M]", "ij"
        case "buffer" if offset == "M - N" and out.program.sizes.kv_len >= out.program.sizes.q_len:
            return out.buffer("seen", f"torch.ones({size}).tril().bool()") + "[M - N : M, :M]", "ij"
        case "buffer_4d" if offset.lstrip("-").isdigit():
            name = out.buffer("seen", f"torch.ones({size}).tril({offset}).view(1, 1, {size})")
            return f"{name}[:, :, :N, :M] != 0", "bhij"
        case "cumulative":
            return f"torch.ones(N, M).cumsum(-1) <= torch.ones(N, M).cumsum(-2) + {o}", "ij"
        case "vmapped":
            seen = f"lambda a, b: b <= a + {o}"
            return f"torch.vmap(torch.vmap({seen}, (None, 0)), (0, None))(torch.arange(N), torch.arange(M))", "ij"
    return f"j <= i + {o}", "ij"


def apply(p: Program, layer: Masked, keeping: str) -> str:
    """The line that hides the scores where `keeping` does not hold."""
    fill = {"-inf": 'float("-inf")', "lowest": _LOWEST}.get(layer.fill, layer.fill)
    if p.dtype == "float16" and fill in ("-1e9", "-1e30"):
        fill = _LOWEST
    finite = "-1e4" if layer.fill == "-inf" and p.dtype == "float16" else "-1e9" if layer.fill == "-inf" else fill
    match layer.applied:
        case "where":
            return f"s = torch.where({keeping}, s, {fill})"
        case "where_not":
            return f"s = torch.where(~{keeping}, {fill}, s)"
        case "added":
            return f"s = s + torch.zeros_like({keeping}, dtype=s.dtype).masked_fill(~{keeping}, {fill})"
        case "added_numbers":
            return f"s = s + (1 - {keeping}.to(s.dtype)) * {finite}"
        case "times_and_added":
            return f"s = s * {keeping}.to(s.dtype) + {finite} * (1 - {keeping}.to(s.dtype))"
        case "in_place":
            return f"s.masked_fill_(~{keeping}, {fill})"
        case "indexed":
            return f"s[(~{keeping}).expand_as(s)] = {fill}"
        case "logarithm":
            return f"s = s + {keeping}.to(s.dtype).log()"
        case "subtracted":
            return f"s = s - (~{keeping}).to(s.dtype) * {'6e4' if p.dtype == 'float16' else '1e9'}"
        case "full_like":
            return f"s = torch.where({keeping}, s, torch.full_like(s, {fill}))"
        case "tensor_fill":
            return f"s = torch.where({keeping}, s, torch.tensor({fill}, dtype=s.dtype))"
    return f"s = s.masked_fill(~{keeping}, {fill})"


# ---- biases


def _biased(out: Source, layer: Biased) -> None:
    made, over = _bias(out, layer)
    term = out.term(made, over)
    sign = "-" if layer.subtracted else "+"
    out.say(f"s = {term} + s" if layer.first and not layer.subtracted else f"s = s {sign} {term}")


def _bias(out: Source, layer: Biased) -> tuple[str, str]:
    out.positions()
    shape = [size if axis in layer.over else "1" for axis, size in zip("bhij", "BHNM", strict=True)]
    has_all_heads = out.program.rank in ("four", "three")
    match layer.kind:
        case "argument":
            return out.argument(out.fresh("bias"), *shape), "bhij"
        case "detached":
            return out.argument(out.fresh("bias"), *shape) + ".detach()", "bhij"
        case "parameter":
            return out.parameter("bias", "H") + ".view(1, H, 1, 1)", "bhij"
        case "alibi":
            return "(0.5 ** (torch.arange(H) + 1)).view(1, H, 1, 1).to(s.dtype) * (j - i).to(s.dtype)", "bhij"
        case "table":
            return out.parameter("table", "7", "H") + "[(i - j).clamp(-3, 3) + 3].permute(2, 0, 1)[None]", "bhij"
        case "of_query":
            return "q.sum(-1, keepdim=True) * 0.3", "bhij"
        case "of_key" if has_all_heads and out.program.sizes.groups == 1:
            return "k.mean(-1)[:, :, None, :] * 0.3", "bhij"
        case "buffer":
            return out.buffer("bias", f"torch.randn({LONGEST}, {LONGEST}, generator=g).to(DTYPE)") + "[:N, :M]", "ij"
        case "whole_numbers":
            return "j % 3", "ij"
        case "distance":
            return "(i - j).abs().to(s.dtype) * -0.2", "ij"
    return "torch.cos((3 * i + j).to(s.dtype))", "ij"


# ---- functions of the score


def _modified(out: Source, kind: str) -> None:
    if kind == "temperature":
        out.say(f"s = s / {out.per_head(out.parameter('heat', 'H', positive=True))}")
        return
    made = {
        "softcap": "2.0 * torch.tanh(s / 2.0)", "clamp": "s.clamp(-2, 2)", "swish": "s * torch.sigmoid(s)",
        "floor": f"torch.max(s, torch.tensor({_LOWEST}, dtype=s.dtype))", "relu": "F.relu(s)", "abs": "s.abs()",
        "square": "s * s * 0.1", "half_sine": "torch.sin(s)", "softplus": "F.softplus(s)",
        "cut_in": "torch.where(s > 0, s, 0.1 * s)",
    }[kind]  # fmt: skip
    out.say(f"s = {made}")
