"""A program's source: what `Program` describes, as a module that stands alone."""

from __future__ import annotations

from tests.fuzz import mutate, numbers
from tests.fuzz.description import STEEP, Layer, Modified, Program
from tests.fuzz.operands import product, value_product, write_groups, write_operands, write_rank
from tests.fuzz.scores import triangle, write_layer, write_scale_after, write_scale_before
from tests.fuzz.source import Source


def write(p: Program) -> str:
    """Python source with `Program`, a module, and `inputs`, a function that makes its arguments."""
    out = Source(p)
    write_operands(out)
    if p.call == "once":
        _attend(out, [])
        return out.text()
    operands, out.lines = out.lines, []
    extra: list[str] = []
    before = set(out.arguments)
    _attend(out, extra)
    body, out.lines = out.lines, operands
    given = ["q", "k", "v", *(name for name in out.arguments if name not in before)]
    if p.dynamic:
        body = ["B, N, M = q.shape[0], q.shape[2], k.shape[2]", *body]
    out.say(f"def attend({', '.join(given)}):", *(f"    {line}" for line in body))
    names = ", ".join(given[1:])
    match p.call:
        case "twice":
            # Each result may be a tuple; what the first gives is the query of the second.
            out.say(f"first = attend(q, {names})", "first = first if isinstance(first, tuple) else (first,)")
            out.say("again = first[0].reshape(-1)[: q.numel()]")
            out.say("q = q + 0.1 * F.pad(again, (0, q.numel() - again.numel())).view(q.shape)")
            out.say(f"second = attend(q, {names})", "second = second if isinstance(second, tuple) else (second,)")
            out.say("return first + second")
        case "vmapped":
            stacked = ", ".join(f"torch.stack([{n}, {n}.flip(0)])" for n in given)
            out.say(f"return torch.vmap(attend)({stacked})")
        case "checkpoint":
            out.say(f"return torch.utils.checkpoint.checkpoint(attend, q, {names}, use_reentrant=False)")
        case _:
            out.say(f"return attend({', '.join(f'{n}={n}' for n in given)})")
    text = out.text()
    return text.replace("import torch\n", "import torch\nimport torch.utils.checkpoint\n", 1)


def _attend(out: Source, results: list[str]) -> None:
    """From q, k and v to the return."""
    p = out.program
    results.append("out")
    if p.detached in ("query", "key", "value"):
        name = p.detached[0]
        out.say(f"{name} = {name}.detach()")
    if p.detached.startswith("no_grad_"):
        name = p.detached[len("no_grad_")]
        out.say("with torch.no_grad():", f"    {name} = ({name} * 0.7).transpose(1, 2).contiguous().transpose(1, 2)")
    numbers.cut(out)
    _edits_before(out)
    alpha = write_scale_before(out)
    write_groups(out)
    mutate.before_product(out)
    write_rank(out)
    _scores(out, alpha)
    mutate.after_product(out)
    if p.outside == "raw_scores":
        out.say("raw = s")
        results.append("raw")
    if p.viewed:
        turned = "B, H, M, N" if p.transposed else "B, H, N, M"
        out.say("native = s.shape", f"s = s.reshape({turned})")
    write_scale_after(out)
    _edits_of_scores(out)
    keeping = None
    for layer in _in_order(p):
        keeping = write_layer(out, layer) or keeping
    if p.detached == "scores":
        out.say("s = s.detach()")
    mutate.before_softmax(out)
    if p.outside == "scores":
        results.append("s")
    if p.outside == "lse":
        results.append(f"torch.logsumexp(s, {out.axis})")
    _softmax(out)
    _weights(out, keeping)
    mutate.weights(out)
    _outside(out, results)
    _value_product(out)
    _output(out, results)
    if p.outside == "operands":
        results += ["q * 2", "k"]
    out.say(f"return {', '.join(results)}")


def _in_order(p: Program) -> list[Layer]:
    """Functions of the score mostly before the masks: of minus infinity, few are anything."""
    return sorted(p.layers, key=lambda x: not isinstance(x, Modified) or (p.seed % 4 == 0 and x.kind not in STEEP))


def _scores(out: Source, alpha: str) -> None:
    p = out.program
    x, y = ("c", "a") if p.transposed else ("a", "c")
    written = mutate.product_of(out, product(p, p.product, x, y, p.letters[0], alpha))
    if p.detached == "no_grad":
        out.say("with torch.no_grad():", f"    s = {written}")
    elif p.detached == "autocast_product":
        out.say('with torch.autocast("cpu", torch.bfloat16):', f"    s = {written}", "s = s.to(q.dtype)")
    elif p.detached == "autocast_off":
        out.say('with torch.autocast("cpu", enabled=False):', f"    s = {written}")
    elif p.edit == "product_out":
        out.say(f"s = torch.empty_like({x} @ {y}.mT)", f"torch.matmul({x}, {y}.mT, out=s)")
    else:
        out.say(f"s = {written}")


