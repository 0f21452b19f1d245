"""Run a command as on a machine that has only what the README names: Linux, Python, a C++ compiler and make.

    python scripts/bare_machine.py [--no-compiler] [--quiet] COMMAND...

The command finds no other commands, headers, static libraries and CMake packages, whatever is installed here. CI runs
the README's commands so. `make wheel` runs those of the wheel with --no-compiler, which hides the compiler, make and
all headers, too.

As root on Debian and its kin, this takes a mount namespace: /usr, and the interpreter's folder if it is elsewhere, get
a layer of their own in which all other files are removed. Nothing changes for anybody else. Without root, PATH leads to
a folder of links to the commands that stay, and PATHWAYS_GOOGLETEST keeps CMake from an installed GoogleTest; headers
stay visible then. Either way, no variable that chooses a compiler, a launcher or a Python reaches the command. The
first lines of the output say what is hidden.
"""

from __future__ import annotations

import argparse
import glob
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator

# What the README names, by Debian's names; and how any machine reaches a package registry.
NAMED = {"g++", "make", "python3", "python3-dev", "python3-venv", "apt", "ca-certificates"}
COMPILING = {"g++", "make", "python3-dev"}
COMMANDS = ("/usr/bin", "/usr/sbin", "/bin", "/sbin", "/usr/games", "/usr/local/bin", "/usr/local/sbin")
HEADERS = ("/usr/include", "/usr/src", "/usr/local/include", "/usr/local/src")
LIBRARIES = ("/usr/lib", "/usr/share", "/lib", "/usr/local/lib", "/usr/local/share")
FOR_BUILDS = re.compile(r"/(cmake|cmake-[^/]+|pkgconfig)/|\.a$|^/usr/lib/(ccache|[^/]+/bin)/")
CHOOSING = re.compile(
    r"^(CC|CXX|AR|LD|C(XX|PP)?FLAGS|LDFLAGS|CPATH|\w+_INCLUDE_PATH|MAKE\w*|MFLAGS|VIRTUAL_ENV|XLA_FLAGS)$"
    r"|^(CCACHE|CMAKE|CONDA|PATHWAYS|PYENV|SKBUILD)_|^PYTHON"
)
NAME = r"([a-z0-9][a-z0-9+.-]*)"


def kept_packages(wanted: set[str]) -> set[str]:
    """The installed packages among `wanted`, those that Debian calls essential or required, and what these need."""
    form = "${db:Status-Abbrev}\t${Package}\t${Essential}\t${Priority}\t${Pre-Depends}, ${Depends}\t${Provides}\n"
    listed = subprocess.run(["dpkg-query", "-W", "-f", form], check=True, text=True, stdout=subprocess.PIPE).stdout
    needs: dict[str, list[str]] = {}
    queue = sorted(wanted)
    for line in listed.splitlines():
        status, name, essential, priority, depends, provides = line.split("\t")
        if status.startswith("ii"):
            needs.setdefault(name, []).extend(re.findall(rf"(?:^|[,|])\s*{NAME}", depends))
            for virtual in re.findall(rf"(?:^|,)\s*{NAME}", provides):
                needs.setdefault(virtual, []).append(name)
            if essential == "yes" or priority == "required":
                queue.append(name)
    kept: set[str] = set()
    while queue:
        name = queue.pop()
        if name in needs and name not in kept:
            kept.add(name)
            queue += needs[name]
    return kept


def files_of(packages: set[str]) -> set[str]:
    """Their files, by real path: /bin may be a link to /usr/bin."""
    folders: dict[str, str] = {}
    found = set()
    for package in packages:
        for listing in [f"/var/lib/dpkg/info/{package}.list", *glob.glob(f"/var/lib/dpkg/info/{package}:*.list")]:
            if os.path.exists(listing):
                for path in pathlib.Path(listing).read_text().splitlines():
                    folder, name = os.path.split(path)
                    if folder not in folders:
                        folders[folder] = os.path.realpath(folder)
                    found.add(os.path.join(folders[folder], name))
    return found


def below(folders: tuple[str, ...]) -> Iterator[str]:
    """Every file below the folders, once."""
    for top in {os.path.realpath(folder) for folder in folders}:
        for folder, _, names in os.walk(top):
            yield from (os.path.join(folder, name) for name in names)


def is_of_python(path: str) -> bool:
    """Whether it is a command or a header of the interpreter that runs this."""
    return re.match(rf"{re.escape(sys.base_prefix)}/(bin|include)/python", path) is not None


def hidden_files(wanted: set[str]) -> tuple[set[str], set[str]]:
    """What is to be hidden: commands, and what only builds use."""
    kept = files_of(kept_packages(wanted))

    def stays(path: str) -> bool:
        # Alternatives, such as /usr/bin/c++, are links that no package owns.
        return path in kept or (os.path.islink(path) and os.path.realpath(path) in kept)

    commands = {path for path in below((*COMMANDS, f"{sys.base_prefix}/bin")) if not stays(path)}
    builds = {path for path in below((*HEADERS, f"{sys.base_prefix}/include")) if not stays(path)}
    builds |= {path for path in below(LIBRARIES) if FOR_BUILDS.search(path) and not stays(path)}
    commands = {path for path in commands if not is_of_python(path)}
    if "python3-dev" in wanted:
        builds = {path for path in builds if not is_of_python(path)}
    return commands, builds


