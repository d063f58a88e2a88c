"""How a model's forward uses its arguments: which layer each reaches, how many dimensions it is unpacked into.

The code is read, not run, from forward through the methods and modules that it hands an argument on to.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from attn_fuse.explain.reading.stages import Staged

# How many calls deep an argument is followed.
DEEPEST = 8
# Methods that leave a tensor's shape as it is.
SAME_SHAPE = {"to", "float", "long", "int", "half", "bool", "contiguous", "clone", "detach", "cuda", "cpu", "type_as"}
SAME_SHAPE |= {"masked_fill", "type", "double", "requires_grad_", "clamp", "cpu"}
# What holds modules in order.
LISTS = (nn.ModuleList, nn.Sequential, list, tuple)
PASSED_OVER = (nn.Dropout, nn.Identity, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh)
NOTED = r"\b{name}`?\s*(?:\([^)\n]*\))?\s*[:=\-,][^\n\[(]*?(?:[\[(])\s*([A-Za-z_*\d]+(?:\s*[,x]\s*[\w*/+ -]+)+)\s*[\])]"


@dataclass(frozen=True)
class Use:
    """What is known of an argument of forward.

    layer: the first layer that takes it, or the weight that it is multiplied by. rank: how many dimensions it has;
    least: how many at least. names: those of its dimensions, where they are unpacked into names.
    items: of what each item of it must be, where it is a list. keys: the same by key, where it is a dict.
    attributes: names that are read of it and that tensors lack. is_truth: whether it is inverted, as a mask is.
    hides_keys: whether a layer takes it for its mask of padded keys.
    """

    layer: nn.Module | Tensor | None = None
    rank: int | None = None
    least: int = 0
    names: tuple[str, ...] = ()
    items: Use | None = None
    keys: Mapping[str, Use] = field(default_factory=dict)
    attributes: frozenset[str] = frozenset()
    is_truth: bool = False
    hides_keys: bool = False

    @property
    def is_vectors(self) -> bool:
        """Whether it is known to hold floating-point numbers, by the layer that takes it."""
        return self.layer is not None and not isinstance(self.layer, nn.Embedding)

    def also(self, other: Use) -> Use:
        """Both together; of what both say, this one's."""
        keys = dict(self.keys)
        for key, use in other.keys.items():
            keys[key] = keys[key].also(use) if key in keys else use
        items = self.items.also(other.items) if self.items and other.items else self.items or other.items
        return Use(
            self.layer if self.layer is not None else other.layer,
            self.rank if self.rank is not None else other.rank,
            max(self.least, other.least),
            self.names or other.names,
            items,
            keys,
            self.attributes | other.attributes,
            self.is_truth or other.is_truth,
            self.hides_keys or other.hides_keys,
        )


def uses_of(model: nn.Module) -> dict[str, Use]:
    """How the forward of `model` uses each of its arguments, by name; nothing where its code cannot be read."""
    if isinstance(model, Staged):
        methods = [(model.model, getattr(type(model.model), stage), own) for stage, _, own in model.plan]
    else:
        methods = [(model, type(model).forward, tuple(inspect.signature(model.forward).parameters))]
    found: dict[str, Use] = {}
    for owner, function, names in methods:
        for name, use in _Reading(owner, function, {name: (name, 0) for name in names}, {}, 0).read().items():
            found[name] = found.get(name, Use()).also(use)
    for name in [name for _, _, names in methods for name in names]:
        rank = _noted_rank(name, model)
        if rank is not None:
            found[name] = found.get(name, Use()).also(Use(rank=rank))
    return found


def _noted_rank(name: str, model: nn.Module) -> int | None:
    # How many dimensions a docstring names for the argument, as in "x: (B, N, C)".
    for text in (type(model).forward.__doc__, type(model).__doc__):
        if noted := re.search(NOTED.format(name=re.escape(name)), text or ""):
            return len(re.split(r"\s*[,x]\s*", noted[1].strip()))
    return None


# What a local name stands for: an argument, with how many dimensions more than it; or the name and an item of it.
_Alias = tuple[str, int]


