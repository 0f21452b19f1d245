"""Checkpoints with orbax: pytrees of `pw.Array`s are saved and restored as those of JAX's own arrays are.

import orbax.checkpoint as ocp

with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, state)                     # arrays of slices; the hosts write their own shards
    state = checkpointer.restore(path, state)          # a template says where each array goes ...
    target = jax.ShapeDtypeStruct(shape, dtype, sharding=slice.sharding(P("data")))  # ... or a description does

orbax is not needed for anything else, and is imported by whoever uses it. A script may import it before it connects or
later. `pw.checkpoint.register()` is for a script that restores onto slices before any of this.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Sequence

_ORBAX = "orbax.checkpoint"


def register_when_imported() -> None:
    """`register`, now if this process has imported orbax, else when it does."""
    if _ORBAX in sys.modules:
        register()
    elif not any(isinstance(finder, _OrbaxFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OrbaxFinder())


class _OrbaxFinder(importlib.abc.MetaPathFinder):
    """Finds orbax as the other finders do, and registers behind its import; then it goes."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _ORBAX or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)  # the others find it now, and this one is not asked again
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(importlib.abc.Loader):
    """Loads orbax by its own loader, then registers."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        try:
            self._loader.exec_module(module)
        except BaseException:
            register_when_imported()  # for whoever imports it again
            raise
        try:
            register()
        except Exception as error:  # the import is the user's, and orbax is whole
            warnings.warn(f"this orbax cannot save arrays of slices: {error}", RuntimeWarning, stacklevel=2)


@functools.cache
def register() -> None:
    """Teaches orbax to save and restore `pw.Array`s.

    Replaces what orbax has registered for JAX's arrays by a handler that also knows ours, and leaves JAX's to orbax.

    Raises:
        ImportError: orbax-checkpoint is not installed; `pip install 'pathways-jax[checkpoint]'`.
    """
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(f"checkpoints need orbax: {error}; pip install 'pathways-jax[checkpoint]'") from error
    del orbax
    from pathways.api.checkpoints import orbax_handler

    orbax_handler.register()
