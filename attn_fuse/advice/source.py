"""Source: the program's own expressions for the values of a graph, at the place where an attention is written.

Each node of Dynamo's graph knows the line that made it, and the column where its expression begins. An operand of that
expression that is a name or an attribute, such as `q` or `self.bias`, names the node that Dynamo passed there. Dynamo
also names nodes after the variables that hold them.
"""

from __future__ import annotations

import ast
import copy
import functools
import linecache
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from attn_fuse.advice.overwritten import Operation, Overwritten, assigned
from attn_fuse.graph.location import locate, user_frames
from attn_fuse.graph.memory import writes_in
from attn_fuse.graph.names import DROPOUT, op_name, storages
from attn_fuse.graph.region import Region
from attn_fuse.graph.scopes import scopes

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
# The names of the operations that an operator of Python makes.
_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "truediv div", ast.MatMult: "matmul",
    ast.Mod: "mod remainder", ast.FloorDiv: "floordiv floor_divide", ast.Pow: "pow", ast.BitAnd: "and_",
    ast.BitOr: "or_", ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge",
    ast.Invert: "invert", ast.USub: "neg",
}  # fmt: skip
_PLACEHOLDER = "_the_call_"
# Expressions with these are not moved.
_IMPURE = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.Lambda, ast.comprehension)


@dataclass(frozen=True)
class Frame:
    """One level of the stack that made a node. column: where the expression begins."""

    file: str
    line: int
    function: str
    column: int


@dataclass(frozen=True)
class Edit:
    """A change of the program.

    lines: the first and last lines of the statements that go; the code stands in place of the last of them.
    conditions: the tests of if statements among them, as this run met them.
    kept: variables whose statements stay only because the function reads them elsewhere.
    """

    lines: tuple[tuple[int, int], ...]
    conditions: tuple[str, ...]
    kept: tuple[str, ...] = ()


