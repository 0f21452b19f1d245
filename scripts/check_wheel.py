"""Build a wheel and see that it is fit to give away. `make wheel` calls it.

    python scripts/check_wheel.py [--python INTERPRETER]

1. Builds dist/pathways_jax-*.whl from a clean copy of the sources, so that no leftover of a working tree gets in.
2. Prints auditwheel's verdict, and lets auditwheel write the manylinux tag into the wheel that it has earned.
3. Looks inside: every file of the package; one libpathways_core.so, which exports the project's namespace and nothing
   else; `$ORIGIN` as its neighbours' run path; no sources of the native parts. `twine check` reads the metadata.
4. Installs the wheel where no compiler and no headers are (scripts/bare_machine.py), in a new environment, asks
   `pip check`, and runs outside of the source tree: the README's program, Figure 2 on host processes, and
   `pathways bench micro`.
5. Puts another project's package `pathways` over it, as pip would, and sees that `pathways --version` says so.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).parents[1]
NAMESPACE = "pathways::"
# What C++ puts before a name: these belong to the type or function that follows.
KIND = r"typeinfo|typeinfo name|vtable|VTT|guard variable|(?:non-)?virtual thunk"
PREFIX = re.compile(rf"^(?:(?:{KIND}) (?:for|to) |TLS \w+ function for )+")
EXPECTED_OUTPUT = "with pw.program: ([3.0, 5.0], [2.0, 4.0]), dispatches: 1"


def run(*command: str | pathlib.Path, cwd: pathlib.Path = ROOT, env: dict[str, str] | None = None) -> str:
    """Run a command; return its output, or end the check with it."""
    done = subprocess.run(command, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"{done.stdout[-6000:]}\n[wheel] failed: {' '.join(map(str, command))}")
    return done.stdout


def say(text: str) -> None:
    """One line of progress."""
    print(f"[wheel] {text}", flush=True)


def build(scratch: pathlib.Path, python: str) -> pathlib.Path:
    """Build the wheel from what git tracks or would track; return its path in `scratch`."""
    # ccache writes paths relative to the build's folder, and so knows the system's headers again only if both sources
    # lie equally deep.
    source = scratch.joinpath(*["source"] * max(1, len(ROOT.parts) - len(scratch.parts)))
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    run(python, "-m", "build", "--wheel", "--no-isolation", "--outdir", scratch / "built", cwd=source)
    (wheel,) = (scratch / "built").glob("*.whl")
    return wheel


def foreign_symbols(library: pathlib.Path) -> list[str]:
    """Symbols that `library` exports and that are not in the project's namespace."""
    exported = run("nm", "--dynamic", "--demangle", "--defined-only", library).splitlines()
    names = [line.split(maxsplit=2)[2] for line in exported if len(line.split(maxsplit=2)) == 3]
    if not any(NAMESPACE in name for name in names):
        raise SystemExit(f"[wheel] failed: {library.name} exports nothing of {NAMESPACE}")
    return [name for name in names if not _is_ours(name)]


def _is_ours(name: str) -> bool:
    """Whether a demangled name is declared in our namespace: a template's name is preceded by its return type."""
    name = PREFIX.sub("", name)
    head = re.split(r"\(", name, maxsplit=1)[0]
    depth, start = 0, 0
    for index, letter in enumerate(head):  # the declared name begins after the last space outside <>
        depth += (letter == "<") - (letter == ">")
        if letter == " " and depth == 0:
            start = index + 1
    return head[start:].startswith(NAMESPACE)


def look_inside(wheel: pathlib.Path, scratch: pathlib.Path) -> None:
    """Check the wheel's contents."""
    folder = scratch / "inside"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(folder)
    strays = [
        name
        for name in names
        if name.endswith((".pyx", ".pxi", ".cpp", ".cc", ".o", ".a")) or "tests/" in name or "benchmarks/" in name
    ]
    cores = [name for name in names if "libpathways_core" in name]
    if strays or len(cores) != 1:
        raise SystemExit(f"[wheel] failed: expected one libpathways_core.so and no sources, got {cores} and {strays}")
    package = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "pathways").splitlines()
    left_out = (".pyx", ".pxi", "CMakeLists.txt")
    if missing := [name for name in package if not name.endswith(left_out) and name not in names]:
        raise SystemExit(f"[wheel] failed: it lacks {len(missing)} files of the package: {missing[:10]}")
    foreign = foreign_symbols(folder / cores[0])
    if foreign:
        raise SystemExit(f"[wheel] failed: {cores[0]} exports {len(foreign)} foreign symbols: {foreign[:10]}")
    for extension in [name for name in names if re.search(r"pathways/_\w+\.cpython.*\.so$", name)]:
        if "$ORIGIN" not in run("readelf", "--dynamic", folder / extension):
            raise SystemExit(f"[wheel] failed: {extension} does not look for libpathways_core.so beside itself")
    say(run(sys.executable, "-m", "twine", "check", "--strict", wheel).strip())
    size = wheel.stat().st_size / 1e6
    say(f"dist/{wheel.name}: {len(names)} files, {size:.1f} MB, exports only {NAMESPACE}*")


