"""The ONE door to the private parts of jax and jaxlib, one small function each.

The rest of the package calls these functions. Nothing else in the project may import `jax._src`, `jaxlib._jax` or
`jaxlib.mlir`. Each function is tested per jaxlib version in `tests/python/test_jaxlib_door.py`. Known versions:
`OLDEST <= jaxlib < TOO_NEW`; `check_versions` refuses any other.

Nothing here initialises a backend, so a client can trace, partition and lower without taking an accelerator.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import enum
import faulthandler
import functools
import importlib
import inspect
import io
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jaxlib
import jaxlib._jax as xla
import numpy as np
from jax._src import (
    ad_util,
    api,
    array,
    config,
    core,
    debugging,
    dispatch,
    dtypes,
    ffi,
    pjit,
    sharding_impls,
    xla_bridge,
)
from jax._src import callback as jax_callback
from jax._src.interpreters import mlir as jax_mlir
from jax._src.interpreters import partial_eval, pxla
from jax._src.lax import lax
from jax._src.numpy import array_methods
from jax._src.random import prng
from jax.experimental import layout
from jax.sharding import AbstractMesh
from jaxlib.mlir import ir as ir
from jaxlib.mlir import passmanager
from jaxlib.mlir.dialects import func as func
from jaxlib.mlir.dialects import mpmd, stablehlo
from jaxlib.mlir.dialects import sdy as sdy

from pathways import errors

#: The module of a type that loops have among their parameters since JAX 0.12.
flattree: Any = importlib.import_module("jax._src.flattree") if jax.__version_info__ >= (0, 12) else None

VERSION = jaxlib.__version__
OLDEST = (0, 10, 2)
TOO_NEW = (0, 13)

_recording: set[int] = set()  # idents of threads that record; see `is_recording`
_debug_nans, _debug_infs = config.debug_nans, config.debug_infs
Literal = core.Literal
DropVar = core.DropVar
jit_p = pjit.jit_p


# ---------------------------------------------------------------------------------------------------- versions


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version.split("+")[0].split("dev")[0])[:4])


def check_versions(jax_version: str = jax.__version__, jaxlib_version: str = jaxlib.__version__) -> None:
    """Raises `UnsupportedVersionError` unless this release knows both versions."""
    for package, version in (("jax", jax_version), ("jaxlib", jaxlib_version)):
        if not _numbers(version)[:3] >= OLDEST or not _numbers(version)[:2] < TOO_NEW:
            oldest, too_new = (".".join(map(str, v)) for v in (OLDEST, TOO_NEW))
            raise errors.UnsupportedVersionError(
                f"this release of pathways knows {package} >={oldest},<{too_new}, but {package} {version} is "
                f"installed; install a version in that range (pip install '{package}>={oldest},<{too_new}')"
            )


def initialized_backends() -> tuple[str, ...]:
    """Names of the XLA backends that this process has initialised so far. This call initialises none."""
    return tuple(xla_bridge._backends)


def keep_threads_of_parent() -> None:
    """For a forked child: keeps alive for ever the JAX objects that have threads.

    The threads exist only in the parent. If the child's exit destroyed these objects, JAX would join the threads and
    crash.
    """
    for owner in (*xla_bridge._backends.values(), jax_mlir.global_thread_pool):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


def is_forked() -> bool:
    """True if a backend is initialised but its threads are not in this process: the process is a forked child."""
    return bool(xla_bridge._backends) and len(os.listdir("/proc/self/task")) == 1


# ---------------------------------------------------------------------------------------------------- jaxprs


def close(jaxpr: core.Jaxpr, consts: Sequence[Any]) -> Any:
    """A closed jaxpr; jax 0.11 merged ClosedJaxpr into Jaxpr."""
    return getattr(core, "ClosedJaxpr", core.Jaxpr)(jaxpr, list(consts))


def is_closed(value: Any) -> bool:
    """True for an object that has both a jaxpr and its constants."""
    return isinstance(value, getattr(core, "ClosedJaxpr", core.Jaxpr))


def new_var(aval: Any) -> core.Var:
    """A fresh jaxpr variable."""
    return core.Var(aval)


def new_jaxpr(
    constvars: Sequence[core.Var],
    consts: Sequence[Any],
    invars: Sequence[core.Var],
    outvars: Sequence[Any],
    eqns: Sequence[Any],
    like: core.Jaxpr,
) -> Any:
    """A closed jaxpr of those equations, with the debug info of `like`."""
    info = like.debug_info._replace(arg_names=None, result_paths=None)
    jaxpr = core.Jaxpr(list(constvars), list(invars), list(outvars), list(eqns), core.no_effects, info)
    return close(jaxpr, consts)


def rebuilt(
    closed: Any,
    constants: Sequence[tuple[core.Var, Any]],
    invars: Sequence[core.Var],
    outvars: Sequence[Any],
    eqns: Any,
) -> Any:
    """A closed jaxpr with these parts and the effects of `closed`."""
    jaxpr = closed.jaxpr
    info = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    variables, values = [v for v, _ in constants], [value for _, value in constants]
    return close(core.Jaxpr(variables, list(invars), list(outvars), list(eqns), jaxpr.effects, info), values)


def extend_jit(eqn: Any, inputs: Sequence[Any], more: Sequence[Any], closed: Any) -> Any:
    """The jit equation `eqn` with the jaxpr `closed` and with the arguments `inputs`, then `more`."""
    params = dict(eqn.params, jaxpr=closed)
    for name, value in (
        ("in_shardings", sharding_impls.UNSPECIFIED),
        ("in_layouts", None),
        ("donated_invars", False),
    ):
        params[name] = (*eqn.params[name], *(value for _ in more))
    return eqn.replace(invars=[*inputs, *more], params=params)


def sub_jaxprs(params: Mapping[str, Any]) -> Iterator[core.Jaxpr]:
    """The jaxprs among an equation's parameters, without their constants."""
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, core.Jaxpr):
                yield item
            elif is_closed(item):
                yield item.jaxpr


def is_jaxpr(value: Any) -> bool:
    """True for a jaxpr, open or closed."""
    return isinstance(value, core.Jaxpr) or is_closed(value)


def is_plain_parameter(value: Any) -> bool:
    """True for a hashable value of JAX's own types without code or arrays in it: specs, shardings, dimension numbers.

    False for a value that names physical devices.
    """
    if isinstance(value, AbstractMesh | jax.sharding.PartitionSpec | sharding_impls.UnspecifiedValue):
        return True
    if isinstance(value, jax.sharding.NamedSharding):
        return isinstance(value.mesh, AbstractMesh) and value.memory_kind is None
    if isinstance(value, jax.sharding.Mesh):
        return bool(value.empty)
    if flattree is not None and isinstance(value, flattree.FlatTree):
        return _has_only_nones(value)
    return type(value).__name__ in _PLAIN_PARAMETERS and type(value).__module__.startswith("jax.")


def _has_only_nones(tree: Any) -> bool:
    if isinstance(tree, flattree.FTTuple):
        return all(map(_has_only_nones, tree.elts))
    if isinstance(tree, flattree.FTFiltered):
        return _has_only_nones(tree.unfilter())
    leaves = tree.xs if isinstance(tree, flattree.FTPyTree) else (getattr(tree, "val", tree),)
    return all(leaf is None for leaf in leaves)


