"""Makes JAX's filter of tracebacks quick.

JAX removes its own frames from the traceback of an error that a call raises. For each frame it compares the file with
the path of each of some twenty libraries, through the file system. The calls of a program are deep, so this took most
of the time of a call that is refused while it is traced. The answer for a file is always the same, so it is kept.
"""

from __future__ import annotations

import functools

from jax._src import traceback_util

#: Files whose answer is kept.
_MOST_FILES = 1 << 12


def keep_filter_answers() -> None:
    """Has JAX ask once for each file. Call it once; for the whole process."""
    include_filename = functools.lru_cache(_MOST_FILES)(traceback_util.include_filename)
    plain_register = traceback_util.register_exclusion

    def register_exclusion(path: str) -> None:
        plain_register(path)
        include_filename.cache_clear()

    traceback_util.include_filename = include_filename
    traceback_util.register_exclusion = register_exclusion
