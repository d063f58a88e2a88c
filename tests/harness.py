"""The harness: a program compiled with attn_fuse, held against itself run eagerly in float64.

The budget is a small multiple of what the program, run as written, is off from float64 in its own dtype, with a floor
of a few roundings. It is the same for every test.

The floor of an output is a rounding of its own magnitude; that of a gradient, of the largest magnitude among all that
is compared. The backward of every flash attention takes sum(grad_out * out) for sum(weights * grad_weights), which is
the same number by another sum: a gradient that is 0 in mathematics, as that of a query with a single key or of a bias
that all keys share, cancels to 0 in the program as written and comes out as a rounding of what it cancels from.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attn_fuse.backend import attn_fuse as backend
from attn_fuse.report import GraphReport, SiteReport, as_text, collecting
from tests.rounding import ROUNDINGS, TIMES_EAGER, rounding_of_float64
from tests.variations import variations

Program = Callable[..., Any]
Tensors = dict[str, Tensor]

# Calls of a dynamic program at other sizes and numbers, and how many of them may compile it again.
AGAIN, COMPILED_AGAIN = 6, 1


@dataclass(frozen=True)
class Outcome:
    """What became of a compiled program.

    tensors: its outputs and the gradients, by name. again: how many calls of a dynamic program at other arguments ran
    the code that there was, how many compiled it again, and how many were not made.
    """

    tensors: Tensors
    graphs: Sequence[GraphReport]
    again: Counter[str] = field(default_factory=Counter)

    @property
    def sites(self) -> list[SiteReport]:
        """Each attention, one that was compiled again for other sizes only once, as it was compiled last."""
        return list({str(site.location): site for graph in self.graphs for site in graph.sites}.values())

    @property
    def site(self) -> SiteReport:
        (site,) = self.sites
        return site

    @property
    def after(self) -> str:
        return "\n".join(graph.after for graph in self.graphs)

    def __str__(self) -> str:
        return "\n".join(map(as_text, self.graphs))


def compiled(program: Program, inner: str = "eager", dynamic: bool | None = None, **options: Any) -> Program:
    """`program` as the backend compiles it, every site fused that some kernel can run, the whole program checked."""
    return torch.compile(
        program,
        backend=backend,
        dynamic=dynamic,
        options={"inner_backend": inner, "pick": "fused", "check": True} | options,
    )


def check(
    program: Program,
    *args: Any,
    inner: str = "eager",
    dynamic: bool | None = None,
    backward: bool = True,
    more: Sequence[tuple[Any, ...]] = (),
    again: Iterable[tuple[str, tuple[Any, ...]]] | None = None,
    **options: Any,
) -> Outcome:
    """Compile `program`, run it on `args` and then on each of `more`, and hold every result against float64.

    A program with dynamic sizes, or called at several, is then called `again`: by default at other sizes and numbers.

    backward: also compare the gradient of every floating-point argument and parameter. options: of the backend.
    """
    run, counts = compiled(program, inner, dynamic, **options), Counter[str]()
    with collecting() as graphs:
        for values in (args, *more):
            got = _results(run, program, values, backward)
            assert_as_good_as_eager(got, program, values, backward)
    with collecting() as compiled_again:
        if again is not None:
            counts = call_again(run, program, again, backward)
        elif dynamic or (dynamic is None and more):
            others = variations(args, lambda values: _exact_and_eager(program, values, False) is not None)
            counts = call_again(run, program, others, backward)
    for site in (site for graph in (*graphs, *compiled_again) for site in graph.sites):
        assert site.blocker is None or not site.blocker.reason.startswith("the check"), site.blocker.reason
    return Outcome(got, tuple(graphs), counts)


def call_again(
    run: Program,
    program: Program,
    calls: Iterable[tuple[str, tuple[Any, ...]]],
    backward: bool,
    most: int = AGAIN,
    compiled_again: int = COMPILED_AGAIN,
) -> Counter[str]:
    """Call the compiled `run` at other arguments, and hold each result against float64; the first `most` that run.

    The code that there is runs wherever its guards let it. Only the first few calls for which they do not may compile
    the program again: what they compile is then called, too. calls: words for what is different, and arguments.
    """
    counts: Counter[str] = Counter()
    for words, args in calls:
        if counts["reused"] + counts["compiled again"] >= most:
            break
        expected = _exact_and_eager(program, args, backward)
        if expected is None:
            counts["not run: eager raises"] += 1
            continue
        try:
            with torch.compiler.set_stance("fail_on_recompile"):
                got, how = _results(run, program, args, backward), "reused"
        except RuntimeError as problem:
            if "fail_on_recompile" not in str(problem):
                raise AssertionError(f"called again with {words}: {problem}") from problem
            if counts["compiled again"] >= compiled_again:
                counts["not run: compiles again"] += 1
                continue
            got, how = _results(run, program, args, backward), "compiled again"
        counts[how] += 1
        try:
            _assert_near(got, *expected, program, args, backward)
        except AssertionError as wrong:
            raise AssertionError(f"called again with {words} ({how}): {wrong}") from wrong
    return counts


def assert_right(program: Program, *args: Any, picks: Sequence[str] = ("fused",), **how: Any) -> None:
    """`check` for each of `picks`, fused or not; skipped where the inner backend alone does not take the program."""
    for pick in picks:
        torch._dynamo.reset()
        try:
            check(program, *args, inner="aot_eager", pick=pick, **how)
        except torch._dynamo.exc.BackendCompilerFailed:
            torch._dynamo.reset()
            try:
                _results(torch.compile(program, backend="aot_eager"), program, args, how.get("backward", True))
            except torch._dynamo.exc.BackendCompilerFailed as problem:
                pytest.skip(f"torch itself does not compile this: {str(problem.inner_exception).splitlines()[0]}")
            raise


def assert_fused(program: Program, *args: Any, **how: Any) -> Outcome:
    """`check`, and every attention in it is fused (there is at least one)."""
    outcome = check(program, *args, **how)
    assert outcome.sites and all(site.fused for site in outcome.sites), str(outcome) or "no attention was found"
    return outcome


def assert_chunked(program: Program, *args: Any, reason: str, **how: Any) -> Outcome:
    """`check`, its one attention is fused on chunked, and cpu_flash declines it with `reason` in its words."""
    outcome = assert_fused(program, *args, **how)
    assert outcome.site.kernel == "chunked", str(outcome)
    said = outcome.site.why_not["cpu_flash"]
    assert any(reason in words for words in said), f"no {reason!r} among {said}"
    return outcome


def assert_refused(program: Program, *args: Any, reason: str, **how: Any) -> Outcome:
    """`check`, nothing is fused, and the one attention found says why: with `reason` in its words.

    An empty reason: no softmax between two products was found, so there is nothing to report.
    """
    outcome = check(program, *args, **how)
    assert not any(site.fused for site in outcome.sites), str(outcome)
    reasons = [site.blocker.reason for site in outcome.sites if site.blocker is not None]
    if not reason:
        assert not outcome.sites, str(outcome)
    else:
        assert any(reason in said for said in reasons), f"no {reason!r} among {reasons}"
    return outcome


def same(
    program: Program, *calls: tuple[Any, ...], dynamic: bool | None = None, inner: str = "eager"
) -> list[SiteReport]:
    """Run `program` and itself compiled on `calls` in turn; outputs, arguments and buffers afterwards are the same.

    Each floating-point output is then added to, and what the program returned and was given is compared once more.
    """
    torch._dynamo.reset()
    again = copy.deepcopy(program)
    with torch.no_grad(), collecting() as graphs:
        run = compiled(again, inner, dynamic, check=True)
        for call in calls:
            given, given_again = (pytree.tree_map_only(Tensor, Tensor.clone, call) for _ in range(2))
            out, out_again = program(*given), run(*given_again)
            torch.testing.assert_close((out_again, given_again), (out, given))
            for one, other in zip(pytree.tree_leaves(out), pytree.tree_leaves(out_again), strict=True):
                one += 1
                other += 1
            torch.testing.assert_close((out_again, given_again), (out, given))
            if isinstance(program, nn.Module):
                torch.testing.assert_close(dict(again.named_buffers()), dict(program.named_buffers()))
    return [site for graph in graphs for site in graph.sites]


def same_and_fused(program: Program, *calls: tuple[Any, ...], **how: Any) -> None:
    """`same`, and every attention in it is fused (there is at least one)."""
    sites = same(program, *calls, **how)
    assert sites and all(site.fused for site in sites), sites


def assert_zeros_are_kept(program: Program, operands: Sequence[Tensor]) -> None:
    """The last operand gets a gradient of zeros, since the site stays as written for it."""
    with collecting() as graphs:
        out = torch.compile(program, backend="attn_fuse", options={"pick": "fused", "inner_backend": "eager"})(
            *operands
        )
    out.sum().backward()
    assert operands[3].grad is not None and not operands[3].grad.any()
    (reason,) = [site.blocker.reason for graph in graphs for site in graph.sites]
    assert "gets a gradient of zeros as written, and would get none" in reason


def assert_causal(outcome: Outcome) -> None:
    """Every attention runs on the kernel's own causal mask, with no mask tensor."""
    calls = outcome.after.count("scaled_dot_product_attention(")
    assert calls and outcome.after.count("is_causal = True") == calls, outcome.after
    assert outcome.after.count("attn_mask = None") == calls, outcome.after


