"""Calls: an attention as a call of `F.scaled_dot_product_attention` or of `flex_attention`."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field, replace

import torch

from attn_fuse.advice.place import MOVED, Place
from attn_fuse.advice.python import ATOM, Words, as_python, number
from attn_fuse.attention.mask import Causal, Documents, KeyPadding, MaskPart, Prefix, Window
from attn_fuse.emit.builder import NotEmitted
from attn_fuse.expression import nodes as ex
from attn_fuse.expression.nodes import Expr
from attn_fuse.graph.names import DROPOUT, op_name
from attn_fuse.kernels.kernel import beyond_masks_and_biases
from attn_fuse.kernels.sdpa import is_grouped, is_plain

# A mask of more characters gets a line of its own.
_LONG = 40
_TORCH = "import torch"
_FUNCTIONAL = "import torch.nn.functional as F"
_FLEX = "from torch.nn.attention.flex_attention import create_block_mask, flex_attention"
_NAMES: dict[type[MaskPart], str] = {
    Causal: "causal", Window: "window", Prefix: "prefix", Documents: "same_document", KeyPadding: "padding",
}  # fmt: skip


@dataclass(frozen=True)
class Written:
    """A call as text. setup: the lines before it. notes: what to know about it.

    undropped: the call without dropout.
    """

    imports: tuple[str, ...]
    setup: tuple[str, ...]
    call: str
    undropped: str
    notes: tuple[str, ...] = field(default=())


def sdpa(place: Place) -> Written:
    """The call of SDPA. Raises NotEmitted where SDPA cannot say the attention."""
    a, facts = place.attention, place.facts
    if (why := next(beyond_masks_and_biases(a), None)) is not None:
        raise NotEmitted(f"SDPA {why}")
    without = place.absent()
    query, key, value = place.operands(without)
    names = [text if _is_name(text) else name for text, name in ((query, "query"), (key, "key"))]
    words = place.words(without, *names)
    mask, scaled = _dense_mask(place, words, names[0]), place.scaled(names[0], words)
    setup = _ranges(f"{mask} {scaled}", *names)
    # A layout is written once.
    needed = " ".join((*setup, mask))
    own = [
        re.search(rf"\b{re.escape(name)}\b", needed) and text != name
        for text, name in zip((query, key), names, strict=True)
    ]
    setup = [f"{name} = {text}" for text, name, used in zip((query, key), names, own, strict=True) if used] + setup
    arguments = [
        scaled if own[0] or query == names[0] else place.scaled(query, words),
        names[1] if own[1] else key,
        value,
    ]
    if mask and len(mask) > _LONG:
        setup.append(f"attn_mask = {mask}")
        mask = "attn_mask"
    if mask:
        arguments.append(f"attn_mask={mask}")
    if a.mask.is_causal and not a.biases:
        arguments.append("is_causal=True")
    arguments += _scale(place.call.scale(), facts.head_dim)
    if is_grouped(a, facts):
        arguments.append("enable_gqa=True")
    dropout = [f"dropout_p={p}"] if (p := _dropout(place)) else []

    def call(*arguments: str) -> str:
        return _output(place, f"F.scaled_dot_product_attention({', '.join(arguments)})", words, without)

    made = _written(place, _FUNCTIONAL, setup, call(*arguments, *dropout), call(*arguments))
    if place.source.dropout or not _drops_in_training(place):
        return made
    note = "in inference give 0.0 for dropout_p" if dropout else "for inference only: it lacks the program's dropout"
    return replace(made, notes=(*made.notes, note))


def _dense_mask(place: Place, words: Words, query: str) -> str:
    """The mask and biases as one tensor; "" for no mask, or the causal mask alone."""
    a, facts = place.attention, place.facts
    if is_plain(a):
        return ""
    keeps = [part.keep for part in a.mask.parts]
    if not a.biases and a.mask.empty_rows != "mean":
        return as_python(functools.reduce(ex.And, keeps), words)
    bias: Expr = functools.reduce(_sum, a.biases) if a.biases else ex.Const(0.0)
    if keeps:
        fill = -torch.inf if a.mask.empty_rows != "mean" else torch.finfo(facts.dtype).min
        bias = _sum(bias, ex.Select(functools.reduce(ex.And, keeps), ex.Const(0.0), ex.Const(fill)))
    read = {place.example(part.leaf).dtype for part in ex.walk(bias) if isinstance(part, ex.Load | ex.Gather)}
    is_same = {dtype for dtype in read if dtype.is_floating_point} <= {facts.dtype}
    if is_same and (facts.dtype == torch.float32 or isinstance(bias, ex.Load)):
        return as_python(bias, words)
    return f"{as_python(bias, words, ATOM)}.to({query}.dtype)"


def _sum(a: Expr, b: Expr) -> Expr:
    """a + b, where choices by the same condition become one."""
    match a, b:
        case (ex.Const(0), x) | (x, ex.Const(0)):
            return x
        case ex.Select(one, x, y), ex.Select(other, z, w) if one == other:
            return ex.Select(one, _sum(x, z), _sum(y, w))
        case x, ex.Select(condition, ex.Const(0), ex.Const(fill)) if fill == -torch.inf:
            return ex.Select(condition, x, ex.Const(fill))
    return ex.Add(a, b)


def _ranges(text: str, query: str, key: str) -> list[str]:
    """The lines that make the positions in `text`."""
    sizes = (
        ("b_idx", query, "0", "[:, None, None, None]"), ("h_idx", query, "-3", "[:, None, None]"),
        ("q_idx", query, "-2", "[:, None]"), ("kv_idx", key, "-2", ""),
    )  # fmt: skip
    return [
        f"{name} = torch.arange({of}.size({place}), device={of}.device){more}"
        for name, of, place, more in sizes
        if re.search(rf"\b{name}\b", text)
    ]


def flex(place: Place) -> Written:
    """The call of FlexAttention. Raises NotEmitted where FlexAttention cannot say the attention."""
    a, facts = place.attention, place.facts
    if a.dropout_p is not None:
        raise NotEmitted("FlexAttention takes no dropout")
    if a.factor is not None:
        raise NotEmitted("FlexAttention takes no factor on the weights that differs from key to key")
    texts = dict(zip(("query", "key", "value"), place.operands(), strict=True))
    query, key = (texts[name] if _is_name(texts[name]) else name for name in ("query", "key"))
    words, whole = place.element_words(), place.words((), query, key)
    texts["query"] = place.scaled(texts["query"], whole) if a.score_mod is None else texts["query"]
    score, mask, options = _functions(place, words)
    functions = [*score, *mask, *(_BLANK if score or mask else ())]
    if mask:
        name, body = mask[-2].split()[1].partition("(")[0], mask[-1]
        of = [f"{query}.size({n})" if re.search(rf"\b{x}\b", body) else "None" for n, x in enumerate("bh")]
        sizes = f"{of[0]}, {of[1]}, {query}.size(-2), {key}.size(-2)"
        functions += [f"block_mask = create_block_mask({name}, {sizes}, device={query}.device)"]
    setup = _ranges(texts["query"], query, key)
    for name, used in (("query", query), ("key", key)):
        if used == name and re.search(rf"\b{name}\.", "\n".join(functions)):
            setup.append(f"{name} = {texts[name]}")
            texts[name] = name
    setup += functions
    options += _scale(place.call.scale() if a.score_mod is None else 1.0, facts.head_dim)
    if is_grouped(a, facts):
        options.append("enable_gqa=True")
    call = f"flex_attention({', '.join((*texts.values(), *options))}"
    if a.sink is None:
        call += ")"
    else:
        difference = "lse" if a.sink == ex.Const(0.0) else f"lse - {as_python(a.sink, place.words((), query), ATOM)}"
        setup += [f"out, lse = {call}, return_lse=True)"]
        call = f"(out * torch.sigmoid({difference})[..., None]).to(out.dtype)"
    call = _output(place, call, whole, ())
    made = _written(place, _FLEX, setup, call, call)
    note = "for inference only: FlexAttention takes no dropout"
    return replace(made, notes=(*made.notes, note)) if _drops_in_training(place) else made


_BLANK = ("",)


def _functions(place: Place, words: Words) -> tuple[list[str], list[str], list[str]]:
    """(the lines of the score function, those of the mask function, the arguments of the call)"""
    a, options = place.attention, list[str]()
    keeps = [part.keep for part in a.mask.parts]
    fills = a.mask.empty_rows == "mean"
    score, mask = _score(place, keeps if fills else []), list[str]()
    lines: list[str] = []
    if score != ex.Score():
        name = "softcap" if a.softcap is not None and not a.biases and not (fills and keeps) else "score_mod"
        lines = [*_BLANK, f"def {name}(score, b, h, q_idx, kv_idx):", f"    return {as_python(score, words)}"]
        options.append(f"score_mod={name}")
    if keeps and not fills:
        name = "_and_".join(dict.fromkeys(_NAMES.get(type(part), "mask") for part in a.mask.parts))
        name = name if name not in place.source.variables else f"{name}_mod"
        body = as_python(functools.reduce(ex.And, keeps), words)
        mask = [*_BLANK, f"def {name}(b, h, q_idx, kv_idx):", f"    return {body}"]
        options.append("block_mask=block_mask")
    return lines, mask, options


def _score(place: Place, fills: list[Expr]) -> Expr:
    """The final score, over a score that is scaled unless it goes through `score_mod`."""
    a = place.attention
    score: Expr = ex.Score()
    if a.score_mod is not None:
        score = ex.Mul(a.score_mod, a.scale) if a.scale != ex.Const(1.0) else a.score_mod
    if a.softcap is not None:
        score = ex.Mul(ex.Unary("tanh", ex.Div(score, ex.Const(a.softcap))), ex.Const(a.softcap))
    score = functools.reduce(ex.Add, a.biases, score)
    if fills:
        keep = functools.reduce(ex.And, fills)
        score = ex.Select(keep, score, ex.Const(torch.finfo(place.facts.dtype).min))
    return score


def _dropout(place: Place) -> str:
    """The probability of the dropout; "" without one."""
    p = place.attention.dropout_p
    return place.source.dropout or ("" if p is None else as_python(p, place.element_words()))


def _drops_in_training(place: Place) -> bool:
    """Whether the program has a dropout of more than 0 here, which may be off."""
    drops = (node for node in place.found.region.nodes if op_name(node) in DROPOUT)
    return any((*node.args[1:2], node.kwargs.get("p", 0.5))[0] != 0 for node in drops)


def _scale(scale: float, head_dim: int) -> list[str]:
    usual = head_dim**-0.5
    return [] if abs(scale - usual) < 1e-6 * usual else [f"scale={number(scale)}"]


def _output(place: Place, call: str, words: Words, without: tuple[int, ...]) -> str:
    if place.attention.out_scale is not None:
        call = f"({call} * {as_python(place.attention.out_scale, words, ATOM)})"
    return place.output(call, without)


def _written(place: Place, imported: str, setup: list[str], call: str, undropped: str) -> Written:
    text = "\n".join((*setup, call))
    notes = [f"{name} is {what}" for name, what in place.unnamed.items()]
    if place.attention.mask.empty_rows == "nan":
        notes.append("a fully masked query gives 0 or NaN, where the program gives NaN")
    if place.attention.mask.empty_rows == "mean":
        notes.append("a fully masked query gets another gradient")
    if place.is_of_these_sizes or re.search(
        r"(?<![\w.(-])([2-9]|\d\d+)(?![\w.])", re.sub(r"-\d\)|torch\.\w+", "", text)
    ):
        notes.append("its whole numbers are those of this run, and may be sizes")
    if setup and setup[0] == "":
        setup = setup[1:]
    return Written((*([_TORCH] if "torch." in text else []), imported), tuple(setup), call, undropped, tuple(notes))


def _is_name(text: str) -> bool:
    return not text.startswith(MOVED) and all(part.isidentifier() for part in text.split("."))
