"""Variables of the environment that a repository's scripts set."""

from __future__ import annotations

import os

import pytest

from attn_fuse.errors import ExplainError
from attn_fuse.explain.opening.open_file import imported
from tests.model_files import Write


def test_a_place_and_counts_of_processes(write: Write) -> None:
    write("import os\nROOT = os.environ['NO_SUCH_PROJECT_DIR']\n", "settings_of_it.py")
    path = write(
        "import os\nfrom settings_of_it import ROOT\nRANK = int(os.environ['LOCAL_RANK'])\nclass Net(nn.Module): pass\n"
    )
    notes: list[str] = []
    with imported(path, notes.append) as module:
        assert str(path.parent) == module.ROOT and module.RANK == 0
    assert notes == ["in the environment: NO_SUCH_PROJECT_DIR=the repository", "in the environment: LOCAL_RANK=0"]
    assert "NO_SUCH_PROJECT_DIR" not in os.environ and "LOCAL_RANK" not in os.environ


@pytest.mark.parametrize("source", ["os.environ['NO_SUCH_KEY_OF_IT']", "dict()['NO_SUCH_DIR']"])
def test_what_is_no_such_variable(write: Write, source: str) -> None:
    with (
        pytest.raises(ExplainError, match="cannot be imported: KeyError: 'NO_SUCH"),
        imported(write(f"import os\nx = {source}\n")),
    ):
        pass
