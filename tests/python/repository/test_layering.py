"""docs/layers.md, ARCHITECTURE.md and docs/labels.md, against the code; and no circles.

The tables are read from the pages themselves, so that page, code and test cannot drift apart. Each check is also run on
a small tree with a planted fault, to see that it can fail.
"""

from __future__ import annotations

import ast
import itertools
import pathlib
import re
from collections.abc import Iterator

import pytest

CXX_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
CYTHON_IMPORT = re.compile(
    r"^\s*(?:from\s+(pathways[\w.]*)\s+c?import\s+([\w, ]+)|c?import\s+(pathways[\w.]*))", re.MULTILINE
)
LABEL = re.compile(r"\b[A-Z]{3,8}-\d{1,2}\b")
NOT_LABELS = {"UTF-8", "UTF-16", "UTF-32", "SHA-1"}
JAX_PRIVATE = ("jaxlib", "jax._src", "jax.jaxlib")
LONGEST_HEADER = 250  # lines: what a reader takes in as one thing
LONGEST_FILE = 500
TOP = "pathways"  # pathways/__init__.py and __main__.py: may use everything
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$|/_core\.cpp$")


def table_under(page: str, heading: str) -> list[list[str]]:
    """Rows of the first table under `## heading`, without its head; cells stripped."""
    section = page.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip().strip("|").split("|")] for row in rows[2:]]


def layers(page: str) -> dict[str, set[str]]:
    """Room to the rooms it may use, itself included; native rooms are `csrc/x`, Python rooms `pathways.x`."""
    table = {}
    for room, _, uses in table_under(page, "Layers"):
        name = room.strip("`")
        prefix = "csrc/" if name.startswith("csrc/") else "pathways."
        table[name] = {name} | {prefix + used for used in uses.split() if used != "-"}
    return table


def python_room(module: str, rooms: set[str]) -> str | None:
    """The room of a module of the package, `pathways` for the package itself, None for other packages."""
    parts = module.split(".")
    if parts[0] != TOP:
        return None
    room = ".".join(parts[:2])
    return room if room in rooms or (len(parts) > 1 and not parts[1].startswith("__")) else TOP


def imports_of(path: pathlib.Path, module: str, is_package: bool) -> Iterator[str]:
    """Every module that a Python file imports, at its top or within functions, with relative names resolved."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def python_violations(root: pathlib.Path, table: dict[str, set[str]]) -> Iterator[str]:
    """Imports within pathways/ that the table does not allow."""
    rooms = {room for room in table if room.startswith("pathways.")}
    for path in sorted((root / "pathways").rglob("*.p*")):
        where = path.relative_to(root)
        if path.suffix not in (".py", ".pyi", ".pyx", ".pxd", ".pxi") or GENERATED.search(path.as_posix()):
            continue
        parts = where.with_suffix("").parts
        if path.suffix == ".pxi":  # part of the one Cython module
            parts = ("pathways", "_core")
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        room = python_room(module, rooms)
        if room != TOP and room not in rooms:
            yield f"{where}: its room {room} is not in the layer table"
            continue
        if path.suffix in (".pyx", ".pxd", ".pxi"):
            found = [
                name
                for match in CYTHON_IMPORT.finditer(path.read_text(encoding="utf-8"))
                for name in _cython_names(match)
            ]
        else:
            found = list(imports_of(path, module, is_package))
        for name in dict.fromkeys(found):
            if room != "pathways._jaxlib" and any(name == door or name.startswith(f"{door}.") for door in JAX_PRIVATE):
                yield f"{where}: imports {name}; only pathways/_jaxlib may"
            used = python_room(name, rooms)
            if used is None or room == TOP or used in table[room] or used not in rooms | {TOP}:
                continue
            if (
                used == TOP
                and path.suffix in (".py", ".pyi")
                and _only_submodules(path, module, is_package, name, rooms)
            ):
                continue
            yield f"{where}: {room} may not import {name}"


def _cython_names(match: re.Match[str]) -> list[str]:
    base, names, plain = match.groups()
    return [plain] if plain else [f"{base}.{name.split(' as ')[0].strip()}" for name in names.split(",")]


def _only_submodules(path: pathlib.Path, module: str, is_package: bool, name: str, rooms: set[str]) -> bool:
    """Whether each use of the bare package is `from pathways import room`, which is checked by that room's name."""
    names = [other for other in imports_of(path, module, is_package) if other.startswith(f"{name}.")]
    return bool(names) and all(python_room(other, rooms) in rooms for other in names)


