"""Run every checker, all of them also when one fails, and end with what failed. `make lint` calls it.

A checker is an entry of `checks()`. clang-tidy runs where it is installed and `make test` has left compile commands. It
reads one file per folder of `csrc`, which includes that folder's sources: they share their headers, and one file takes
less than half of the time. So two sources of a folder must not define the same name, also in anonymous namespaces.
clang-analyzer follows fewer paths from function to function than it could (its mode "shallow"), which takes a third of
the time. `python scripts/lint.py --deep` lets it follow all.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[1]
#: What a search of the sources proves: layers, labels, one clock, one loop of sockets, records in one room.
SEAMS = ["tests/python/repository/test_layering.py", "tests/python/repository/test_seams.py"]


def files(*patterns: str) -> list[str]:
    """Tracked and new files that git knows, by pattern, without what is ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    listed = subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE).stdout.split("\n")
    return sorted(name for name in set(listed) if name and (ROOT / name).exists())


def united(sources: list[str]) -> list[str]:
    """Writes build/tidy/UnifiedSource-<folder>.cpp for each folder of `sources`; the slowest first. By that name
    clang-analyzer knows that it shall follow every path in what the file includes, too."""
    folder = ROOT / "build/tidy"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    parts: dict[str, list[str]] = {}
    for name in sources:
        parts.setdefault(pathlib.Path(name).parent.name, []).append(name)
    for part, names in parts.items():
        lines = [f'#include "{ROOT / name}"  // NOLINT(bugprone-suspicious-include)\n' for name in names]
        (folder / f"UnifiedSource-{part}.cpp").write_text("".join(lines))
    order = sorted(parts, key=lambda part: -len(parts[part]))
    return [f"build/tidy/UnifiedSource-{part}.cpp" for part in order]


def compiled_files(commands: pathlib.Path) -> dict[str, list[str]]:
    """The command that compiles each file. One that is compiled as a part of CMake's unity files has theirs."""
    found: dict[str, list[str]] = {}
    for entry in json.loads(commands.read_text()):  # the first of a file counts: later ones are for the models
        path = pathlib.Path(entry["file"])
        is_unity = path.match("Unity/unity_*_cxx.cxx")
        for name in re.findall(r'#include "(.*)"', path.read_text()) if is_unity else [str(path)]:
            found.setdefault(str(ROOT / name), shlex.split(entry["command"]))
    return found


def checks(is_deep: bool = False) -> dict[str, list[str]]:
    """Name and command of every check that applies here."""
    cxx, cython = files("*.h", "*.cc"), files("*.pyx", "*.pxd", "*.pxi")
    table = {
        "ruff": ["ruff", "check", "."],
        "ruff format": ["ruff", "format", "--check", "."],
        "mypy": ["mypy"],
        "words": [sys.executable, "scripts/words.py"],
        "rooms and seams": [sys.executable, "-m", "pytest", "-q", *SEAMS],
    }
    if cython:
        table["cython-lint"] = ["cython-lint", *cython]
    if cxx:
        table["clang-format"] = ["clang-format", "--dry-run", "--Werror", *cxx]
        # clang-format leaves comments as they are, so it does not see long ones.
        table["line lengths"] = ["bash", "-c", "! grep -nHE '^.{121,}' \"$@\"", "bash", *cxx]
    commands = ROOT / "build/dev/compile_commands.json"
    if shutil.which("clang-tidy") and commands.exists():
        compiled = compiled_files(commands)
        sources = [name for name in cxx if name.startswith("csrc/") and str(ROOT / name) in compiled]
        bound = re.compile(r"csrc/(?!bind/).*[.]cc")  # the bindings are compiled with Python's headers, not here
        if unseen := [name for name in cxx if bound.match(name) and name not in sources]:
            print(f"[lint] clang-tidy does not see {', '.join(unseen)}: run `make native` first")
        flags = [flag for flag in compiled[str(ROOT / sources[0])] if re.match("-[DIOWfs]", flag)]
        if not is_deep:
            flags += ["-Xclang", "-analyzer-config", "-Xclang", "mode=shallow"]
        each = f"clang-tidy --quiet {{}} -- {shlex.join(flags)} 2>&1"  # its stderr only counts what it hides
        xargs = f"xargs -P {os.cpu_count() or 1} -I {{}} bash -c '{each}'"
        table["clang-tidy"] = ["bash", "-c", f"printf '%s\\n' {shlex.join(united(sources))} | {xargs}"]
    else:
        print("[lint] clang-tidy left out: it needs clang-tidy on PATH, and build/dev from `make test`")
    return table


def main() -> int:
    """Command line. Returns 1 when a check failed."""
    failed = []
    for name, command in checks(is_deep="--deep" in sys.argv[1:]).items():
        began = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        verdict = "ok" if done.returncode == 0 else "FAILED"
        print(f"[lint] {name}: {verdict} ({time.perf_counter() - began:.1f} s)", flush=True)
        if done.returncode:
            failed.append(name)
            print(done.stdout, flush=True)
    print(f"[lint] failed: {', '.join(failed)}" if failed else "[lint] all clean")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
