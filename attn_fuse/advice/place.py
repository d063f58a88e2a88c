"""Place: an attention cut at the variables of the program, with a name for each tensor that it reads."""

from __future__ import annotations

import ast
import builtins
import itertools
import keyword
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from attn_fuse.advice.layout import written
from attn_fuse.advice.python import ATOM, Words, as_python
from attn_fuse.advice.source import Source
from attn_fuse.attention.axes import position
from attn_fuse.attention.describe import plain
from attn_fuse.emit.builder import NotEmitted, size_expr
from attn_fuse.emit.call import Call
from attn_fuse.expression import nodes as ex
from attn_fuse.graph.location import locate
from attn_fuse.graph.names import value_of
from attn_fuse.graph.region import alone
from attn_fuse.site import Recognised
from attn_fuse.torch_internals import source_name

# The beginning of names that stand for the program's expressions.
MOVED = "_moved_"
# The arguments of FlexAttention's functions.
_ARGUMENTS = ("score", "b", "h", "q_idx", "kv_idx")


class Place:
    """Writes the operands, expressions and output of one attention as Python.

    moves: whether to write the program's expressions where it has no names.
    used: the names of the leaves read so far, by number. moved: names that stand for the program's expressions.
    unnamed: names made up, with a description.
    """

    def __init__(self, found: Recognised, source: Source, moves: bool) -> None:
        self.found, self.source = found, source
        self.moved: dict[str, Node] = {}
        self._moves = moves
        self._views: list[str] = []
        self.attention, self.facts = found.attention, found.facts
        module, inside = alone(found.region)
        self.call = _Call(inside, replace(found.attention, out_scale=None), found.facts, found.mode)
        self.unnamed: dict[str, str] = {}
        self.used: dict[int, str] = {}
        self._inside = inside
        self._graph = module.graph

    def as_written(self) -> GraphModule:
        """The region as a graph of its own."""
        return alone(self.found.region)[0]

    def example(self, leaf: int) -> Any:
        """The example value of a leaf, given its number."""
        return value_of(self.found.region.leaves[leaf])

    # ---- tensors

    def name(self, leaf: int) -> str:
        """The name of a leaf, given its number."""
        if leaf not in self.used:
            node = self.found.region.leaves[leaf]
            name = self.source.names.get(node) or self._attribute(node)
            if not name and self._moves and node in self.source.expressions:
                name = f"{MOVED}{leaf}_"
                self.moved[name] = node
            self.used[leaf] = name or self._made_up(leaf, node)
        detached = self.found.region.leaves[leaf] in self.found.region.detached
        return f"{self.used[leaf]}.detach()" if detached else self.used[leaf]

    def held(self) -> list[str]:
        """The names of the tensors on whose contents in this run the attention rests."""
        proofs = ((leaf, proof) for leaf, proof in self.found.proofs.items() if proof in self.found.used)
        names = (self.source.names.get(leaf) or self._attribute(leaf) or plain(proof.source) for leaf, proof in proofs)
        return sorted(dict.fromkeys(names))

    def _attribute(self, node: Node) -> str:
        """The attribute of `self` that holds `node`; "" for none."""
        top = self.found.region.scope.top(node)
        path = plain(source_name(top)) if top is not None and top.op == "placeholder" else ""
        module = self.source.module and f"{self.source.module}."
        attribute = path.removeprefix(module)
        is_own = path.startswith(module) and all(part.isidentifier() for part in attribute.split("."))
        return f"self.{attribute}" if is_own and "self" in self.source.variables else ""

    def _made_up(self, leaf: int, node: Node) -> str:
        operands = (("query", self.attention.query), ("key", self.attention.key), ("value", self.attention.value))
        roles = [role for role, x in operands if any(isinstance(y, ex.Load) and y.leaf == leaf for y in ex.walk(x))]
        base = re.sub(r"^l_|_\d*$", "", node.name) or "tensor"
        name = roles[0] if len(roles) == 1 else base
        taken = {*self.used.values(), *self.source.variables, *_ARGUMENTS, *dir(builtins), *keyword.kwlist}
        name = next(one for one in (name, *(f"{name}_{n}" for n in range(2, 100))) if one not in taken)
        value, where = value_of(node), locate(node)
        shape = f"a tensor {[*value.shape]}" if isinstance(value, torch.Tensor) else "a number"
        self.unnamed[name] = f"{shape}, made on line {where.line}: {where.code}" if where.line else shape
        return name

    def operands(self, without: tuple[int, ...] = ()) -> tuple[str, str, str]:
        """Query, key and value. without: the dimensions to leave out, of batch (0) and heads (1)."""
        with self._graph.inserting_before(self._inside.output):
            made = (self.call.query(scaled=False), self.call.key(), self.call.value())
            query, key, value = self._views = [self._text(self._reduced(node, without)) for node in made]
        return query, key, value

    @property
    def is_of_these_sizes(self) -> bool:
        """Whether views of the operands or the output hold for the sizes and loop steps of this run only."""
        return any(re.search(r"unflatten\(|\[[^\[\]]*\d", view) for view in self._views)

    def absent(self) -> tuple[int, ...]:
        """The dimensions of batch and heads that the program's own operands do not have.

        SDPA takes operands without them. A program with a batch of 1 may have the dimension: the shorter text decides.
        """
        a = self.attention
        missing = [place for place, axes in enumerate((a.axes.batch, a.head_axes)) if not axes]
        choices = [chosen for n in range(len(missing) + 1) for chosen in itertools.combinations(missing, n)]
        return min(choices, key=lambda chosen: len("".join(self.operands(chosen))))

    def scaled(self, query: str, words: Words) -> str:
        """The query times the part of the scale that a kernel does not take."""
        match self.call.factor_of_query:
            case ex.Const(1.0):
                return query
            case ex.Const(-1.0):
                return f"-{query}"
            case ex.Div(ex.Const(1 | 1.0), x):
                return f"{query} / {as_python(x, words, ATOM)}"
            case x:
                return f"{query} * {as_python(x, words, ATOM)}"

    def output(self, call: str, without: tuple[int, ...]) -> str:
        """The output of the region, from the text of a call that gives [batch, heads, q_len, value_dim].

        without: as for `operands`.
        """
        a = self.attention
        with self._graph.inserting_before(self._inside.output):
            sizes = [self.call.size(a.length(axes)) for axes in (a.axes.batch, a.head_axes, a.axes.query, a.axes.value)]
            out = self.call.node(torch.empty, sizes, dtype=self.facts.dtype, device=self.facts.device)
            whole = base = self._reduced(out, without)
            for place in without:
                whole = self.call.node("unsqueeze", whole, place)
            made = self.call.as_written(whole)
        self._views.append(written(made, {base: ""}))
        return written(made, {base: call})

    def _reduced(self, node: Node, without: tuple[int, ...]) -> Node:
        for place in reversed(without):
            node = self.call.node("select", node, place, 0)
        return node

    def _text(self, node: Node) -> str:
        names = {leaf: n for n, leaf in enumerate(self._inside.leaves)}
        base = node
        while base not in names:
            if not base.all_input_nodes:
                raise NotEmitted("an operand is made in place")
            base = base.all_input_nodes[0]
        return written(node, {base: self.name(names[base])})

    def final(self, text: str) -> str:
        """`text` with the program's expressions in place of the names that stand for them."""
        for name, node in self.moved.items():
            written = self.source.expressions[node]
            is_atom = isinstance(written, ast.Call | ast.Subscript | ast.Attribute)
            text = text.replace(name, ast.unparse(written) if is_atom else f"({ast.unparse(written)})")
        return text

    # ---- expressions

    def words(self, without: tuple[int, ...], query: str, key: str = "") -> Words:
        """The words for tensors that broadcast to the scores.

        without: as for `operands`. query, key: their names; without a key for tensors that do not depend on it.
        """
        lengths = {"q_idx": f"{query}.size(-2)", "kv_idx": f"{key}.size(-2)"}
        slots = [
            (position(axes, self.attention.space), lengths.get(name, ""))
            for place, (name, axes) in enumerate(self._groups("b_idx", "h_idx"))
            if place not in without and (key or name != "kv_idx")
        ]
        return Words(self._symbols("b_idx", "h_idx"), self._element, lambda load: self._aligned(load, slots))

    def element_words(self) -> Words:
        """The words for single elements, as in the functions of FlexAttention."""

        def element(leaf: int, index: list[str]) -> str:
            if (name := self.name(leaf)) in _ARGUMENTS:
                raise NotEmitted(f"a tensor is called {name}, like an argument of FlexAttention's functions")
            return self._element(leaf, index)

        return Words(self._symbols("b", "h"), element)

    def _groups(self, batch: str, head: str) -> list[tuple[str, tuple[sympy.Symbol, ...]]]:
        a = self.attention
        return [(batch, a.axes.batch), (head, a.head_axes), ("q_idx", a.axes.query), ("kv_idx", a.axes.key)]

    def _symbols(self, batch: str, head: str) -> dict[sympy.Symbol, str]:
        """The texts of index symbols; a symbol that shares its dimension is a digit of the position."""
        space, texts = self.attention.space, self._sizes()
        for name, axes in self._groups(batch, head):
            stride = sympy.Integer(1)
            for place, axis in reversed([*enumerate(axes)]):
                text = name if stride == 1 else f"{name} // {stride}"
                if place > 0:
                    text = f"({text}) % {space.sizes[axis]}" if stride != 1 else f"{text} % {space.sizes[axis]}"
                texts[axis] = text
                stride *= space.sizes[axis]
        return texts

    def _sizes(self) -> dict[sympy.Symbol, str]:
        found: dict[sympy.Symbol, str] = {}
        for node in self.found.region.leaves:
            value = value_of(node)
            name = self.source.names.get(node)
            if name and isinstance(value, torch.Tensor):
                for place, size in enumerate(value.shape):
                    if isinstance(size, torch.SymInt) and (symbol := size_expr(size)).is_Symbol:
                        found.setdefault(symbol, f"{name}.size({place})")
            elif name and isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
                found.setdefault(value.node.expr, name)
        return found

    def _element(self, leaf: int, index: list[str]) -> str:
        return f"{self.name(leaf)}[{', '.join(index)}]" if index else self.name(leaf)

    def _aligned(self, load: ex.Load, slots: Sequence[tuple[sympy.Expr, str]]) -> str:
        """The tensor of `load`, indexed to broadcast over `slots`; "" where no index does that.

        slots: the position along each dimension, and the text of its length or "".
        """
        entries: list[str] = []
        ones, done = 0, 0
        for index, length in zip(load.index, self.call.lengths(load.leaf), strict=True):
            if index == 0 and length == 1:
                ones += 1
                continue
            at, entry = next(self._entries(index, length, slots, done), (len(slots), ""))
            if not entry:
                return ""
            entries += [*_filled(ones, at - done, not entries), entry]
            ones, done = 0, at + 1
        entries += _filled(ones, len(slots) - done, not entries)
        while entries and entries[-1] == ":":
            entries.pop()
        return f"{self.name(load.leaf)}[{', '.join(entries)}]" if entries else self.name(load.leaf)

    def _entries(
        self, index: sympy.Expr, length: sympy.Expr, slots: Sequence[tuple[sympy.Expr, str]], done: int
    ) -> Iterator[tuple[int, str]]:
        """(slot, entry) where `index` runs along a slot, as a whole dimension or a slice of it."""
        space = self.attention.space
        for n, (slot, text) in enumerate(slots[done:], done):
            offset, size = sympy.expand(index - slot), sympy.Mul(*(space.sizes[s] for s in slot.free_symbols))
            if slot == 0 or not offset.is_Integer:
                continue
            if offset == 0:
                yield n, ":" if space.same_size(length, size) else f":{text}" if text else ""
            elif text and space.same_size(length, size + offset):
                yield n, f"-{text}:"


def _filled(ones: int, gap: int, is_first: bool) -> list[str]:
    """The index entries for `gap` missing dimensions, of which `ones` are there with size 1."""
    entries = ["0"] * max(0, ones - gap) + [":"] * min(ones, gap) + ["None"] * max(0, gap - ones)
    if is_first:
        while entries and entries[0] == "None":
            entries.pop(0)
    return entries


class _Call(Call):
    def _with_strides(self, out: Node, original: torch.Tensor) -> Node:
        return out
