"""`pw.jit`: a function compiled for a slice. Inside a program it is a computation; alone, a program of one node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pathways import errors
from pathways.api.program import Program, is_tracing, remember
from pathways.api.slices import Slice
from pathways.compiler import placed


class PlacedFunction(Program):
    """A function on a slice. Made by `jit`."""

    def __init__(
        self,
        fun: Callable[..., Any],
        slice_: Slice,
        *,
        in_shardings: Any,
        out_shardings: Any,
        donate_argnums: int | Sequence[int],
        static_argnums: int | Sequence[int],
        static_argnames: str | Sequence[str],
        name: str | None,
    ) -> None:
        self.slice = slice_
        remember(slice_)
        self._placed = placed(
            fun,
            slice_.mesh_spec,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            name=name,
        )
        super().__init__(
            self._placed,
            name=self._placed.name,
            home=slice_,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            donate_argnums=donate_argnums,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Inside a program's trace: one computation of it. Alone: one run of a program of one node."""
        if is_tracing():
            remember(self.slice)
            return self._placed(*args, **kwargs)
        return self._submit(args, kwargs)

    def __repr__(self) -> str:
        return f"<pw.jit {self._name!r} on {self.slice!r}>"


def jit(
    fun: Callable[..., Any],
    devices: Slice | None = None,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    name: str | None = None,
) -> PlacedFunction:
    """`fun`, compiled for a slice; the `jax.jit` of a cluster.

    Args:
        fun: any function that `jax.jit` takes. Callbacks in it are refused when it is traced.
        devices: the slice it runs on.
        in_shardings, out_shardings: pytree prefixes of `PartitionSpec`s over the slice's axes; None leaves the choice
            to the compiler.
        donate_argnums: arguments whose buffers the results may take over, when called alone.
        static_argnums, static_argnames: as in `jax.jit`.
        name: shown in plans and errors; the function's own name when not given.

    Raises:
        ShardingError: when called, for a sharding that does not fit; names argument, dimension and axes.
    """
    if not isinstance(devices, Slice):
        raise errors.SliceError(
            "pw.jit expects devices= a slice (make_virtual_device_set().add_slice(...)), got "
            f"{devices!r} of type {type(devices).__name__}"
        )
    return PlacedFunction(
        fun,
        devices,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        donate_argnums=donate_argnums,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        name=name,
    )
