"""A function of `jax.experimental.colocated_python`, as a process calls it that a host has for one client's functions.

That process reads it by cloudpickle, and never the proxy or a host: what the client's JAX has pickled is any Python
(TRUST-1). Its JAX has all devices of the cluster as CPU devices with the client's numbers, and can use its host's own.
One thread uses it.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pathways.proxy.foreign_code import is_own
from pathways.proxy.packed_strings import pack

#: What cloudpickle writes where a pickle has the type of code objects.
_TYPES = ("cloudpickle.cloudpickle", "_builtin_type")
#: What XLA says when a computation has devices of other hosts.
_ELSEWHERE = "Unknown PjRt global device ID"
_has_devices = False


class ColocatedFunction:
    """See `pathways.proxy.behind.Function.call`."""

    def __init__(self, payload: bytes, devices: Sequence[int], hosts: Mapping[int, int]) -> None:
        """`payload`: what the client's JAX has pickled. `hosts`: the host of each device of the cluster."""
        self._payload, self._devices, self._hosts = payload, tuple(devices), dict(hosts)
        self._read: tuple[Any, ...] | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        import jax  # noqa: F401 - it takes a second or more, which is none of a call's time

    def __call__(self, host: np.ndarray[Any, Any], *arguments: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """Calls it with this host's shards.

        Raises:
            ValueError: it cannot be read, because it is another Python's.
            TypeError: its results are not what was promised.
            Whatever reading it raises, or the function.
        """
        _use_devices([device for device, its in self._hosts.items() if its == int(host)], self._hosts)
        import jax

        if self._read is None:
            self._read = _read(self._payload)
        function, in_tree, in_types, out_tree, out_types, _ = self._read
        by_number = {device.id: device for device in jax.local_devices()}
        here = [by_number[number] for number in self._devices if number in by_number]
        is_wide = jax.config.jax_enable_x64 or any(map(_is_wide, (*in_types, *out_types)))
        # What it makes without arguments lies on one of its devices, too.
        with jax.enable_x64(is_wide), jax.default_device(here[0]):
            arrays = [_array(type, shards, here) for type, shards in zip(in_types, arguments, strict=True)]
            args, kwargs = jax.tree_util.tree_unflatten(in_tree, arrays)
            try:
                made, tree = jax.tree_util.tree_flatten(function(*args, **kwargs))
            except jax.errors.JaxRuntimeError as error:
                if _ELSEWHERE in str(error):
                    error.add_note(
                        "An array of several hosts was computed with as a whole, and each host has its own shards "
                        "alone: take array.addressable_shards, and jax.make_array_from_single_device_arrays"
                    )
                raise
            if tree != out_tree:
                raise TypeError(f"it returned {tree}, but {out_tree} was promised")
            return [
                _shards(f"result {number}", array, type, here)
                for number, (array, type) in enumerate(zip(made, out_types, strict=True))
            ]


def _use_devices(own: Sequence[int], hosts: Mapping[int, int]) -> None:
    global _has_devices
    if not _has_devices:
        from pathways import _jaxlib

        _jaxlib.use_colocated_devices(own, hosts)
        _has_devices = True


def _is_wide(type: Any) -> bool:
    return type.dtype in ("int64", "uint64", "float64", "complex128")


def _array(type: Any, shards: np.ndarray[Any, Any], devices: Sequence[Any]) -> Any:
    """The array of which this host has these shards."""
    import jax

    kind = type.sharding.memory_kind
    places = [jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for device in devices]
    parts = [jax.device_put(shards[number, ...], place) for number, place in enumerate(places)]
    return jax.make_array_from_single_device_arrays(type.shape, type.sharding, parts)


def _shards(what: str, array: Any, type: Any, devices: Sequence[Any]) -> np.ndarray[Any, Any]:
    """This host's shards of a result. Raises `TypeError` when it is not what was promised."""
    import jax

    if not isinstance(array, jax.Array):
        raise TypeError(f"{what} is a {array.__class__.__name__}; a colocated function returns JAX's arrays")
    if (array.shape, array.dtype) != (type.shape, type.dtype):
        raise TypeError(f"{what} is {array.dtype}{list(array.shape)}; {type.dtype}{list(type.shape)} was promised")
    promised = type.sharding.devices_indices_map(type.shape)
    found = {shard.device: shard for shard in array.addressable_shards}
    for device in devices:
        if device not in found or found[device].index != promised[device]:
            raise TypeError(f"{what} is cut by {array.sharding}, but {type.sharding} was promised")
    values = [np.asarray(found[device].data) for device in devices]
    return np.stack([pack(each) for each in values] if isinstance(type.dtype, np.dtypes.StringDType) else values)


def _read(payload: bytes) -> tuple[Any, ...]:
    from pathways import _jaxlib

    with _jaxlib.common_objects():
        read: tuple[Any, ...] = _Reader(io.BytesIO(payload)).load()
        return read


class _Reader(pickle.Unpickler):
    """Reads no code of another Python, which would crash this process when it runs."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return (lambda kind: _code if kind == "CodeType" else found(kind)) if (module, name) == _TYPES else found


def _code(*parts: Any) -> Any:
    try:
        made = type(_code.__code__)(*parts)
        if is_own(made.co_code):
            return made
    except TypeError:  # the code of another Python has other parts
        pass
    raise ValueError(
        f"the function comes from another Python; that of the hosts is {sys.version.split()[0]}, and the program's "
        "must be of the same minor version"
    )
