"""The attention functions of `transformers`, read from where it is installed, rewritten at random, and tried.

A rewrite is what another author would have written (an operator in place, a method, an einsum), what an author might
do besides (a write on an operand, a block without gradients), or a slip (another axis). The judge is the rewritten
function itself in float64.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import linecache
import random
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

ENTRY = "eager_attention_forward"


@dataclass(frozen=True)
class Rewritten:
    """source: of a function `eager_attention_forward`, to be run among the names of `module`."""

    module: str
    source: str
    changes: tuple[str, ...]
    entropy: int

    def __str__(self) -> str:
        changes = ", ".join(self.changes) or "as it is"
        return f"rewritten({self.module!r}, {self.entropy}): {changes}\n\n{self.source}"


@functools.cache
def published() -> tuple[str, ...]:
    """One module for each way that `transformers` writes the function. None where it is not installed."""
    try:
        import transformers
    except ImportError:
        return ()
    found: dict[str, str] = {}
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        text = path.read_text()
        if f"def {ENTRY}(" not in text:
            continue
        function = next(n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == ENTRY)
        found.setdefault(ast.dump(function), f"transformers.models.{path.parent.name}.{path.stem}")
    return tuple(found.values())


def rewritten(module: str, entropy: int) -> Rewritten:
    """The function of `module` after up to four rewrites."""
    r = random.Random(entropy)
    tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(importlib.import_module(module), ENTRY))))
    changes = tuple(change.__name__ for change in r.sample(CHANGES, r.randrange(5)) if change(tree, r))
    return Rewritten(module, ast.unparse(ast.fix_missing_locations(tree)), changes, entropy)


class Program(nn.Module):
    """The function on the state that it asks its module for."""

    def __init__(self, of: Rewritten, heads: int, groups: int, head_dim: int) -> None:
        super().__init__()
        home: ModuleType = importlib.import_module(of.module)
        name = f"<{of.module} {of.entropy}>"
        linecache.cache[name] = (len(of.source), None, of.source.splitlines(keepends=True), name)
        names = dict(vars(home))
        exec(compile(of.source, name, "exec"), names)
        self.function: Callable[..., Any] = names[ENTRY]
        self.num_key_value_groups = groups
        self.scaling = self.scale = head_dim**-0.5
        self.head_dim = head_dim
        self.sinks = nn.Parameter(torch.randn(heads))
        self.config = SimpleNamespace(num_attention_heads=heads, attn_logit_softcapping=20.0, scale_attn_weights=True)
        self.is_causal, self.layer_idx, self.attention_dropout, self.dropout = True, 0, 0.0, nn.Identity()
        self.eval()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Any:
        return self.function(self, query, key, value, mask, scaling=self.scaling, dropout=0.0)


def inputs(entropy: int) -> tuple[tuple[int, int, int], tuple[Tensor, ...]]:
    """(heads, groups, head_dim), and query, key, value and a mask to add."""
    r, g = random.Random(entropy), torch.Generator().manual_seed(entropy % 2**31)
    groups, kv_heads, head_dim = r.choice([1, 1, 2]), r.choice([1, 2, 4]), r.choice([4, 8])
    q_len = r.choice([1, 4, 7])
    kv_len = r.choice([q_len, q_len, q_len + 3])
    q = torch.randn(2, kv_heads * groups, q_len, head_dim, generator=g)
    k, v = torch.randn(2, 2, kv_heads, kv_len, head_dim, generator=g).unbind(0)
    fill = r.choice([-torch.inf, torch.finfo(torch.float32).min, -1e4])
    mask = torch.zeros(2, 1, q_len, kv_len).masked_fill(torch.ones(q_len, kv_len).triu(kv_len - q_len + 1).bool(), fill)
    return (kv_heads * groups, groups, head_dim), (q, k, v, mask)


# ---- the rewrites: each says whether it found a place


def in_place(tree: ast.Module, r: random.Random) -> bool:
    """`x = x + y` becomes `x += y`, and `x = x * y` `x *= y`."""
    places = [
        (body, n, s)
        for body in _bodies(tree)
        for n, s in enumerate(body)
        if isinstance(s, ast.Assign)
        and isinstance(s.targets[0], ast.Name)
        and isinstance(s.value, ast.BinOp)
        and isinstance(s.value.left, ast.Name)
        and s.value.left.id == s.targets[0].id
    ]
    if not places:
        return False
    body, n, s = r.choice(places)
    assert isinstance(s.value, ast.BinOp) and isinstance(s.targets[0], ast.Name)
    body[n] = ast.AugAssign(target=s.targets[0], op=s.value.op, value=s.value.right)
    return True


def by_method(tree: ast.Module, r: random.Random) -> bool:
    """`nn.functional.softmax(x, ...)` becomes `x.softmax(...)`, `torch.matmul(x, y)` `x.matmul(y)`."""
    calls = [c for c in _calls(tree, "softmax", "matmul") if c.args and _is_module(c)]
    if not calls:
        return False
    call = r.choice(calls)
    assert isinstance(call.func, ast.Attribute)
    call.func.value, call.args = call.args[0], call.args[1:]
    return True


def by_operator(tree: ast.Module, r: random.Random) -> bool:
    """`torch.matmul(x, y)` becomes `x @ y`, or an einsum."""
    calls = [c for c in _calls(tree, "matmul") if len(c.args) == 2]
    if not calls:
        return False
    chosen, einsum = r.choice(calls), r.random() < 0.5

    class Replace(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> Any:
            if node is not chosen:
                return self.generic_visit(node)
            if einsum:
                operands = ", ".join(map(ast.unparse, node.args))
                return ast.parse(f"torch.einsum('...ij, ...jk -> ...ik', {operands})", mode="eval").body
            return ast.BinOp(node.args[0], ast.MatMult(), node.args[1])

    Replace().visit(tree)
    return True


EDITS = (
    "query *= 0.5", "query /= 1.5", "key.mul_(0.5)", "value *= 2", "key[..., :2] = 0.25", "value[:, :, ::2] *= 0.5",
    "torch.mul(query, 0.5, out=query)", "query = query.transpose(1, 2).contiguous().transpose(1, 2); query += 0.1",
    "with torch.no_grad(): key = key * 0.5", "with torch.no_grad(): value = value.contiguous()",
    "value = value.detach()", "query = query.clone(); query.clamp_(-1, 1)",
    "key = torch.cat([key[:, :, :1] * 0, key[:, :, 1:]], 2)",
    "kept = torch.zeros_like(key); kept[:, :, : key.shape[2]] = key; key = kept",
    "kept = torch.zeros_like(value); kept.index_copy_(2, torch.arange(value.shape[2]), value); value = kept",
    "key, value = key[:, :, -64:], value[:, :, -64:]; attention_mask = attention_mask[..., -64:]",
)  # fmt: skip


def edited_before(tree: ast.Module, r: random.Random) -> bool:
    """A write on an operand, a cache or a block without gradients comes before everything else."""
    fresh = "query, key, value = query * 1, key * 1, value * 1"
    _function(tree).body[:0] = ast.parse("\n".join([fresh, *r.choice(EDITS).split("; ")])).body
    return True


BETWEEN = (
    "{0} *= 0.5", "{0}.mul_(0.5)", "{0} = {0}.float()", "{0}[..., 0] = 0.1", "torch.mul({0}, 0.5, out={0})",
    "{0}.transpose(-2, -1).add_(0.1)", "kept_{0} = {0}; {0} *= 2; {0} = {0} + kept_{0}", "{0}.zero_()",
    "with torch.no_grad(): {0} = {0} * 1", "{0} -= {0}.amax(-1, keepdim=True)", "{0} = torch.tanh({0} / 5) * 5",
    "{0} = {0}.masked_fill_((torch.arange({0}.shape[-1]) % 3 == 1), torch.finfo({0}.dtype).min)",
    "{0} = {0}.masked_fill(((torch.arange({0}.shape[-1]) * 100).to(torch.uint8) > 100), -1e9)",
)  # fmt: skip


def edited_between(tree: ast.Module, r: random.Random) -> bool:
    """Something more is done to what was just assigned."""
    places = [
        (body, n, s.targets[0].id)
        for body in _bodies(tree)
        for n, s in enumerate(body)
        if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name)
    ]
    if not places:
        return False
    body, n, name = r.choice(places)
    body[n + 1 : n + 1] = ast.parse(r.choice(BETWEEN).format(name).replace("; ", "\n")).body
    return True


def in_a_block(tree: ast.Module, r: random.Random) -> bool:
    """One statement stands under no_grad, enable_grad or autocast."""
    places = [(b, n) for b in _bodies(tree) for n, s in enumerate(b) if isinstance(s, ast.Assign)]
    if not places:
        return False
    body, n = r.choice(places)
    how = ["torch.no_grad()", "torch.enable_grad()", "torch.autocast('cpu', torch.bfloat16)"]
    how += ["torch.autocast('cpu', enabled=False)"]
    block = ast.parse(f"with {r.choice(how)}: pass").body[0]
    assert isinstance(block, ast.With)
    block.body = [body[n]]
    body[n] = block
    return True


def another_axis(tree: ast.Module, r: random.Random) -> bool:
    """A slip: one small number is another."""
    numbers = [
        n
        for n in ast.walk(_function(tree))
        if isinstance(n, ast.Constant) and type(n.value) is int and 1 <= n.value <= 3
    ]
    if not numbers:
        return False
    number = r.choice(numbers)
    number.value = r.choice([x for x in (1, 2, 3) if x != number.value])
    return True


def keeps_more(tree: ast.Module, r: random.Random) -> bool:
    """What is returned is returned together with another value that the function made."""
    function = _function(tree)
    names = [s.targets[0].id for s in function.body if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name)]
    last = function.body[-1]
    if not names or not isinstance(last, ast.Return) or last.value is None:
        return False
    last.value = ast.Tuple([last.value, ast.Name(r.choice(names), ast.Load())], ast.Load())
    return True


CHANGES: tuple[Callable[[ast.Module, random.Random], bool], ...] = (
    in_place, by_method, by_operator, edited_before, edited_between, in_a_block, another_axis, keeps_more,
)  # fmt: skip


def _function(tree: ast.Module) -> ast.FunctionDef:
    (function,) = tree.body
    assert isinstance(function, ast.FunctionDef)
    return function


def _bodies(tree: ast.Module) -> list[list[ast.stmt]]:
    found = [_function(tree).body]
    return found + [n.body for n in ast.walk(_function(tree)) if isinstance(n, ast.If)]


def _calls(tree: ast.Module, *names: str) -> list[ast.Call]:
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    return [c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr in names]


def _is_module(call: ast.Call) -> bool:
    assert isinstance(call.func, ast.Attribute)
    return ast.unparse(call.func.value) in ("torch", "nn.functional", "F", "torch.nn.functional")
