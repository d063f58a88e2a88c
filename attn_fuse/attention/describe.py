"""An attention in words and as mathematics, for the report."""

from __future__ import annotations

import re
from collections.abc import Mapping

from attn_fuse.attention.attention import Attention, Refusal
from attn_fuse.attention.facts import Facts
from attn_fuse.expression import nodes as ex
from attn_fuse.expression.nodes import Expr
from attn_fuse.expression.text import Names, as_text


def in_words(attention: Attention, facts: Facts, proofs: tuple[str, ...]) -> dict[str, str]:
    """The recognised facts in words, by name. proofs: the buffers whose contents were used, in words."""
    words = {"heads": str(facts.heads)}
    if facts.kv_heads != facts.heads:
        words["kv_heads"] = str(facts.kv_heads)
    words["head_dim"] = str(facts.head_dim)
    if facts.value_dim != facts.head_dim:
        words["value_dim"] = str(facts.value_dim)
    words["q_len"] = _length("q_len", facts)
    words["kv_len"] = _length("kv_len", facts)
    words["mask"] = _mask(attention, proofs)
    words["scale"] = _scale(attention, facts)
    if attention.softcap is not None:
        words["softcap"] = f"{attention.softcap:g}"
    if attention.score_mod is not None:
        words["score_mod"] = attention.unread.reason if attention.unread is not None else ""
    if attention.sink is not None:
        words["sink"] = f"{attention.sink.value:g}" if isinstance(attention.sink, ex.Const) else "a tensor"
    if attention.factor is not None:
        words["factor"] = "the weights are multiplied by a factor for each key"
    if attention.out_scale is not None:
        words["output"] = "multiplied by the factor of the weights"
    if attention.biases:
        words["bias"] = f"{len(attention.biases)} added to the scores"
    words["dropout"] = _dropout(attention)
    words["dtype"] = str(facts.dtype).removeprefix("torch.")
    return words


def _length(name: str, facts: Facts) -> str:
    length = str(getattr(facts, name))
    return f"{length} on the first call, may change" if name in facts.symbolic else length


def _mask(attention: Attention, proofs: tuple[str, ...]) -> str:
    if not attention.mask.parts:
        soft = " & ".join(map(str, attention.mask.parts_if_others_seen))
        return f"{soft}, added as a bias; a fully masked query attends to every key" if soft else "none"
    structure = " & ".join(map(str, attention.mask.parts))
    rule = next((part.rule for part in attention.mask.parts if part.rule), "")
    if not rule:
        return structure
    because = " and ".join(proofs) if proofs else "the positions that the program compares"
    return f"{structure}, since query i sees key {rule} by {because}"


def _scale(attention: Attention, facts: Facts) -> str:
    if not isinstance(attention.scale, ex.Const):
        return "a tensor of the program, multiplied with the query"
    scale = float(attention.scale.value)
    usual = facts.head_dim**-0.5
    return f"{scale:.6g}" + (f" = 1 / sqrt({facts.head_dim})" if abs(scale - usual) < 1e-6 * usual else "")


def _dropout(attention: Attention) -> str:
    match attention.dropout_p:
        case None:
            return "none"
        case ex.Const(p):
            return f"{p:g}"
    return "a probability known only at run time"


def plain(source: str) -> str:
    """Dynamo's name for a tensor, as a program spells it, such as "layers.0.mask"."""
    source = source.replace(".__dict__['_modules']", "._modules")
    source = re.sub(r"\._(?:modules|buffers|parameters)\['([^']+)'\]", r".\1", source)
    return re.sub(r"L\['(self'\]|args'\]\[0\])\.", "", source, count=1)


# The max size of an expression in a report, in nodes and in characters.
_MOST = 4000


def printed(result: Attention | Refusal, element: Expr, leaves: dict[int, str]) -> str:
    """The mathematics of an attention, or of the output of a refused site; "" if too large to print.

    element: an element of the output. leaves: names by number.
    """
    if ex.size(element) > _MOST:
        return ""
    if isinstance(result, Refusal):
        text = f"out = {as_text(element, Names(leaves=leaves))}"
    else:
        letters: dict[int, str] = {}
        for letter, operand in (("q", result.query), ("k", result.key), ("v", result.value)):
            if isinstance(operand, ex.Load):
                letters[operand.leaf] = letters.get(operand.leaf, "") + letter
        text = in_mathematics(result, leaves | letters)
    return text if len(text) <= _MOST else f"{text[:_MOST]} ..."


def in_mathematics(attention: Attention, leaves: Mapping[int, str]) -> str:
    """The formulas of a score and of an output element, over b, h, g, i, j, e, d. leaves: names by number."""
    axes = attention.axes
    roles = (
        ("b", axes.batch), ("h", axes.kv_heads), ("g", axes.groups), ("i", axes.query), ("j", axes.key),
        ("e", axes.inner), ("d", axes.value),
    )  # fmt: skip
    symbols = {
        symbol: letter if len(group) == 1 else f"{letter}{n}"
        for letter, group in roles
        for n, symbol in enumerate(group)
    }
    plain = Names(symbols, leaves)
    product = ex.Contract(axes.inner, attention.query, attention.key, attention.query_dtype)
    names = Names(symbols, leaves, as_text(product, plain))
    heads, keys = (",".join(symbols[s] for s in group) for group in ((*attention.head_axes,), axes.key))
    rows = ",".join(filter(None, (*(symbols[s] for s in axes.batch), heads, *(symbols[s] for s in axes.query))))
    weights = f"softmax_{keys}(score)"
    if attention.sink is not None:
        weights = f"softmax_{keys}(score, sink {as_text(attention.sink, plain)})"
    for factor in (attention.factor, attention.out_scale):
        weights = weights if factor is None else f"({as_text(factor, plain)})·{weights}"
    if attention.dropout_p is not None:
        weights = f"dropout({weights}, {as_text(attention.dropout_p, plain)})"
    columns = ",".join(symbols[s] for s in axes.value)
    return (
        f"score[{','.join(filter(None, (rows, keys)))}] = {as_text(attention.score, names)}\n"
        f"out[{','.join(filter(None, (rows, columns)))}] = sum_{keys}({weights}·{as_text(attention.value, plain)})"
    )
