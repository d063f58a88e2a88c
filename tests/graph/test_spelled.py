"""What texts of a repository say of a model besides its constructor: class methods, tools that count, its own name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attn_fuse.errors import ExplainError
from attn_fuse.explain.opening.open_file import imported
from attn_fuse.explain.reading.snippets import inputs_of
from tests.model_files import Write, model_of, net
from tests.subjects import found_in

GPT = net("width, flavour", "self.layer = nn.Linear(width, flavour)")


class TestClassMethods:
    NAMED = f"""{GPT}
    @classmethod
    def from_name(cls, name):
        return cls(*{{"small": (6, 2), "large": (60, 2)}}[name])
    @classmethod
    def from_pretrained(cls, name):
        raise OSError("no network")
"""

    def test_one_that_a_readme_calls(self, write: Write, tmp_path: Path) -> None:
        path = write(self.NAMED)
        call = "GPT.from_pretrained('large')\nmodel = GPT.from_name('small')"
        (tmp_path / "README.md").write_text(f"```python\nfrom model import GPT\n{call}\n```\n")
        notes: list[str] = []
        assert model_of(path, notes)[0].layer.in_features == 6
        assert notes == ["as in README.md: GPT.from_name('small')"]

    def test_what_loads_is_not_called(self, write: Write, tmp_path: Path) -> None:
        path = write(self.NAMED)
        (tmp_path / "README.md").write_text("```python\nfrom model import GPT\nGPT.from_pretrained('large')\n```\n")
        notes: list[str] = []
        model_of(path, notes)
        assert not any("README" in note for note in notes)


class TestTools:
    @pytest.mark.parametrize(
        "call, shapes",
        [
            ("summary(model, [64, 12, 207, 3])", [(1, 12, 207, 3), (1, 64, 12, 207, 3)]),
            ("summary(model, input_size=(3, 8, 8))", [(1, 8, 8), (1, 3, 8, 8)]),
            ("torchinfo.summary(GPT(3, 4), input_data=torch.ones(2, 3))", [(2, 3)]),
            ("flops = profile(model, inputs=(torch.ones(2, 3),))", [(2, 3)]),
            ("torch.onnx.export(model, torch.ones(5, 3), 'model.onnx')", [(5, 3)]),
            ("summary(model, (3, 'auto'))", []),
            ("summary(model, 3)", []),
            ("summary(other, (3, 8, 8))", []),
            ("describe(model, (3, 8, 8))", []),
        ],
    )
    def test_the_shapes_that_a_tool_is_given(self, write: Write, call: str, shapes: list[tuple[int, ...]]) -> None:
        path = write(f"{GPT}\nif __name__ == '__main__':\n    model = GPT(3, 4)\n    {call}\n")
        with imported(path) as module:
            found = [*inputs_of(module.GPT, vars(module), path)]
        assert [tuple(args[0].shape) for args, _ in found] == shapes

    def test_a_time_of_the_day_lies_within_it(self, write: Write) -> None:
        source = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.times, self.layer = nn.Embedding(288, 4), nn.Linear(2, 4)
    def forward(self, x):
        return (self.layer(x[..., :2]) + self.times((x[..., 1] * 288).long())).softmax(-1)

if __name__ == "__main__":
    summary(Net(), [64, 12, 5, 3])
"""
        assert str(found_in(write(source))) == "Net(float32[1, 12, 5, 3])"

    def test_a_value_that_ends_the_program(self, write: Write) -> None:
        source = f"""
def parsed():
    raise SystemExit(2)
{GPT}
if __name__ == "__main__":
    options = parsed()
    model = GPT(options.width, parsed())
    model(parsed())
"""
        assert model_of(write(source))[0].layer.in_features == 256


@pytest.mark.parametrize("folder", ["examples", "evaluation", "scripts"])
def test_a_call_in_a_script_of_the_repository(write: Write, tmp_path: Path, folder: str) -> None:
    (tmp_path / "README.md").touch()
    path = write(GPT, "models/gpt.py")
    write("from models.gpt import GPT\ndef check():\n    return GPT(6, flavour=5)\n", f"{folder}/check.py")
    write("from elsewhere import GPT\ndef check():\n    return GPT(60, flavour=50)\n", f"{folder}/another.py")
    notes: list[str] = []
    model = model_of(path, notes)[0]
    assert (model.layer.in_features, model.layer.out_features) == (6, 5)
    assert notes == ["as in check.py: GPT(6, flavour=5)"]


def test_a_constructor_that_ends_the_program(write: Write) -> None:
    with pytest.raises(ExplainError, match="cannot build GPT: SystemExit: 3"):
        model_of(write(net("width=3", "raise SystemExit(3)")))


class TestPackagesWithoutInit:
    LAYER = "def width():\n    return 12\n"

    def test_the_repository_by_the_name_that_it_was_cloned_as(self, write: Write, tmp_path: Path) -> None:
        (tmp_path / "README.md").touch()
        write(self.LAYER, "util/layers.py")
        path = write(f"from video_net.util.layers import width\n{net('n=width()', 'self.layer = nn.Linear(n, 1)')}")
        assert model_of(path)[0].layer.in_features == 12

    def test_a_folder_below_src(self, write: Write, tmp_path: Path) -> None:
        (tmp_path / "setup.py").touch()
        write(self.LAYER, "code/video_net/util/layers.py")
        source = f"from video_net.util.layers import width\n{net('n=width()', 'self.layer = nn.Linear(n, 1)')}"
        assert model_of(write(source, "code/video_net/dit/model.py"))[0].layer.in_features == 12

    def test_one_that_lacks_a_module_is_not_installed(self, write: Write, tmp_path: Path) -> None:
        (tmp_path / "README.md").touch()
        write(self.LAYER, "util/layers.py")
        imports = "import video_net.util.layers\nfrom video_net.other import width\n"
        notes: list[str] = []
        with imported(write(imports + net("n=3", "self.n = n")), notes.append):
            assert notes == ["not installed, and stood in for: video_net"]

    @pytest.mark.parametrize("init", [(), ("video_net/models/__init__.py",)])
    def test_a_file_that_has_the_name_of_its_package(self, write: Write, tmp_path: Path, init: tuple[str, ...]) -> None:
        (tmp_path / "README.md").touch()
        write(self.LAYER, "video_net/util/layers.py")
        for name in init:
            write("", name)
        source = f"from video_net.util.layers import width\n{net('n=width()', 'self.layer = nn.Linear(n, 1)')}"
        assert model_of(write(source, "video_net/models/video_net.py"))[0].layer.in_features == 12


def test_a_class_of_a_missing_package_is_none_that_is_there(write: Write) -> None:
    body = "self.several = type(sizes) == ListConfig; self.layer = nn.Linear(3, 3)"
    model, _ = model_of(write(f"from no_such_config import ListConfig\n{net('sizes=(2, 4)', body)}"))
    assert model.several is False and isinstance(model.layer, torch.nn.Linear)
