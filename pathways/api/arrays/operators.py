"""Ordinary use of arrays outside programs: each operation is a small program on the arrays' own slice.

JAX itself says what an operation is: operators, methods and `jnp` functions all end in a jaxpr (see
`_jaxlib.accept_arrays`), which is placed, compiled once per layout of its arguments, and submitted. Where several
slices meet, one operation runs on the slice of its largest array (the first among equals) and the others are moved
there; a library function with several results (an optax update of a tree) keeps each operation where its own operands
are. A loop or a branch around placed functions of several slices, which JAX runs by itself outside of a program, is a
program of its own. NumPy arrays and arrays of this process's own JAX are put to the slice with every call.

Python numbers are compiled in, so that they cost no message; an operation that has seen `CONSTANTS` different ones
takes any further as arguments, so that a changing learning rate compiles nothing.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from pathways import _jaxlib, errors
from pathways.api.arrays.array import Array
from pathways.api.programs.compiled import Compiled, current_shapes
from pathways.api.programs.program import Program
from pathways.api.programs.signature import argument_of
from pathways.api.programs.tracing import find_slice, refuse_stand_in, remember
from pathways.api.session import Session
from pathways.api.slices.virtual_devices import Slice
from pathways.compiler import specs
from pathways.compiler.added_primitives.transfers import constrained, transfer
from pathways.compiler.inlining import leaves_slice
from pathways.compiler.ir import MeshSpec, Spec
from pathways.compiler.placed import TaggedFunction as placed
from pathways.compiler.trace import as_argument

#: How many different sets of Python numbers one operation on given layouts compiles in.
CONSTANTS = 16
#: Compiled operations kept per cluster; the oldest go first.
KEPT = 4096

_NUMBERS = (int, float, bool, complex)
_running = threading.local()  # .runs: a list of (compiled, leaves, results) while `Operations.learn` looks on


class Operations:
    """What one cluster has compiled for ordinary use."""

    def __init__(self) -> None:
        self.known: dict[Hashable, Compiled] = {}  # an entry goes with the jaxpr whose id is in its key
        self.constants: dict[Hashable, int] = {}
        self.makers: dict[Hashable, Any] = {}  # placed functions that make arrays, see `creation`
        #: Operators that turned out to be one run of one program: (settings, call, which operand each argument is).
        self.shortcuts: dict[Hashable, tuple[Any, Any, tuple[int, ...]]] = {}
        self.callees: dict[Hashable, Compiled] = {}  # keeps the programs of `shortcuts`
        self.lock = threading.RLock()

    def learn(self, key: Hashable, fun: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
        """Calls `fun`; when all it does is one run on `operands`, the next call of `key` is only that."""
        outer = getattr(_running, "runs", None)
        runs: list[tuple[Compiled, list[Any], list[Array]]] = []
        _running.runs = runs
        settings = _jaxlib.trace_modes()
        try:
            result = fun(*operands)
        finally:
            _running.runs = outer
        if outer is not None:
            outer.extend(runs)
        if len(runs) == 1 and not _jaxlib.value_checks():
            compiled, leaves, results = runs[0]
            if len(results) == 1 and results[0] is result:
                places = tuple(next((n for n, x in enumerate(operands) if x is leaf), -1) for leaf in leaves)
                if -1 not in places:
                    if len(self.shortcuts) >= KEPT:
                        self.shortcuts.clear()
                        self.callees.clear()
                    self.callees[key] = compiled
                    self.shortcuts[key] = (settings, compiled.call, places)
        return result

    def forget_outdated(self) -> None:
        """Drops what was compiled for a slice that has another shape now."""
        with self.lock:
            for key in [key for key, compiled in list(self.known.items()) if compiled.is_outdated]:
                self.known.pop(key, None)
            for key in [key for key, compiled in list(self.callees.items()) if compiled.is_outdated]:
                self.callees.pop(key, None)
                self.shortcuts.pop(key, None)


def operations(cluster: Session) -> Operations:
    """The operations of a cluster."""
    known: Operations | None = cluster.operations
    if known is None:
        known = cluster.operations = Operations()
    return known


@_jaxlib.outside_meshes
def run(
    closed: Any,
    name: str,
    args: Sequence[Any],
    like: Array | None = None,
    home: Slice | None = None,
    jit: Mapping[str, Any] | None = None,
    is_free: bool = False,
) -> list[Array]:
    """Runs a closed jaxpr on `home`, or on arguments of which at least one is a `pw.Array`; see the module.

    The results are sharded as the compiler finds best: an elementwise operation keeps its operand's sharding. With
    `like`, one of the arguments, they are sharded as that is. `jit`: the parameters of a jit of the user's with that
    jaxpr, which may have shardings and donated arguments. `is_free`: `home` is only where what has no slice runs.

    Raises:
        DeletedArrayError: an argument was deleted or donated.
        PlacementError: arrays of two clusters.
        ProgramError: it reads a variable, which only programs may.
    """
    return current_shapes(lambda: _run_once(closed, name, args, like, home, jit, is_free or home is None))


def _run_once(
    closed: Any,
    name: str,
    args: Sequence[Any],
    like: Array | None,
    home: Slice | None,
    jit: Mapping[str, Any] | None,
    is_free: bool,
) -> list[Array]:
    arrays = [arg for arg in args if type(arg) is Array]
    for array in arrays:
        if array.is_deleted():
            raise errors.DeletedArrayError(f"{name}: the array {array!r} was deleted, or donated to a program")
        if array.raw_handle == 0:
            refuse_stand_in(array)
    home = home or _home(name, arrays)
    table = operations(home.cluster)
    shapes: list[Hashable] = []
    numbers: list[Hashable] = []
    for arg in args:
        if type(arg) is Array:
            shapes.append(arg.layout)
        elif type(arg) in _NUMBERS:
            shapes.append(type(arg).__name__)
            numbers.append(constant(arg))
        else:
            shapes.append(_jaxlib.abstract_value(arg))
    options = None if jit is None else tuple(jit[each] for each in ("in_shardings", "out_shardings", "donated_invars"))
    where = (id(closed), home.mesh_spec.name, _jaxlib.trace_modes(), options, *shapes)
    key: Hashable = (where, tuple(numbers))
    known = table.known.get(key)
    if known is None and numbers and table.constants.get(where, 0) >= CONSTANTS:
        numbers = []
        key = (where, None)
        known = table.known.get(key)
    if known is None:
        home.cluster.control()
        for value in closed.consts:
            refuse_stand_in(value)
        with table.lock:
            known = table.known.get(key)
            if known is None:
                known = _compile(closed, name, args, home, bool(numbers), like, jit, is_free)
                if numbers:
                    table.constants[where] = table.constants.get(where, 0) + 1
                _keep(table, key, known, closed)
    if numbers:
        leaves = [arg for arg in args if type(arg) not in _NUMBERS]
    else:
        leaves = list(args)
    results = known.run(leaves)
    runs = getattr(_running, "runs", None)
    if runs is not None:
        runs.append((known, leaves, results))
    return results


def constant(number: Any) -> Hashable:
    """A key that tells numbers apart that compare equal, and finds those again that do not equal themselves."""
    if number == 0 or number != number:
        return type(number), repr(number)
    return type(number), number


def _keep(table: Operations, key: Hashable, known: Compiled, closed: Any) -> None:
    while len(table.known) >= KEPT:
        table.known.pop(next(iter(table.known)), None)
        table.constants.clear()
    table.known[key] = known
    # A derivative of a function goes with the function, and with it what it closes over. The table, whose programs may
    # hold what they were traced from, goes with its cluster.
    weakref.finalize(closed, _forget, weakref.ref(table), key).atexit = False


def _forget(table: weakref.ref[Operations], key: Hashable) -> None:
    if (there := table()) is not None:
        there.known.pop(key, None)


def _of_type(x: Any, aval: Any, home: Slice) -> Any:
    """An argument as a value of the type for which JAX has traced an operation: a cotangent has come from elsewhere."""
    typed = specs.spec_of_type(aval)
    if typed is None or typed[0] != home.mesh_spec or not _jaxlib.is_tracer(x):
        return x
    if jax.typeof(x).sharding == aval.sharding:
        return x
    return transfer(x, *typed)


def _sent_back(body: Callable[..., list[Any]], back: Mapping[int, tuple[MeshSpec, Spec]], *leaves: Any) -> list[Any]:
    """Cotangents go to the slices whose types they have."""
    return [transfer(x, *back[n]) if n in back else x for n, x in enumerate(body(*leaves))]


def _as_jit(jit: Mapping[str, Any], home: Slice, *leaves: Any) -> list[Any]:
    """A jit of the user's on `home`. Its shardings say how its results lie, also over explicit axes."""
    results = _jaxlib.bind_jit(jit, leaves)
    if not home.mesh_spec.explicit:
        return results
    return [
        constrained(x, home.mesh_spec, home.spec(sharding.spec, x.shape, f"result of {jit['name']!r}"))
        if isinstance(sharding, NamedSharding)
        else x
        for x, sharding in zip(results, jit["out_shardings"], strict=True)
    ]


