"""Checkpoints with orbax: pytrees of `pw.Array`s are saved and restored as those of JAX's own arrays are.

import orbax.checkpoint as ocp

with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, state)                     # arrays of slices; the hosts write their own shards
    state = checkpointer.restore(path, state)          # a template says where each array goes ...
    target = jax.ShapeDtypeStruct(shape, dtype, sharding=slice.sharding(P("data")))  # ... or a description does

orbax is not needed for anything else, and is imported by whoever uses it. A script that has imported it before it
connects needs to do nothing; one that imports it later calls `pw.checkpoint.register()`.
"""

from __future__ import annotations

import functools
import sys


def register_if_imported() -> None:
    """`register`, if this process uses orbax."""
    if "orbax.checkpoint" in sys.modules:
        register()


@functools.cache
def register() -> None:
    """Teaches orbax to save and restore `pw.Array`s.

    Replaces what orbax has registered for JAX's arrays by a handler that also knows ours, and leaves JAX's to orbax.

    Raises:
        ImportError: orbax-checkpoint is not installed; `pip install pathways[checkpoint]`.
    """
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(f"checkpoints need orbax: {error}; pip install 'pathways[checkpoint]'") from error
    del orbax
    from pathways.api import orbax_handler

    orbax_handler.register()