_PLAIN_PARAMETERS = frozenset({"GatherDimensionNumbers", "ScatterDimensionNumbers", "ConvDimensionNumbers", "PRNGImpl"})


def equation_context(eqn: Any) -> tuple[Any, ...]:
    """What decides how an equation is lowered, besides its primitive, parameters and operands."""
    return str(eqn.source_info.name_stack), eqn.ctx


def is_transposed(eqn: Any) -> bool:
    """True for an equation that reverse-mode differentiation made."""
    return "transpose(" in str(eqn.source_info.name_stack)


def physical(aval: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of an array as a computation takes or gives it.

    A PRNG key array becomes its uint32 words. A complex array becomes its real and imaginary parts, in one more
    dimension at the end, because complex types kill jaxlib's partitioner.
    """
    aval = core.physical_aval(aval)
    shape, dtype = tuple(aval.shape), np.dtype(aval.dtype)
    return ((*shape, 2), _part(dtype)) if dtype.kind == "c" else (shape, dtype)


def _part(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.float32 if dtype == np.complex64 else np.float64)


def is_complex(dtype: Any) -> bool:
    """True for complex64 and complex128."""
    return not is_key(dtype) and np.dtype(dtype).kind == "c"


def logical_dtype(logical: Any, parts: np.dtype) -> Any:
    """The dtype of an array that was asked for as `logical` (in any x64 mode) and has the physical dtype `parts`."""
    if is_key(logical):
        return logical
    return np.result_type(parts, np.complex64) if np.dtype(logical).kind == "c" else parts


def to_physical(value: Any, dtype: Any) -> Any:
    """A host value of logical dtype `dtype`, in the physical form that computations take and give."""
    if is_key(dtype):
        return jax.random.key_data(value)
    if is_complex(dtype):
        array = np.asarray(value, dtype, order="C")
        return array.reshape(-1).view(_part(np.dtype(dtype))).reshape(*array.shape, 2)
    return value


def from_physical(value: Any, dtype: Any) -> Any:
    """The inverse of `to_physical`: a JAX key array, or a NumPy array on the same memory."""
    if is_key(dtype):
        return wrap_key(jax.numpy.asarray(value), dtype)
    if is_complex(dtype):
        array = np.asarray(value, order="C")
        logical = array.reshape(-1).view(np.dtype(dtype)).reshape(array.shape[:-1])
        logical.flags.writeable = array.flags.writeable
        return logical
    return value


@functools.cache
def _conversion(shape: tuple[int, ...], dtype: np.dtype, joins: bool) -> Any:
    """The equation that makes a complex array from its parts (`joins`), or the parts from the array."""

    def join(parts: jax.Array) -> jax.Array:
        return lax.complex(parts[..., 0], parts[..., 1])

    def split(value: jax.Array) -> jax.Array:
        return jax.numpy.stack([lax.real(value), lax.imag(value)], axis=-1)

    with jax.enable_x64(True):
        if joins:
            return jax.make_jaxpr(jax.jit(join))(jax.ShapeDtypeStruct((*shape, 2), _part(dtype))).eqns[0]
        return jax.make_jaxpr(jax.jit(split))(jax.ShapeDtypeStruct(shape, dtype)).eqns[0]


def cross_physically(
    inputs: Sequence[core.Var], outputs: Sequence[core.Var], eqns: Sequence[Any]
) -> tuple[list[core.Var], list[core.Var], list[Any]]:
    """Adds equations so that complex inputs and outputs are passed as parts: new inputs, outputs and equations."""

    def convert(v: core.Var, joins: bool) -> tuple[core.Var, list[Any]]:
        if not is_complex(v.aval.dtype):
            return v, []
        like = _conversion(tuple(v.aval.shape), np.dtype(v.aval.dtype), joins)
        parts = new_var((like.invars if joins else like.outvars)[0].aval)
        ends = ([parts], [v]) if joins else ([v], [parts])
        return parts, [like.replace(invars=ends[0], outvars=ends[1])]

    before = [convert(v, True) for v in inputs]
    after = [convert(v, False) for v in outputs]
    return (
        [v for v, _ in before],
        [v for v, _ in after],
        [*(eqn for _, made in before for eqn in made), *eqns, *(eqn for _, made in after for eqn in made)],
    )


def is_key(dtype: Any) -> bool:
    """True for the dtype of PRNG key arrays."""
    return dtype is not None and dtypes.issubdtype(dtype, dtypes.prng_key)


def key_name(dtype: Any) -> str:
    """The name of a key dtype's PRNG implementation, as `jax.random.key(impl=)` takes it."""
    return str(dtype._impl.name)


def wrap_key(words: jax.Array, dtype: Any) -> jax.Array:
    """The PRNG key array of key dtype `dtype` over its uint32 words."""
    return jax.random.wrap_key_data(words, impl=dtype._impl.name)


def physical_struct(shape: tuple[int, ...], dtype: Any) -> tuple[tuple[int, ...], np.dtype]:
    """`physical` of an array of this logical shape and dtype."""
    return physical(core.ShapedArray(shape, dtype))


def trace_modes() -> Any:
    """All global JAX settings that change what a call does, as one comparable value. Takes 0.2 us."""
    if _recording:
        return config.trace_context(), is_recording()
    if _debug_nans.value or _debug_infs.value:
        return config.trace_context(), _debug_nans.value, _debug_infs.value
    return config.trace_context()


def is_recording() -> bool:
    """Whether this thread is inside `checkify`, which records a function in order to change it before it runs.

    `checkify` records on values, not on tracers. So what is computed meanwhile belongs to the record.
    """
    return bool(_recording) and threading.get_ident() in _recording


def value_checks() -> tuple[str, ...]:
    """The values that no result may have: "nan" under `jax.debug_nans`, "inf" under `jax.debug_infs`."""
    return ("nan",) * bool(_debug_nans.value) + ("inf",) * bool(_debug_infs.value)


def collect_garbage() -> None:
    """Frees Python memory that XLA's buffers do not use any more. Otherwise it is freed only at JAX's next call."""
    jaxlib._jax.collect_garbage()


def is_sub_byte(dtype: np.dtype) -> bool:
    """True for integers and floats of 2 or 4 bits."""
    return bool(dtypes.itemsize_bits(dtype) < 8) if np.dtype(dtype) != np.bool_ else False


def is_concrete(value: Any) -> bool:
    """True for JAX's own arrays of numbers; not for tracers, keys, or other objects that JAX takes as an array."""
    return type(value) is array.ArrayImpl


def is_tracer(value: Any) -> bool:
    """True for a value under trace."""
    return isinstance(value, core.Tracer)


def valid_jaxtype(value: Any) -> bool:
    """True for what JAX takes as an array: arrays, NumPy arrays, Python and NumPy scalars."""
    return bool(core.valid_jaxtype(value))


# ---------------------------------------------------------------------------------------------------- MLIR


@contextlib.contextmanager
def mlir_context() -> Iterator[ir.Context]:
    """Enters an MLIR context with JAX's dialects and `mpmd`."""
    with jax_mlir.make_ir_context() as context, ir.Location.unknown(context):
        mpmd.register_dialect(context)
        sdy.register_dialect(context)
        yield context


def lower_jaxpr(
    closed: Any,
    platforms: Sequence[str],
    mesh: AbstractMesh | None,
    number: Callable[[Callback], int],
    name: str = "body",
) -> bytes:
    """Lowers a closed jaxpr to StableHLO bytecode for `platforms` without initialising any backend.

    `mesh` is the mesh whose axes sharding constraints and shard_maps inside may name. A callback becomes a custom call
    `CALLBACK` with the number that `number(callback)` returns.
    """
    size = mesh.size if mesh is not None else 1
    extra = {}
    if "out_avals" in inspect.signature(jax_mlir.lower_jaxpr_to_module).parameters:
        extra["out_avals"] = closed.out_avals
    with lowering_for_slices():
        result = jax_mlir.lower_jaxpr_to_module(
            name,
            closed,
            num_const_args=0,
            in_avals=closed.in_avals,
            ordered_effects=[],
            platforms=tuple(platforms),
            backend=None,
            axis_context=sharding_impls.ShardingContext(size, None, mesh),
            donated_args=[False] * len(closed.in_avals),
            num_partitions=size,
            lowering_parameters=jax_mlir.LoweringParameters(
                hoist_constants_as_args=False,
                override_lowering_rules=tuple(
                    (primitive, functools.partial(_lower_callback, kind, number))
                    for primitive, kind in _CALLBACKS.items()
                ),
            ),
            **extra,
        )
    with result.module.context, ir.Location.unknown():
        if next(_callback_ops(result.module), None) is not None:
            _tokens_to_data(result.module)
            strip_locations(result.module)  # the partitioner logs a remark on the call, with the user's source lines
    return jax_mlir.module_to_bytecode(result.module)


_lowering = threading.local()  # .for_slices: how many `lowering_for_slices` this thread is inside


@contextlib.contextmanager
def lowering_for_slices() -> Iterator[None]:
    """Turns off the guard of `guard_lowering` for this thread: what it lowers meanwhile runs on slices, not here."""
    depth = getattr(_lowering, "for_slices", 0)
    _lowering.for_slices = depth + 1
    try:
        yield
    finally:
        _lowering.for_slices = depth


def guard_lowering(refuse: Callable[[str], None]) -> None:
    """From now on, calls `refuse(name)` for each inner `jax.jit` that JAX lowers to run in this process."""
    plain = pjit._pjit_lowering

    def rule(ctx: Any, *args: Any, name: str, **params: Any) -> Any:
        if not getattr(_lowering, "for_slices", 0):
            refuse(name)
        return plain(ctx, *args, name=name, **params)

    jax_mlir.register_lowering(jit_p, rule, cacheable=False)


def parse(module: bytes | str) -> ir.Module:
    """Parses a module in the context that is entered."""
    return ir.Module.parse(module)


def tensor_type(shape: Sequence[int], dtype: np.dtype) -> ir.Type:
    """The builtin tensor type of a physical shape and dtype, in the context that is entered."""
    return ir.RankedTensorType.get(list(shape), jax_mlir.dtype_to_ir_type(np.dtype(dtype)))


def portable_bytecode(module: ir.Module) -> bytes:
    """StableHLO (with `sdy`) as portable bytecode, which any supported jaxlib can read, on any machine."""
    version = stablehlo.get_version_from_compatibility_requirement(stablehlo.StablehloCompatibilityRequirement.WEEK_4)
    return bytes(xla.mlir.serialize_portable_artifact(module, version, True))


def standalone(op: Any) -> bytes:
    """A nested module as bytecode that `parse` reads as a module of its own."""
    buffer = io.BytesIO()
    op.operation.write_bytecode(buffer)
    return buffer.getvalue()


def strip_locations(module: ir.Module) -> None:
    """Drops source locations, in place."""
    passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(module.operation)


def parse_portable(module: bytes) -> ir.Module:
    """Parses what `portable_bytecode` wrote, in the context that is entered."""
    return xla.mlir.deserialize_portable_artifact(module)


# ---------------------------------------------------------------------------------------------------- callbacks

#: The custom call of a callback, until a host connects it to XLA's callback: see `connect_callbacks`.
CALLBACK = "pathways_callback"


@dataclasses.dataclass(frozen=True)
class _Kind:
    """A kind of callback: its name in JAX, and how JAX calls the user's function."""

    name: str
    call: Callable[..., Any]
    effect: Any = None  # the effect of an `ordered` one


def _callback_kinds() -> dict[core.Primitive, _Kind]:
    kinds = {
        jax_callback.pure_callback_p: _Kind("jax.pure_callback", jax_callback.pure_callback_impl),
        jax_callback.io_callback_p: _Kind(
            "jax.experimental.io_callback", jax_callback.io_callback_impl, jax_callback._OrderedIOEffect
        ),
        debugging.debug_callback_p: _Kind("jax.debug.callback", debugging.debug_callback_impl),
    }
    if hasattr(debugging, "debug_print_p"):
        kinds[debugging.debug_print_p] = _Kind(
            "jax.debug.print", debugging.debug_print_impl, debugging.ordered_debug_effect
        )
    return kinds


_CALLBACKS = _callback_kinds()
_ORDERED = (jax_callback.OrderedIOEffect, debugging.OrderedDebugEffect)
_EFFECTS = (jax_callback.IOEffect, debugging.DebugEffect, *_ORDERED)


@dataclasses.dataclass(frozen=True)
class Callback:
    """A callback of a traced program: the function, and the results that it must give."""

    what: str  # "jax.pure_callback (sin)"
    call: Callable[..., Sequence[Any]]
    results: tuple[tuple[tuple[int, ...], np.dtype], ...]
    x64: bool

    def __call__(self, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Calls the user's function as JAX would, and checks its results.

        Raises:
            Whatever the function raises.
            ValueError, TypeError: the results are not what was promised.
        """
        with jax.enable_x64(self.x64):
            given = [np.asarray(dtypes.canonicalize_value(np.asarray(each))) for each in self.call(*arguments)]
        if len(given) != len(self.results):
            raise ValueError(f"{self.what} gave {len(given)} results, but {len(self.results)} were promised")
        for number, (value, (shape, dtype)) in enumerate(zip(given, self.results, strict=True)):
            if value.shape != shape:
                raise ValueError(f"{self.what}: result {number} has shape {value.shape}, but {shape} was promised")
            if value.dtype != dtype:
                raise TypeError(f"{self.what}: result {number} has dtype {value.dtype}, but {dtype} was promised")
        return given


class CallsBack(enum.IntEnum):
    """Whether an equation has callbacks, and whether they are ordered."""

    NOTHING = 0
    FREELY = 1
    IN_ORDER = 2


def calls_back(eqn: Any, memo: dict[int, CallsBack]) -> CallsBack:
    """Whether an equation has a callback inside, and whether JAX promises its order. `memo` is by id() of jaxprs."""
    if any(isinstance(effect, _ORDERED) for effect in eqn.effects):
        return CallsBack.IN_ORDER
    if eqn.primitive in _CALLBACKS:
        return CallsBack.FREELY
    found = CallsBack.NOTHING
    for sub in sub_jaxprs(eqn.params):
        if id(sub) not in memo:
            memo[id(sub)] = max((calls_back(each, memo) for each in sub.eqns), default=CallsBack.NOTHING)
        found = max(found, memo[id(sub)])
    return found


def has_effects(eqn: Any) -> bool:
    """Whether an equation has side effects of callbacks. A `pure_callback` has none: it only gives results."""
    return any(isinstance(effect, _EFFECTS) for effect in eqn.effects)


def callback_name(eqn: Any) -> str:
    """The user's name of a callback: that of its function, or the format that it prints."""
    if "fmt" in eqn.params:
        return f"format {eqn.params['fmt']!r}"
    return _function_name(eqn.params.get("callback"))


def _function_name(callback: Any) -> str:
    callback = _users_function(callback)
    return str(getattr(callback, "__qualname__", None) or callback)


def _users_function(callback: Any, depth: int = 6) -> Any:
    """The user's function inside JAX's wrappers; if it cannot be found, the innermost wrapper that can."""
    if depth == 0 or callback is None:
        return callback
    inner = [getattr(callback, name, None) for name in ("callback_func", "func", "__wrapped__")]
    if str(getattr(callback, "__module__", "")).split(".")[0] == "jax":
        for cell in getattr(callback, "__closure__", None) or ():
            try:
                inner.append(cell.cell_contents)
            except ValueError:  # an empty cell
                continue
    found = [f for f in inner if callable(f) and not isinstance(f, type)]
    return _users_function(found[0], depth - 1) if found else callback


def _lower_callback(kind: _Kind, number: Callable[[Callback], int], ctx: Any, *args: ir.Value, **params: Any) -> Any:
    axes = ctx.module_context.axis_context
    is_manual = isinstance(axes, sharding_impls.SPMDAxisContext)
    if is_manual and axes.manual_axes != frozenset(axes.mesh.axis_names):
        raise NotImplementedError(
            f"{kind.name} inside a shard_map that leaves some axes of the slice to the compiler; make all axes manual"
        )
    what = (
        f"{kind.name} ({params['fmt']!r})" if "fmt" in params else f"{kind.name} ({_function_name(params['callback'])})"
    )
    results = tuple((tuple(aval.shape), np.dtype(aval.dtype)) for aval in ctx.avals_out)
    own = number(Callback(what, functools.partial(kind.call, **params), results, bool(config.enable_x64.value)))
    effect = params.get("effect", kind.effect if params.get("ordered") else None)
    effect = effect if isinstance(effect, _ORDERED) else None
    tokens = [] if effect is None else [ctx.tokens_in.get(effect)]
    call = jax_mlir.custom_call(
        CALLBACK,
        result_types=[*(token.type for token in tokens), *(tensor_type(*result) for result in results)],
        operands=[*tokens, *args],
        backend_config=f"{own} {'each' if is_manual else 'once'} {len(tokens)}",
        has_side_effect=kind.name != "jax.pure_callback",
        api_version=1,
    )
    made = list(call.results)
    if effect is not None:
        ctx.set_tokens_out(ctx.tokens_in.update_tokens(jax_mlir.TokenSet({effect: made.pop(0)})))
    return made


def _operations(block: Any) -> Iterator[Any]:
    """Every operation inside, outer ones first. The caller may erase an operation without regions when it gets it."""
    for op in list(block.operations):
        inside = [inner for region in op.operation.regions for inner in region.blocks]
        yield op
        for inner in inside:
            yield from _operations(inner)


def _tokens_to_data(module: ir.Module) -> None:
    """Makes a number of each token. Then the order of callbacks is data flow, which every compiler keeps."""
    token, data = ir.Type.parse("!stablehlo.token"), tensor_type((), np.dtype(np.bool_))

    def turn(values: Any) -> None:
        for value in values:
            if value.type == token:
                value.set_type(data)

    for op in _operations(module.body):
        name = op.operation.name
        if name == "stablehlo.create_token":
            with ir.InsertionPoint(op), op.operation.location:
                start = stablehlo.ConstantOp(
                    ir.DenseElementsAttr.get(np.array(False), type=data.element_type, shape=())
                )
            op.operation.results[0].replace_all_uses_with(start.result)
            op.operation.erase()
            continue
        turn(op.operation.results)
        for region in op.operation.regions:
            for block in region.blocks:
                turn(block.arguments)
        if name == "func.func":
            kind = ir.FunctionType(ir.TypeAttr(op.attributes["function_type"]).value)
            inputs, results = (
                [data if each == token else each for each in types] for types in (kind.inputs, kind.results)
            )
            op.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(inputs, results))
        elif name == "builtin.unrealized_conversion_cast":
            op.operation.results[0].replace_all_uses_with(op.operation.operands[0])
            op.operation.erase()


def _token_aval() -> Any:
    return core.ShapedArray((), np.dtype(np.bool_))


def order_var() -> core.Var:
    """A variable for the order of callbacks: callbacks that read it run after the callbacks that wrote it."""
    return core.Var(_token_aval())


_in_order_p = core.Primitive("pathways_in_order")
_in_order_p.multiple_results = True
_in_order_p.def_abstract_eval(lambda *_, jaxpr: [_token_aval(), *(v.aval for v in jaxpr.jaxpr.outvars)])


def _lower_in_order(ctx: Any, before: ir.Value, *args: ir.Value, jaxpr: Any) -> Sequence[ir.Value]:
    found = {effect for eqn in jaxpr.jaxpr.eqns for effect in eqn.effects if isinstance(effect, _ORDERED)}
    ordered = sorted(found, key=str)
    token, data = ir.Type.parse("!stablehlo.token"), before.type
    cast = functools.partial(ir.Operation.create, "builtin.unrealized_conversion_cast")
    tokens = jax_mlir.TokenSet({effect: cast(results=[token], operands=[before]).result for effect in ordered})
    outs, tokens = jax_mlir.jaxpr_subcomp(
        ctx.module_context,
        jaxpr.jaxpr,
        ctx.name_stack,
        tokens,
        (),
        *args,
        dim_var_values=ctx.dim_var_values,
        const_lowering=ctx.const_lowering,
        outer_traceback=xla.Traceback(),
    )
    after = [cast(results=[data], operands=[tokens.get(effect)]).result for effect in ordered]
    return [functools.reduce(lambda a, b: stablehlo.AndOp(a, b).result, after), *outs]


jax_mlir.register_lowering(_in_order_p, _lower_in_order, cacheable=False)


def in_order(
    eqns: Sequence[Any],
    constants: Sequence[core.Var],
    inputs: Sequence[core.Var],
    outputs: Sequence[core.Var],
    before: core.Var | None,
    after: core.Var,
    like: core.Jaxpr,
) -> tuple[list[Any], list[Any]]:
    """Equations and outputs of a body that has callbacks.

    `after`, one of the outputs, exists when the body's callbacks are over. `before`, one of the inputs, comes before
    the ordered callbacks; None: the body has no ordered callbacks.
    """
    if before is None:
        done = core.Literal(np.bool_(False), _token_aval())
        return list(eqns), [done if v is after else v for v in outputs]
    args = [*constants, *(v for v in inputs if v is not before)]
    results = [v for v in outputs if v is not after]
    body = new_jaxpr([], [], args, results, eqns, like=like)
    new = {v: core.Var(v.aval) for v in results}
    eqn = core.new_jaxpr_eqn([before, *args], [after, *new.values()], _in_order_p, {"jaxpr": body}, core.no_effects)
    return [eqn], [new.get(v, v) for v in outputs]


def _callback_ops(module: ir.Module) -> Iterator[Any]:
    for op in _operations(module.body):
        is_call = op.operation.name == "stablehlo.custom_call"
        if is_call and ir.StringAttr(op.attributes["call_target_name"]).value == CALLBACK:
            yield op


def callbacks_of(module: ir.Module) -> Iterator[int]:
    """The numbers of the callbacks in a module."""
    for op in _callback_ops(module):
        yield int(ir.StringAttr(op.attributes["backend_config"]).value.split()[0])


def wait_for_effects_also(wait: Callable[[], None]) -> None:
    """From now on, `jax.effects_barrier` also calls `wait`."""
    plain = dispatch.runtime_tokens.block_until_ready

    def block_until_ready() -> None:
        plain()
        wait()

    dispatch.runtime_tokens.block_until_ready = block_until_ready


def connect_callbacks(ctx: Any, module: ir.Module, ask: Callable[..., Sequence[np.ndarray]]) -> None:
    """Makes each custom call `CALLBACK` of a module that is lowered in `ctx` call `ask(number, arrays, results)`.

    `results` are the shapes and dtypes that `ask` must return. As in `jax.jit`, the first device makes the call, once
    and with whole arrays; in a shard_map, each device makes a call.
    """
    for op in list(_callback_ops(module)):
        number, how, tokens = ir.StringAttr(op.attributes["backend_config"]).value.split()
        has_side_effect = "has_side_effect" in op.attributes and ir.BoolAttr(op.attributes["has_side_effect"]).value
        inputs, outputs = (
            [core.ShapedArray(*_shape_and_dtype(value.type)) for value in values]
            for values in (op.operation.operands, op.operation.results)
        )
        call = functools.partial(
            _answer, ask, int(number), int(tokens), [(o.shape, np.dtype(o.dtype)) for o in outputs]
        )
        if how == "each":
            sharding = jax_callback._get_sdy_array_list_for_callbacks(outputs)
        else:
            sharding = jax_callback._callback_op_sharding(ctx.module_context.axis_context, None, outputs)
        with ir.InsertionPoint(op), op.operation.location:
            made = _emit_callback(ctx, call, list(op.operation.operands), inputs, outputs, has_side_effect, sharding)
        for old, new in zip(op.operation.results, made, strict=True):
            old.replace_all_uses_with(new)
        op.operation.erase()


def _shape_and_dtype(kind: ir.Type) -> tuple[tuple[int, ...], np.dtype]:
    tensor = ir.RankedTensorType(kind)
    return tuple(tensor.shape), _element_types()[str(tensor.element_type)]


@functools.cache
def _element_types() -> dict[str, np.dtype]:
    with jax_mlir.make_ir_context():
        known = {str(jax_mlir.dtype_to_ir_type(np.dtype(each))): np.dtype(each) for each in dtypes._jax_types}
        return {**known, "i1": np.dtype(np.bool_)}


def _answer(
    ask: Callable[..., Sequence[np.ndarray]],
    number: int,
    tokens: int,
    results: Sequence[tuple[tuple[int, ...], np.dtype]],
    *arrays: Any,
) -> tuple[Any, ...]:
    """XLA calls this function, on a thread of XLA's."""
    arrays = tuple(np.asarray(each) for each in arrays)
    return (*arrays[:tokens], *ask(number, arrays[tokens:], results[tokens:]))


def _emit_callback(
    ctx: Any,
    call: Callable[..., tuple[Any, ...]],
    operands: list[ir.Value],
    inputs: list[Any],
    outputs: list[Any],
    has_side_effect: bool,
    sharding: Any,
) -> Sequence[ir.Value]:
    """As `jax._src.callback.emit_python_callback`, but keeps 64-bit results on threads where 64-bit types are off."""
    platform = ctx.module_context.platforms[0]
    ctx = dataclasses.replace(ctx, avals_in=inputs, avals_out=outputs)
    if platform == "tpu":
        return jax_callback.emit_python_callback(
            ctx, call, None, operands, inputs, outputs, has_side_effect=has_side_effect, sharding=sharding
        )[0]
    ctx.module_context.add_host_callback(call)
    index = np.uint64(len(ctx.module_context.host_callbacks) - 1)
    target = f"xla_ffi_python_{'cpu' if platform == 'cpu' else 'gpu'}_callback"
    made = ffi.build_ffi_lowering_function(target, has_side_effect=has_side_effect)(ctx, *operands, index=index)
    if sharding is not None:
        jax_mlir.set_sharding(ctx.module_context, made, sharding)
    return list(made.results)


# ---------------------------------------------------------------------------------------------------- MPMD


@functools.cache
def mpmd_compiler() -> Any:
    """jaxlib's MPMD compiler. Its extension module imports jaxlib by a name that the wheel lacks: add it."""
    sys.modules.setdefault("jax.jaxlib", jaxlib)
    sys.modules.setdefault("jax.jaxlib._jax", xla)
    import jaxlib._sdy_mpmd as compiler

    return compiler


_quiet_lock = threading.Lock()
_LOG_LINE = re.compile(rb"[IW]\d{4} \d\d:\d\d:\d+\.\d+ +\d+ [^ ]+\.(cc|h):\d+\] |[^ ]+: (note|warning|remark): ")
_LOG_MORE = re.compile(rb"[\s})%^]|$")  # the beginning of a line that continues a log line: a printed operation


def _without_log(text: bytes) -> bytes:
    """`text` without the compiler's log lines."""
    kept, inside = [], False
    for line in text.splitlines(keepends=True):
        if _LOG_LINE.match(line):
            inside = True
        elif not (inside and _LOG_MORE.match(line)):
            inside = False
            kept.append(line)
    return b"".join(kept)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drops the log lines that the compiler writes to file descriptors 1 and 2 meanwhile.

    What another thread writes there meanwhile is written to the real ones afterwards. If the compiler kills the
    process, the Python stack still goes to the real stderr.
    """
    with _quiet_lock, contextlib.ExitStack() as stack:
        for fd, stream in ((1, sys.stdout), (2, sys.stderr)):
            try:
                stream.flush()
                stack.enter_context(_caught(fd))
            except (OSError, ValueError, AttributeError):  # no usable stream: nothing to keep clean
                continue
        yield


@contextlib.contextmanager
def _caught(fd: int) -> Iterator[None]:
    kept = os.dup(fd)
    caught = os.memfd_create("pathways-compiler-log", os.MFD_CLOEXEC)
    watch = fd == 2 and not faulthandler.is_enabled()
    if watch:
        faulthandler.enable(kept, all_threads=False)
    os.dup2(caught, fd)
    try:
        yield
    finally:
        os.dup2(kept, fd)
        if watch:
            faulthandler.disable()
        os.lseek(caught, 0, os.SEEK_SET)
        with open(caught, "rb") as log:
            rest = _without_log(log.read())
        if rest:
            os.write(kept, rest)
        os.close(kept)


def partition(
    module: ir.Module,
    *,
    meshes: Sequence[tuple[str, Sequence[tuple[str, int]]]],
    assignment: Mapping[str, Any],
    input_meshes: Sequence[str | None],
    output_meshes: Sequence[str | None],
    options: Mapping[str, Any],
) -> ir.Module:
    """Runs jaxlib's MPMD partitioner and returns the partitioned module.

    The caller must check every argument before: a wrong schedule name or a list of the wrong length aborts the process.
    """
    compiler = mpmd_compiler()
    with quiet():
        return compiler.apply_mpmd_partitioning(
            module,
            "main",
            [(name, list(axes)) for name, axes in meshes],
            dict(assignment),
            list(input_meshes),
            list(output_meshes),
            [],
            partitioning_options=dict(options),
            fragment_merge_rules=[],
            fragment_schedule_rules=[],
            phases=compiler.PartitioningPhase.ALL,
        ).mpmd_module


def lower_to_ifrt(module: ir.Module) -> None:
    """Rewrites a partitioned module to IFRT IR, in place."""
    with quiet():
        mpmd_compiler().lower_to_ifrt(module)


def named_computation(results: Sequence[ir.Type], operands: Sequence[ir.Value], name: str, transposes: int) -> Any:
    """An `mpmd.named_computation` with an empty block of the operands' types; returns (op, block)."""
    origin = ir.Attribute.parse(f'#mpmd.user_origin<"{name}"({transposes})>')
    op = mpmd.NamedComputationOp(list(results), list(operands), origin)
    return op, op.region.blocks.append(*[operand.type for operand in operands])


def forward_barrier(value: ir.Value) -> ir.Value:
    """`value` behind a barrier, past which no sharding is propagated backwards."""
    forward = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 1)
    return sdy.PropagationBarrierOp(value, forward).result