class _Reading:
    # Reads one function. aliases: local names that stand for arguments. modules: local names that stand for modules.

    def __init__(
        self,
        owner: nn.Module,
        function: Any,
        aliases: dict[str, _Alias],
        modules: dict[str, object],
        depth: int,
    ) -> None:
        self.owner, self.aliases, self.modules, self.depth = owner, dict(aliases), dict(modules), depth
        self.function = function
        self.found: dict[str, Use] = {}
        # Names bound to an item of a list argument, and to one of a dict argument with its key.
        self.items: dict[str, str] = {}
        self.keyed: dict[str, tuple[str, str]] = {}

    def read(self) -> dict[str, Use]:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(self.function)))).body[0]
        except (OSError, TypeError, SyntaxError, IndexError):
            return self.found
        if isinstance(tree, ast.FunctionDef):
            self._block(tree.body)
        return self.found

    def _add(self, name: str, use: Use) -> None:
        if name in self.keyed:
            name, key = self.keyed[name]
            use = Use(keys={key: use})
        elif name in self.items:
            use, name = Use(items=use), self.items[name]
        elif name in self.aliases:
            name, added = self.aliases[name]
            rank = use.rank - added if use.rank is not None else None
            if added and isinstance(use.layer, nn.Module):
                # The layer takes more dimensions than the argument has: it says only how many.
                inner = _rank_at(use.layer)
                use, rank = replace(use, layer=None), inner - added if inner is not None else rank
            use = replace(use, rank=rank, least=max(use.least - added, 0), names=() if added else use.names)
        else:
            return
        self.found[name] = self.found.get(name, Use()).also(use)

    def _block(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign([target], value):
                self._expression(value)
                self._assign(target, value)
            case ast.AnnAssign(target, _, ast.expr() as value):
                self._expression(value)
                self._assign(target, value)
            case ast.For(target, iterated, body, orelse):
                self._expression(iterated)
                self._loop(target, iterated)
                self._block([*body, *orelse])
            case ast.If(test, body, orelse) | ast.While(test, body, orelse):
                self._expression(test)
                before = dict(self.aliases)
                self._block([*body, *orelse])
                # What a branch binds anew, as padding where it is needed, is the argument still where it is not taken.
                self.aliases.update(before)
            case ast.With(items, body):
                for item in items:
                    self._expression(item.context_expr)
                self._block(body)
            case ast.FunctionDef() | ast.ClassDef():
                return
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self._expression(child)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple):
            names = tuple(t.id if isinstance(t, ast.Name) else "_" for t in target.elts)
            source = _shape_of(value)
            if source is not None and not any(isinstance(t, ast.Starred) for t in target.elts):
                self._add(source, Use(rank=len(names), names=tuple(n.strip("_").lower() for n in names)))
            elif isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
                for one, given in zip(target.elts, value.elts, strict=True):
                    self._assign(one, given)
                return
            for name in names:
                self._forget(name)
        elif isinstance(target, ast.Name):
            alias = self._alias_of(value)
            item = self._item_of(value)
            module = self._module(value)
            keyed = self._keyed_by(value)
            self._forget(target.id)
            if keyed is not None:
                self.keyed[target.id] = keyed
            if alias is not None:
                self.aliases[target.id] = alias
            elif item is not None:
                self.items[target.id] = item
            elif module is not None:
                self.modules[target.id] = module

    def _forget(self, name: str) -> None:
        for table in (self.aliases, self.items, self.modules, self.keyed):
            table.pop(name, None)

    def _alias_of(self, value: ast.expr) -> _Alias | None:
        # The argument that `value` is, up to its dtype, device and dimensions of size one.
        match value:
            case ast.Name(name):
                return self.aliases.get(name)
            case ast.Call(ast.Attribute(_, "dropout"), [inner, *_]):
                return self._alias_of(inner)
            case ast.Call(called, [inner]) if isinstance(self._module(called), PASSED_OVER):
                return self._alias_of(inner)
            case ast.Call(ast.Attribute(inner, method), args):
                alias = self._alias_of(inner)
                if alias is None or method in SAME_SHAPE:
                    return alias
                if method == "unsqueeze" and len(args) == 1:
                    return alias[0], alias[1] + 1
            case ast.IfExp(_, body, orelse):
                return self._alias_of(body) or self._alias_of(orelse)
        return None

    def _item_of(self, value: ast.expr) -> str | None:
        match value:
            case ast.Subscript(ast.Name(name), ast.Constant(int()) | ast.Name()) if name in self.aliases:
                return None if isinstance(value.slice, ast.Constant) else self.aliases[name][0]
        return None

    def _keyed_by(self, value: ast.expr) -> tuple[str, str] | None:
        match value:
            case ast.Subscript(ast.Name(name), ast.Constant(str() as key)) if name in self.aliases:
                return self.aliases[name][0], key
        return None

    def _loop(self, target: ast.expr, iterated: ast.expr) -> None:
        # `for a, b in zip(x, self.layers)`, `for i, x in enumerate(xs)`, `for layer in self.layers`.
        match target, iterated:
            case ast.Tuple([_, inner]), ast.Call(ast.Name("enumerate"), [source, *_]):
                self._loop(inner, source)
            case ast.Tuple(elements), ast.Call(ast.Name("zip"), sources) if len(elements) == len(sources):
                for element, source in zip(elements, sources, strict=True):
                    self._loop(element, source)
            case ast.Name(name), ast.Name(source) if source in self.aliases:
                self.items[name] = self.aliases[source][0]
                self.found[self.aliases[source][0]] = self.found.get(self.aliases[source][0], Use()).also(
                    Use(items=Use())
                )
            case ast.Name(name), _:
                module = self._module(iterated)
                if isinstance(module, LISTS) and len(module):
                    self.modules[name] = module[0]

    def _module(self, node: ast.expr) -> object | None:
        # The module, parameter or list of modules that an expression names.
        match node:
            case ast.Name("self"):
                return self.owner
            case ast.Name(name):
                return self.modules.get(name)
            case ast.Attribute(inner, name):
                holder = self._module(inner)
                value = getattr(holder, name, None) if isinstance(holder, (nn.Module, nn.ModuleDict)) else None
                return value if isinstance(value, (nn.Module, Tensor)) or _is_list_of_modules(value) else None
            case ast.Subscript(inner, key):
                holder = self._module(inner)
                if isinstance(holder, LISTS) and len(holder):
                    known = isinstance(key, ast.Constant) and isinstance(key.value, int) and key.value < len(holder)
                    return holder[int(ast.literal_eval(key)) if known else 0]
                if isinstance(holder, nn.ModuleDict) and isinstance(key, ast.Constant) and str(key.value) in holder:
                    return holder[str(key.value)]
        return None

    def _expression(self, node: ast.expr) -> None:
        for inner in ast.walk(node):
            match inner:
                case ast.ListComp(_, generators) | ast.GeneratorExp(_, generators):
                    for generator in generators:
                        self._loop(generator.target, generator.iter)
                case ast.Call():
                    self._call(inner)
                case ast.Subscript(value, ast.Tuple(parts)):
                    self._indexed(value, parts)
                case ast.Subscript(ast.Name(name), ast.Constant(str() as key)):
                    self._add(name, Use(keys={key: Use()}))
                case ast.Subscript(ast.Attribute(ast.Name(name), "shape"), ast.Constant(int() as axis)):
                    self._add(name, Use(least=axis + 1 if axis >= 0 else -axis))
                case ast.UnaryOp(ast.Invert(), ast.Name(name)):
                    self._add(name, Use(is_truth=True))
                case ast.Attribute(ast.Name(name), attribute) if not hasattr(Tensor, attribute):
                    self._add(name, Use(attributes=frozenset((attribute,))))
                case ast.BinOp(left, ast.MatMult(), right):
                    self._product(left, right, None)

    def _indexed(self, value: ast.expr, parts: Sequence[ast.expr]) -> None:
        alias = _name_of(value)
        kept = [p for p in parts if not (isinstance(p, ast.Constant) and p.value is None)]
        if alias is not None:
            dotted = any(isinstance(p, ast.Constant) and p.value is ... for p in kept)
            self._add(alias, Use(least=len(kept) - dotted))

    def _product(self, left: ast.expr, right: ast.expr, rank: int | None) -> None:
        weight = self._module(right)
        alias = self._alias_of(left)
        if isinstance(weight, Tensor) and weight.dim() >= 2 and alias is not None:
            self.found[alias[0]] = self.found.get(alias[0], Use()).also(Use(layer=weight, rank=rank))

    def _call(self, node: ast.Call) -> None:
        match node:
            case ast.Call(ast.Attribute(ast.Name(name), called), args) if name in self.aliases or name in self.items:
                self._add(name, _use_by_method(called, args))
            case ast.Call(ast.Attribute(inner, called), args) if (alias := self._alias_of(inner)) is not None:
                use = _use_by_method(called, args)
                rank = use.rank - alias[1] if use.rank is not None else None
                found = Use(rank=rank, least=max(use.least - alias[1], 0))
                self.found[alias[0]] = self.found.get(alias[0], Use()).also(found)
            case ast.Call(ast.Attribute(_, "mm" | "matmul" as product), [left, right, *_]):
                self._product(left, right, 2 if product == "mm" else None)
            case ast.Call(ast.Attribute(ast.Name(), _), [ast.Name(name), *_], keywords) if name in self.aliases:
                for keyword in keywords:
                    if keyword.arg == "dim" and (axis := _number(keyword.value)) is not None:
                        self._add(name, Use(least=axis + 1 if axis >= 0 else -axis))
            case ast.Call(ast.Name("rearrange") | ast.Attribute(_, "rearrange"), [given, ast.Constant(str() as text)]):
                names = re.findall(r"\([^)]*\)|\S+", text.partition("->")[0])
                if (given_name := _name_of(given)) is not None and "..." not in names:
                    self._add(given_name, Use(rank=len(names), names=tuple(names)))
        module = self._module(node.func)
        if isinstance(module, nn.Module) and module is not self.owner:
            self._into(module, type(module).forward, node, module)
        elif isinstance(node.func, ast.Attribute):
            owner = self._module(node.func.value)
            method = getattr(type(owner), node.func.attr, None) if isinstance(owner, nn.Module) else None
            is_own = inspect.isfunction(method) and not method.__module__.startswith("torch.")
            if isinstance(owner, nn.Module) and is_own:
                self._into(owner, method, node, None)

    def _into(self, owner: nn.Module, function: Any, node: ast.Call, layer: nn.Module | None) -> None:
        # What a module, or a method, makes of the arguments that it is handed on.
        while isinstance(layer, nn.Sequential) and type(layer).forward is nn.Sequential.forward and len(layer):
            layer = next((one for one in layer if not isinstance(one, PASSED_OVER)), layer[0])
        if isinstance(layer, PASSED_OVER):
            return
        if layer is not None:
            owner, function = layer, type(layer).forward
        if layer is not None and type(layer).__module__.startswith("torch."):
            for inner, given in _bound(function, node):
                if inner.endswith("key_padding_mask") and (name := _name_of(given)) is not None:
                    self._add(name, Use(rank=2, hides_keys=True))
            for given in node.args[:1]:
                if (keyed := self._keyed_by(given)) is not None:
                    held, key = keyed
                    self.found[held] = self.found.get(held, Use()).also(Use(keys={key: Use(layer=layer)}))
                elif (name := _name_of(given)) is not None:
                    self._add(name, Use(layer=layer))
                elif (alias := self._alias_of(given)) is not None:
                    rank = _rank_at(layer)
                    use = Use(layer=layer if not alias[1] else None, rank=rank - alias[1] if rank else None)
                    self.found[alias[0]] = self.found.get(alias[0], Use()).also(use)
            return
        if self.depth >= DEEPEST:
            return
        passed = dict(_bound(function, node))
        aliases = {inner: alias for inner, given in passed.items() if (alias := self._alias_of(given)) is not None}
        items = {i: self.items[n] for i, g in passed.items() if (n := _name_of(g)) is not None and n in self.items}
        if not aliases and not items:
            return
        reading = _Reading(owner, function, aliases, {}, self.depth + 1)
        reading.items = items
        for name, use in reading.read().items():
            self.found[name] = self.found.get(name, Use()).also(use)


