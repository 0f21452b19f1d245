"""The versions of jax and jaxlib that are installed, and those that this release knows.

The compiler checks them before it compiles. Pure.
"""

from __future__ import annotations

import re

import jax
import jaxlib

from pathways import errors

VERSION = jaxlib.__version__
OLDEST = (0, 10, 2)
TOO_NEW = (0, 13)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version.split("+")[0].split("dev")[0])[:4])


def check_versions(jax_version: str = jax.__version__, jaxlib_version: str = jaxlib.__version__) -> None:
    """Raises `UnsupportedVersionError` unless this release knows both versions."""
    for package, version in (("jax", jax_version), ("jaxlib", jaxlib_version)):
        if not _numbers(version)[:3] >= OLDEST or not _numbers(version)[:2] < TOO_NEW:
            oldest, too_new = (".".join(map(str, v)) for v in (OLDEST, TOO_NEW))
            raise errors.UnsupportedVersionError(
                f"this release of pathways knows {package} >={oldest},<{too_new}, but {package} {version} is "
                f"installed; install a version in that range (pip install '{package}>={oldest},<{too_new}')"
            )