def native_violations(root: pathlib.Path, table: dict[str, set[str]]) -> Iterator[str]:
    """Includes within csrc/ that the table does not allow."""
    for path in sorted(itertools.chain((root / "csrc").rglob("*.h"), (root / "csrc").rglob("*.cc"))):
        where = path.relative_to(root)
        room = "/".join(where.parts[:2])
        if room not in table:
            yield f"{where}: its room {room} is not in the layer table"
            continue
        for name in CXX_INCLUDE.findall(path.read_text(encoding="utf-8")):
            used = "csrc/" + name.split("/")[0]
            if "/" in name and used not in table[room]:
                yield f'{where}: {room} may not include "{name}"'


def missing_rooms(root: pathlib.Path, table: dict[str, set[str]]) -> Iterator[str]:
    """Rows of the table without code."""
    for room in table:
        place = root / room.replace(".", "/")
        native = room == "pathways._native" and (root / "csrc/bind").is_dir()
        files = [place.with_suffix(suffix) for suffix in (".py", ".pyx")]
        filled = place.is_dir() and any(entry.is_file() for entry in place.rglob("*"))
        if not (filled or native or any(file.exists() for file in files)):
            yield f"{room} is in the layer table and has no code"


def labels_in(root: pathlib.Path, *folders: str) -> dict[str, set[str]]:
    """Label to the files under `folders` that carry it."""
    found: dict[str, set[str]] = {}
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in (".h", ".cc", ".py", ".pyx", ".pxd", ".pxi") or GENERATED.search(path.as_posix()):
                continue
            if path.name == pathlib.Path(__file__).name:  # plants labels, proves none
                continue
            for label in set(LABEL.findall(path.read_text(encoding="utf-8"))) - NOT_LABELS:
                found.setdefault(label, set()).add(path.relative_to(root).as_posix())
    return found


def index_of(page: str) -> dict[str, tuple[list[str], list[str]]]:
    """Label to its code files and its test files, from the index; `ARENA-1..4` stands for four labels."""
    index = {}
    for labels, _, code, test in table_under(page, "Labels"):
        first, _, last = labels.strip("`").partition("..")
        prefix, number = first.rsplit("-", 1)
        for n in range(int(number), int(last or number) + 1):
            index[f"{prefix}-{n}"] = (re.findall(r"`([^`]+)`", code), re.findall(r"`([^`]+)`", test))
    return index


def index_faults(root: pathlib.Path, index: dict[str, tuple[list[str], list[str]]]) -> Iterator[str]:
    """Where the index and the code disagree."""
    code, tests = labels_in(root, "csrc", "pathways"), labels_in(root, "tests")
    for label in sorted(code.keys() - index.keys()):
        proof = ", ".join(sorted(tests.get(label, set()))) or "no test"
        yield f"{label} is claimed by {', '.join(sorted(code[label]))} (proved by {proof}) and is not in the index"
    for label, (code_files, test_files) in index.items():
        if not code_files or not test_files:
            yield f"{label}: the index must name a code file and a test file"
        yield from (f"{label}: {name} does not carry it" for name in code_files if name not in code.get(label, set()))
        yield from (f"{label}: {name} does not carry it" for name in test_files if name not in tests.get(label, set()))


def stale_references(root: pathlib.Path, page: str) -> Iterator[str]:
    """What the page names as `file` or `file:function`, and is not there."""
    for file, name in re.findall(r"`([\w/]+\.(?:py|pyx|pxi|h|cc))(?::([\w.]+))?`", page):
        path = root / file
        if not path.is_file() or not re.search(rf"\b{name.split('.')[-1]}\b", path.read_text(encoding="utf-8")):
            yield f"a page names {file}{name and ':' + name}, which is not there"


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected parts of a graph that have more than one node (Tarjan), each sorted."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            part = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(part) > 1:
                found.append(sorted(part))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def native_graph(root: pathlib.Path) -> dict[str, set[str]]:
    """Each header of csrc/ to those that it includes."""
    headers = {path.relative_to(root / "csrc").as_posix(): path for path in (root / "csrc").rglob("*.h")}
    return {name: set(CXX_INCLUDE.findall(path.read_text(encoding="utf-8"))) for name, path in headers.items()}