def tag(wheel: pathlib.Path, scratch: pathlib.Path, python: str) -> pathlib.Path:
    """Print auditwheel's verdict; return the wheel under dist/, with the manylinux tag if it has earned one."""
    print(run(python, "-m", "auditwheel", "show", wheel).strip())
    command = [python, "-m", "auditwheel", "repair", "--only-plat", "--wheel-dir", scratch / "tagged", wheel]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        say(f"keeps its plain tag, as auditwheel cannot give a better one: {done.stdout.strip().splitlines()[-1]}")
    else:
        (wheel,) = (scratch / "tagged").glob("*.whl")
    (ROOT / "dist").mkdir(exist_ok=True)
    kept = ROOT / "dist" / wheel.name
    shutil.copy2(wheel, kept)
    return kept


def readme_program() -> tuple[str, list[str]]:
    """The README's program, and the lines that it must print."""
    blocks = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    program = "\n".join(blocks)
    return program, re.findall(r"^# output: (.*)$", program, re.MULTILINE)


def try_out(wheel: pathlib.Path, scratch: pathlib.Path, python: str) -> None:
    """Install the wheel alone where nothing can be compiled, and run it far from the sources."""

    def bare(*command: str | pathlib.Path) -> str:
        return run(python, ROOT / "scripts/bare_machine.py", "--no-compiler", "--quiet", *command, cwd=scratch)

    say("installing it in a clean environment, without a compiler")
    look = "for each in c++ g++ clang++ cc gcc clang make; do command -v $each; done; ls /usr/include/stdio.h; true"
    say(seen := bare("sh", "-c", f"{look}; echo that is all").strip())
    if seen.splitlines()[1:] != ["ls: cannot access '/usr/include/stdio.h': No such file or directory", "that is all"]:
        say("a compiler or headers are there: this machine has no namespaces, or keeps them elsewhere")
    bare("sh", "-c", f'"$PYTHON" -m venv {scratch}/clean')
    clean = scratch / "clean/bin/python"
    bare(clean, "-m", "pip", "install", "--quiet", wheel)
    say(f"pip check: {bare(clean, '-m', 'pip', 'check').strip()}")
    program, expected = readme_program()
    (scratch / "readme.py").write_text(program, encoding="utf-8")
    for name in ("figure2.py", "target.py"):
        shutil.copy2(ROOT / "examples" / name, scratch / name)
    for what, command, lines in (
        ("the README's program", ["readme.py"], expected),
        ("Figure 2, local", ["figure2.py", "--cluster", "local"], [EXPECTED_OUTPUT]),
    ):
        output = bare(clean, *command)
        if not set(lines) <= set(output.splitlines()):
            raise SystemExit(f"[wheel] failed: {what}: expected {lines}, got:\n{output}")
        say(f"{what}: as in the paper")
    print(bare(scratch / "clean/bin/pathways", "bench", "micro", "--repeats", "1"))
    see_the_other_package(scratch / "clean")


def see_the_other_package(environment: pathlib.Path) -> None:
    """Put another project's package `pathways` over ours, as pip does, and read what `pathways --version` says."""
    (site,) = environment.glob("lib/python*/site-packages")
    other = site / "pathways-1.0.3.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: pathways\nVersion: 1.0.3\n", encoding="utf-8")
    (site / "pathways/__init__.py").write_text("__all__ = ('Pathways',)\n", encoding="utf-8")
    output = run(environment / "bin/pathways", "--version")
    if "`import pathways` is that package now" not in output or "pip uninstall pathways pathways-jax" not in output:
        raise SystemExit(f"[wheel] failed: `pathways --version` does not tell of another `pathways`:\n{output}")
    say("with another project's package `pathways` over it, `pathways --version` says what to do")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Build a wheel and check it.")
    parser.add_argument("--python", default=sys.executable, help="interpreter with build and auditwheel")
    python = parser.parse_args().python
    with tempfile.TemporaryDirectory(prefix="pathways-wheel-") as name:
        scratch = pathlib.Path(name)
        say("building")
        wheel = tag(build(scratch, python), scratch, python)
        look_inside(wheel, scratch)
        try_out(wheel, scratch, python)
    say("good")


if __name__ == "__main__":
    main()