def mpmd_return(values: Sequence[ir.Value]) -> None:
    """The terminator of a named computation."""
    mpmd.ReturnOp(list(values))


# ---------------------------------------------------------------------------------------------------- running


def initialize_lapack() -> None:
    """Initialises LAPACK: needed before a process that traced no LAPACK call loads an executable with LAPACK calls."""
    with contextlib.suppress(ImportError, AttributeError):
        from jaxlib import lapack

        lapack._lapack.initialize()


def fast_call(compiled: Any) -> Callable[..., Any]:
    """The C++ fast path of a `jax.stages.Compiled`, which saves one Python frame per call.

    Under `jax.disable_jit` it refuses to run, before it does anything.
    """
    create = getattr(getattr(compiled, "_executable", None), "create_cpp_call", None)
    fast: Callable[..., Any] | None = create(compiled._params) if create is not None else None
    return fast or compiled


def drop_main_attributes(module: ir.Module) -> None:
    """Removes the shardings of `main`'s arguments and results: the caller that inlines the module gives them."""
    for op in module.body.operations:
        if op.operation.name == "func.func" and op.attributes["sym_name"].value == "main":
            for name in ("arg_attrs", "res_attrs"):
                if name in op.attributes:
                    del op.attributes[name]


def mesh_axes(module: ir.Module) -> tuple[tuple[str, int], ...]:
    """Axes of the first `sdy.mesh` that has any."""
    for op in module.body.operations:
        if op.operation.name == "sdy.mesh":
            axes = tuple(
                (axis.name, axis.size) for axis in map(sdy.MeshAxisAttr, sdy.MeshAttr(op.attributes["mesh"]).axes)
            )
            if axes:
                return axes
    return ()