def _is_list_of_modules(value: object) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(one, nn.Module) for one in value)


def _name_of(node: ast.expr) -> str | None:
    # The name of `x`, and of `x.float()` and the like.
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SAME_SHAPE:
        node = node.func.value
    return node.id if isinstance(node, ast.Name) else None


def _shape_of(value: ast.expr) -> str | None:
    # The name whose sizes `value` gives.
    match value:
        case ast.Attribute(ast.Name(name), "shape") | ast.Call(ast.Attribute(ast.Name(name), "size"), []):
            return name
        case ast.Call(ast.Name("list" | "tuple"), [inner]):
            return _shape_of(inner)
    return None


def _use_by_method(method: str, args: Sequence[ast.expr]) -> Use:
    # What calling a method says of the dimensions of a tensor.
    axes = [_number(a) for a in args]
    first = axes[0] if axes else None
    if method == "permute" and len(args) > 1:
        return Use(rank=len(args))
    if method in ("repeat", "expand") and len(args) > 1:
        return Use(rank=len(args))
    if method == "transpose" and len(axes) == 2 and None not in axes:
        return Use(least=max(a + 1 if a >= 0 else -a for a in axes if a is not None))
    if method == "size" and first is not None:
        return Use(least=first + 1 if first >= 0 else -first)
    if method == "flatten" and first is not None and len(args) == 1:
        return Use(least=first + 2 if first >= 0 else -first)
    if method in ("items", "keys", "values"):
        return Use(attributes=frozenset((method,)))
    return Use()


def _number(node: ast.expr) -> int | None:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return None
    return value if isinstance(value, int) else None


def _rank_at(layer: nn.Module) -> int | None:
    # How many dimensions a layer's input has, where the layer says it.
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return len(layer.kernel_size) + 2
    return None


def _bound(function: Any, node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    # The arguments of a call by the parameters' names.
    try:
        parameters = list(inspect.signature(inspect.unwrap(function)).parameters)
    except (TypeError, ValueError):
        return
    names = parameters[1:] if parameters[:1] == ["self"] else parameters
    yield from zip(names, node.args, strict=False)
    yield from ((k.arg, k.value) for k in node.keywords if k.arg is not None)