def assert_as_good_as_eager(got: Tensors, program: Program, args: Sequence[Any], backward: bool = True) -> None:
    """`got` is about as near to float64 as `program` run eagerly on `args`."""
    wide = _wider(program)
    exact = _results(wide, wide, pytree.tree_map(_widened, args), backward)
    eager = _results(program, program, args, backward)
    _assert_near(got, exact, eager, program, args, backward)


def _exact_and_eager(program: Program, args: Sequence[Any], backward: bool) -> tuple[Tensors, Tensors] | None:
    """The results in float64 and as written; None where `program` does not run."""
    wide, narrow = _wider(program), copy.deepcopy(program) if isinstance(program, nn.Module) else program
    try:
        eager = _results(narrow, narrow, args, backward)
        return _results(wide, wide, pytree.tree_map(_widened, args), backward), eager
    except Exception:
        return None


def _assert_near(
    got: Tensors, exact: Tensors, eager: Tensors, program: Program, args: Sequence[Any], backward: bool
) -> None:
    assert got.keys() == eager.keys() == exact.keys()
    given = [*pytree.tree_leaves(args), *(program.parameters() if isinstance(program, nn.Module) else ())]
    dtypes = {t.dtype for t in given if isinstance(t, Tensor) and t.is_floating_point()}
    largest = max(map(_magnitude, exact.values()), default=0.0)
    for name in exact:
        reference, as_written, result = exact[name], eager[name], got[name]
        assert result.shape == as_written.shape and result.dtype == as_written.dtype, name
        known = reference.isfinite() & as_written.isfinite()
        if not known.any():
            continue
        reference, as_written, result = (t[known].double() for t in (reference, as_written, result))
        usual = (as_written - reference).abs().max().item()
        error = (result - reference).abs().max().item()
        of = () if name.startswith("gradient") else dtypes  # a gradient of zeros has numbers of every dtype
        rounding = _rounding(eager[name][known], of) if got[name].dtype.is_floating_point else 0.0
        magnitude = largest if name.startswith("gradient") else reference.abs().max().item()
        allowed = TIMES_EAGER * usual + ROUNDINGS * rounding * magnitude
        if error > allowed and got[name].dtype == torch.float64:
            allowed += TIMES_EAGER * _rounding_of_float64(program, args, backward).get(name, 0.0)
        assert error <= allowed, f"{name} is {error:.3g} from float64, as written {usual:.3g}, allowed {allowed:.3g}"