@contextlib.contextmanager
def ignore_unused_donations() -> Iterator[None]:
    """Silences JAX's warning about donated buffers that no output could take."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Dd]onat")
        yield


def module_primitive(name: str, load: Callable[[Any], ir.Module]) -> core.Primitive:
    """A primitive with parameters `key` and `out_avals`, whose lowering inlines the StableHLO module `load(key)`.

    If `key.ask` is not None, the lowering also connects the module's callbacks to it.
    """
    primitive = core.Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *_, key, out_avals: list(out_avals))

    def lowering(ctx: Any, *args: ir.Value, key: Any, out_avals: Any) -> Sequence[ir.Value]:
        module = load(key)
        if key.ask is not None:
            connect_callbacks(ctx, module, key.ask)
        main = next(
            op
            for op in module.body.operations
            if op.operation.name == "func.func" and op.attributes["sym_name"].value == "main"
        )
        results = main.type.results
        callee = jax_mlir.merge_mlir_modules(
            ctx.module_context.module, "computation", module, dst_symtab=ctx.module_context.symbol_table
        )
        return func.CallOp(results, ir.FlatSymbolRefAttr.get(callee), list(args)).results

    jax_mlir.register_lowering(primitive, lowering)
    return primitive


def start_coordination_service(address: str, members: int) -> Any:
    """Starts the coordination service of one `jax.distributed` group. It lives as long as the returned object.

    `address` may be a Unix socket (`unix:/path`): then no port is opened. Initialises no backend.
    """
    return jaxlib._jax.get_distributed_runtime_service(address, members)


def stop_coordination_service(service: Any) -> None:
    """Ends a coordination service whose members are gone."""
    service.shutdown()


def drop_tracebacks() -> None:
    """From now on, XLA's objects of this process do not record the Python code that made them.

    On a host that code is always the same loop, and recording it costs 0.2 us per call.
    """
    jaxlib._jax.set_tracebacks_enabled(False)


def join_island(address: str, members: int, rank: int, timeout_s: int) -> None:
    """Makes this process member `rank` of the group whose coordination service listens at `address`.

    `jax.distributed.initialize` would start the service in member 0. Our service runs in the controller, so that it
    survives the loss of any member. CPU collectives (gloo) use the loopback interface only. Their default is the
    address that the machine's name resolves to: there may be none, or one that other machines can reach.
    """
    client = jaxlib._jax.get_distributed_runtime_client(address, rank, init_timeout=timeout_s, use_compression=True)
    client.connect()
    state = jax._src.distributed.global_state
    state.client, state.process_id, state.num_processes, state.coordinator_address = client, rank, members, address
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jaxlib._jax.make_gloo_tcp_collectives = functools.partial(
        _make_polite_collectives, jaxlib._jax.make_gloo_tcp_collectives
    )


def _make_polite_collectives(make: Callable[..., Any], *, distributed_client: Any) -> Any:
    """Makes gloo collectives over loopback whose own thread never preempts the thread that computes.

    Gloo's thread must not preempt a sender on the same core in the middle of a send. The sender would stop while it
    holds the pair's lock, and gloo's thread would poll for that lock in vain until the scheduler's next tick, up to
    4 ms. So gloo's thread gets the batch class: such a thread takes a core only when the core is free or its turn has
    come. A new thread inherits the class of the thread that makes it, so this function sets the class for the call.
    """
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        return make(distributed_client=distributed_client, hostname="127.0.0.1")
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def shards_of(array: jax.Array) -> list[jax.Array]:
    """This process's shards as arrays of one device each, in the order of the sharding's devices; takes 0.4 us."""
    return list(array._arrays)  # type: ignore[attr-defined]


def address_of(shard: jax.Array) -> int:
    """The address of the bytes, in C order, of a ready array on one CPU device. Not for types of less than a byte."""
    return int(shard.unsafe_buffer_pointer())


def assemble(aval: Any, sharding: Any, parts: Sequence[Any], devices: Sequence[jax.Device]) -> jax.Array:
    """Makes a global array of one part per local device. Does not wait for the parts. Takes 3 us for one part.

    A part that is an array on its device is used as it is; an array on another device is copied. Host memory is used as
    it is if the device can do so (on CPU, if aligned), and is copied otherwise.
    """
    return xla.batched_device_put(aval, sharding, parts, devices, True)


# ---------------------------------------------------------------------------------------------------- foreign arrays


def array_operators() -> dict[str, Callable[..., Any]]:
    """By name, the operators that JAX gives its arrays, as functions of the array: `__add__`, `__getitem__`, ..."""
    return {f"__{name}__": fun for name, fun in array_methods._array_operators.items()}


def array_attributes() -> tuple[dict[str, Callable[..., Any]], dict[str, Callable[[Any], Any]]]:
    """By name, the methods and the properties that JAX gives its arrays, as functions of the array."""
    return dict(array_methods._array_methods), dict(array_methods._array_properties)


def is_staging() -> bool:
    """Whether JAX now records what this thread does, to run it later (in a `jax.jit` or the like)."""
    trace = core.trace_ctx.trace
    while trace is not None:
        if isinstance(trace, partial_eval.DynamicJaxprTrace):
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


def is_jit_disabled() -> bool:
    """Whether `jax.disable_jit` is on, for this thread."""
    return bool(config.disable_jit.value)


def is_top_level() -> bool:
    """Whether no JAX transformation is under way on this thread. Takes 0.1 us."""
    return bool(core.trace_state_clean())


def shaped_array(shape: tuple[int, ...], dtype: Any, weak_type: bool) -> Any:
    """The abstract value of an array."""
    return core.ShapedArray(shape, dtype, weak_type=weak_type)


def abstract_value(value: Any) -> Any:
    """The abstract value of anything JAX takes as an array."""
    return core.shaped_abstractify(value)


def array_format(ndim: int, sharding: Any) -> Any:
    """The format of an array whose dimensions are in memory in their own order (C order)."""
    return layout.Format(layout.Layout(tuple(range(ndim))), sharding)


def as_function(closed: Any) -> Callable[..., list[Any]]:
    """A closed jaxpr as a function of its flat arguments."""
    return core.jaxpr_as_fun(closed)


class _NotesRecording:
    """Wraps JAX's tracing function: while it traces for `checkify`, its thread is in `_recording`."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def __call__(self, fun: Any, in_avals: Any, debug_info: Any, *args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        if debug_info.traced_for != "checkify" or thread in _recording:
            return self._plain(fun, in_avals, debug_info, *args, **kwargs)
        _recording.add(thread)
        try:
            return self._plain(fun, in_avals, debug_info, *args, **kwargs)
        finally:
            _recording.discard(thread)


