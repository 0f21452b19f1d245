"""What orbax calls to save and restore `pw.Array`s. Nothing but this file and `orbax_templates` imports orbax.

orbax runs in the client, as its only process; hosts know nothing of it. It decides what is written where and makes a
checkpoint appear at once or not at all; this handler has the hosts write and read the arrays' shards, in the very
layout of orbax's own `ArrayHandler` (zarr in OCDBT, one folder per writing process, merged by orbax at the end), so
that plain JAX reads what Pathways wrote and the other way round. The client writes metadata only.

Saving has two halves. `serialize`, in the caller's thread, stages each array on its hosts by a command in the order; it
waits for no value (ASY-1), and whatever the caller does with its arrays next, donates or deletes them, comes after.
orbax then calls the other half on a thread of its own: once the folder is there, the hosts write, and commit when all
have written. What fails anywhere gives the whole job up.

orbax's bounds on the bytes that its process has in flight (`save_concurrent_gb` and its kin) mean nothing here, where
its process moves none.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint._src.metadata import array_metadata, array_metadata_store
from orbax.checkpoint._src.metadata import sharding as sharding_metadata
from orbax.checkpoint._src.serialization import jax_array_handlers, tensorstore_utils, type_handler_registry, types

from pathways import _jaxlib, errors
from pathways.api.arrays.array import Array
from pathways.api.arrays.host_values import physical
from pathways.api.checkpoints.jobs import Job, settled
from pathways.api.checkpoints.orbax_templates import follow_templates, sharding_of, slice_of
from pathways.api.session import Session
from pathways.api.slices.virtual_devices import Slice
from pathways.compiler.ir import ArrayType
from pathways.protocol import payloads


def register() -> None:
    """Puts the handler in place of orbax's own for `jax.Array`; adapts how orbax reads templates and logs errors."""
    follow_templates(ocp.PyTreeCheckpointHandler)
    logging.getLogger("absl").addFilter(_ToldOnce())
    ours = (jax.Array, Array)
    type_handler_registry.GLOBAL_TYPE_HANDLER_REGISTRY.add(
        jax.Array, ArrayHandler(), func=lambda t: issubclass(t, ours), override=True, ignore_warnings=True
    )


class ArrayHandler(ocp.type_handlers.ArrayHandler):
    """orbax's handler of arrays, which also knows `pw.Array`s and shardings over slices."""

    def __init__(self) -> None:
        super().__init__(array_metadata_store=array_metadata_store.Store())

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        """See `orbax.checkpoint.type_handlers.TypeHandler`. Stages ours; the futures are done when it is all written.

        Raises:
            ValueError: an array without elements, which orbax does not store.
            CheckpointError, HostLostError, ComputationError: from the futures; with the host and path, or the array.
        """
        args = args or [ocp.SaveArgs()] * len(values)
        types.check_input_arguments(values, infos, args)
        jax_array_handlers.check_array_values(values, infos)
        each = list(zip(values, infos, args, strict=True))
        ours = [item for item in each if type(item[0]) is Array]
        plain = [item for item in each if type(item[0]) is not Array]
        if not ours:
            return list(await super().serialize(values, infos, args))
        save = _Save(ours)
        futures: list[Any] = []
        store = self._array_metadata_store
        if plain:  # what it says of the layout of arrays is one file
            beside = ocp.type_handlers.ArrayHandler(array_metadata_store=_Beside(store, save))
            futures += await beside.serialize(*map(list, zip(*plain, strict=True)))
            store = None
        futures.append(
            ocp.future.CommitFutureAwaitingContractedSignals(save.write(store), name="pathways_array_handler")
        )
        return futures

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Sequence[Any]:
        """See `orbax.checkpoint.type_handlers.TypeHandler`. Arrays whose sharding is over a slice go there.

        Raises:
            ValueError: the stored shape is another one; neither the template nor the checkpoint says where it goes.
            SliceError: a sharding over a mesh that several slices have; use `slice.sharding(spec)`.
            CheckpointError: a host could not read; with host and path.
        """
        args = args or [ocp.RestoreArgs()] * len(infos)
        slices = [slice_of(sharding_of(arg)) for arg in args]
        out: list[Any] = [None] * len(infos)
        plain = [number for number, slice_ in enumerate(slices) if slice_ is None]
        ours = [(number, slice_) for number, slice_ in enumerate(slices) if slice_ is not None]
        if plain:
            try:
                arrays = await super().deserialize([infos[n] for n in plain], [args[n] for n in plain])
            except ValueError as error:
                if all(sharding_of(args[n]) is not None for n in plain):
                    raise
                raise ValueError(
                    f"{error}; arrays that were saved from a slice need a template that says where they go: an array "
                    "on a slice, or a jax.ShapeDtypeStruct with slice.sharding(spec)"
                ) from error
            for number, array in zip(plain, arrays, strict=True):
                out[number] = array
        if ours:
            restore = _Restore(self._array_metadata_store)
            arrays = await restore.read([(infos[n], args[n], slice_) for n, slice_ in ours])
            for (number, _), array in zip(ours, arrays, strict=True):
                out[number] = array
        return out