class Source:
    """The place of one attention in the program.

    file, function, module: where its output is computed; the module by its path.
    names: the variables and attributes for nodes, such as "q" and "self.bias".
    expressions: other expressions for nodes, such as `F.normalize(q, dim=-1)`.
    dropout: an expression for the probability of the dropout, which is 0 outside training; "" if it is not found.
    """

    def __init__(self, region: Region, frames: Sequence[Frame], original: GraphModule) -> None:
        self.file, self.function = frames[-1].file, frames[-1].function
        self._frames = frames
        self._depth = len(frames) - 1
        self._definition = function_at(frames[-1])
        self.module = locate(region.output).module
        self._expression = expression_of(region.output, frames[-1])
        simple = at(frames[-1], ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr)
        holding = (one for one in simple if self._expression is not None and self._expression in ast.walk(one))
        self._statement: ast.stmt | None = next(holding, None)
        self._output = region.output.name
        self._overwritten = self._overwritten_in(original)
        self.names: dict[Node, str] = {}
        self.expressions: dict[Node, ast.expr] = {}
        for user in region.nodes:
            for node, written in self._operands(user):
                if _is_name(written):
                    self.names.setdefault(node, ast.unparse(written))
                elif not any(isinstance(part, _IMPURE) for part in ast.walk(written)):
                    self.expressions.setdefault(node, written)
        for node in (n for user in region.nodes for n in (*user.all_input_nodes, user)):
            if node not in self.names and (variable := self._variable(node)):
                self.names[node] = variable
        drops = (self._dropout(node) for node in region.nodes if op_name(node) in DROPOUT)
        self.dropout = next(filter(None, drops), "")

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """The names in the function."""
        definition = self._definition or ast.Module([], [])
        arguments = {node.arg for node in ast.walk(definition) if isinstance(node, ast.arg)}
        return frozenset(arguments | {node.id for node in ast.walk(definition) if isinstance(node, ast.Name)})

    def with_call(self, call: str) -> str:
        """The statement of the output with `call` in its place; an assignment to `out` if it is not found."""
        if self._statement is None or self._expression is None:
            return f"out = {call}"
        changed = _Replaced(self._expression).visit(copy.deepcopy(self._statement))
        return ast.unparse(changed).replace(_PLACEHOLDER, call)

    def edit(self, region: Region, code: Sequence[str], moved: Collection[Node], scores: Collection[Node]) -> Edit:
        """The statements that `code` replaces: those of the function that only serve the attention of `region`.

        moved: nodes outside the region that `code` computes, too. scores: the nodes that depend on the scores.
        """
        if self._statement is None or self._expression is None or self._definition is None:
            return Edit(((self._frames[-1].line,) * 2,), ())
        units = _beside(self._definition, self._statement)
        private = self._private(region, units, moved)
        served = [unit for unit in units if private.get(unit, False)]
        served_names = set[str]().union(*map(_stored, served))
        # A branch that this run did not take, or a `del`, would change what is gone.
        beside = [
            x for x in units if isinstance(x, ast.If | ast.Delete) and x not in private and _stored(x) & served_names
        ]
        gone = [unit for unit in (*served, *beside) if not _leaves(unit)]
        own = {id(node) for node in ast.walk(self._expression)}
        written = _read(ast.walk(ast.parse("\n".join(code))))
        while True:
            removed = own.union(*({id(node) for node in ast.walk(unit)} for unit in gone))
            read = written | _read(node for node in ast.walk(self._definition) if id(node) not in removed)
            kept = [unit for unit in gone if not _stored(unit) & read]
            if kept == gone:
                break
            gone = kept
        gone.sort(key=lambda unit: unit.lineno)
        conditions = [x for unit in (*served, *beside) for x in self._conditions(unit, region)]
        lines = [(one.lineno, one.end_lineno or one.lineno) for one in (*gone, self._statement)]
        lines_of_scores = {frame.line for node in scores if (frame := self.here(node)) is not None}
        staying = [unit for unit in served if unit not in gone and _lines(unit) & lines_of_scores]
        returned = sorted(set[str]().union(*map(_stored, staying)) & read)
        return Edit(tuple(lines), tuple(dict.fromkeys(conditions)), tuple(returned))

    def _private(self, region: Region, units: Sequence[ast.stmt], moved: Collection[Node]) -> dict[ast.stmt, bool]:
        """Whether all operations of a statement only serve `region`; without those that have no operations."""
        inside, found = {*region.nodes, *moved}, dict[ast.stmt, bool]()
        for node in reversed(region.output.graph.nodes):
            if node.op.startswith("call_") and node.users and node.users.keys() <= inside and moved:
                inside.add(node)
        for node in region.output.graph.nodes:
            frame = self.here(node) if node.op.startswith("call_") else None
            unit = frame and next((u for u in units if u.lineno <= frame.line <= (u.end_lineno or u.lineno)), None)
            if unit and f"{locate(node).module}.".startswith(self.module and f"{self.module}."):
                found[unit] = found.get(unit, True) and node in inside and node.users.keys() <= inside
        return found

    def is_written_later(self) -> bool:
        """Whether the function writes into the output, which a kernel keeps for its backward."""
        if not isinstance(self._statement, ast.Assign) or self._statement.value is not self._expression:
            return False
        names = {target.id for target in self._statement.targets if isinstance(target, ast.Name)}
        later = (
            n
            for n in ast.walk(self._definition or ast.Module([], []))
            if getattr(n, "lineno", 0) > self._statement.lineno
        )
        for node in later:
            match node:
                case ast.AugAssign(ast.Name(name)) | ast.Call(ast.Attribute(ast.Name(name), _)) if name in names:
                    if isinstance(node, ast.AugAssign) or re.search(r"[^_]_$", ast.unparse(node.func)):
                        return True
                case ast.Subscript(ast.Name(name), _, ast.Store()) if name in names:
                    return True
        return False

    def _conditions(self, unit: ast.stmt, region: Region) -> Iterator[str]:
        """The tests within a statement, each with its outcome in this run."""
        lines = {frame.line for node in region.nodes if (frame := self.here(node)) is not None}
        for node in ast.walk(unit):
            if isinstance(node, ast.If):
                taken = any(one.lineno <= n <= (one.end_lineno or one.lineno) for one in node.body for n in lines)
                yield ast.unparse(node.test if taken else _negated(node.test))

    def here(self, node: Node) -> Frame | None:
        """The level of `node` in the same call of the function; None if something else made the node."""
        frames = frames_of(node)
        return frames[self._depth] if self._are_here(frames) else None

    def _are_here(self, frames: Sequence[Frame]) -> bool:
        own = self._frames[-1]
        return (
            len(frames) > self._depth
            and [*frames[: self._depth]] == [*self._frames[:-1]]
            and (frames[self._depth].file, frames[self._depth].function) == (own.file, own.function)
        )

    def _overwritten_in(self, original: GraphModule) -> Overwritten:
        operations = [
            Operation(node.name, frame.line, tuple((x, storages(read)) for read, x in self._reads(node)), writes)
            for scope in scopes(original)
            for node, writes in writes_in(scope.module, scope.modes).items()
            if (frame := self.here(node)) is not None
        ]
        return Overwritten(self._definition or ast.Module([], []), self._statement, self._frames[-1].line, operations)

    def _reads(self, user: Node) -> Iterator[tuple[Node, ast.expr]]:
        """(node, expression) for each operand of `user` that the function writes."""
        frames = frames_of(user)
        if not self._are_here(frames):
            return
        operands = ((x, expression) for x, expression in arguments_of(user, frames[-1]) if isinstance(x, Node))
        for node, expression in operands:
            written: ast.expr | None = expression
            # An operand within a function that this one calls is written here if it is an argument of the call.
            for outer, inner in reversed([*zip(frames[self._depth :], frames[self._depth + 1 :], strict=False)]):
                written = None if written is None else _argument(written, outer, inner)
            if written is not None:
                yield node, written

    def _operands(self, user: Node) -> Iterator[tuple[Node, ast.expr]]:
        """(node, expression) for each operand of `user` that the function can still read at the output."""
        for node, written in self._reads(user):
            if not self._is_overwritten(written, frames_of(user)[self._depth].line, user):
                yield node, written

    def _is_overwritten(self, expression: ast.expr, line: int, user: Node, made_by: ast.stmt | None = None) -> bool:
        names = {"user": user.name, "output": self._output}
        return self._definition is None or self._overwritten.since(expression, line, made_by, **names)

    def _variable(self, node: Node) -> str:
        """The variable that holds `node`; "" for none."""
        if (frame := self.here(node)) is None:
            return ""
        for statement in at(frame, ast.Assign):
            for target in statement.targets:
                several = isinstance(target, ast.Tuple | ast.List)
                for number, one in enumerate(target.elts if isinstance(target, ast.Tuple | ast.List) else [target]):
                    if not isinstance(one, ast.Name) or one.id not in (node.name, re.sub(r"_\d+$", "", node.name)):
                        continue
                    is_it = node.args[1:] == (number,) if several else _begins(statement.value, frame)
                    if is_it and not self._is_overwritten(
                        one, statement.end_lineno or statement.lineno, node, statement
                    ):
                        return one.id
        return ""

    def _dropout(self, node: Node) -> str:
        """The probability of a dropout as an expression that is 0 outside training; "" if it is not found."""
        # The function itself calls the dropout; a function that it calls has other names.
        frame = self.here(node) if len(frames_of(node)) == self._depth + 1 else None
        # A line may hold several dropouts, so the column decides.
        calls = [] if frame is None else [call for call in at(frame, ast.Call) if _begins(call, frame)]
        _, kind = next(reversed((node.meta.get("nn_module_stack") or {}).values()), ("", None))
        for call in calls:
            called = ast.unparse(call.func)
            given = {k.arg: ast.unparse(k.value) for k in call.keywords}
            given |= {name: ast.unparse(x) for name, x in zip(("input", "p", "training"), call.args, strict=False)}
            if called.rpartition(".")[2] == "dropout" and {"p", "training"} <= given.keys():
                return f"{given['p']} if {given['training']} else 0.0"
            if kind is nn.Dropout and len(given) == 1 and re.fullmatch(r"[\w.]+", called):
                return f"{called}.p if {called}.training else 0.0"
        return ""