def accept_arrays(
    array_type: type,
    fetch: Callable[[Any], Any],
    run: Callable[[Any, str, Sequence[Any]], Sequence[Any]],
    full_like: Callable[[Any, Any, Any], Any],
    elsewhere: Callable[[str], Callable[[Any, Sequence[Any]], Sequence[Any]] | None],
    pulled: Callable[[str, str, Sequence[Any]], None],
) -> None:
    """Teaches JAX an array type of ours, whose instances have `aval`.

    Every `jax.jit` call with such an array, and every primitive outside of a trace, ends in one function of JAX's. That
    function is wrapped here. A function of JAX itself or of optax (`jnp.sin`, `lax.add`, the halves of a gradient) goes
    to `run(closed jaxpr, name, arguments)`. Any other function runs in this process, on `fetch`ed values, after a call
    of `pulled(name, source file and line, arrays)`. JAX's own conversions (constants of a trace, `jax.device_put` to a
    local device) also use `fetch`ed values.

    If `elsewhere(name)` returns a function for a jit's name, the jit runs by that function, whatever its arguments. So
    a placed function runs on its slice even when its gradient or its batched form is computed eagerly.

    Two functions read an array without computing with it. `jax.device_get` (of keys) goes to `fetch`. `lax.full_like`,
    in which `jnp.zeros_like` ends, goes to `full_like(array, fill value, dtype or None)`.
    """
    plain = pjit._pjit_call_impl_python

    def is_ours(value: Any) -> bool:
        return type(value) is array_type

    def call(*args: Any, **params: Any) -> Any:
        jaxpr = params["jaxpr"]
        there = elsewhere(params["name"])
        if there is not None:
            return list(there(jaxpr, args)), None, None, []
        ours = [value for value in (*args, *jaxpr.consts) if is_ours(value)]
        if not ours:
            return plain(*args, **params)
        if not any(map(is_ours, args)):
            pulled(params["name"], jaxpr.debug_info.func_src_info, ours)
            return plain(*args, **params)
        if _is_from_library(jaxpr.debug_info.func_filename):
            return list(run(jaxpr, params["name"], args)), None, None, []
        pulled(params["name"], jaxpr.debug_info.func_src_info, ours)
        fetched = [fetch(arg) if is_ours(arg) else arg for arg in args]
        return jit_p.impl(*fetched, **params), None, None, []

    pjit._pjit_call_impl_python = call

    def by_program(primitive: core.Primitive) -> None:
        plain_impl = primitive.impl

        def impl(*args: Any, **params: Any) -> Any:
            if any(map(is_ours, args)):
                return dispatch.apply_primitive(primitive, *args, **params)
            return plain_impl(*args, **params)

        primitive.def_impl(impl)

    # The eager rules of these primitives read inside a key array; in ours there is nothing, so run them as programs.
    for name in ("split", "fold_in", "bits", "unwrap", "wrap", "seed"):
        by_program(getattr(prng, f"random_{name}_p"))

    plain_get, plain_full_like = api._device_get, lax.full_like

    @functools.wraps(plain_full_like)
    def like(x: Any, fill_value: Any, dtype: Any = None, shape: Any = None, sharding: Any = None) -> Any:
        if is_ours(x) and sharding is None and shape in (None, x.shape) and not is_key(x.dtype):
            return full_like(x, fill_value, dtype)
        return plain_full_like(x, fill_value, dtype, shape, sharding)

    api._device_get = lambda x: fetch(x) if is_ours(x) else plain_get(x)
    lax.full_like = jax.lax.full_like = like

    partial_eval.trace_to_jaxpr = _NotesRecording(partial_eval.trace_to_jaxpr)

    def shard(xs: Any, shardings: Any, layouts: Any, copy_semantics: Any) -> Any:
        return pxla.shard_args(shardings, layouts, copy_semantics, [fetch(x) for x in xs])

    core.pytype_aval_mappings[array_type] = lambda x: x.aval
    ad_util.raw_jaxval_adders[array_type] = lax.add  # adds the cotangents of a value that is used twice
    dtypes.canonicalize_value_handlers[array_type] = lambda x: x
    pxla.shard_arg_handlers[array_type] = shard
    jax_mlir.register_constant_handler(array_type, lambda value, aval: jax_mlir.ir_constant(fetch(value)))


