"""The source of a program as it grows: its lines, its arguments, and how terms broadcast against the scores."""

from __future__ import annotations

from tests.fuzz.description import Program

# Longer than any length drawn: buffers are cut to size.
LONGEST = 24


class Source:
    """lines: the body of forward. setup: the body of __init__. arguments: names, and expressions that make them.

    numbers: whole numbers that the arguments are made of, and what they are in the first call.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.lines: list[str] = []
        self.setup: list[str] = []
        self.arguments: dict[str, str] = {}
        self.numbers: dict[str, int] = {}
        self._count = 0
        self._has_positions = False

    def say(self, *lines: str) -> None:
        self.lines += lines

    def fresh(self, stem: str) -> str:
        self._count += 1
        return f"{stem}{self._count}"

    def argument(self, name: str, *shape: str) -> str:
        """One more floating-point argument, normally distributed."""
        return self.given(name, f"torch.randn({', '.join(shape)}, generator=g).to(DTYPE)")

    def given(self, name: str, made: str) -> str:
        self.arguments[name] = made
        return name

    def parameter(self, stem: str, *shape: str, positive: bool = False) -> str:
        name, like = self.fresh(stem), "rand" if positive else "randn"
        more = " + 0.5" if positive else " * 0.4"
        self.setup.append(
            f"self.{name} = nn.Parameter((torch.{like}({', '.join(shape)}, generator=g){more}).to(DTYPE))"
        )
        return f"self.{name}"

    def buffer(self, stem: str, made: str) -> str:
        name = self.fresh(stem)
        self.setup.append(f'self.register_buffer("{name}", {made})')
        return f"self.{name}"

    def positions(self) -> None:
        """i and j, the positions of queries and keys, are known from here on."""
        if not self._has_positions:
            self.say("i, j = torch.arange(N)[:, None], torch.arange(M)[None, :]")
        self._has_positions = True

    # ---- terms that meet the scores

    @property
    def is_four(self) -> bool:
        """Whether the layers of the scores see them as (B, H, N, M), or transposed."""
        return self.program.rank == "four" or self.program.viewed

    @property
    def axis(self) -> int:
        """Where the keys are in the scores."""
        return -2 if self.program.transposed else -1

    def term(self, made: str, over: str) -> str:
        """A name for `made`, which has the axes i and j, or all of b, h, i and j where it differs along b or h."""
        name = self.fresh("t")
        if self.is_four or not set("bh") & set(over):
            pass
        elif self.program.rank == "three":
            made = f"({made}).expand(B, H, -1, -1).flatten(0, 1)"
        elif "h" in over:
            made = f"({made}).unflatten(1, (KV, G))"
        else:
            made = f"({made}).unsqueeze(2)"
        self.say(f"{name} = ({made}).mT" if self.program.transposed else f"{name} = {made}")
        return name

    def per_head(self, made: str) -> str:
        """The term for a tensor of length H."""
        return self.term(f"{made}.view(1, H, 1, 1)", "h")

    def text(self) -> str:
        s = self.program.sizes
        names = ", ".join(self.arguments)
        numbers = "".join(f", {name}={n}" for name, n in self.numbers.items())
        body = [*(f"        {line}" for line in self.lines)]
        return "\n".join(
            [
                "import math",
                "import torch",
                "import torch.nn.functional as F",
                "from torch import nn",
                "",
                f"KV, G, D, E = {s.kv_heads}, {s.groups}, {s.head_dim}, {s.value_dim}",
                "H = KV * G",
                *([] if self.program.dynamic else [f"B, N, M = {s.batch}, {s.q_len}, {s.kv_len}"]),
                f"DTYPE = torch.{self.program.dtype}",
                "",
                f"def inputs(B={s.batch}, N={s.q_len}, M={s.kv_len}{numbers}):",
                f"    g = torch.Generator().manual_seed({self.program.seed})",
                "    return (",
                *(f"        {made},  # {name}" for name, made in self.arguments.items()),
                "    )",
                "",
                "class Program(nn.Module):",
                "    def __init__(self):",
                "        super().__init__()",
                f"        g = torch.Generator().manual_seed({self.program.seed + 1})",
                *(f"        {line}" for line in self.setup),
                "",
                f"    def forward(self, {names}):",
                *body,
                "",
            ]
        )
