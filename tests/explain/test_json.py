"""The JSON of reports: its schema knows each key, and docs/json.md describes each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attn_fuse
from attn_fuse.explain import explain, explanation_of
from attn_fuse.explain.command import main
from attn_fuse.explain.explanation import Explanation
from attn_fuse.explain.inputs import Inputs
from attn_fuse.report import Failure, GraphReport, Location, SiteReport

SCHEMA = json.loads(Path(attn_fuse.__file__).with_name("report.schema.json").read_text())
DOCUMENT = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
OBJECTS = SCHEMA["$defs"]


def check(data: dict[str, Any], kind: str = "explanation") -> dict[str, Any]:
    """`data`, once written and read again, which the schema takes as a `kind` and nothing else."""
    found: dict[str, Any] = json.loads(json.dumps(data, allow_nan=False))
    jsonschema.validate(found, {**SCHEMA, "oneOf": [{"$ref": f"#/$defs/{kind}"}]})
    jsonschema.validate(found, SCHEMA)
    return found


def causal(q: Tensor) -> Tensor:
    at = torch.arange(q.shape[-2])
    return (q @ q.mT / 4).masked_fill(at > at[:, None], -torch.inf).softmax(-1) @ q


def biased(q: Tensor) -> Tensor:
    at = torch.arange(q.shape[-2])
    return (q @ q.mT / 4 + (at - at[:, None])).masked_fill(at > at[:, None], -torch.inf).softmax(-1) @ q


def refused(q: Tensor) -> Tensor:
    return (q @ q.mT).softmax(-2) @ q


def of_torch(q: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q)


def without(q: Tensor) -> Tensor:
    return q.sin()


PROGRAMS: dict[str, tuple[Callable[[Tensor], Tensor], dict[str, Any], str]] = {
    "fused": (causal, {"pick": "fused"}, "fused"),
    "fused by evidence": (causal, {}, "fused"),
    "with a bias": (biased, {"pick": "fused"}, "fused"),
    "as written": (biased, {"kernels": ["cudnn"]}, "as written"),
    "refused": (refused, {}, "refused"),
    "already fused": (of_torch, {}, "already fused"),
    "none": (without, {}, ""),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_schema_knows_each_key(name: str) -> None:
    program, options, status = PROGRAMS[name]
    x = torch.randn(1, 2, 1024 if name == "fused by evidence" else 8, 16, requires_grad=name == "fused")
    explanation = explanation_of(program, Inputs((x,)), lambda run: run(x), options, codes=True)
    data = check(explanation.as_json(graphs=True))
    sites = [site for graph in data["graphs"] for site in graph["sites"]]
    assert [site["status"] for site in sites] == ([status] if status else [])
    if name == "with a bias":
        assert (
            sites[0]["code"] and sites[0]["picture"][0] == "#......." and sites[0]["bias"][1][:3] == [-1.0, 0.0, None]
        )
    if name == "fused by evidence":
        assert 0 < sites[0]["ratios"][sites[0]["kernel"]] < 1


def test_a_model_in_training() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    model.forward = lambda x: biased(nn.Sequential.forward(model, x))  # type: ignore[method-assign]
    assert check(explain(model.train(), torch.randn(2, 8, 16)).as_json())["attentions"] == 1


def test_a_failure() -> None:
    site = SiteReport(Location("<unknown>", 0, "", ""), "refused", failures=(Failure("it raised", "flex", "f.py"),))
    check(Explanation("M()", (GraphReport((site,), 0.0),)).as_json())


def test_the_command_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.py"
    file.write_text(
        "import torch\n\n\nclass Part(torch.nn.Module):\n    def forward(self, x: torch.Tensor):\n"
        "        return (x @ x.mT).softmax(-1) @ x\n\n\nclass Whole(torch.nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.part = Part()\n\n    def forward(self, x: torch.Tensor):\n"
        "        return self.part(x) + torch.zeros(10**12)\n"
    )
    assert main([str(file), "--json"]) == 0
    data = check(json.loads(capsys.readouterr().out))
    assert data["schema"] == 1 and data["torch"] == torch.__version__ and "before" not in data["graphs"][0]
    assert "of a part only" in data["said"][0]


def test_a_key_that_the_schema_does_not_know_is_an_error() -> None:
    data = explain(causal, torch.randn(1, 2, 8, 16)).as_json()
    data["graphs"][0]["sites"][0]["location"]["column"] = 3
    with pytest.raises(jsonschema.ValidationError, match="column"):
        check(data)


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for name, known in OBJECTS.items():
        assert known["additionalProperties"] is False, name
        optional = {"before", "after"} if name == "graph" else set()
        assert set(known["required"]) == set(known["properties"]) - optional, name
    assert set(OBJECTS["site"]["properties"]) == {field.name for field in fields(SiteReport)}


@pytest.mark.parametrize("name", OBJECTS)
def test_the_document_describes_each_key(name: str) -> None:
    section = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert section is not None
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+) \|$", section[1], re.MULTILINE)
    assert [row[0] for row in rows] == [*OBJECTS[name]["properties"]]
    for key, _, meaning in rows:
        assert meaning == OBJECTS[name]["properties"][key]["description"]
