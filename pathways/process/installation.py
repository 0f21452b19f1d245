"""What is installed as `pathways`: this project, and perhaps another one's package of the same name.

On PyPI, `pathways` is another project's. Both packages have the folder `pathways`, and pip installs both into one, in
which the package that came last wrote `__init__.py`. `pathways --version` and the benchmarks call this.
"""

from __future__ import annotations

import importlib.metadata
import sys

DISTRIBUTION = "pathways-jax"
OLD_NAME = "pathways"  # builds before 0.3
MEND = (
    f"To mend it: `pip uninstall {OLD_NAME} {DISTRIBUTION}`, then install {DISTRIBUTION} again. Keep the two in "
    "environments of their own, as each uninstallation also takes files of the other."
)


def version() -> str:
    """The version of this project that is installed."""
    own = _installed(DISTRIBUTION) or _installed(OLD_NAME)
    if own is None:
        raise importlib.metadata.PackageNotFoundError(DISTRIBUTION)
    return own.version


def problem() -> str | None:
    """What is wrong when another package called `pathways` is installed, too, and what to do; else None."""
    own, other = _installed(DISTRIBUTION), _installed(OLD_NAME)
    if other is None:
        return None
    is_old_build = any(entry.value == "pathways.cli:main" for entry in other.entry_points)
    if own is None and is_old_build:
        return None
    who = "an older build of this project" if is_old_build else "another project's"
    names = getattr(sys.modules.get("pathways"), "__all__", ())
    whose = "this project" if "make_virtual_device_set" in names else "that package"
    return (
        f"the package `{OLD_NAME}` {other.version} is installed here, too: {who}, in the same folder. "
        f"`import pathways` is {whose} now. {MEND}"
    )


def _installed(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
