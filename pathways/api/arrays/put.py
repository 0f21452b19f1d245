"""`pw.device_put`: pytrees of host values, and of arrays of other slices, onto a slice."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.tree_util import tree_flatten

from pathways import _core, _jaxlib, errors
from pathways.api.arrays import transfer_guard
from pathways.api.arrays.array import Array
from pathways.api.arrays.host_values import physical, put_leaf
from pathways.api.programs.compiled import move
from pathways.api.programs.tracing import is_tracing, remember
from pathways.api.slices.virtual_devices import Slice, slice_sharding
from pathways.compiler import specs
from pathways.compiler.trace import as_argument
from pathways.compiler.trace import device_put as traced_put

#: How many layouts of puts a slice keeps, for arrays whose shapes change from step to step.
_MOST_LAYOUTS = 1024


def device_put(x: Any, devices: Any, spec: Any = None) -> Any:
    """Puts a pytree of host values, or of arrays of other slices, onto a slice. Inside a program: a transfer.

    Args:
        x: NumPy or JAX arrays, numbers, `pw.Array`s, or a pytree of them.
        devices: the slice; or a sharding over one, `slice.sharding(spec)`, or a pytree prefix of them.
        spec: for a slice, a pytree prefix of `PartitionSpec`s; None replicates.

    Returns:
        The same pytree of `pw.Array`s. The call copies the bytes and returns; it does not wait for devices.

    Raises:
        ShardingError: a dimension does not divide; names it.
    """
    leaves, tree = tree_flatten(x)
    if isinstance(devices, Slice):
        wanted = specs.broadcast(spec, x, f"shardings of device_put to {devices!r}")
        targets = [(devices, leaf_spec) for leaf_spec in wanted]
    else:
        targets = _targets(x, devices, spec)
    for slice_ in {slice_ for slice_, _ in targets}:
        remember(slice_)
    if is_tracing() or any(_jaxlib.is_tracer(leaf) for leaf in leaves):
        where = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(x)[0]]
        return tree.unflatten(
            traced_put(leaf, slice_.mesh_spec, leaf_spec, path)
            for leaf, (slice_, leaf_spec), path in zip(leaves, targets, where, strict=True)
        )
    out = []
    for number, (leaf, (slice_, leaf_spec)) in enumerate(zip(leaves, targets, strict=True)):
        what = ValueName(tree, number)
        if _jaxlib.is_reference(leaf):
            raise errors.ProgramError(f"{what} is a reference (jax.new_ref); put its value: ref[...]")
        if isinstance(leaf, Array):
            if leaf.layout.slice is not slice_:
                transfer_guard.check("device-to-device", what, leaf, is_explicit=True)
            out.append(move(leaf, slice_, slice_.spec(leaf_spec, leaf.shape, what)))
        elif getattr(leaf, "dtype", None) == jax.dtypes.float0:
            out.append(leaf)  # the derivative of a whole number has no bytes to put, as under jax.device_put
        else:
            out.append(_put(leaf, slice_, leaf_spec, what))
    return tree.unflatten(out)


def _put(leaf: Any, slice_: Slice, spec: Any, what: object) -> Array:
    while True:
        try:
            return put_leaf(leaf, _layout(leaf, slice_, spec, what), what, is_explicit=True)
        except errors.SliceResizedError:  # since the layout was looked up
            continue


def _layout(leaf: Any, slice_: Slice, spec: Any, what: object) -> _core.Layout:
    """The layout of a host value on a slice. Its type and its spec are looked at once for all NumPy arrays alike."""
    known, key = slice_.put_layouts, None  # another shape of the slice has others
    if type(leaf) is np.ndarray and spec is None:
        key = leaf.shape, leaf.dtype, jax.config.jax_enable_x64
        if (layout := known.get(key)) is not None:
            return layout
    argument = as_argument(leaf, what)
    kind = physical(argument.shape, argument.dtype, slice_, slice_.spec(spec, argument.shape, what))
    layout = slice_.cluster.layout(
        kind,
        slice_,
        dtype=_jaxlib.logical_dtype(argument.dtype, kind.dtype),
        shape=argument.shape,
        weak_type=argument.weak_type,
    )
    if key is not None:
        if len(known) >= _MOST_LAYOUTS:
            known.clear()
        known[key] = layout
    return layout


class ValueName:
    """The name of one value in messages, by its path: worked out when it is read."""

    def __init__(self, tree: Any, number: int) -> None:
        self._tree, self._number = tree, number

    def __str__(self) -> str:
        paths = jax.tree_util.tree_flatten_with_path(self._tree.unflatten(range(self._tree.num_leaves)))[0]
        return f"value{jax.tree_util.keystr(paths[self._number][0])} of device_put"


def _targets(x: Any, shardings: Any, spec: Any) -> list[tuple[Slice, Any]]:
    """Slice and spec of each leaf, where shardings say both."""
    wanted = [slice_sharding(each) or each for each in specs.broadcast(shardings, x, "shardings of device_put")]
    for sharding in jax.tree_util.tree_leaves(shardings, is_leaf=lambda leaf: leaf is None):
        if slice_sharding(sharding) is None:
            raise errors.SliceError(
                "pw.device_put expects a slice, or shardings over slices (slice.sharding(spec)), got "
                f"{sharding!r} of type {type(sharding).__name__}"
            )
    if spec is not None:
        raise errors.ShardingError(f"pw.device_put got shardings and, beside them, spec={spec!r}; give one of the two")
    return [(sharding.slice, sharding.spec) for sharding in wanted]
