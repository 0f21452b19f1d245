"""`pw.jit`: a function compiled for a slice. Inside a program it is a computation; alone, a program of one node."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import jax

from pathways import _jaxlib, errors
from pathways._jaxlib import trace_modes
from pathways.api.arrays.array import Array
from pathways.api.arrays.put import device_put
from pathways.api.programs.program import P, Program, R
from pathways.api.programs.tracing import is_tracing, remember, tracing
from pathways.api.slices.virtual_devices import Slice
from pathways.compiler import specs
from pathways.compiler.placed import TaggedFunction as placed
from pathways.compiler.plain_jaxprs import untagged
from pathways.compiler.trace import Traced


class PlacedFunction(Program[P, R]):
    """A function on a slice. Made by `jit`."""

    def __init__(
        self,
        fun: Callable[P, R],
        slice_: Slice,
        *,
        in_shardings: Any,
        out_shardings: Any,
        static: Mapping[str, Any],
        donate: Mapping[str, Any],
        name: str | None,
    ) -> None:
        """`static`, `donate`: the options of `jax.jit` that say which arguments are static, and which are donated."""
        self.slice = slice_
        self._make = functools.partial(
            placed, fun, in_shardings=in_shardings, out_shardings=out_shardings, name=name, **static
        )
        with slice_.cluster.steady:  # the slice gets no other shape meanwhile
            self.place()
            slice_.functions.add(self)
        super().__init__(self._placed, name=self._placed.name, home=slice_, **static, **donate)

    def place(self) -> None:
        """Puts the function onto the slice's mesh of now. `Session.steady` is held."""
        remember(self.slice)
        self._fun = self._placed = self.__wrapped__ = self._make(mesh=self.slice.mesh_spec)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Inside a program's trace: one computation of it. Alone: one run of a program of one node."""
        if not tracing:  # the way of most calls, in as little Python as can be
            last = self._last
            if last is not None and last.is_flat and not kwargs and last.modes == trace_modes():
                out = last.enter([*args])
                if type(out) is list:
                    return out[0]
        elif is_tracing():
            remember(self.slice)
            return self._placed(*args, **kwargs)
        return self._submit(args, kwargs)

    def _call_eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        fun = self._placed
        dynamic = fun.dynamic(len(args))
        given = tuple(args[n] for n in dynamic)
        wanted = specs.broadcast(fun.in_shardings, given, f"argument shardings of placed function {fun.name!r}")
        leaves, tree = jax.tree_util.tree_flatten(given)
        put = [self._put_leaf(leaf, spec) for leaf, spec in zip(leaves, wanted, strict=True)]
        there = dict(zip(dynamic, tree.unflatten(put), strict=True))
        named = {
            k: v if k in fun.static_argnames else jax.tree_util.tree_map(self._put_leaf, v) for k, v in kwargs.items()
        }
        result = fun.fun(*(there.get(n, arg) for n, arg in enumerate(args)), **named)
        if _jaxlib.is_staging():
            return result
        leaves, tree = jax.tree_util.tree_flatten(result)
        wanted = specs.broadcast(fun.out_shardings, result, f"result shardings of placed function {fun.name!r}")
        return tree.unflatten(
            leaf
            if type(leaf) is Array and leaf.slice is self.slice and spec is None
            else device_put(leaf, self.slice, spec)
            for leaf, spec in zip(leaves, wanted, strict=True)
        )

    def _put_leaf(self, leaf: Any, spec: Any = None) -> Any:
        """A value on the slice. A reference stays where it is."""
        return leaf if _jaxlib.is_reference(leaf) else device_put(leaf, self.slice, spec)

    def _stage(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        remember(self.slice)
        return self._placed(*args, **kwargs)

    @_jaxlib.outside_meshes
    def _lower_plainly(self, split: Any, platforms: tuple[str, ...], private: dict[str, Any]) -> Any:
        with _jaxlib.lowering_for_slices():
            return _jaxlib.forget_meshes(self._plain(split).lower(lowering_platforms=platforms, **private))

    @_jaxlib.outside_meshes
    def _shown_jaxpr(self, traced: Traced, split: Any, *, is_exported: bool) -> Any:
        return untagged(self._plain(split).jaxpr, keep_shardings=not is_exported)

    def _plain(self, split: Any) -> Any:
        """JAX's own trace of the plain function, with its shardings."""
        args, kwargs = jax.tree_util.tree_map(
            lambda x: _jaxlib.struct(x.aval) if type(x) is Array else x,
            (split.args, split.kwargs),
        )
        return self._placed.trace(*args, **kwargs)

    def argument_specs(self, number: int, argument: Any) -> list[Any]:
        """What `in_shardings` says of each leaf of a positional argument; None: the choice is the compiler's."""
        given = self._placed.in_shardings
        if isinstance(given, list | tuple):
            given = given[number] if number < len(given) else None
        return specs.broadcast(given, argument, f"argument shardings of placed function {self._placed.name!r}")

    def clear_cache(self) -> None:
        """Forgets what it has compiled and traced; the next call does both again."""
        super().clear_cache()
        self._placed.clear_cache()

    def __repr__(self) -> str:
        return f"<pw.jit {self._name!r} on {self.slice!r}>"


@overload
def jit(
    fun: Callable[P, R],
    devices: Slice,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    name: str | None = None,
) -> PlacedFunction[P, R]: ...
@overload
def jit(
    fun: None = None,
    *,
    devices: Slice,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    name: str | None = None,
) -> Callable[[Callable[P, R]], PlacedFunction[P, R]]: ...
def jit(
    fun: Callable[..., Any] | None = None,
    devices: Slice | None = None,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    name: str | None = None,
) -> Any:
    """`fun`, compiled for a slice; the `jax.jit` of a cluster. Also a decorator: `@pw.jit(devices=slice)`.

    Args:
        fun: any function that `jax.jit` takes. Its callbacks (`jax.debug.print`, `jax.pure_callback` and their kin)
            run in this process.
        devices: the slice it runs on.
        in_shardings, out_shardings: pytree prefixes of `PartitionSpec`s over the slice's axes; None leaves the choice
            to the compiler.
        donate_argnums, donate_argnames: arguments whose buffers the results may take over, when called alone.
        static_argnums, static_argnames: as in `jax.jit`.
        name: shown in plans and errors; the function's own name when not given.

    Returns:
        A callable of the same signature. Its results are `pw.Array`s of the shapes and types that `fun` gives.

    Raises:
        ProgramError: `fun` is no function, or has no argument of such a name or number.
        ShardingError: when called, for a sharding that does not fit; names argument, dimension and axes.
        ComputationError: at the results, with XLA's message, the host and the device.
    """
    if not isinstance(devices, Slice):
        raise errors.SliceError(
            "pw.jit expects devices= a slice (make_virtual_device_set().add_slice(...)), got "
            f"{devices!r} of type {type(devices).__name__}"
        )
    make = functools.partial(
        PlacedFunction,
        slice_=devices,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        static={"static_argnums": static_argnums, "static_argnames": static_argnames},
        donate={"donate_argnums": donate_argnums, "donate_argnames": donate_argnames},
        name=name,
    )
    return make if fun is None else make(fun)
