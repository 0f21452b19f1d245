"""Run every checker, all of them also when one fails, and end with what failed. `make lint` calls it.

A checker is a line of `CHECKS`. clang-tidy runs where it is installed and `make test` has left compile commands.
"""

from __future__ import annotations

import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[1]


def files(*patterns: str) -> list[str]:
    """Tracked and new files that git knows, by pattern, without what is ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    listed = subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE).stdout.split("\n")
    return sorted(name for name in set(listed) if name and (ROOT / name).exists())


def checks() -> dict[str, list[str]]:
    """Name and command of every check that applies here."""
    cxx, cython = files("*.h", "*.cc"), files("*.pyx", "*.pxd", "*.pxi")
    table = {
        "ruff": ["ruff", "check", "."],
        "ruff format": ["ruff", "format", "--check", "."],
        "mypy": ["mypy"],
        "words": [sys.executable, "scripts/words.py"],
    }
    if cython:
        table["cython-lint"] = ["cython-lint", *cython]
    if cxx:
        table["clang-format"] = ["clang-format", "--dry-run", "--Werror", *cxx]
    commands = ROOT / "build/dev/compile_commands.json"
    if shutil.which("clang-tidy") and commands.exists():
        compiled = {str(pathlib.Path(entry["file"])) for entry in json.loads(commands.read_text())}
        sources = [name for name in cxx if name.startswith("csrc/") and str(ROOT / name) in compiled]
        each = "clang-tidy --quiet -p build/dev {} 2>&1"  # its stderr only counts the warnings that it hides
        xargs = f"xargs -P {os.cpu_count() or 1} -I {{}} bash -c '{each}'"
        table["clang-tidy"] = ["bash", "-c", f"printf '%s\\n' {' '.join(map(shlex.quote, sources))} | {xargs}"]
    else:
        print("[lint] clang-tidy left out: it needs clang-tidy on PATH, and build/dev from `make test`")
    return table


def main() -> int:
    """Command line. Returns 1 when a check failed."""
    failed = []
    for name, command in checks().items():
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
