"""From the user's Python to a jaxpr: `trace` runs a program once under JAX, on abstract arguments.

The arguments may be anything JAX takes, `jax.ShapeDtypeStruct`s, or `Argument`s. An `Argument` also says on which slice
a value is.
Nothing executes, and no backend is initialised.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from pathways import _jaxlib, errors
from pathways.compiler import closures, placed, specs
from pathways.compiler.added_primitives import transfers
from pathways.compiler.closures import ClosedOver
from pathways.compiler.ir import MeshSpec, Spec


@dataclasses.dataclass(frozen=True)
class Argument:
    """The abstract value of one array argument of a program. `mesh` and `spec` say where it is; None: anywhere.

    `is_reference`: the argument is a reference to such an array (`jax.new_ref`), and the program takes its value.
    """

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool = False
    mesh: MeshSpec | None = None
    spec: Spec | None = None
    is_reference: bool = False

    def struct(self) -> Any:
        """The same as a `jax.ShapeDtypeStruct`, or as a reference to one, to trace with."""
        if self.is_reference:
            return _jaxlib.abstract_reference(self.aval())
        sharding = specs.sharding_in_type(self.mesh, self.spec)
        return jax.ShapeDtypeStruct(self.shape, self.dtype, weak_type=self.weak_type, sharding=sharding)

    def aval(self) -> Any:
        """Its type as JAX traces with it."""
        sharding = specs.sharding_in_type(self.mesh, self.spec)
        return _jaxlib.shaped_array(self.shape, self.dtype, self.weak_type, sharding)


#: A program with ordered callbacks takes one more argument of this type, and gives one more result of it.
ORDER = Argument((), np.dtype(np.bool_))


@dataclasses.dataclass(frozen=True)
class Given:
    """The reference that a call gives as this argument."""

    position: int


@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced program: its jaxpr, its pytrees and where its arguments are. Input of `compile_traced`.

    `in_tree` is the pytree of a call's arguments. In the jaxpr, the values of the closed-over references and the
    closed-over arrays come after these arguments; `closed_over` has the references and the arrays. `out_tree` is the
    pytree of what the function returns. The results behind that are new values of state: `updates` says of what.
    """

    name: str
    jaxpr: Any
    in_tree: Any
    out_tree: Any
    arguments: tuple[Argument, ...]
    argument_names: tuple[str, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    result_names: tuple[str, ...]
    donated: tuple[bool, ...]
    closed_over: tuple[Any, ...] = ()
    updates: tuple[Any, ...] = ()

    @property
    def given(self) -> int:
        """How many arguments a call gives."""
        return len(self.arguments) - len(self.closed_over)

    @property
    def returned(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What the function returns, flat."""
        return self.results[: len(self.results) - len(self.updates)]

    def in_order(self) -> Traced:
        """The same program with `ORDER` as one more argument, after the arguments that a call gives."""
        at = self.given
        return dataclasses.replace(
            self,
            arguments=(*self.arguments[:at], ORDER, *self.arguments[at:]),
            argument_names=(*self.argument_names[:at], "the order of callbacks", *self.argument_names[at:]),
            donated=(*self.donated[:at], False, *self.donated[at:]),
        )


class State(Protocol):
    """State that outlives the program, which the program reads and sets while it is traced."""

    def begin(self) -> None:
        """JAX traces the function now."""

    def results(self) -> list[tuple[Any, str, Any]]:
        """The function has returned: what it has set, with a name and the new value."""

    @property
    def donates(self) -> bool:
        """Whether the old values of what is set are donated."""

    def is_set(self, value: Any) -> bool:
        """Whether a closed-over value is the old value of something that is set."""

    def name_of(self, value: Any) -> str | None:
        """What a closed-over value is called; None: it is no state."""


class ClosesOver(Protocol):
    """Which values that a function closes over become arguments of the program."""

    def stands_in(self, value: Any) -> ClosedOver | None:
        """What becomes an argument in place of a value; None: it stays a constant."""

    def argument(self, closed_over: ClosedOver) -> Argument:
        """The argument that it becomes."""


class _Nothing:
    """Stands for a float0, the derivative of an integer, in a pytree of results.

    A float0 has a shape and no bytes, so the client makes it itself when it unflattens the results, as `jax.jit` does.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape


jax.tree_util.register_pytree_node(
    _Nothing, lambda nothing: ((), nothing.shape), lambda shape, _: np.zeros(shape, jax.dtypes.float0)
)


def _without_float0(leaf: Any) -> Any:
    return _Nothing(tuple(leaf.shape)) if getattr(leaf, "dtype", None) == jax.dtypes.float0 else leaf


def as_argument(leaf: Any, what: object) -> Argument:
    """The `Argument` of any leaf that JAX takes as an array.

    Raises:
        ProgramError: for anything else, naming the argument.
    """
    if isinstance(leaf, Argument):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return Argument(tuple(leaf.shape), leaf.dtype, bool(getattr(leaf, "weak_type", False)))
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSUV" and not _jaxlib.valid_jaxtype(leaf):
            raise errors.ProgramError(f"{what} is a NumPy array of dtype {leaf.dtype}, which is no dtype of JAX")
        aval = jax.api_util.shaped_abstractify(leaf)
        return Argument(tuple(aval.shape), aval.dtype, bool(aval.weak_type))
    if _jaxlib.is_reference(leaf) and isinstance(aval := _jaxlib.reference_type(leaf), jax.core.ShapedArray):
        mesh, spec = specs.spec_of_type(aval) or (None, None)
        return Argument(tuple(aval.shape), aval.dtype, bool(aval.weak_type), mesh, spec, is_reference=True)
    raise errors.ProgramError(
        f"{what} is {leaf!r} of type {type(leaf).__name__}; expected an array, a number, or a "
        "pytree of them. Mark it static (static_argnums, static_argnames) if it is none"
    )


def trace(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    name: str | None = None,
    closed_over: ClosesOver | None = None,
    state: State | None = None,
) -> Traced:
    """Traces `fun(*args, **kwargs)`; calls of placed functions inside become its computations.

    Leaves of the arguments that are not static are `Argument`s, `jax.ShapeDtypeStruct`s, arrays or numbers.
    `closed_over` says which closed-over values become arguments; None: all stay constants.
    `state`: what the function sets becomes more results, and their old values are donated.

    Raises:
        ProgramError: an argument or a result is no array; the error names it.
        Whatever JAX or the user's own code raises while it is traced.
    """
    kwargs = dict(kwargs or {})
    name = name or placed.function_name(fun)
    parameters = placed.parameter_names(fun, len(args))
    most = placed.positional_parameters(fun)
    static = which(static_argnums, static_argnames, parameters, most)
    donate = which(donate_argnums, donate_argnames, parameters, most)
    static_names = names_of(static_argnames)
    donate_names = names_of(donate_argnames)
    dynamic = [n for n in range(len(args)) if n not in static]
    static_kwargs = {k: v for k, v in kwargs.items() if k in static_names}
    tree = (tuple(args[n] for n in dynamic), {k: v for k, v in kwargs.items() if k not in static_names})
    leaves, in_tree = jax.tree_util.tree_flatten_with_path(tree)
    names, donated, arguments = [], [], []
    for path, leaf in leaves:
        if path[0].idx == 0:
            number = dynamic[path[1].idx]
            names.append(parameters[number] + jax.tree_util.keystr(path[2:]))
            donated.append(number in donate)
        else:
            names.append(path[1].key + jax.tree_util.keystr(path[2:]))
            donated.append(path[1].key in donate_names)
        arguments.append(as_argument(leaf, f"argument {names[-1]} of {name!r}"))
    out: dict[str, Any] = {}

    def flat(*dynamic_args: Any, **dynamic_kwargs: Any) -> list[Any]:
        merged = list(args)
        for number, value in zip(dynamic, dynamic_args, strict=True):
            merged[number] = value
        if state is not None:
            state.begin()
        result = jax.tree_util.tree_map(_without_float0, fun(*merged, **static_kwargs, **dynamic_kwargs))
        paths, out["tree"] = jax.tree_util.tree_flatten_with_path(result)
        out["names"] = tuple("result" + jax.tree_util.keystr(path) for path, _ in paths)
        for result_name, (_, leaf) in zip(out["names"], paths, strict=True):
            if not (_jaxlib.is_tracer(leaf) or _jaxlib.valid_jaxtype(leaf)):
                raise errors.ProgramError(
                    f"{result_name} of {name!r} is {leaf!r} of type {type(leaf).__name__}; a "
                    "program returns arrays, numbers, None, or pytrees of them"
                )
        new = state.results() if state is not None else []
        out["names"] += tuple(each for _, each, _ in new)
        out["updates"] = tuple(what for what, _, _ in new)
        return [*(leaf for _, leaf in paths), *(value for _, _, value in new)]

    flat.__name__ = flat.__qualname__ = name
    # With these two, JAX's messages name the user's function, file and arguments.
    flat.__wrapped__ = fun  # type: ignore[attr-defined]
    flat.__signature__ = _without(fun, [parameters[n] for n in static], static_kwargs)  # type: ignore[attr-defined]
    structs = jax.tree_util.tree_unflatten(in_tree, [argument.struct() for argument in arguments])
    # Jit must be on, because a placed function is a jit. And no mesh may be set: a mesh that the user has set for this
    # process is not the mesh of a slice.
    with jax.disable_jit(False), _jaxlib.no_mesh():
        try:
            made = _discharged(_jaxlib.in_low_terms(jax.make_jaxpr(flat)(*structs[0], **structs[1])), name)
        except RuntimeError as error:
            if isinstance(error, errors.PathwaysError) or "set_mesh" not in str(error):
                raise
            raise errors.ShardingError(
                f"{name!r} gives a PartitionSpec where no slice is known. Give it inside a placed function "
                "(pw.jit(fun, devices=slice)), whose slice it then speaks of, or give slice.sharding(spec)"
            ) from error
    jaxpr, lifted = made.jaxpr, list[ClosedOver]()
    if closed_over is not None:
        jaxpr, lifted = closures.lift(jaxpr, closed_over.stands_in)
    donates = state is not None and state.donates
    given = [Given(number) for number, argument in enumerate(arguments) if argument.is_reference]
    changed = tuple((*given, *made.closed_over)[number] for number in made.written)
    for each in given:
        donated[each.position] = donates and each in changed
    everything = [*(ClosedOver(reference) for reference in made.closed_over), *lifted]
    for one in everything:
        value = one.value
        what = f"closed-over {'reference' if _jaxlib.is_reference(value) else 'array'} {len(names) - len(leaves)}"
        arguments.append(closed_over.argument(one) if closed_over is not None else as_argument(value, what))
        known = state.name_of(value) if state is not None else None
        names.append(known or what)
        is_set = any(value is each for each in changed) or (state is not None and state.is_set(value))
        donated.append(donates and is_set)
    results = tuple(map(_jaxlib.struct, jaxpr.out_avals))
    return Traced(
        name,
        jaxpr,
        in_tree,
        out["tree"],
        tuple(arguments),
        tuple(names),
        results,
        (*out["names"], *(f"the new value of a reference, {number}" for number in range(len(changed)))),
        tuple(donated),
        tuple(each.value for each in everything),
        (*out["updates"], *changed),
    )


def _discharged(closed: Any, name: str) -> Any:
    """The traced program `name` without references (`jax.new_ref`)."""
    try:
        return _jaxlib.discharged(closed)
    except (NotImplementedError, ValueError) as error:
        if isinstance(error, errors.PathwaysError):
            raise
        what = str(error) or "a reference is an argument of a jax.jit with shardings or layouts of its own"
        raise errors.EffectError(
            f"{name!r} uses a reference (jax.new_ref) in a way that JAX cannot turn into values: {what}. Read the "
            "reference before (ref[...]), pass the value on, and write what comes back"
        ) from error


def _without(fun: Callable[..., Any], *names: Collection[str]) -> inspect.Signature:
    """The function's signature without those parameters."""
    try:
        signature = inspect.signature(fun)
        left = [p for p in signature.parameters.values() if not any(p.name in some for some in names)]
        return signature.replace(parameters=left)
    except (ValueError, TypeError):
        rest = inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)
        named = inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)
        return inspect.Signature([rest, named])