def _rounding(as_written: Tensor, dtypes: Collection[torch.dtype]) -> float:
    """The epsilon of its dtype; of a narrower one of `dtypes` where a program that computes in it has widened it."""
    own = as_written.dtype
    widened = [
        d for d in dtypes if 2 <= d.itemsize < own.itemsize and bool((as_written.to(d).to(own) == as_written).all())
    ]
    return max(torch.finfo(d).eps for d in (own, *widened))


def _rounding_of_float64(program: Program, args: Sequence[Any], backward: bool) -> dict[str, float]:
    """By name of a result."""
    narrow = copy.deepcopy(program).float() if isinstance(program, nn.Module) else program
    wide = _wider(program)
    leaves, spec = pytree.tree_flatten(tuple(args))
    places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def run(given: Sequence[Tensor]) -> list[Tensor]:
        values = list(leaves)
        for n, tensor in zip(places, given, strict=True):
            values[n] = tensor
        one = wide if any(x.dtype == torch.float64 for x in given) else narrow
        return list(_results(one, one, pytree.tree_unflatten(values, spec), backward).values())

    given = [leaves[n] for n in places]
    names = _results(program, program, args, backward)
    return dict(zip(names, rounding_of_float64(run, given), strict=False))


def every_day(table: Iterable[Any], *some: Any) -> list[Any]:
    """The values to parametrise a test with: all but `some` are thorough."""
    return [value if value in some else pytest.param(value, marks=pytest.mark.thorough) for value in table]


