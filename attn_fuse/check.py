"""Check: run a site as written and rewritten on the first inputs, against the same in float64, and compare.

The graph is interpreted once as written, without changing the user's tensors or random state, and what each site
reads is kept. Dropout inside the site is off on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node, map_arg

from attn_fuse.emit import Verify
from attn_fuse.names import DROPOUT, INLINE_SUBGRAPHS, op_name
from attn_fuse.region import Region

# How much further from float64 the rewrite may be than the program as written, and its floor in units of rounding.
_TIMES_AS_WRITTEN = 8.0
_ROUNDINGS = 64.0

Values = dict[tuple[str, str], Any]


class Checker:
    """Compares the sites of one graph. original: a copy of the graph before any rewrite."""

    def __init__(self, original: GraphModule, inputs: Sequence[Any]) -> None:
        self._original = original
        self._inputs = inputs
        self._values: Values | None = None

    def verifier_of(self, region: Region, leaves: Sequence[Node]) -> Verify:
        """What says whether new operations give what `region` gives. leaves: its leaves as they were written."""
        names = [leaf.name for leaf in leaves]

        def verify(made: Sequence[Node], result: Node) -> str | None:
            leaves = self._leaves(region.scope.path, names)
            written = lambda *v: _run(region.nodes, region.output, region.leaves, v)  # noqa: E731
            rewritten = lambda *v: _run(made, result, region.leaves, v)  # noqa: E731
            return _disagreement(written, rewritten, leaves)

        return verify

    def _leaves(self, path: str, names: Sequence[str]) -> list[Any]:
        if self._values is None:
            self._values = {}
            with torch.random.fork_rng(), torch.no_grad():
                _Recorder(self._original, "", self._values).run(*map(_copied, self._inputs))
        return [self._values[path, name] for name in names]


def _disagreement(written: Callable[..., Any], rewritten: Callable[..., Any], leaves: Sequence[Any]) -> str | None:
    exact = _results(written, [_widened(leaf) for leaf in leaves])
    for name, reference, as_written, as_rewritten in zip(
        _names(leaves), exact, _results(written, leaves), _results(rewritten, leaves), strict=True
    ):
        known = reference.isfinite()
        reference = reference[known]
        if reference.numel() == 0:
            continue
        error = (as_rewritten.double()[known] - reference).abs().max().item()
        usual = (as_written.double()[known] - reference).abs().max().item()
        rounding = torch.finfo(as_written.dtype).eps * reference.abs().max().item()
        allowed = _TIMES_AS_WRITTEN * usual + _ROUNDINGS * rounding
        if not error <= allowed:
            return (
                f"the check failed: the rewritten {name} is {error:.3g} from float64, "
                f"as written {usual:.3g}, allowed {allowed:.3g}"
            )
    return None


def _results(function: Callable[..., Any], leaves: Sequence[Any]) -> list[torch.Tensor]:
    """The output, then the gradient of each floating-point leaf under a fixed weighting of the output."""
    values = [
        v.detach().clone().requires_grad_() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for v in leaves
    ]
    with torch.enable_grad():
        out = function(*values)
        wanted = [v for v in values if isinstance(v, torch.Tensor) and v.requires_grad]
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape).to(out)
        found = torch.autograd.grad((out * weights).sum(), wanted, allow_unused=True)
    grads = [torch.zeros_like(v) if g is None else g for v, g in zip(wanted, found, strict=True)]
    return [out.detach(), *grads]


def _names(leaves: Sequence[Any]) -> list[str]:
    floating = [n for n, v in enumerate(leaves) if isinstance(v, torch.Tensor) and v.is_floating_point()]
    return ["output", *(f"gradient of input {n} of the attention" for n in floating)]


def _run(nodes: Sequence[Node], output: Node, leaves: Sequence[Node], values: Sequence[Any]) -> Any:
    env: dict[Node, Any] = dict(zip(leaves, values, strict=True))
    for node in nodes:
        args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
        if op_name(node) in DROPOUT:
            env[node] = args[0] if args else kwargs["input"]
            continue
        if "dropout_p" in kwargs:
            kwargs = {**kwargs, "dropout_p": 0.0}
        target: Any = getattr(type(args[0]), node.target) if isinstance(node.target, str) else node.target
        env[node] = target(*args, **kwargs)
    return env[output]


class _Recorder(Interpreter):
    def __init__(self, module: GraphModule, path: str, values: Values) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._path = path
        self._kept = values

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        self._kept[self._path, n.name] = result.clone() if isinstance(result, torch.Tensor) else result
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if getattr(target, "__name__", "") in INLINE_SUBGRAPHS:
            body = next(a for a in args if isinstance(a, GraphModule))
            name = next(n for n, child in self.module.named_children() if child is body)
            operands = [a for a in args if a is not body and not isinstance(a, str)]
            return _Recorder(body, f"{self._path}.{name}".lstrip("."), self._kept).run(*operands)
        return super().call_function(target, args, dict(kwargs))


def _copied(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return value.node.hint
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _widened(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