def _softmax(out: Source) -> None:
    p, ax = out.program, out.axis
    if mutate.softmax(out):
        return
    total = f"sum({ax}, keepdim=True)"
    match p.softmax:
        case "function":
            made = "F.softmax(s, dim=s.dim() - 1)" if ax == -1 else "F.softmax(s, dim=s.dim() - 2)"
        case "float":
            made = f"F.softmax(s.float(), {ax}).to(q.dtype)"
        case "float_argument":
            made = f"torch.softmax(s, {ax}, dtype=torch.float32).type_as(q)"
        case "by_hand" | "by_hand_detached_max" | "late":
            detached = ".detach()" if p.softmax == "by_hand_detached_max" else ""
            out.say(f"m = s.amax({ax}, keepdim=True){detached}", "e = torch.exp(s - m)")
            made = "e" if p.softmax == "late" else f"e / e.{total}"
        case "by_hand_without_max":
            out.say("e = s.exp()")
            made = f"e / torch.sum(e, dim={ax}, keepdim=True)"
        case "log_softmax":
            made = f"F.log_softmax(s, {ax}).exp()"
        case "logsumexp":
            made = f"torch.exp(s - torch.logsumexp(s, {ax}, keepdim=True))"
        case "less_maximum":
            made = f"(s - s.max({ax}, keepdim=True).values).softmax({ax})"
        case "safe":
            made = f'torch.where((s == float("-inf")).all({ax}, keepdim=True), 0.0, s.softmax({ax}))'
        case "nan_to_num":
            made = f"s.softmax({ax}).nan_to_num(0.0)"
        case "where_nan":
            out.say(f"p = s.softmax({ax})")
            made = "torch.where(p.isnan(), torch.zeros_like(p), p)"
        case "sink" if out.is_four:
            sink = out.parameter("sink", "H")
            out.say(f"s = torch.cat([s, {sink}.view(1, H, 1, 1).expand(s.shape[0], s.shape[1], s.shape[2], 1)], -1)")
            made = "s.softmax(-1)[..., :-1]"
        case "constant_sink" | "sink":
            made = "F.pad(s, (0, 1), value=0.3).softmax(-1)[..., :-1]"
        case "plus_one":
            out.say("e = s.exp()")
            made = f"e / (1 + e.{total})"
        case "exp2":
            out.say("e = torch.exp2(s * 1.4426950408889634)")
            made = f"e / e.{total}"
        case _:
            made = f"s.softmax({ax})"
    out.say(f"p = {made}")


def _weights(out: Source, keeping: str | None) -> None:
    p, ax = out.program, out.axis
    if p.detached == "weights":
        out.say("p = p.detach()")
    if p.edit == "weights_scaled":
        out.say("p.mul_(0.5)")
    if p.edit == "weights_operator":
        out.say("p *= 0.5")
    for layer in p.weights:
        if layer in ("masked_again", "filled_again") and keeping is None:
            keeping = out.term(triangle(out, "arange", "0")[0], "ij")
        match layer:
            case "dropout_zero":
                made = "F.dropout(p, 0.0, True)"
            case "dropout_eval":
                made = "F.dropout(p, p=0.5, training=False)"
            case "times_number":
                made = "p * 0.9"
            case "head_mask":
                made = f"p * {out.term(out.argument(out.fresh('head_mask'), '1', 'H', '1', '1'), 'h')}"
            case "masked_again":
                made = f"p * {keeping}.to(p.dtype)"
            case "filled_again":
                made = f"p.masked_fill(~{keeping}, 0.0)"
            case "renormalised":
                made = f"p / (p.sum({ax}, keepdim=True) + 1e-9)"
            case "times_dense":
                made = f"p * {out.term(out.argument(out.fresh('factor'), 'B', '1', 'N', 'M'), 'bij')}"
            case "times_row":
                made = f"p * {out.term(out.argument(out.fresh('factor'), 'B', '1', 'N', '1'), 'bi')}"
            case _:
                made = "p.to(v.dtype)"
        out.say(f"p = {made}")


def _outside(out: Source, results: list[str]) -> None:
    match out.program.outside:
        case "weights":
            results.append("p")
        case "mean_weights":
            results.append("p.mean(1)")
        case "detached_weights":
            results.append("p.detach()")