def python_graph(root: pathlib.Path) -> dict[str, set[str]]:
    """Each module of the package to the modules that it imports, at its top or later, for types or to run."""
    modules = {}
    for path in (root / "pathways").rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        if not GENERATED.search(path.as_posix()):
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {}
    for module, path in modules.items():
        used = set(imports_of(path, module, path.name == "__init__.py")) & modules.keys()
        graph[module] = {name for name in used if not module.startswith(f"{name}.") and name != module}
    return graph


def long_files(root: pathlib.Path) -> Iterator[str]:
    """Files that are longer than one reader takes in. There are no exceptions: split a file by job."""
    for folder in ("csrc", "pathways", "tests", "examples", "scripts"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in (".h", ".cc", ".py", ".pyx", ".pxi") or GENERATED.search(path.as_posix()):
                continue
            most = LONGEST_HEADER if folder == "csrc" and path.suffix == ".h" else LONGEST_FILE
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > most:
                yield f"{path.relative_to(root)} has {lines} lines: expected at most {most}; split it by job"


@pytest.fixture(scope="module")
def page(root: pathlib.Path) -> str:
    return (root / "docs/layers.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def labels_page(root: pathlib.Path) -> str:
    return (root / "docs/labels.md").read_text(encoding="utf-8")


def test_python_imports_follow_the_table(root: pathlib.Path, page: str) -> None:
    faults = list(python_violations(root, layers(page)))
    assert not faults, "\n".join(faults)


def test_includes_follow_the_table(root: pathlib.Path, page: str) -> None:
    faults = list(native_violations(root, layers(page)))
    assert not faults, "\n".join(faults)


def test_every_room_of_the_table_has_code(root: pathlib.Path, page: str) -> None:
    faults = list(missing_rooms(root, layers(page)))
    assert not faults, "\n".join(faults)


def test_the_table_has_no_cycle(page: str) -> None:
    table = layers(page)
    for room, used in table.items():
        assert used <= table.keys(), f"{room} uses {used - table.keys()}, which the table does not have"
        for other in used - {room}:
            assert room not in table[other], f"{room} and {other} use each other"


def test_the_index_of_labels_is_true(root: pathlib.Path, labels_page: str) -> None:
    faults = list(index_faults(root, index_of(labels_page)))
    assert not faults, "\n".join(faults)


def test_each_promise_of_security_has_its_law(root: pathlib.Path, labels_page: str) -> None:
    promises = table_under((root / "docs/security.md").read_text(encoding="utf-8"), "What is protected")
    assert len(promises) >= 10
    for whom, _, laws in promises:
        assert set(laws.split(", ")) <= index_of(labels_page).keys(), f"{whom}: no law {laws!r} in docs/labels.md"


def test_the_pages_for_builders_name_what_is_there(root: pathlib.Path, page: str) -> None:
    faults = list(stale_references(root, page + (root / "ARCHITECTURE.md").read_text(encoding="utf-8")))
    assert not faults, "\n".join(faults)


def test_no_headers_include_each_other(root: pathlib.Path) -> None:
    assert circles(native_graph(root)) == []


def test_no_file_is_too_long(root: pathlib.Path) -> None:
    faults = list(long_files(root))
    assert not faults, "\n".join(faults)


def test_no_modules_import_each_other(root: pathlib.Path) -> None:
    assert circles(python_graph(root)) == []


PLANTED_TABLE = {
    "csrc/base": {"csrc/base"},
    "csrc/sync": {"csrc/sync", "csrc/base"},
    "pathways.errors": {"pathways.errors"},
    "pathways._jaxlib": {"pathways._jaxlib", "pathways.errors"},
    "pathways.compiler": {"pathways.compiler", "pathways.errors", "pathways._jaxlib"},
    "pathways.api": {"pathways.api", "pathways.errors", "pathways.compiler"},
}


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        ("csrc/base/a.h", '#include "sync/ring.h"\n', "csrc/base may not include"),
        ("csrc/attic/a.h", "", "csrc/attic is not in the layer table"),
        ("pathways/compiler/a.py", "import pathways.api\n", "may not import pathways.api"),
        ("pathways/compiler/a.py", "from pathways import api\n", "may not import pathways.api"),
        ("pathways/compiler/a.py", "import pathways as pw\n", "may not import pathways"),
        ("pathways/compiler/a.py", "def f():\n    from ..api import arrays\n", "may not import pathways.api"),
        ("pathways/compiler/a.py", "from jax._src import core\n", "only pathways/_jaxlib may"),
        ("pathways/api/a.py", "import jaxlib.mlir\n", "only pathways/_jaxlib may"),
        ("pathways/errors.py", "from .compiler import ir\n", "may not import pathways.compiler"),
        ("pathways/compiler/a.pyx", "from pathways.api cimport x\n", "may not import pathways.api"),
        ("pathways/attic/a.py", "", "pathways.attic is not in the layer table"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: pathlib.Path, file: str, text: str, fault: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    found = [*python_violations(tmp_path, PLANTED_TABLE), *native_violations(tmp_path, PLANTED_TABLE)]
    assert found and all(fault in violation for violation in found), found


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("csrc/sync/a.h", '#include <vector>\n#include "base/status.h"\n#include "sync/ring.h"\n'),
        ("pathways/compiler/a.py", "import jax\nfrom pathways import _jaxlib, errors\nfrom . import ir\n"),
        ("pathways/_jaxlib/__init__.py", "import jaxlib\nfrom pathways._jaxlib.a import f\n"),
        ("pathways/_jaxlib/a.py", "from jax._src import core\nfrom pathways import errors\n"),
        ("pathways/__init__.py", "from pathways import errors\nfrom pathways.api import connect\n"),
    ],
)
def test_what_the_table_allows_is_no_violation(tmp_path: pathlib.Path, file: str, text: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    assert [*python_violations(tmp_path, PLANTED_TABLE), *native_violations(tmp_path, PLANTED_TABLE)] == []


def test_a_false_index_is_found(tmp_path: pathlib.Path) -> None:
    for file, text in {"csrc/a/a.h": "// ORD-1 FUT-1 UTF-8\n", "tests/cpp/a_test.cc": "// ORD-1\n"}.items():
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(text)
    row = "| ORD-1 | x | `csrc/a/a.h` | `tests/cpp/a_test.cc` |\n"
    true = f"\n## Labels\n\n| label | law | code | test |\n|---|---|---|---|\n{row}"
    assert index_of(true) == {"ORD-1": (["csrc/a/a.h"], ["tests/cpp/a_test.cc"])}
    (fault,) = index_faults(tmp_path, index_of(true))
    assert fault.startswith("FUT-1 is claimed by csrc/a/a.h (proved by no test)")
    unproved = true + "| FUT-1 | x | `csrc/a/a.h` | `tests/cpp/a_test.cc` |\n"
    assert list(index_faults(tmp_path, index_of(unproved))) == ["FUT-1: tests/cpp/a_test.cc does not carry it"]


def test_a_planted_circle_is_found(tmp_path: pathlib.Path) -> None:
    for file, text in {
        "csrc/a/a.h": '#include "a/b.h"\n',
        "csrc/a/b.h": '#include "a/c.h"\n',
        "csrc/a/c.h": '#include "a/a.h"\n',
        "csrc/a/d.h": '#include "a/a.h"\n',
        "pathways/__init__.py": "from pathways import one\n",
        "pathways/one.py": "def f():\n    from pathways import two\n",
        "pathways/two.py": "from pathways.one import f\n",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    assert circles(native_graph(tmp_path)) == [["a/a.h", "a/b.h", "a/c.h"]]
    assert circles(python_graph(tmp_path)) == [["pathways.one", "pathways.two"]]


def test_a_long_header_is_found(tmp_path: pathlib.Path) -> None:
    (tmp_path / "csrc/a").mkdir(parents=True)
    (tmp_path / "csrc/a/fits.h").write_text("//\n" * LONGEST_HEADER)
    (tmp_path / "csrc/a/long.h").write_text("//\n" * (LONGEST_HEADER + 1))
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/fits.cc").write_text("//\n" * LONGEST_FILE)
    (tmp_path / "tests/long.py").write_text("#\n" * (LONGEST_FILE + 1))
    assert list(long_files(tmp_path)) == [
        "csrc/a/long.h has 251 lines: expected at most 250; split it by job",
        "tests/long.py has 501 lines: expected at most 500; split it by job",
    ]


def test_a_stale_reference_is_found(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.py").write_text("def f():\n    pass\n")
    assert list(stale_references(tmp_path, "`a.py:f` `b.py:f` `a.py:g` `a.py` `c.py`")) == [
        "a page names b.py:f, which is not there",
        "a page names a.py:g, which is not there",
        "a page names c.py, which is not there",
    ]
