"""Where a client's checkpoints may lie: inside one folder, if the operator says so (`--checkpoint-root`).

The client decides which files its hosts open (`pathways.api.checkpoints.orbax_handler`), and sends that as
tensorstore specs. With a root, a host opens a spec only if it names nothing but files below the root. Links are
followed first: neither the path nor anything that lies there may lead out. A program that replaces a folder by a link
between this check and tensorstore's use of it is not caught; who may write there decides that.
"""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Iterator
from typing import Any

from pathways import errors

#: The drivers that read and write nothing but what the file driver below them names.
_DRIVERS = {"zarr", "zarr2", "zarr3", "ocdbt", "file"}
#: The fields that may name a place by a URL.
_PLACES = {"kvstore", "base", "manifest"}


class CheckpointRoot:
    """The folder; or None: every place is allowed."""

    def __init__(self, folder: str | None) -> None:
        self._folder = None if folder is None else os.path.realpath(folder)

    def check(self, name: str, spec: Any) -> None:
        """Refuses what lies elsewhere. `name`: of the array, for the error.

        Raises:
            CheckpointError: the spec names something that is not below the root.
        """
        if self._folder is None:
            return
        try:
            paths = list(_of_url(spec) if isinstance(spec, str) else _files(spec))
        except ValueError as error:
            raise self._refused(name, str(error)) from None
        if not paths:
            raise self._refused(name, "a spec without a file")
        for path in paths:
            if (way_out := self._way_out(path)) is not None:
                raise self._refused(name, way_out)

    def _refused(self, name: str, got: str) -> errors.CheckpointError:
        return errors.CheckpointError(
            f"array {name!r}: this client's checkpoints lie in {self._folder} (the operator's --checkpoint-root), got "
            f"{got}"
        )

    def _is_inside(self, path: str) -> bool:
        assert self._folder is not None
        return os.path.commonpath([self._folder, os.path.realpath(path)]) == self._folder

    def _way_out(self, path: str) -> str | None:
        """How the path leads out of the root; None: it does not."""
        if not os.path.isabs(path):
            return f"the relative path {path!r}"
        if not self._is_inside(path):
            real = os.path.realpath(path)
            return path if real == os.path.normpath(path) else f"{path}, which leads to {real}"
        for folder, folders, files in os.walk(path):
            for each in (*folders, *files):
                inner = os.path.join(folder, each)
                if os.path.islink(inner) and not self._is_inside(inner):
                    return f"{path}, where {inner} leads to {os.path.realpath(inner)}"
        return None


def _files(spec: Any) -> Iterator[str]:
    """The paths that a spec, or a part of one, names.

    Raises:
        ValueError: it names something else, too.
    """
    if isinstance(spec, dict):
        driver = spec.get("driver")
        if driver is not None and driver not in _DRIVERS:
            raise ValueError(f"the driver {driver!r}")
        if driver == "file":
            yield str(spec.get("path", ""))
        for name, each in spec.items():
            if isinstance(each, str) and name in _PLACES:
                yield from _of_url(each)
            yield from _files(each)
    elif isinstance(spec, (list, tuple)):
        for each in spec:
            yield from _files(each)
    elif isinstance(spec, str) and ".." in spec.split("/"):
        raise ValueError(f"the path {spec!r}")


def _of_url(url: str) -> Iterator[str]:
    """The path of `file:///a/path/`, perhaps with `|ocdbt:` and the like behind it."""
    first, *rest = url.split("|")
    place = urllib.parse.urlparse(first)
    drivers = [each.partition(":")[0] for each in rest]
    if place.scheme != "file" or place.netloc or not set(drivers) <= _DRIVERS - {"file"}:
        raise ValueError(url)
    path = urllib.parse.unquote(place.path)
    if ".." in path.split("/"):
        raise ValueError(url)
    yield path