def source_of(region: Region, original: GraphModule) -> Source | None:
    """The place of `region`; None if no line of the user's program computes its output. original: as in `by_hand`."""
    frames = frames_of(region.output)
    return Source(region, frames, original) if frames else None


def _beside(function: Function, statement: ast.stmt) -> list[ast.stmt]:
    """The statements in the blocks that hold `statement`, without those that hold it."""
    blocks = (
        block
        for node in ast.walk(function)
        for name in ("body", "orelse", "finalbody")
        if isinstance(block := getattr(node, name, None), list) and any(statement in ast.walk(one) for one in block)
    )
    return [one for block in blocks for one in block if statement not in ast.walk(one)]


def _lines(unit: ast.stmt) -> set[int]:
    return {*range(unit.lineno, (unit.end_lineno or unit.lineno) + 1)}


def _leaves(unit: ast.stmt) -> bool:
    """Whether a statement may leave the function or the loop, or raises."""
    return any(
        isinstance(node, ast.Return | ast.Break | ast.Continue | ast.Raise | ast.Yield) for node in ast.walk(unit)
    )


def _negated(test: ast.expr) -> ast.expr:
    match test:
        case ast.Compare(left, [ast.IsNot()], others):
            return ast.Compare(left, [ast.Is()], others)
        case ast.Compare(left, [ast.Is()], others):
            return ast.Compare(left, [ast.IsNot()], others)
        case ast.UnaryOp(ast.Not(), x):
            return x
    return ast.UnaryOp(ast.Not(), test)