# ----------------------------------------------------------------------------------------------------- what went wrong


class _ToldOnce(logging.Filter):
    """Shortens what orbax logs of our errors: one line for each error, however many of its threads saw it.

    orbax logs the error of a save with its traceback in each thread that the error passes. The error itself, with its
    traceback, is the caller's: `wait_until_finished` or `close` raises it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._told: weakref.WeakSet[BaseException] = weakref.WeakSet()

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        while error is not None and not isinstance(error, errors.PathwaysError):
            error = error.__cause__ or error.__context__
        if error is None:
            return True
        if error in self._told:
            return False
        self._told.add(error)
        record.msg, record.args = f"a checkpoint was not saved: {type(error).__name__}: {error}", ()
        record.exc_info = record.exc_text = None
        return True


# -------------------------------------------------------------------------------------------------------------- arrays


def _stored_type(array: Array) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype in a file: keys are their words there; complex numbers are themselves, though not on a slice."""
    kind: ArrayType = array.layout.cache
    return (array.shape, array.dtype) if _jaxlib.is_complex(array.dtype) else (kind.shape, kind.dtype)


def _is_storable(dtype: np.dtype) -> bool:
    try:
        ts.dtype(dtype.name)
    except (TypeError, ValueError):
        return False
    return True


def _context(info: Any) -> Any:
    """orbax's tensorstore context, as the hosts can make it."""
    return {} if info.ts_context is None else info.ts_context.spec.to_json()


# ------------------------------------------------------------------------------------------------------------- saving


