"""Where a restored array goes: what orbax's arguments and templates say of it, in terms of slices.

Only `orbax_handler` uses it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import AbstractMesh, NamedSharding

from pathways import errors
from pathways.api.session import current
from pathways.api.slices.virtual_devices import Slice, SliceSharding, slice_sharding


def follow_templates(handler: Any) -> None:
    """Has `handler.restore` put an array where the template's is when the caller gives no arguments for it.

    orbax hands a template's leaves to no `TypeHandler`. Without `restore_args` it would go by the names of devices in
    the checkpoint, which mean nothing for a slice.
    """
    restore = handler.restore
    signature = inspect.signature(restore)

    @functools.wraps(restore)
    def restore_by_template(*positional: Any, **named: Any) -> Any:
        bound = signature.bind(*positional, **named)
        given = bound.arguments
        if (args := given.get("args")) is not None:
            given["args"] = dataclasses.replace(args, restore_args=_by_template(args.item, args.restore_args))
        elif "item" in given:
            given["restore_args"] = _by_template(given["item"], given.get("restore_args"))
        return restore(*bound.args, **bound.kwargs)

    handler.restore = restore_by_template


def _by_template(item: Any, restore_args: Any) -> Any:
    """`restore_args`, with a sharding for each leaf of `item` that lies on a slice, unless the caller gave one."""
    is_leaf = ocp.utils.is_empty_or_leaf
    if not any(map(_is_on_slice, jax.tree.leaves(item))):
        return restore_args

    def args_of(leaf: Any, arg: Any) -> Any:
        arg = arg if isinstance(arg, ocp.RestoreArgs) else ocp.RestoreArgs()
        if not _is_on_slice(leaf) or sharding_of(arg) is not None or arg.restore_type not in (None, jax.Array):
            return arg
        filled = ocp.checkpoint_utils.construct_restore_args(leaf)
        return filled if arg.dtype is None else dataclasses.replace(filled, dtype=arg.dtype)

    return jax.tree.map(args_of, item, item if restore_args is None else restore_args, is_leaf=is_leaf)


def _is_on_slice(leaf: Any) -> bool:
    sharding = getattr(leaf, "sharding", None)
    is_abstract = isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh)
    return is_abstract or isinstance(sharding, SliceSharding)


def sharding_of(arg: Any) -> Any:
    """The sharding that an orbax `RestoreArgs` names; None when it names none."""
    if getattr(arg, "mesh", None) is not None and getattr(arg, "mesh_axes", None) is not None:
        return NamedSharding(arg.mesh, arg.mesh_axes)
    sharding = getattr(arg, "sharding", None)
    return getattr(sharding, "sharding", sharding)  # of a jax.experimental.layout.Format


def slice_of(sharding: Any) -> Slice | None:
    """The slice that a sharding is over; None when it is over JAX's own devices, or no sharding.

    Raises:
        SliceError: no slice has its mesh, or several have.
    """
    if (known := slice_sharding(sharding)) is not None:
        return known.slice
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, AbstractMesh):
        return None
    fitting = [slice_ for slice_ in current().slices if slice_.mesh.shape_tuple == sharding.mesh.shape_tuple]
    if len(fitting) == 1:
        return fitting[0]
    raise errors.SliceError(
        f"{'no' if not fitting else len(fitting)} slices of this cluster have the mesh {sharding.mesh}: say on which "
        "one to restore, by slice.sharding(spec) or by a pw.Array on it as the template"
    )
