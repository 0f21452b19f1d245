"""Host values onto slices: `pw.device_put`, and what a call does to arguments that are no `pw.Array` yet."""

from __future__ import annotations

import gc
import itertools
import time
from typing import Any

import jax
import numpy as np
from jax.tree_util import tree_flatten

from pathways import _core, _jaxlib, errors
from pathways.api.array import Array
from pathways.api.slices import Slice, SliceSharding
from pathways.compiler import device_put as traced_put
from pathways.compiler import specs
from pathways.compiler.ir import ArrayType
from pathways.compiler.trace import as_argument
from pathways.plan.shard_packing import aligned
from pathways.protocol import payloads

#: Up to here bytes travel inside the command; above, through shared memory.
INLINE_BYTES = 1024
#: How long a value waits for room in shared memory before nothing seems to give any back.
_PATIENCE_S = 30.0
#: From here on blocks are worth a look at how much is in use.
BIG_BYTES = 1 << 20
_keys = itertools.count(1)


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
    from pathways.api import program

    leaves, tree = tree_flatten(x)
    if isinstance(devices, Slice):
        wanted = specs.broadcast(spec, x, f"shardings of device_put to {devices!r}")
        targets = [(devices, leaf_spec) for leaf_spec in wanted]
    else:
        targets = _targets(x, devices, spec)
    for slice_ in {slice_ for slice_, _ in targets}:
        program.remember(slice_)
    if program.is_tracing() or any(_jaxlib.is_tracer(leaf) for leaf in leaves):
        where = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(x)[0]]
        return tree.unflatten(
            traced_put(leaf, slice_.mesh_spec, leaf_spec, path)
            for leaf, (slice_, leaf_spec), path in zip(leaves, targets, where, strict=True)
        )
    out = []
    for number, (leaf, (slice_, leaf_spec)) in enumerate(zip(leaves, targets, strict=True)):
        what = ValueName(tree, number)
        if isinstance(leaf, Array):
            out.append(_move(leaf, slice_, leaf_spec, what))
        else:
            argument = as_argument(leaf, what)
            kind = physical(argument.shape, argument.dtype, slice_, slice_.spec(leaf_spec, argument.shape, what))
            layout = slice_.cluster.layout(
                kind,
                slice_,
                dtype=_jaxlib.logical_dtype(argument.dtype, kind.dtype),
                shape=argument.shape,
                weak_type=argument.weak_type,
            )
            out.append(put_leaf(leaf, layout, what))
    return tree.unflatten(out)


class ValueName:
    """The name of one value in messages, by its path: worked out when it is read."""

    def __init__(self, tree: Any, number: int) -> None:
        self._tree, self._number = tree, number

    def __str__(self) -> str:
        paths = jax.tree_util.tree_flatten_with_path(self._tree.unflatten(range(self._tree.num_leaves)))[0]
        return f"value{jax.tree_util.keystr(paths[self._number][0])} of device_put"


def _targets(x: Any, shardings: Any, spec: Any) -> list[tuple[Slice, Any]]:
    """Slice and spec of each leaf, where shardings say both."""
    wanted = specs.broadcast(shardings, x, "shardings of device_put")
    for sharding in jax.tree_util.tree_leaves(shardings, is_leaf=lambda leaf: leaf is None):
        if not isinstance(sharding, SliceSharding):
            raise errors.SliceError(
                "pw.device_put expects a slice, or shardings over slices (slice.sharding(spec)), got "
                f"{sharding!r} of type {type(sharding).__name__}"
            )
    if spec is not None:
        raise errors.ShardingError(f"pw.device_put got shardings and, beside them, spec={spec!r}; give one of the two")
    return [(sharding.slice, sharding.spec) for sharding in wanted]


def physical(shape: tuple[int, ...], dtype: Any, slice_: Slice, spec: Any) -> ArrayType:
    """The physical type of an array: PRNG keys are their words, complex numbers their parts."""
    full, words = _jaxlib.physical_struct(shape, dtype)
    return ArrayType(full, words, 0, (*spec, *((),) * (len(full) - len(shape))))


def put_leaf(leaf: Any, layout: _core.Layout, what: object) -> Array:
    """One host value as an array of `layout`. The bytes are copied, once, before this returns: on CPU the devices then
    show that copy as it is."""
    if isinstance(leaf, Array):
        if leaf.layout is layout:
            return leaf
        raise errors.ProgramError(
            f"{what}: expected {layout.dtype}{list(layout.shape)} on {layout.slice!r}, got {leaf!r}"
        )
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise errors.ProgramError(
            f"{what} is {leaf!r}, which has a shape and a dtype but no value; give an array (`lower` takes it)"
        )
    kind: ArrayType = layout.cache
    client = layout.slice.cluster.native
    leaf = _jaxlib.to_physical(leaf, layout.dtype)
    if not isinstance(leaf, (np.ndarray, jax.Array)):
        leaf = np.asarray(leaf, dtype=kind.dtype)
    if leaf.shape != kind.shape:
        raise errors.ProgramError(f"{what}: expected shape {kind.shape}, got {leaf.shape}")
    client.enter()  # a slice that moves changes who holds the array
    try:
        return _send(leaf, layout, kind, what)
    finally:
        client.leave()


def _send(leaf: Any, layout: _core.Layout, kind: ArrayType, what: object) -> Array:
    client = layout.slice.cluster.native
    packing = layout.slice.cluster.packing(layout)
    placement = layout.slice.cluster.placement(layout)
    array: Array = client.new_array(layout)
    driver = layout.slice.cluster.driver
    if driver is not None:
        # This process is the host: hand the value over as it is, but never memory that the caller can change.
        key = next(_keys)
        if isinstance(leaf, jax.Array):
            driver.local[key] = leaf
        else:
            driver.local[key] = memory = aligned(packing.nbytes)
            packing.pack(leaf, memory)
        client.put(array, payloads.put_local(placement, key))
    elif kind.nbytes <= INLINE_BYTES:
        data = np.asarray(leaf, dtype=kind.dtype).tobytes()
        client.put(array, payloads.put_inline(placement, data))
    else:
        block = allocate(client, packing.nbytes, what)
        if packing.nbytes >= BIG_BYTES:
            layout.slice.cluster.arena_trimmer.block_taken()
        packing.pack(leaf, memoryview(block))
        client.put(array, payloads.put_arena(placement, block.offset, packing.nbytes), block)
    return array


def allocate(client: _core.Client, nbytes: int, what: object) -> _core.BlockView:
    """A block of the client's shared memory; waits while others give theirs back, and refuses what can never fit."""
    capacity = client.arena_stats()[2]
    if nbytes > capacity:
        raise errors.ResourceExhaustedError(
            f"{what} has {nbytes} bytes, but this client's shared memory only {capacity}; connect with more"
        )
    deadline = 0.0
    while (block := client.allocate(nbytes)) is None:
        if deadline == 0:
            gc.collect()  # arrays in cycles
            deadline = time.monotonic() + _PATIENCE_S
        client.flush()
        client.check_alive()
        client.pause(0.001)
        if time.monotonic() > deadline:
            raise errors.ResourceExhaustedError(
                f"{what} needs {nbytes} bytes of this client's shared memory, and none of its {capacity} bytes became "
                f"free for {_PATIENCE_S:g} s: {client.arena_stats()[0]} are in use by arrays that are still alive"
            )
    return block


def _move(array: Array, devices: Slice, spec: Any, what: object) -> Array:
    """An array of the cluster on another slice, or sharded otherwise."""
    from pathways.api import operators

    return operators.move(array, devices, devices.spec(spec, array.shape, what))