def _stored(unit: ast.AST) -> set[str]:
    """The variables that a statement assigns or writes into."""
    # A call whose result nobody takes is there for its writes, such as `scores.mul_(2)`.
    return assigned(unit).union(*(_read(ast.walk(node)) for node in ast.walk(unit) if isinstance(node, ast.Expr)))


def _read(nodes: Iterable[ast.AST]) -> set[str]:
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


@functools.lru_cache(maxsize=4096)
def _frames_in(stack: str) -> list[Frame]:
    frames = []
    for level in user_frames(stack):
        file, line = level["file"], int(level["line"])
        text, marks = linecache.getline(file, line), level["marks"] or ""
        if level["code"] and level["code"].strip() != text.strip():
            return []  # the file has changed
        column = len(text) - len(text.lstrip()) + len(marks) - len(marks.lstrip())
        frames.append(Frame(file, line, level["function"], column))
    return frames


def frames_of(node: Node) -> list[Frame]:
    """The levels of the user's program that made `node`, outermost first."""
    return _frames_in(node.stack_trace or "")


@functools.cache
def _tree(file: str) -> list[ast.AST]:
    try:
        return [*ast.walk(ast.parse("".join(linecache.getlines(file))))]
    except SyntaxError:
        return []


def at(frame: Frame, *kinds: type[Any]) -> list[Any]:
    """The nodes of these kinds of the file's syntax tree whose lines include that of `frame`."""
    return [
        node
        for node in _tree(frame.file)
        if isinstance(node, kinds) and node.lineno <= frame.line <= (node.end_lineno or node.lineno)
    ]


def function_at(frame: Frame) -> Function | None:
    return max(at(frame, ast.FunctionDef, ast.AsyncFunctionDef), key=lambda node: node.lineno, default=None)


def _begins(expression: ast.expr, frame: Frame) -> bool:
    return (expression.lineno, expression.col_offset) == (frame.line, frame.column)


def _is_name(expression: ast.expr) -> bool:
    """Whether `expression` is a variable or attribute, not a view such as `x.mT`."""
    while isinstance(expression, ast.Attribute) and not hasattr(Tensor, expression.attr):
        expression = expression.value
    return isinstance(expression, ast.Name)


