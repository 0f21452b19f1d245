"""Where a host process keeps its executables, so that the next cluster need not compile them again.

A host calls `keep` at its start. By default the folder is `pathways/executables` in the user's folder for caches, with
a folder below for each version of jaxlib and kind of machine: executables of one processor may not run on another one.
A user's own setting of JAX's persistent cache goes before it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Mapping, Sequence

import jax

from pathways import _jaxlib, errors
from pathways.process.kept_files import KeptFiles

_log = logging.getLogger(__name__)

#: The bytes that executables may take; 0: nothing is kept.
VARIABLE = "PATHWAYS_COMPILE_CACHE"
DEFAULT_BYTES = 2 << 30


def keep(devices: Sequence[jax.Device], environ: Mapping[str, str]) -> None:
    """Has this process keep what it compiles, unless the user has another wish or the folder is not usable.

    Raises:
        OptionError: the variable is no number of bytes.
    """
    limit = _limit(environ)
    if limit == 0 or _jaxlib.has_compile_cache():
        return
    try:
        files = KeptFiles(root(environ), f"jaxlib-{_jaxlib.VERSION}-{machine_kind(devices)}", limit)
    except OSError as error:
        _tell(f"executables are not kept for the next cluster: {error}")
        return
    _jaxlib.keep_executables(files, _tell)


def root(environ: Mapping[str, str]) -> str:
    """The folder of all executables of this user.

    Raises:
        FileNotFoundError: this user has no folder for caches.
    """
    base = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    if not os.path.isabs(base):
        raise FileNotFoundError("this user has no home folder; set XDG_CACHE_HOME")
    return os.path.join(base, "pathways", "executables")


def folders(environ: Mapping[str, str]) -> list[str]:
    """Those whose executables this process runs (KEPT-1): who may write there is trusted with all that it does."""
    found = [environ.get("JAX_COMPILATION_CACHE_DIR", "")]
    with contextlib.suppress(FileNotFoundError):
        found.append(root(environ))
    return [folder for folder in found if os.path.isabs(folder)]


def machine_kind(devices: Sequence[jax.Device]) -> str:
    """The platform, and a digest of what its executables depend on: the kinds of the devices, and the processor."""
    parts = sorted({device.device_kind for device in devices})
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            parts += sorted({line for line in file if line.startswith(("model name", "flags", "Features", "CPU part"))})
    except OSError:
        pass
    return f"{devices[0].platform}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"


def _limit(environ: Mapping[str, str]) -> int:
    text = environ.get(VARIABLE, "").strip() or str(DEFAULT_BYTES)
    if not text.isdecimal():
        raise errors.OptionError(f"{VARIABLE} is {text!r}; expected a number of bytes, or 0 to keep no executables")
    return int(text)


def _tell(text: str) -> None:
    _log.warning("%s", text)
