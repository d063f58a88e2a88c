"""What a missing package gives that a model holds, as a tokenizer, and whether a package is said to be there."""

from __future__ import annotations

import sys

import pytest
import torch

from attn_fuse.errors import ExplainError
from attn_fuse.explain.building.arguments import UnknownArgument
from attn_fuse.explain.building.build import built
from attn_fuse.explain.building.choose_entry import outermost
from attn_fuse.explain.opening.absent_values import MissingPackage
from attn_fuse.explain.opening.open_file import imported
from tests.model_files import Write, model_of, net

HOLDS = "import no_such_tokens\n" + net(
    "width=3", "self.tokens = no_such_tokens.get_encoding('gpt2'); self.layer = nn.Linear(width, 3)"
)
NAME = r"the model uses no_such_tokens\.get_encoding(\.\w+)?, and no_such_tokens is not installed"


class TestHeld:
    def test_a_value_that_forward_never_uses(self, write: Write) -> None:
        notes: list[str] = []
        forward = "    def forward(self, x):\n        return self.layer(x)\n"
        model, _ = model_of(write(HOLDS + forward), notes)
        assert model(torch.ones(3)).shape == (3,)
        assert notes == ["held and never used, so that it may be missing: no_such_tokens.get_encoding"]

    @pytest.mark.parametrize(
        "use", ["self.tokens(x)", "self.tokens.encode(x)", "x if self.tokens == 'gpt2' else 2 * x", "x + self.tokens"]
    )
    def test_a_value_that_forward_uses(self, write: Write, use: str) -> None:
        with imported(write(f"{HOLDS}    def forward(self, x):\n        return {use}\n")) as module:
            model = built(outermost(module), vars(module)).model
            with pytest.raises(MissingPackage, match=NAME):
                model(torch.ones(3))

    @pytest.mark.parametrize(
        "use",
        [
            "nn.Linear(self.tokens.count, 3)",
            "nn.Sequential(nn.Linear(3, 3), self.tokens)",
            "self.register_buffer('table', self.tokens)",
            "[n for n in self.tokens]",
        ],
    )
    def test_a_value_that_the_constructor_uses(self, write: Write, use: str) -> None:
        with pytest.raises(MissingPackage, match=NAME):
            model_of(write(f"{HOLDS.rstrip()}; {use}\n"))

    def test_another_problem_is_told_as_it_is(self, write: Write) -> None:
        with pytest.raises(ExplainError, match="cannot build GPT: ValueError: no kind"):
            model_of(write(f"{HOLDS.rstrip()}; raise ValueError('no kind')\n"))


class TestWhetherItIsThere:
    def test_who_asks_is_told_the_truth(self, write: Write) -> None:
        source = "import no_such_package\nimport importlib.util\nTHERE = importlib.util.find_spec('no_such_package')\n"
        with imported(write(source)) as module:
            assert module.THERE is None

    def test_a_folder_within_a_package_has_the_name_of_a_library(
        self, write: Write, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        site = tmp_path_factory.mktemp("libraries")
        (site / "library_of_tables.py").write_text("SIZE = 4\n")
        monkeypatch.setattr(sys, "path", [*sys.path, str(site)])
        for file in (
            "menagerie/__init__.py",
            "menagerie/tables/__init__.py",
            "menagerie/tables/library_of_tables/__init__.py",
        ):
            write("", file)
        path = write("from library_of_tables import SIZE\n", "menagerie/tables/library_of_tables/model.py")
        with imported(path) as module:
            assert module.SIZE == 4


class TestCircular:
    def test_a_module_that_was_to_be_imported_second(self, write: Write) -> None:
        write("", "circles/__init__.py")
        # Whoever imports the words first has both; whoever imports the model first finds it without `build`.
        write("from circles.model import build\n", "circles/words/__init__.py")
        write("SIZE = 5\n", "circles/words/sizes.py")
        path = write(
            "from circles.words.sizes import SIZE\nimport circles.words\n"
            "class Net(nn.Module):\n    size = SIZE\ndef build():\n    return Net()\n",
            "circles/model.py",
        )
        with imported(path) as module:
            assert module.Net.size == 5


class TestArguments:
    SOURCE = net("width=3, *, tokenizer", "self.tokenizer = tokenizer; self.layer = nn.Linear(width, 3)")

    def test_one_that_is_kept(self, write: Write) -> None:
        notes: list[str] = []
        model, _ = model_of(write(self.SOURCE), notes)
        assert model.layer.in_features == 3 and notes == ["held and never used, so that it may be missing: tokenizer"]

    @pytest.mark.parametrize(
        "use", ["self.tokenizer(x)", "x + self.tokenizer", "self.tokenizer.n * x", "x if self.tokenizer else 2 * x"]
    )
    def test_one_that_forward_uses(self, write: Write, use: str) -> None:
        with imported(write(f"{self.SOURCE}    def forward(self, x):\n        return {use}\n")) as module:
            model = built(outermost(module), vars(module)).model
            with pytest.raises(UnknownArgument, match=r"cannot build GPT: it uses tokenizer; pass --entry"):
                model(torch.ones(3))

    def test_one_that_the_constructor_uses(self, write: Write) -> None:
        path = write(net("tokenizer", "self.layer = nn.Linear(len(tokenizer.words.lower()), 3)"))
        with pytest.raises(ExplainError, match=r"cannot build GPT: its constructor needs tokenizer"):
            model_of(path)
