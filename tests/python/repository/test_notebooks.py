"""The notebooks in docs/notebooks run from their first cell to their last, and are committed without results."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[3]
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


def cells(notebook: pathlib.Path) -> list[dict[str, object]]:
    return [each for each in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if each["cell_type"] == "code"]


def test_there_are_notebooks_and_the_site_has_them() -> None:
    listed = (ROOT / "docs/site/contents.md").read_text(encoding="utf-8")
    assert len(NOTEBOOKS) >= 3
    assert [each.stem for each in NOTEBOOKS if f"\ndocs/notebooks/{each.stem}\n" not in listed] == []


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_a_notebook_has_no_results(notebook: pathlib.Path) -> None:
    assert [each for each in cells(notebook) if each["outputs"] or each["execution_count"]] == []


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_a_notebook_runs(notebook: pathlib.Path, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "notebook.py"
    script.write_text("\n".join("".join(each["source"]) for each in cells(notebook)), encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "PYTHONPATH")}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path,
        env=environment,
        text=True,
        timeout=150,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