def _home(name: str, arrays: Sequence[Array]) -> Slice:
    best = arrays[0]
    for array in arrays[1:]:
        if array.layout.slice is best.layout.slice:
            continue
        if array.layout.slice.cluster is not best.layout.slice.cluster:
            raise errors.PlacementError(
                f"{name}: {best!r} and {array!r} live on different clusters; fetch one "
                "(np.asarray) and put it to the other (pw.device_put)"
            )
        if array.layout.nbytes > best.layout.nbytes:
            best = array
    home: Slice = best.layout.slice
    return home


def _compile(
    closed: Any,
    name: str,
    args: Sequence[Any],
    home: Slice,
    numbers_inside: bool,
    like: Array | None,
    jit: Mapping[str, Any] | None,
    is_free: bool,
) -> Compiled:
    """The program of an operation. It takes the arguments in order, without the numbers that are compiled in."""
    function = _jaxlib.as_function(closed) if jit is None else functools.partial(_as_jit, jit, home)
    inside = {n: arg for n, arg in enumerate(args) if numbers_inside and type(arg) in _NUMBERS}
    slices = set()
    arguments = []
    for number, arg in enumerate(args):
        if type(arg) is Array:
            slices.add(arg.layout.slice)
            remember(arg.layout.slice)
            arguments.append(argument_of(arg))
        elif number not in inside:
            arguments.append(as_argument(arg, f"argument {number} of {name!r}"))

    def operation(*leaves: Any) -> list[Any]:
        rest = iter(leaves)
        given = (inside[n] if n in inside else next(rest) for n in range(len(args)))
        return function(*(_of_type(x, aval, home) for x, aval in zip(given, closed.in_avals, strict=True)))

    operation.__name__ = operation.__qualname__ = name
    apart = is_free and ((len(slices) > 1 and len(closed.out_avals) > 1) or leaves_slice(closed.jaxpr, home.mesh_spec))
    donated = [n for n, given in enumerate(jit["donated_invars"]) if given] if jit is not None else []
    left = [n for n in range(len(args)) if n not in inside]
    wanted = None if like is None else specs.to_partition_spec(like.layout.spec[: len(like.layout.shape)])
    body = operation if apart else placed(operation, home.mesh_spec, name=name, out_shardings=wanted)
    donate = [at for at, n in enumerate(left) if n in donated]
    back = {
        n: typed
        for n, aval in enumerate(closed.out_avals)
        if (typed := specs.spec_of_type(aval)) is not None and typed[0] != home.mesh_spec and find_slice(typed[0])
    }
    if back and not apart:
        body = functools.partial(_sent_back, body, back)
    return Program(body, name=name, home=home, donate_argnums=donate).lower(*arguments).compile()
