"""`pw.host_callback`: Python functions that run on the hosts of a slice, as part of a program; `pw.HostObject`."""

from __future__ import annotations

import math
import numbers
import os
import sys
import threading
import uuid
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from pathways import errors
from pathways.process.host_functions import HostFunction, Kept, dump, filled, write

_turn = threading.RLock()
_here: dict[str, Any] = {}  # the objects of functions that are called without a cluster, by number


def host_callback(
    function: Callable[..., Any],
    result_shape_dtypes: Any,
    *args: Any,
    deadline: float | None = 60.0,
    ordered: bool = False,
    **kwargs: Any,
) -> Any:
    """Calls a Python function on a host of the slice where the computation runs: an environment, a reader of data.

    It is `jax.experimental.io_callback`, but for where the function runs: not in the client's process, but beside the
    arrays, in a process that each host of the cluster has for this client. The function gets there by cloudpickle. Its
    standard output is the host's log. It is called once per run, with whole arrays; in a `jax.shard_map`, once per
    device, with the device's part. Calls of one client on one host take turns.

    Without a cluster, under plain `jax.jit`, the function runs in this process.

    Args:
        function: takes NumPy arrays, in the trees of `args` and `kwargs`; gives arrays or numbers, in the tree of
            `result_shape_dtypes`. Trees are of dicts, lists, tuples and named tuples.
        result_shape_dtypes: `jax.ShapeDtypeStruct`s.
        *args: arrays.
        deadline: seconds that a call may take. When it takes longer, its process is ended, and the call fails. None:
            no limit.
        ordered: calls come in the order of the program; see `jax.experimental.io_callback`.
        **kwargs: arrays.

    Returns:
        Arrays, in the tree of `result_shape_dtypes`.

    Raises:
        ProgramError: cloudpickle cannot write the function; an argument or a result is in another kind of tree.
        OptionError: the deadline is not above 0.
        CallbackFailedError: at the results, when the call fails: with the function's name, the host, what the function
            raised and where.

    Example:
        ```
        env = pw.HostObject(Environment, seed=1)

        @functools.partial(pw.jit, devices=actors)
        def step(params, observed):
            action = policy(params, observed)
            return pw.host_callback(lambda a: env.step(a), next_type, action)
        ```
    """
    name = str(getattr(function, "__qualname__", None) or function)
    what = f"pw.host_callback ({name})"
    if not is_limit(deadline):
        raise errors.OptionError(f"{what}: deadline is {deadline!r}; expected seconds above 0, or None for no limit")
    leaves, arguments = _numbered(f"{what}: an argument", (args, kwargs))
    results, promised = _numbered(f"{what}: result_shape_dtypes", result_shape_dtypes)
    for each in results:
        if not hasattr(each, "shape") or not isinstance(getattr(each, "dtype", None), np.dtype):
            raise errors.ProgramError(
                f"{what}: result_shape_dtypes has {each!r}; expected jax.ShapeDtypeStruct of dtypes of NumPy"
            )
    try:
        data = write(function, arguments, promised, bool(jax.config.jax_enable_x64))
    except Exception as error:
        raise errors.ProgramError(
            f"{what}: cloudpickle cannot write the function for the hosts: {type(error).__name__}: {error}. What "
            "cannot be written can be made there: pw.HostObject(factory)"
        ) from error
    limit_s = 0.0 if deadline is None or math.isinf(deadline) else float(deadline)
    marked = Marked(what, data, limit_s, results)
    return filled(promised, io_callback(marked, list(results), *leaves, ordered=ordered))


def is_limit(deadline: Any) -> bool:
    """Whether this says how long a call may take."""
    return deadline is None or (isinstance(deadline, numbers.Real) and float(deadline) > 0)


class Marked:
    """A host function in a trace, as JAX knows it: something to call with flat arguments."""

    is_host_function = True  # `pathways._jaxlib.callbacks` asks

    def __init__(self, what: str, data: bytes, deadline_s: float, results: list[Any]) -> None:
        self.what = what
        self.data = data
        self.deadline_s = deadline_s
        self.path = tuple(os.path.abspath(each) for each in sys.path if isinstance(each, str))
        self.__qualname__ = what
        self._results = results
        self._function: HostFunction | None = None

    def __call__(self, *arrays: Any) -> list[np.ndarray]:
        """Without a cluster: calls it in this process. Calls take turns, as on a host."""
        kinds = [(tuple(each.shape), np.dtype(each.dtype)) for each in self._results]
        with _turn:
            if self._function is None:
                self._function = HostFunction(self.data, _here)
            return self._function([np.asarray(each) for each in arrays], kinds)


def _numbered(what: str, tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a tree, and the tree with their numbers.

    Raises:
        ProgramError: it has a node that is no dict, list or tuple.
    """
    leaves: list[Any] = []

    def walk(item: Any) -> Any:
        if item is None:
            return None
        if type(item) is dict:
            return {key: walk(each) for key, each in item.items()}
        if type(item) in (list, tuple):
            return type(item)(walk(each) for each in item)
        if isinstance(item, tuple) and hasattr(item, "_fields"):
            return type(item)(*(walk(each) for each in item))
        if not jax.tree_util.all_leaves([item]):
            raise errors.ProgramError(
                f"{what} is in a {type(item).__name__}; expected arrays in dicts, lists, tuples or named tuples"
            )
        leaves.append(item)
        return len(leaves) - 1

    return leaves, walk(tree)


class HostObject:
    """An object that host functions keep from call to call: an environment, an open file, a random generator.

    It is made on each host that calls a function which uses it, once, by `factory(*args, **kwargs)`, in the process
    that this host has for this client. There, in functions of `pw.host_callback`, the `HostObject` is that object. It
    lives until the client leaves, or a function there misses its deadline or ends the process. Then the next call makes
    a new one. On the client it has no attributes.

    Raises:
        ProgramError: cloudpickle cannot write the factory or its arguments.
    """

    is_host_object = True

    def __init__(self, factory: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        name = str(getattr(factory, "__qualname__", None) or factory)
        try:
            made_by = dump((factory, args, kwargs))
        except Exception as error:
            raise errors.ProgramError(
                f"pw.HostObject({name}): cloudpickle cannot write it for the hosts: {type(error).__name__}: {error}"
            ) from error
        self._name = name
        self.kept = Kept(uuid.uuid4().hex, made_by)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"{self!r} has no {name!r} here: the object is on hosts. Use it in a function of pw.host_callback"
        )

    def __repr__(self) -> str:
        return f"pw.HostObject({self._name})"