def tell(title: str, names: set[str]) -> None:
    """A paragraph of the log."""
    text = f"{title}: {' '.join(sorted(names))}"
    print(textwrap.fill(text, 160, initial_indent="[bare] ", subsequent_indent="    ", break_on_hyphens=False))


def tell_files(commands: set[str], builds: set[str], quiet: bool) -> None:
    """Says what is hidden: commands by name, the rest by the top of its folder; numbers only if `quiet`."""
    if quiet:
        print(f"[bare] {len(commands)} commands are hidden, and {len(builds)} files for builds")
        return
    tell(f"{len(commands)} commands are hidden", {os.path.basename(path) for path in commands})
    top = re.compile(r".*?/(include|src)/([^/]+-linux-gnu/)?[^/]+|.*?/cmake/[^/]+|(/[^/]+){1,4}(?=/)")
    tell(f"{len(builds)} files for builds are hidden, of", {m[0] for path in builds if (m := top.match(path))})


def environment(path: str) -> dict[str, str]:
    """The variables of this process, without those that choose something; and the Python that the README names."""
    kept = {name: value for name, value in os.environ.items() if not CHOOSING.search(name)}
    return {**kept, "PATH": path, "PYTHON": sys._base_executable}  # type: ignore[attr-defined]


def mount_layer(folder: str, scratch: str) -> None:
    """Puts a layer over a folder: what is changed below it from now on lies in `scratch`."""
    above = tempfile.mkdtemp(dir=scratch)
    for name in ("changes", "work"):
        os.mkdir(f"{above}/{name}")
    options = f"lowerdir={folder},upperdir={above}/changes,workdir={above}/work"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, folder], check=True)


def run_in_namespace(command: list[str], wanted: set[str], scratch: str, quiet: bool) -> None:
    """Hides what is hidden, in a mount namespace of this process; becomes the command."""
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", scratch], check=True)
    tops = ["/usr", *(top for top in ("/bin", "/sbin", "/lib") if not os.path.islink(top))]
    if not sys.base_prefix.startswith("/usr/") and sys.base_prefix != "/usr":
        tops.append(sys.base_prefix)
    for top in tops:
        mount_layer(top, scratch)
    commands, builds = hidden_files(wanted)
    tell_files(commands, builds, quiet)
    for path in commands | builds:
        os.remove(path)
    sys.stdout.flush()
    os.execvpe(command[0], command, environment(f"{sys.base_prefix}/bin:/usr/sbin:/usr/bin:/sbin:/bin"))


def run_with_links(command: list[str], wanted: set[str], scratch: str, quiet: bool) -> int:
    """Runs the command with a PATH of links to what stays."""
    commands, _ = hidden_files(wanted)
    print("[bare] no namespaces here: commands are not on PATH, all else stays visible")
    tell(f"{len(commands)} commands are hidden", set() if quiet else {os.path.basename(path) for path in commands})
    for path in below(COMMANDS):
        link = f"{scratch}/{os.path.basename(path)}"
        if path not in commands and not os.path.lexists(link):
            os.symlink(path, link)
    sys.stdout.flush()
    roads = {"PATHWAYS_GOOGLETEST": "package;release"}
    return subprocess.run(command, env={**environment(scratch), **roads}, check=False).returncode


def can_make_namespaces(scratch: str) -> bool:
    """Whether this process may mount layers in a namespace of its own."""
    probe = f"mount -t tmpfs t {scratch} && mkdir {scratch}/a {scratch}/b && mount -t overlay o -o lowerdir=/usr," + (
        f"upperdir={scratch}/a,workdir={scratch}/b /usr"
    )
    done = subprocess.run(["unshare", "--mount", "sh", "-c", probe], stderr=subprocess.DEVNULL, check=False)
    return os.getuid() == 0 and done.returncode == 0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Run a command with what the README names, and nothing else.")
    parser.add_argument("--no-compiler", action="store_true", help="hide the compiler, make and all headers, too")
    parser.add_argument("--quiet", action="store_true", help="say how much is hidden, not what")
    parser.add_argument("--inside", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    wanted = NAMED - COMPILING if options.no_compiler else NAMED
    if shutil.which("dpkg-query") is None:
        print("[bare] no dpkg-query here, which knows what belongs to what: no command is hidden", flush=True)
        return subprocess.run(options.command, env=environment(os.environ["PATH"]), check=False).returncode
    if options.inside:
        run_in_namespace(options.command, wanted, options.inside, options.quiet)
    with tempfile.TemporaryDirectory(prefix="pathways-bare-") as scratch:
        if can_make_namespaces(scratch):
            again = ["unshare", "--mount", sys.executable, __file__, "--inside", scratch]
            again += ["--no-compiler"] * options.no_compiler + ["--quiet"] * options.quiet
            return subprocess.run([*again, *options.command], check=False).returncode
        return run_with_links(options.command, wanted, scratch, options.quiet)


if __name__ == "__main__":
    sys.exit(main())
