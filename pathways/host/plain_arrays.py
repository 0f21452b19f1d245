"""Arrays in plain files: a folder for each, in the form zarr 2, a file for each shard. `checkpoint_io` calls it, on a
thread that may wait for files.

orbax asks for such files where it does not ask for OCDBT, and a proxy's programs do (`pathways.proxy.persistence`).

SAVE-1 (whole or not there): nobody finds an array without its metadata, the file `.zarray`. So one host, the lead,
removes the metadata of what was there before, then all hosts write their shards, and then the lead writes the metadata
of the new array, if it sees all shards. Between these steps the client waits for all hosts. So an array whose save
failed, whose host was lost, or whose hosts see different folders, is not there.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Sequence
from typing import Any

from pathways import errors
from pathways.host.checkpoint_root import CheckpointRoot

_METADATA = ".zarray"
#: What other hosts have written appears here within so long, on a network's file system.
_APPEARS_S = 30.0
_PAUSE_S = 0.2

Entry = tuple[int, str, Any]  # an array's number and name, and tensorstore's spec of it


def prepare(entries: Sequence[Entry], is_lead: bool, host: int) -> None:
    """Looks whether this host could write these arrays. The lead makes sure that none of them is there.

    Raises:
        CheckpointError: a folder is missing, or may not be written.
    """
    for _, name, spec in entries:
        path = _path_of(spec)
        folder = path.removesuffix(f"/{name}/")
        what = f"writing {name!r} at {path} failed on host {host}"
        if not os.path.isdir(folder):
            raise errors.CheckpointError(
                f"{what}: the folder {folder} is not there; save into a folder that the program and all hosts see "
                "under one path"
            )
        if not os.access(folder, os.W_OK | os.X_OK):
            raise errors.CheckpointError(f"{what}: the host's user may not write into {folder}")
        if is_lead:
            try:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path + _METADATA)
            except OSError as error:
                raise errors.CheckpointError(f"{what}: {error}") from error


def check_shards(entries: Sequence[Entry], host: int) -> None:
    """Looks whether all shards of these arrays are there.

    Raises:
        CheckpointError: one is not.
    """
    deadline = time.monotonic() + _APPEARS_S
    for _, name, spec in entries:
        path, metadata = _path_of(spec), spec["metadata"]
        grid = [size // part for size, part in zip(metadata["shape"], metadata["chunks"], strict=True)]
        wanted = {".".join(map(str, at)) or "0" for at in itertools.product(*map(range, grid))}
        while missing := wanted.difference(os.listdir(path) if os.path.isdir(path) else ()):
            if time.monotonic() > deadline:
                raise errors.CheckpointError(
                    f"writing {name!r} at {path}: host {host} does not see {len(missing)} of {len(wanted)} shards "
                    f"that other hosts have written, such as {min(missing)}; all hosts must share the folder"
                )
            time.sleep(_PAUSE_S)


def find(folder: str, name: str, root: Sequence[CheckpointRoot]) -> Any:
    """tensorstore's spec of a stored array: of plain files, or in orbax's OCDBT, of zarr 2 or 3. If it is not there,
    the spec of where it should be.

    Raises:
        CheckpointError: it lies outside of a root.
    """
    if ".." in name.split("/"):
        raise errors.CheckpointError(f"an array of the name {name!r}")
    files = {"driver": "file", "path": f"{folder}/{name}/"}
    ocdbt = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}, "path": f"{name}/"}
    for each in root:
        each.check(name, files)
    kvstore: dict[str, Any] = files
    if not _is_there(files["path"]) and os.path.isfile(f"{folder}/manifest.ocdbt"):
        for each in root:
            each.check(name, ocdbt)
        kvstore = ocdbt
    is_new = os.path.isfile(f"{files['path']}zarr.json") if kvstore is files else _says(folder, "use_zarr3")
    return {
        "driver": "zarr3" if is_new else "zarr",
        "kvstore": kvstore,
        # A missing shard is an error, unless the checkpoint says that shards of zeros were not written.
        "fill_missing_data_reads": not _says(folder, "store_array_data_equal_to_fill_value", True),
    }


def _path_of(spec: Any) -> str:
    if spec["kvstore"].get("driver") != "file":  # `CheckpointRoot` knows what paths of files are
        raise ValueError("an array of plain files whose spec names none")
    return str(spec["kvstore"]["path"])


def _is_there(path: str) -> bool:
    return any(os.path.isfile(path + name) for name in (_METADATA, "zarr.json"))


def _says(folder: str, what: str, otherwise: bool = False) -> bool:
    """What orbax says of all arrays in a folder; `otherwise` if it says nothing of arrays there."""
    try:
        with open(f"{folder}/_METADATA", encoding="utf-8") as file:
            said = json.load(file)
        return bool(said.get(what, False))
    except (OSError, ValueError, AttributeError):
        return otherwise
