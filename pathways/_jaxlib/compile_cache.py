"""JAX's persistent compile cache, with a store of ours in place of its folder.

JAX looks into the store before it compiles, and puts into it what it has compiled. A host calls `keep_executables`
once, before it compiles; the rest is for any thread.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
from jax._src import compilation_cache, compiler

_is_suspended = contextvars.ContextVar("pathways_compile_cache_suspended", default=False)


class Store(Protocol):
    """Bytes by key."""

    def get(self, key: str) -> bytes | None:
        """The bytes of this key, if they are there."""

    def put(self, key: str, value: bytes) -> bool:
        """Keeps the bytes under this key, if it can."""


class _Cache(compilation_cache.CacheInterface):
    """A store, as JAX wants it."""

    _path = None

    def __init__(self, store: Store) -> None:
        self._store = store

    def get(self, key: str) -> bytes | None:
        return None if _is_suspended.get() else self._store.get(key)

    def put(self, key: str, value: bytes) -> None:
        self._store.put(key, value)


def has_compile_cache() -> bool:
    """Whether the user has given JAX a folder for its persistent cache, or has turned the cache off."""
    return bool(jax.config.jax_compilation_cache_dir) or not jax.config.jax_enable_compilation_cache


def keep_executables(store: Store, report: Callable[[str], None]) -> None:
    """From now on, what this process compiles is put into `store`, and is taken from there if it is there.

    JAX itself lets only the first process of a group write. But executables of processes differ, so the others would
    compile anew each time. JAX also writes nothing that took less than a second to compile. `report` is told of errors:
    then the process compiles as if nothing were kept.
    """

    def write(
        key: str, seconds: float, module: str, backend: Any, executable: Any, host_callbacks: Any = (), *_: Any
    ) -> None:
        if host_callbacks or _is_suspended.get():
            return
        try:
            compilation_cache.put_executable_and_time(key, module, executable, backend, int(seconds))
        except Exception as error:
            report(f"the executable of {module!r} is not kept: {type(error).__name__}: {error}")

    compilation_cache._cache = _Cache(store)
    compilation_cache._cache_initialized = True
    compiler._cache_write = write


@contextlib.contextmanager
def compile_anew() -> Iterator[None]:
    """Inside, this thread's compilations neither take from the store nor put into it.

    It is for what has pointers of this process in it, such as callbacks.
    """
    token = _is_suspended.set(True)
    try:
        yield
    finally:
        _is_suspended.reset(token)