def tensors(*shape: int, count: int = 3, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """`count` random tensors of one shape; query, key and value by default."""
    return tuple(torch.randn(count, *shape).to(dtype).unbind(0))


def _results(run: Program, program: Program, args: Sequence[Any], backward: bool) -> Tensors:
    """The outputs, then the gradients of arguments and parameters under a fixed weighting of the outputs."""
    args = pytree.tree_map(lambda a: _leaf(a, backward), tuple(args))
    parameters = dict(program.named_parameters()) if isinstance(program, nn.Module) else {}
    given = [a for a in pytree.tree_leaves(args) if isinstance(a, Tensor) and not a.requires_grad]
    with torch.set_grad_enabled(backward):
        found = [out for out in pytree.tree_leaves(run(*args)) if isinstance(out, Tensor)]
        results = {f"output {n}": out.detach() for n, out in enumerate(found)}
        results |= {f"argument {n} afterwards": a.detach() for n, a in enumerate(given)}
        wanted = {f"argument {n}": a for n, a in enumerate(pytree.tree_leaves(args)) if _is_wanted(a)} | parameters
        total = sum((out * _weights(out)).sum() for out in found if out.requires_grad)
        if not backward or not isinstance(total, Tensor) or not wanted:
            return results
        gradients = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
    named = zip(wanted.items(), gradients, strict=True)
    return results | {f"gradient of {n}": torch.zeros_like(t) if g is None else g for (n, t), g in named}


def _magnitude(x: Tensor) -> float:
    known = x[x.isfinite()].double()
    return known.abs().max().item() if known.numel() else 0.0


def _leaf(value: Any, backward: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    copied = value.detach().clone(memory_format=torch.preserve_format)
    # Tensors of the world have been written before; fresh ones would hide how their writes are counted.
    if type(copied) is Tensor and copied.layout == torch.strided:
        copied.copy_(copied.clone())
        copied.copy_(copied.clone())
    return copied.requires_grad_(backward and value.is_floating_point())


def _is_wanted(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _weights(out: Tensor) -> Tensor:
    # The same in every dtype, and no multiple of a constant: that would hide a softmax's own gradient.
    return torch.linspace(-1, 1, out.numel(), dtype=torch.float64).cos().reshape(out.shape).to(out.dtype)


def _widened(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _wider(program: Program) -> Program:
    return copy.deepcopy(program).double() if isinstance(program, nn.Module) else program
