"""The Python in README.md and docs/ runs as printed: each page is one program, its blocks in order.

A block that says `# output: ...` below a line that prints must print exactly that. Blocks marked `python norun` are
for reading only.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[3]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OUTPUT = re.compile(r"^# output: (.*)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
PAGES = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "tests/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def name_of(page: pathlib.Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", [p for p in PAGES if BLOCK.search(p.read_text(encoding="utf-8"))], ids=name_of)
def test_the_python_of_a_page_runs(page: pathlib.Path, tmp_path: pathlib.Path) -> None:
    program = "\n".join(BLOCK.findall(page.read_text(encoding="utf-8")))
    script = tmp_path / "page.py"
    script.write_text(program, encoding="utf-8")
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
    assert done.stdout.splitlines() == OUTPUT.findall(program)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_within_the_repository_lead_somewhere(page: pathlib.Path) -> None:
    links = LINK.findall(page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_readme_names_only_targets_that_make_has(root: pathlib.Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"`make ([a-z-]+)", page.read_text(encoding="utf-8")))
        named |= set(re.findall(r"^make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE))
        assert named <= targets, f"{name_of(page)} names {named - targets}"


def test_the_pictures_are_those_of_their_text(tmp_path: pathlib.Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "docs/figures.py"), str(tmp_path)], check=True, timeout=60)
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == ["processes.svg", "program.svg", "throughput.svg"]
    for name in written:
        assert (tmp_path / name).read_bytes() == (ROOT / "docs" / name).read_bytes(), f"run docs/figures.py: {name}"
