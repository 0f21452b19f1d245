"""README.md and docs/: their Python runs as printed, and their links lead somewhere.

Each page is one program, its blocks in order. A block that says `# output: ...` below a line that prints must print
exactly that. Blocks marked `python norun` are for reading only. The programs of the pages run beside each other, as
many at a time as the machine has cores. Anchors are those that GitHub makes of headings.
"""

from __future__ import annotations

import collections
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from pathways import errors

ROOT = pathlib.Path(__file__).parents[3]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OUTPUT = re.compile(r"^# output: (.*)$", re.MULTILINE)
CODE = re.compile(r"^ *```.*?^ *```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:\s]*)(#[^)\s]*)?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
NAMED = re.compile(r"\bdocs/[\w-]+\.(?:md|svg)(?:#[\w-]+)?")
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(ROOT / name / "README.md" for name in ("tests", "benchmarks")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "deploy").rglob("*.md")),
]
PAGE_S = 300.0
WITH_PYTHON = [page for page in PAGES if BLOCK.search(page.read_text(encoding="utf-8"))]


def name_of(page: pathlib.Path) -> str:
    return page.relative_to(ROOT).as_posix()


def program_of(page: pathlib.Path) -> str:
    return "\n".join(BLOCK.findall(page.read_text(encoding="utf-8")))


def anchors_of(page: pathlib.Path) -> set[str]:
    """What may stand behind "#" in a link to the page."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found: collections.Counter[str] = collections.Counter()
    anchors = set()
    for heading in HEADING.findall(text):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
        anchors.add(f"{anchor}-{found[anchor]}" if found[anchor] else anchor)
        found[anchor] += 1
    return anchors


def leads_nowhere(source: pathlib.Path, target: str, anchor: str) -> bool:
    """Whether no file, or no heading of it, is what `source` links to."""
    page = source.parent / target if target else source
    if not page.exists():
        return True
    return bool(anchor) and page.suffix == ".md" and anchor[1:] not in anchors_of(page)


def links_of(page: pathlib.Path) -> list[tuple[str, str]]:
    """The page's links within the repository: paths, and anchors with their "#"."""
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    return [(target, anchor) for target, anchor in LINK.findall(text) if target or anchor]


def play(page: pathlib.Path, folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """Runs a page's program in a process of its own."""
    script = folder / "page.py"
    script.write_text(program_of(page), encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "PYTHONPATH")}
    return subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=folder,
        env=environment,
        text=True,
        timeout=PAGE_S,
        capture_output=True,
    )


Played = dict[pathlib.Path, "Future[subprocess.CompletedProcess[str]]"]


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    """The programs of the pages that are played, under way or over."""
    pages = [
        item.callspec.params["page"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test_the_python_of_a_page_runs
    ]
    pool = ThreadPoolExecutor(os.cpu_count())
    yield {page: pool.submit(play, page, tmp_path_factory.mktemp(page.stem)) for page in pages}
    pool.shutdown(cancel_futures=True)


@pytest.mark.watchdog(PAGE_S + 30)  # a page begins when an earlier one ends
@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_the_python_of_a_page_runs(page: pathlib.Path, played: Played) -> None:
    done = played[page].result()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == OUTPUT.findall(program_of(page))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_within_the_repository_lead_somewhere(page: pathlib.Path) -> None:
    assert [target + anchor for target, anchor in links_of(page) if leads_nowhere(page, target, anchor)] == []


def test_the_link_check_knows_what_github_makes_of_headings(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `jit` of [mine](x.md), twice\n\n```sh\n# none\n```\n\n## On 2 x 1_a\n\n## On 2 x 1_a\n")
    assert anchors_of(page) == {"a-jit-of-mine-twice", "on-2-x-1_a", "on-2-x-1_a-1"}
    page.write_text("[a](page.md#here) `[b](none.md)` [c](#here) [d](none.md) [e](https://x.y/z#q)\n\n## Here\n")
    links = [("page.md", "#here"), ("", "#here"), ("none.md", "")]
    assert links_of(page) == links
    assert [leads_nowhere(page, *link) for link in [*links, ("", "#there")]] == [False, False, True, True]


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached and page.suffix == ".md" and page.exists():
            reached.add(page)
            waiting += [(page.parent / target).resolve() for target, _ in links_of(page) if target]
    assert [name_of(page) for page in PAGES if page.parent.name == "docs" and page not in reached] == []


def test_pages_that_code_names_are_there() -> None:
    """In docstrings, comments and messages."""
    sources = [
        path
        for folder in ("pathways", "csrc", "examples", "benchmarks", "deploy", "scripts", "tests")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".pyx", ".pxi", ".h", ".cc", ".service", ".yaml", ".sbatch") and path.is_file()
    ]
    wrong = []
    for source in sources:
        for named in NAMED.findall(source.read_text(encoding="utf-8")):
            target, _, anchor = named.partition("#")
            if leads_nowhere(ROOT / "README.md", target, anchor and f"#{anchor}"):
                wrong.append(f"{name_of(source)}: {named}")
    assert wrong == []


def test_the_tests_that_hold_the_promises_are_there(root: pathlib.Path) -> None:
    """Each row of the page of attacks names some, as path::name."""
    page = (root / "docs" / "security-tests.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|") and not line.startswith(("|---", "| promise"))]
    named = [re.findall(r"`(tests/\S+?)::(\w+)`", row) for row in rows]
    assert len(rows) >= 40 and all(named), [row for row, found in zip(rows, named, strict=True) if not found]
    for path, name in (each for found in named for each in found):
        assert f"\ndef {name}(" in (root / path).read_text(), f"{path} has no test {name}"


def test_the_page_of_errors_has_each_class_with_its_bases() -> None:
    page = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    told = {}
    for name, bases in re.findall(r"^\| `(\w+Error)` \| ([^|]+) \|", page, re.MULTILINE):
        told[name] = re.findall(r"`(\w+)`", bases)
    classes = [each for each in vars(errors).values() if isinstance(each, type) and each.__module__ == errors.__name__]
    root = errors.PathwaysError
    assert told == {
        each.__name__: [base.__name__ for base in each.__bases__ if base is not root]
        for each in classes
        if issubclass(each, root) and each is not root
    }
    warnings = {each.__name__ for each in classes if issubclass(each, Warning)} - {"PathwaysWarning"}
    assert warnings == set(re.findall(r"^\| `(\w+Warning)` \|", page, re.MULTILINE))


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