def _value_product(out: Source) -> None:
    p = out.program
    if p.edit == "value_between":
        out.say("v.mul_(0.5)")
    if p.edit == "scores_after":
        out.say("s = s + 0", "s.zero_()")
    if p.viewed:
        out.say("p = p.reshape(native)")
        if p.softmax == "late":
            out.say("e = p")
    weights = "p.mT" if p.transposed else "p"
    out.say(f"out = {value_product(p, p.value_product, weights, 'u', p.letters[1])}")
    if p.softmax == "late" and not _writes_softmax(p):
        out.say(f"out = out / p.sum({out.axis}, keepdim=True){'.mT' if p.transposed else ''}")
    mutate.output(out)
    match p.rank:
        case "three":
            out.say("out = out.view(B, H, N, E)")
        case "grouped" | "rows_folded":
            out.say("out = out.reshape(B, H, N, E)")
    if p.edit == "weights_after":
        out.say("p.zero_()")
    if p.edit == "value_after":
        out.say("v.add_(1)")


def _writes_softmax(p: Program) -> bool:
    return p.mutation is not None and mutate.softmax(Source(p))


def _output(out: Source, results: list[str]) -> None:
    p = out.program
    match p.edit:
        case "out_operator":
            out.say("out /= 2")
        case "out_scaled":
            out.say("out.mul_(0.5)")
        case "out_set":
            out.say("out[:, :, 0] = 0.25")
        case "value_after":
            results.append("v * 1")
    if p.detached == "out":
        results.append("out.detach()")
    made = {
        "joined": "out.transpose(1, 2).reshape(B, N, -1)",
        "sequence_first": "out.permute(2, 0, 1, 3).contiguous()",
        "residual": "out * 2 + 1",
        "summed_heads": "out.sum(1)",
        "wide": "out.float()" if p.dtype != "float64" else "out",
        "first_row": "out[:, :, :1]",
    }.get(p.output)
    if p.output == "linear":
        made = f"F.linear(out, {out.parameter('wo', '3', 'E')})"
    if made is not None:
        out.say(f"out = {made}")


# ---- edits in place


def _edits_before(out: Source) -> None:
    match out.program.edit:
        case "query_operator":
            out.say("q = q * 1", "q /= 1.5")
        case "key_method":
            out.say("k = k * 1", "k.mul_(0.7)")
        case "value_slice":
            out.say("v = v * 1", "v[:, :, ::2] *= 0.5")
        case "key_view":
            out.say("k = k * 1", "k.transpose(1, 2).add_(0.1)")
        case "query_out":
            out.say("q = q * 1", "torch.mul(q, 0.5, out=q)")
        case "argument_operator":
            out.say("q *= 0.5")
        case "key_cached":
            out.say("kept = torch.zeros_like(k)", "kept[:, :, :M] = k", "k = kept")
        case "value_cached":
            out.say("kept = torch.zeros_like(v)", "kept.index_copy_(2, torch.arange(M), v)", "v = kept")
        case "cache_given":
            cache = out.argument(out.fresh("cache"), "B", "KV", "M + 2", "D")
            out.say(f"{cache}[:, :, 1 : M + 1] = k", f"k = {cache}[:, :, 1 : M + 1]")
        case "beyond_the_end":
            out.say("k, v = k[:, :, -9:], v[:, :, -9:]")
        case "key_before":
            out.say("k = k.clone()", "k.mul_(0.7)")
        case "key_after":
            out.say("k = k.clone()", "kept = k")
        case "value_between" | "value_after":
            out.say("v = v.clone()")
        case "query_base":
            out.say("base = q.clone()", "q = base.view(base.shape)")


def _edits_of_scores(out: Source) -> None:
    """Right after the product (and its scale)."""
    p = out.program
    column = "s[..., 0]" if out.axis == -1 else "s[..., 0, :]"
    match p.edit:
        case "scores_scaled":
            out.say("s.mul_(0.5)")
        case "scores_set":
            out.say(f"{column} = 0.3")
        case "scores_operator":
            out.say("s /= 1.7")
        case "scores_slice":
            out.say("s[:, ::2] *= 0.5")
        case "scores_out":
            out.say("torch.add(s, 0.3, out=s)")
        case "column_alias":
            out.say(f"column = {column}", "column.add_(0.7)")
        case "diagonal_set":
            out.say("s.diagonal(dim1=-2, dim2=-1).fill_(-1e4)")
        case "mask_between":
            out.say("shared = torch.zeros(M, N, dtype=s.dtype).mT", "shared[:, :1] = -0.5")
            term = "shared.mT" if p.transposed else "shared"
            out.say(f"s = s + {term}", "shared[:, 1:] = 0.5", f"s = s + {term}")
        case "scores_alias":
            out.say("s = s.contiguous()", "flat = s.view(-1)", "flat.mul_(0.7)")
        case "scores_twice":
            out.say("s = s * 1", "before = s", "s += 1", "s = s + before")
        case "scores_copied":
            out.say("s.copy_(s * 0.5)")
        case "key_after":
            out.say("kept.mul_(0.5)")
        case "query_base":
            out.say("base.add_(1)")
        case "argument_meanwhile":
            out.say("q.add_(1)")