def users_level(package: str) -> int:
    """The `stacklevel` for the caller's `warnings.warn`: it then names the user's line.

    That is the first line on the stack that is neither in JAX nor in the folder `package`.
    """
    level, frame = 1, sys._getframe(1)
    inside = (package + os.sep, os.path.dirname(jax.__file__) + os.sep)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        level, frame = level + 1, frame.f_back
    return level


@functools.cache
def _is_from_library(filename: str | None) -> bool:
    """Whether a function of that source file belongs to JAX or optax."""
    roots = [os.path.dirname(jax.__file__)]
    if "optax" in sys.modules:
        roots += list(sys.modules["optax"].__path__)
    return filename is not None and any(filename.startswith(root + os.sep) for root in roots)


def accept_shardings(
    is_ours: Callable[[Any], bool],
    put: Callable[[Any, Any], Any],
    full: Callable[[Any, Any, Any, Any], Any],
    iota: Callable[[Any, Any, int, Any], Any],
    from_callback: Callable[[Any, Any, Callable[[Any], Any], Any], Any],
    refuse_put: Callable[[], NoReturn],
) -> None:
    """Teaches JAX shardings of ours: to put a value to one, or to make an array with one, JAX calls these functions.

    `jax.device_put`, and what ends in it, calls `put(value, sharding)`; where it is lowered to run in this process, it
    calls `refuse_put()`. `lax.full`, in which `jnp.zeros(device=)` ends, calls `full(shape, value, dtype, sharding)`.
    `lax.broadcasted_iota`, in which `jnp.arange(device=)` ends, calls `iota(dtype, shape, dimension, sharding)`.
    `jax.make_array_from_callback` calls `from_callback(shape, sharding, callback, dtype or None)`.
    `jax.make_array_from_process_local_data` takes the whole array, and `jax.make_array_from_single_device_arrays` is
    refused.
    """
    plain_put, plain_full, plain_iota = dispatch._batched_device_put_impl, lax.full, lax.broadcasted_iota
    plain_convert, plain_constraint = lax._convert_element_type, pjit.sharding_constraint_p.impl
    put_lowering = jax_mlir._lowerings[dispatch.device_put_p].rule
    plain_callback, plain_local = array.make_array_from_callback, array.make_array_from_process_local_data
    plain_single = array.make_array_from_single_device_arrays

    def put_all(*xs: Any, devices: Any, srcs: Any, copy_semantics: Any, dst_avals: Any) -> list[Any]:
        shardings = [getattr(device, "sharding", device) for device in devices]  # of a jax.experimental.layout.Format
        here = [n for n, sharding in enumerate(shardings) if not is_ours(sharding)]
        each = devices, srcs, copy_semantics, dst_avals
        names = "devices", "srcs", "copy_semantics", "dst_avals"
        if len(here) == len(xs):
            return list(plain_put(*xs, **dict(zip(names, each, strict=True))))
        out: list[Any] = [None] * len(xs)
        chosen = [[values[n] for n in here] for values in each]
        for n, y in zip(here, plain_put(*(xs[n] for n in here), **dict(zip(names, chosen, strict=True))), strict=True):
            out[n] = y
        for n in set(range(len(xs))) - set(here):
            x, semantics = xs[n], copy_semantics[n]
            if semantics is dispatch.ArrayCopySemantics.REUSE_INPUT and getattr(x, "sharding", None) == shardings[n]:
                out[n] = x
                continue
            out[n] = put(x, shardings[n])
            if semantics is dispatch.ArrayCopySemantics.DONATE_INPUT and hasattr(x, "delete"):
                x.delete()
        return out

    @functools.wraps(plain_convert)
    def convert_there(
        operand: Any, new_dtype: Any = None, weak_type: bool = False, sharding: Any = None, **options: Any
    ) -> Any:
        if is_ours(sharding):
            return put(plain_convert(operand, new_dtype, weak_type, **options), sharding)
        return plain_convert(operand, new_dtype, weak_type, sharding, **options)

    @functools.wraps(plain_full)
    def full_there(shape: Any, fill_value: Any, dtype: Any = None, *, sharding: Any = None) -> Any:
        if is_ours(sharding):
            return full(shape, fill_value, dtype, sharding)
        return plain_full(shape, fill_value, dtype, sharding=sharding)

    @functools.wraps(plain_iota)
    def iota_there(dtype: Any, shape: Any, dimension: int, *, out_sharding: Any = None) -> Any:
        if is_ours(out_sharding):
            return iota(dtype, shape, dimension, out_sharding)
        return plain_iota(dtype, shape, dimension, out_sharding=out_sharding)

    @functools.wraps(plain_callback)
    def callback_there(shape: Any, sharding: Any, data_callback: Any, dtype: Any = None) -> Any:
        target = getattr(sharding, "sharding", sharding)
        if is_ours(target):
            return from_callback(shape, target, data_callback, dtype)
        return plain_callback(shape, sharding, data_callback, dtype)

    @functools.wraps(plain_local)
    def local_there(sharding: Any, local_data: Any, global_shape: Any = None) -> Any:
        if not any(map(is_ours, jax.tree.leaves(sharding))):
            return plain_local(sharding, local_data, global_shape)
        if global_shape is not None:
            shapes = jax.tree.map(np.shape, local_data)
            if jax.tree.map(lambda _, given: tuple(given), local_data, global_shape) != shapes:
                raise errors.ShardingError(
                    "the client of a cluster is its only process: what it gives to a slice must be the whole array, of "
                    f"shape {global_shape}, got {shapes}"
                )
        return jax.device_put(local_data, sharding)

    @functools.wraps(plain_single)
    def single_there(shape: Any, sharding: Any, arrays: Any, **options: Any) -> Any:
        if is_ours(sharding):
            raise errors.ShardingError(
                "make_array_from_single_device_arrays takes arrays that lie on the devices of its sharding, but those "
                "of a slice hold none of this process's. Use jax.make_array_from_callback or jax.device_put"
            )
        return plain_single(shape, sharding, arrays, **options)

    def put_rule(ctx: Any, *args: Any, devices: Any, **params: Any) -> Any:
        if any(is_ours(getattr(device, "sharding", device)) for device in devices):
            refuse_put()
        return put_lowering(ctx, *args, devices=devices, **params)

    def constrain(x: Any, sharding: Any, **params: Any) -> Any:
        if is_ours(sharding) or is_ours(getattr(x, "sharding", None)):
            return put(x, sharding)
        return plain_constraint(x, sharding=sharding, **params)

    jax_mlir.register_lowering(dispatch.device_put_p, put_rule)
    pjit.sharding_constraint_p.def_impl(constrain)
    dispatch._batched_device_put_impl = put_all
    lax._convert_element_type = convert_there
    lax.full = jax.lax.full = full_there
    lax.broadcasted_iota = jax.lax.broadcasted_iota = iota_there
    array.make_array_from_callback = jax.make_array_from_callback = callback_there
    array.make_array_from_process_local_data = jax.make_array_from_process_local_data = local_there
    array.make_array_from_single_device_arrays = jax.make_array_from_single_device_arrays = single_there
