"""A user's program has types: mypy --strict and pyright accept typed_program.py, and find what is wrong in it.

The engine of pyright comes from basedpyright, whose package has all that it needs; pyright's own fetches Node.js.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

NAME = "typed_program.py"
WRONG = "  # wrong"


def errors_of_mypy(folder: pathlib.Path) -> dict[int, str]:
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-pretty", "--output=json", NAME]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {each["line"]: each["message"] for each in found if each["severity"] == "error"}


def errors_of_pyright(folder: pathlib.Path) -> dict[int, str]:
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "--level", "error"]
    done = subprocess.run([*command, "--outputjson", NAME], cwd=folder, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == 1, done.stdout
    return {each["range"]["start"]["line"] + 1: each["message"] for each in found["generalDiagnostics"]}


@pytest.mark.slow
@pytest.mark.parametrize("check", [errors_of_mypy, errors_of_pyright])
def test_what_is_right_has_types_and_what_is_wrong_is_found(check: object, tmp_path: pathlib.Path) -> None:
    text = pathlib.Path(__file__).with_name(NAME).read_text(encoding="utf-8")
    (tmp_path / NAME).write_text(text, encoding="utf-8")
    wrong = {number for number, line in enumerate(text.splitlines(), 1) if line.endswith(WRONG)}
    found = check(tmp_path)  # type: ignore[operator]
    assert len(wrong) > 15
    assert set(found) == wrong, {number: found.get(number, "not found") for number in set(found) ^ wrong}
