"""The distribution is `pathways-jax`: on PyPI, `pathways` is another project's package, with the same folder."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

SUFFIXES = {
    ".md",
    ".py",
    ".pyi",
    ".pyx",
    ".pxi",
    ".yaml",
    ".toml",
    ".sbatch",
    ".service",
    ".json",
    ".cmake",
    ".txt",
    "",
}
NOT_OURS = {"results", "shared", "build", "dist", "wheelhouse", "__pycache__"}
OURS = "[console_scripts]\npathways = pathways.cli:main\n"
NEW = ("pathways-jax", "7.1", OURS)
THEIRS = "__all__ = ('Pathways',)\n"


def files(root: pathlib.Path) -> list[pathlib.Path]:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_OURS and (not name.startswith(".") or name == ".ci")]
        found += [pathlib.Path(folder, name) for name in names if pathlib.Path(name).suffix in SUFFIXES]
    return [path for path in found if path.name != pathlib.Path(__file__).name]


def old_names(text: str, extras: set[str]) -> list[str]:
    """Where a text would have pip install another project's package, or looks for a wheel of that name."""
    text = re.sub(r"\s+", " ", text)
    requirement = rf"(?<![\w-])pathways\[(?:{'|'.join(extras)})[\],]"
    command = r"pip3? install(?: -[-\w]+)* [\"']?pathways(?![\w/-])"
    wheel = r"(?<![\w/.])(?:dist/)?pathways-(?:\d|\*)[^\s/]*\.whl|dist/pathways-"
    return re.findall(rf"{requirement}|{command}|{wheel}", text)


def test_no_page_or_message_names_the_other_projects_package(root: pathlib.Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    assert project["name"] == "pathways-jax"
    found = {}
    looked_at = files(root)
    for path in looked_at:
        if hits := old_names(path.read_text(encoding="utf-8", errors="replace"), extras):
            found[path.relative_to(root).as_posix()] = hits
    assert not found
    assert {"README.md", "Dockerfile", "ray.md", "checkpoint.py", "run"} <= {path.name for path in looked_at}
    for text in ("pip install 'pathways[ray]'", "pip install\npathways", "dist/pathways-*.whl", "pathways[test,ray]"):
        assert old_names(text, extras), text
    for text in (
        "pip install 'pathways-jax[ray]'",
        "/tmp/pathways-*/control.sock",
        "pathways[0]",
        "pathways_jax-0.2.whl",
    ):
        assert not old_names(text, extras), text


def install(site: pathlib.Path, name: str, version: str, entry_points: str = "") -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "entry_points.txt").write_text(entry_points)


VERSION = """
import sys
from importlib import metadata
real, site, replaced = metadata.distribution, sys.argv[1], sys.argv[2]
def distribution(name):
    if not name.startswith("pathways"):
        return real(name)
    for found in metadata.distributions(name=name, path=[site]):
        return found
    raise metadata.PackageNotFoundError(name)
metadata.distribution = distribution
import pathways.cli
exec(replaced, pathways.__dict__)
sys.argv = ["pathways", "--version"]
pathways.cli.main()
"""


@pytest.mark.parametrize(
    ("installed", "is_theirs", "words"),
    [
        ([NEW], False, []),
        ([("pathways", "7.1", OURS)], False, []),
        ([NEW, ("pathways", "1.0.3", "")], False, ["1.0.3", "another project's", "is this project now"]),
        ([NEW, ("pathways", "1.0.3", "")], True, ["1.0.3", "another project's", "is that package now"]),
        ([NEW, ("pathways", "0.2.0", OURS)], False, ["0.2.0", "an older build of this project"]),
    ],
    ids=["ours", "an old build", "theirs came first", "theirs came last", "an old build too"],
)
def test_version_tells_whose_package_is_imported(
    tmp_path: pathlib.Path, installed: list[tuple[str, str, str]], is_theirs: bool, words: list[str]
) -> None:
    for each in installed:
        install(tmp_path, *each)
    command = [sys.executable, "-c", VERSION, str(tmp_path), THEIRS if is_theirs else ""]
    done = subprocess.run(command, text=True, capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "pathways 7.1 (jax {}, jaxlib {})\n".format(
        *(importlib.metadata.version(name) for name in ("jax", "jaxlib"))
    )
    assert [word for word in words if word not in done.stderr] == []
    assert ("pip uninstall pathways pathways-jax" in done.stderr) is bool(words)
    assert words or done.stderr == ""