def names_of(names: str | Sequence[str]) -> tuple[str, ...]:
    """Names given as one string or several, as a tuple."""
    return (names,) if isinstance(names, str) else tuple(names)


def which(
    numbers: int | Sequence[int], names: str | Sequence[str], parameters: Sequence[str], most: int | None = 0
) -> set[int]:
    """The positional arguments of a call that those numbers and names mean.

    The function has `most` positional parameters (None: any number). A number below `most` is valid even if the call
    does not give that argument by position.
    """
    numbers = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    count = len(parameters)
    for number in numbers:
        if not -count <= number < count and not (most is None or 0 <= number < most):
            raise errors.ProgramError(f"argnums {number} is out of range: the call has {count} positional arguments")
    meant = {n % count for n in numbers if -count <= n < count}
    return meant | {n for n, parameter in enumerate(parameters) if parameter in names_of(names)}


def device_put(x: Any, mesh: MeshSpec, spec: Any = None, within: str = "") -> Any:
    """Under trace: the pytree `x` moved to `mesh`. `spec` is a pytree prefix of PartitionSpecs; None replicates.

    `within` is the path of `x` in a bigger pytree, for messages. Differentiable: a cotangent goes back to the slice
    that the value came from.
    """
    wanted = specs.broadcast(spec, x, f"shardings of device_put to slice {mesh.name!r}")
    leaves, treedef = jax.tree_util.tree_flatten_with_path(x)
    out = []
    for (path, leaf), leaf_spec in zip(leaves, wanted, strict=True):
        what = f"value{within}{jax.tree_util.keystr(path)} of device_put to slice {mesh.name!r}"
        if _jaxlib.is_traced_reference(leaf) or not (_jaxlib.is_tracer(leaf) or _jaxlib.valid_jaxtype(leaf)):
            raise errors.ProgramError(
                f"{what} is {leaf!r} of type {type(leaf).__name__}; expected an array. Of a reference, put the value: "
                "ref[...]"
            )
        leaf = leaf if _jaxlib.is_tracer(leaf) else jax.numpy.asarray(leaf)
        out.append(transfers.transfer(leaf, mesh, specs.normalize(leaf_spec, jax.numpy.shape(leaf), mesh, what)))
    return jax.tree_util.tree_unflatten(treedef, out)