def expression_of(node: Node, frame: Frame) -> ast.expr | None:
    """The expression that made `node`; None if it is not the only one that begins there and may have."""
    found = [x for x in at(frame, ast.expr) if _begins(x, frame) and _may_make(x, node)]
    return found[0] if len(found) == 1 else None


def _may_make(expression: ast.expr, node: Node) -> bool:
    """Whether `expression` is an operation like that of `node`."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    match expression:
        case ast.BinOp(_, operation, _) | ast.UnaryOp(operation, _) | ast.Compare(_, [operation], _):
            return {name, name.removeprefix("i")} & {*_OPERATORS.get(type(operation), "").split()} != set()
        case ast.Subscript():
            return name == "getitem"
        case ast.Attribute(_, attribute):
            # From torch 2.14 on Dynamo calls the operator of a view such as `x.mT`.
            is_view = op_name(node) == attribute and not callable(getattr(Tensor, attribute, callable))
            return is_view or (name == "getattr" and node.args[1:] == (attribute,))
        case ast.Call(ast.Attribute(_, called) | ast.Name(called)):
            return called == name
    return False


def arguments_of(node: Node, frame: Frame) -> list[tuple[Any, ast.expr]]:
    """(argument of `node`, its expression), as far as the source has it."""
    match expression_of(node, frame):
        case ast.BinOp(left, _, right) | ast.Compare(left, _, [right]):
            return [*zip(node.args, (left, right), strict=False)]
        case ast.UnaryOp(_, x) | ast.Subscript(x, _) | ast.Attribute(x, _):
            return [*zip(node.args, (x,), strict=False)]
        case ast.Call(called, positional, keywords):
            own = [called.value] if isinstance(called, ast.Attribute) and node.op == "call_method" else []
            named = [(node.kwargs[k.arg], k.value) for k in keywords if k.arg in node.kwargs]
            return [*zip(node.args, (*own, *positional), strict=False), *named]
    return []


def _argument(parameter: ast.expr, outer: Frame, inner: Frame) -> ast.expr | None:
    """The argument that the call at `outer` passes for `parameter`, a name in the function at `inner`, or None."""
    function = function_at(inner)
    if function is None or not isinstance(parameter, ast.Name):
        return None
    if parameter.id in _stored(function):
        return None
    calls = [x for x in at(outer, ast.Call) if _begins(x, outer) and _may_call(x.func, function, outer)]
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    if len(calls) != 1 or parameter.id not in names or any(isinstance(x, ast.Starred) for x in calls[0].args):
        return None
    named = {k.arg: k.value for k in calls[0].keywords}
    given = calls[0].args
    is_bound = names[0] in ("self", "cls") and not (given and ast.unparse(given[0]) == names[0])
    place = names.index(parameter.id) - is_bound
    return named.get(parameter.id) or (given[place] if 0 <= place < len(given) else None)


def _may_call(called: ast.expr, function: Function, outer: Frame) -> bool:
    """Whether `called` is `function` itself, or a module whose forward it is: not a checkpoint, say, that calls it."""
    if ast.unparse(called).rpartition(".")[2] == function.name:
        return True
    base = called
    while isinstance(base, ast.Attribute | ast.Subscript):
        base = base.value
    caller = function_at(outer)
    local = (
        set()
        if caller is None
        else _stored(caller) | {node.arg for node in ast.walk(caller.args) if isinstance(node, ast.arg)}
    )
    return function.name == "forward" and isinstance(base, ast.Name) and base.id in local


class _Replaced(ast.NodeTransformer):
    """Puts the placeholder in place of `expression`, found by its position."""

    def __init__(self, expression: ast.expr) -> None:
        self._place = ast.dump(expression, include_attributes=True)

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.expr) and ast.dump(node, include_attributes=True) == self._place:
            return ast.Name(_PLACEHOLDER, ast.Load())
        return self.generic_visit(node)
