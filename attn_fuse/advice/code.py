"""Code: what to write by hand in place of an attention, as a call of SDPA or FlexAttention.

SDPA where it can say the attention, else FlexAttention with a `score_mod` and a `mask_mod`. On CUDA, FlexAttention
comes first for masks computed from positions, because it skips their hidden blocks. The code is run on operands like
the site's own before it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from torch.fx import GraphModule, Node

from attn_fuse.advice.calls import Written, flex, sdpa
from attn_fuse.advice.place import Place
from attn_fuse.advice.proof import wrong
from attn_fuse.advice.source import Source, source_of
from attn_fuse.attention.attention import Refusal
from attn_fuse.emit.builder import NotEmitted
from attn_fuse.expression import nodes as ex
from attn_fuse.graph.reach import reach
from attn_fuse.graph.region import Region, cut_at
from attn_fuse.graph.walk import is_product
from attn_fuse.report import Code
from attn_fuse.site import Recognised

Form: TypeAlias = Literal["sdpa", "flex"]
Judge: TypeAlias = Callable[[Region], "Refusal | Recognised"]
_FORMS: dict[Form, Callable[[Place], Written]] = {"sdpa": sdpa, "flex": flex}


def by_hand(
    original: GraphModule,
    found: Recognised,
    judged: Judge,
    values: Callable[[Region], Mapping[Node, Any]],
    forms: Sequence[Form] | None = None,
) -> Code | str:
    """The code for an attention, or why there is none.

    original: the whole graph, before writes in place became values.
    judged: reads a region that is cut at variables of the program. values: the example values of its leaves.
    forms: the calls to try, in order; by default those that suit the device.
    """
    between = {*reach(filter(is_product, found.region.nodes), lambda node: node.users.keys() & {*found.region.nodes})}
    source = source_of(found.region, original)
    if source is None:
        return "no line of the program computes its output"
    objections = []
    for form in forms or _usual(found):
        for moves in (True, False):
            try:
                place, made = _named(_FORMS[form], found, judged, source, between, moves)
            except NotEmitted as problem:
                objections.append(str(problem))
                break
            known = values(place.found.region)
            objection = wrong(place, made, known, learns=True)
            if objection and not found.facts.training and wrong(place, made, known, learns=False) is None:
                note = "for inference only: its gradients differ from the program's"
                objection, made = None, replace(made, notes=(*made.notes, note))
            if objection:
                objections.append(objection)
                break
            if (code := _code(place, made, between)) is not None:
                return code
    return "; ".join(dict.fromkeys(objections))


def _usual(found: Recognised) -> tuple[Form, ...]:
    attention, computed = found.attention, (ex.Index, ex.NonNegative, ex.IsZero)
    if found.facts.device.type != "cuda" or attention.dropout_p is not None or attention.mask.is_causal:
        return "sdpa", "flex"
    read = (*(part.keep for part in attention.mask.parts), *attention.biases)
    by_position = any(isinstance(part, computed) for x in read for part in ex.walk(x))
    return ("flex", "sdpa") if by_position else ("sdpa", "flex")


def _named(
    form: Callable[[Place], Written], found: Recognised, judged: Judge, source: Source, between: set[Node], moves: bool
) -> tuple[Place, Written]:
    """The call on the program's variables: nearest to the products, then also nearest to the scores.

    Masks keep their structure unless that leaves a tensor without a name.
    """
    tries: list[tuple[Place, Written]] = []
    for beside in (False, True):
        region = found.region
        for node in _nearest(region, source, between, beside):
            region = cut_at(region, node) or region
        again = found if region is found.region else judged(region)
        if isinstance(again, Refusal):
            continue
        place = Place(again, source, moves)
        tries.append((place, form(place)))
        if not place.unnamed:
            break
    if not tries:
        tries.append((place := Place(found, source, moves), form(place)))
    return min(tries, key=lambda tried: len(tried[0].unnamed))


def _nearest(region: Region, source: Source, between: set[Node], beside: bool) -> Iterator[Node]:
    """The named nodes nearest to the products, and if `beside` is set to the scores and weights, too."""
    inside = {*region.nodes} - between

    def above(node: Node) -> list[Node]:
        return node.all_input_nodes if node in inside and node not in source.names else []

    starts = [n for user in between if beside or is_product(user) for n in user.all_input_nodes]
    yield from (node for node in reach(starts, above) if node in inside and node in source.names)


def _code(place: Place, made: Written, between: set[Node]) -> Code | None:
    """The code; None if it would compute an expression twice."""
    source, moved = place.source, tuple(place.moved.values())
    call = f"{made.call}.clone()" if source.is_written_later() else made.call
    text = tuple(map(place.final, (*made.setup, *source.with_call(call).splitlines())))
    edit = source.edit(place.found.region, text, moved, between)
    lines = [n for first, last in edit.lines for n in range(first, last + 1)]
    if any(source.expressions[node].lineno not in lines for node in moved):
        return None
    notes = [*made.notes, *(f"in this run: {test}" for test in edit.conditions)]
    if held := place.held():
        notes.append(f"for what {', '.join(held)} {'holds' if len(held) == 1 else 'hold'} in this run")
    if edit.kept:
        them = "it" if len(edit.kept) == 1 else "them"
        notes.append(f"{', '.join(edit.kept)}: still computed as written, because the function reads {them} elsewhere")
    return Code(source.file, edit.lines, source.function, made.imports, text, tuple(notes))