class _Save(Job):
    """The arrays of one save."""

    def __init__(self, items: Sequence[tuple[Array, Any, Any]]) -> None:
        """Stages them."""
        super().__init__()
        self._items = items
        clusters: dict[Session, int] = {}
        self._process: list[str] = []  # whose folder: hosts of several clusters may write into one checkpoint
        try:
            for number, (array, info, _) in enumerate(items):
                kind: ArrayType = array.layout.cache
                if not _is_storable(_stored_type(array)[1]):
                    raise errors.CheckpointError(
                        f"saving {info.name!r}: orbax's files have no elements of type {kind.dtype}; save it as another"
                    )
                if array.is_deleted():
                    raise errors.DeletedArrayError(f"saving it: the array {array!r} was deleted, or donated")
                cluster, _ = self.stage(array, number)
                self._process.append(f"pw{clusters.setdefault(cluster, len(clusters))}host{payloads.HOST}")
        except BaseException:
            self.end(early=True)
            raise

    async def write(self, store: Any) -> None:
        """Has it all written. `store`: where what orbax keeps of the layout goes; None: somebody else writes it."""
        try:
            await self.paths()
            await self.settle()
            self._ask_for_writes()
            await self._write_shardings()
            if store is not None:
                await store.write(self._items[0][1].parent_dir, self.metadatas(), process_index=0)
            await self.settle()
            name = str(self._items[0][1].parent_dir)
            for group in self.groups():
                self.ask(group, payloads.task("commit", self.number, name=name))
            await self.settle()
            self.end(early=False)
        except BaseException:
            await self.give_up()
            raise
        finally:
            self._items = ()

    async def paths(self) -> None:
        """Waits until the folders are there."""
        await asyncio.gather(*(info.await_path_creation() for _, info, _ in self._items))

    def metadatas(self) -> list[Any]:
        """What orbax keeps of each array's layout."""
        return [self._spec(number).metadata for number in range(len(self._items))]

    def _spec(self, number: int) -> Any:
        array, info, arg = self._items[number]
        kind: ArrayType = array.layout.cache
        parts = array.layout.slice.placed(kind).parts()
        shape, dtype = _stored_type(array)
        extra = None
        if _jaxlib.is_key(array.dtype):
            extra = {array_metadata.RANDOM_KEY_IMPL: _jaxlib.key_name(array.dtype)}
        return tensorstore_utils.build_array_write_spec(
            info,
            arg,
            global_shape=shape,
            local_shape=tuple(size // count for size, count in zip(shape, parts, strict=False)),
            dtype=dtype,
            use_ocdbt=info.is_ocdbt_checkpoint,
            process_index=self._process[number] if info.is_ocdbt_checkpoint else None,
            ext_metadata=extra,
        )

    def _ask_for_writes(self) -> None:
        info = self._items[0][1]
        arrays = (
            (array, [number, item.name, ts.Spec(self._spec(number).json).to_json()])
            for number, (array, item, _) in enumerate(self._items)
        )
        self.ask_for("write", arrays, context=_context(info), atomic=bool(info.is_ocdbt_checkpoint))

    async def _write_shardings(self) -> None:
        """For who restores without saying where: the mesh's shape and names, on whatever devices there are."""
        transaction = ts.Transaction()
        for array, info, _ in self._items:
            sharding = array.sharding
            words = sharding_metadata.NamedShardingMetadata(
                shape=np.array(list(sharding.mesh.shape.values())),
                axis_names=list(sharding.mesh.axis_names),
                axis_types=tuple(sharding.mesh.axis_types),
                partition_spec=tuple(sharding.spec),
            ).to_serialized_string()
            spec = tensorstore_utils.get_sharding_tensorstore_spec(info.parent_dir.as_posix(), info.name)
            store = await ts.open(spec, open=True, context=info.ts_context)
            await store.with_transaction(transaction).write(words)
        await transaction.commit_async()


class _Beside(array_metadata_store.Store):
    """Writes what orbax says of its arrays together with what we say of ours."""

    def __init__(self, store: Any, save: _Save) -> None:
        super().__init__(primary_host=store._primary_host)
        self._save = save

    async def write(self, checkpoint_dir: Any, array_metadatas: Sequence[Any], process_index: Any) -> None:
        """See `Store`."""
        await self._save.paths()
        await super().write(checkpoint_dir, [*array_metadatas, *self._save.metadatas()], process_index)


# ---------------------------------------------------------------------------------------------------------- restoring


class _Restore(Job):
    """The arrays of one restore."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store

    async def read(self, items: Sequence[tuple[Any, Any, Slice]]) -> list[Array]:
        """Has them read, and waits: an array that cannot be read is an error now, not later."""
        await asyncio.gather(*(info.await_path_creation() for info, _, _ in items))
        keys = await self._keys(items[0][0].parent_dir)
        specs = [
            ocp.type_handlers.get_json_tspec_read(
                info,
                use_ocdbt=info.is_ocdbt_checkpoint,
                raise_array_data_missing_error=info.raise_array_data_missing_error,
            )
            for info, _, _ in items
        ]
        opening = [
            ts.open(ts.Spec(spec), open=True, context=info.ts_context)
            for spec, (info, _, _) in zip(specs, items, strict=True)
        ]
        stored = await asyncio.gather(*opening)
        arrays: list[Array] = []
        try:
            for (info, arg, slice_), spec, found in zip(items, specs, stored, strict=True):
                arrays.append(self._ask(info, arg, slice_, spec, found, keys.get(info.name)))
            for array in arrays:
                await settled(array.client, array.raw_handle)
            for array in arrays:
                array.block_until_ready()  # raises the error that it failed with
        except BaseException:
            await self.give_up()
            for array in arrays:  # the error of one is raised; nobody can read the others (UNREAD-1)
                if not array.client.closed and array.client.state(array) == "failed":
                    array._failure()
            raise
        self.end(early=False)
        return arrays

    async def _keys(self, folder: Any) -> dict[str, str]:
        """Which arrays are PRNG keys: name of the implementation by the array's."""
        found = await self._store.read(checkpoint_dir=folder) or {}
        return {
            each.param_name: each.ext_metadata[array_metadata.RANDOM_KEY_IMPL]
            for metadatas in found.values()
            for each in metadatas
            if each.ext_metadata and array_metadata.RANDOM_KEY_IMPL in each.ext_metadata
        }

    def _ask(self, info: Any, arg: Any, slice_: Slice, spec: Any, stored: Any, key: str | None) -> Array:
        what = f"restoring {info.name!r}"
        shape, dtype = tuple(stored.shape), np.dtype(stored.dtype.numpy_dtype)
        if key is not None:
            logical: Any = jax.random.key(0, impl=key).dtype
            wanted = arg.dtype
            if _jaxlib.is_key(wanted) and wanted != logical:
                raise errors.ProgramError(f"{what}: the stored keys are {logical}, not {wanted}")
            shape = shape[: len(shape) - len(_jaxlib.physical_struct((), logical)[0])]
        else:
            logical = dtype if arg.dtype is None else np.dtype(arg.dtype)
            wanted_shape = getattr(arg, "global_shape", None)
            if wanted_shape is not None and tuple(wanted_shape) != shape:
                if getattr(arg, "strict", True):
                    raise ValueError(
                        f"{what}: it is stored with shape {shape}, not {tuple(wanted_shape)}; to cut it off or fill it "
                        "up with zeros, set strict=False"
                    )
                shape = tuple(wanted_shape)
        sharding = sharding_of(arg)
        partition = jax.sharding.PartitionSpec(*tuple(sharding.spec)[: len(shape)])
        kind = physical(shape, logical, slice_, slice_.spec(partition, shape, what))
        cluster = slice_.cluster
        layout = cluster.layout(kind, slice_, dtype=logical, shape=shape)
        cluster.native.enter()  # a slice that moves changes who shall hold it
        try:
            placement = cluster.placement(layout).number
            array: Array = cluster.native.new_array(layout)
            self.join(array)
            payload = payloads.task(
                "read",
                self.number,
                name=info.name,
                spec=ts.Spec(spec).to_json(),
                context=_context(info),
                placement=placement,
                dtype=(logical if _jaxlib.is_complex(logical) else kind.dtype).name,
            )
            cluster.native.make(array, payload)
        finally:
            cluster.native.leave()
        return array
