"""Bad input to the compiler path: refused before jaxlib's compiler sees it, with the argument named."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

from pathways import errors
from pathways.compiler.ir import Calls, MeshSpec
from pathways.compiler.pipeline import compile_traced
from pathways.compiler.placed import TaggedFunction as placed
from pathways.compiler.trace import Argument, device_put, trace

LEFT = MeshSpec("left", (("x", 2),))
X = Argument((4,), np.float32, False, LEFT, (("x",),))


def compiled(fun, *args, options=None, **kwargs):
    return compile_traced(trace(fun, args, **kwargs), options)


def unit(**shardings):
    return placed(lambda x, y=None: x, LEFT, name="unit", **shardings)


@pytest.mark.parametrize(
    ("shardings", "message"),
    [
        (
            {"in_shardings": P("x")},
            r"argument x of placed function 'unit': dimension 0 of size 3 .* 2 parts over .*'x'",
        ),
        ({"out_shardings": P("x")}, r"result  ?of placed function 'unit': dimension 0 of size 3"),
        ({"in_shardings": P("z")}, r"names the axis 'z', but the slice 'left' has only the axes \['x'\]"),
        ({"in_shardings": P(None, "x")}, r"2 entries, but the array has only 1 dimensions"),
        ({"in_shardings": (P(), P(), P())}, r"argument shardings of placed function 'unit': .* no prefix"),
        ({"in_shardings": "x"}, r"expected a PartitionSpec, got 'x'"),
    ],
)
def test_shardings_that_do_not_fit(shardings, message):
    with pytest.raises(errors.ShardingError, match=message):
        compiled(unit(**shardings), np.ones(3, np.float32))


def test_sharding_that_does_not_divide_names_the_leaf():
    f = placed(lambda params: params["w"], LEFT, in_shardings=({"w": P("x")},), name="f")
    with pytest.raises(errors.ShardingError, match=r"argument params\['w'\] of placed function 'f'"):
        compiled(f, {"w": np.ones(3, np.float32)})
    with pytest.raises(errors.ShardingError, match=r"device_put to slice 'left': dimension 0 of size 3"):
        compiled(lambda x: device_put(x, LEFT, P("x")), np.ones(3, np.float32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "1f1b"}, "unknown schedule '1f1b'; did you mean '1F1B'"),
        ({"schedule": 7}, "unknown schedule 7; expected one of"),
        (
            {"schedule": "ZeroBubbleH2ZeroTxLatency"},
            "schedule 'ZeroBubbleH2ZeroTxLatency' is not built: it keeps .* give 'ZeroBubbleH1'; expected one of",
        ),
        ({"merged": True}, "unknown compiler option 'merged'; did you mean 'merge'"),
        ({"merge": "yes"}, "expected True or False, got 'yes'"),
        ({"mpmd_pipeline_schedule": "x"}, "unknown compiler option"),
        ({"platforms": ()}, "expected the name of the one platform"),
    ],
)
def test_options(options, message):
    with pytest.raises(errors.OptionError, match=message):
        compiled(unit(), X, options=options)


def test_results_that_are_no_arrays():
    with pytest.raises(errors.ProgramError, match=r"result\['a'\]\[1\] of 'prog' is 'text' of type str"):
        compiled(lambda x: {"a": (x, "text")}, X, name="prog")
    with pytest.raises(TypeError):
        compiled(lambda x: object(), X)


def test_arguments_that_are_no_arrays():
    with pytest.raises(errors.ProgramError, match=r"argument p\['a'\] of 'f' is 'text'"):
        compiled(lambda p: p, {"a": "text"}, name="f")
    with pytest.raises(errors.ProgramError, match="NumPy array of dtype <U1"):
        compiled(lambda p: p, np.array(["a"]))
    with pytest.raises(errors.ProgramError, match="argnums 3 is out of range"):
        compiled(unit(), X, donate_argnums=3)


def printing(x):
    jax.debug.print("x is {}", x)
    return x


def pure(x):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def logger(x):
    io_callback(logger_callback, None, x)
    return x


def logger_callback(x):
    return None


@pytest.mark.parametrize(
    ("fun", "name"),
    [
        (printing, "jax.debug.print ('x is {}')"),
        (pure, "jax.pure_callback (sin)"),
        (logger, "jax.experimental.io_callback (logger_callback)"),
        (lambda x: jax.debug.callback(logger_callback, x), "jax.debug.callback (logger_callback)"),
        (lambda x: jax.lax.scan(lambda c, y: (printing(c), y), x, x)[0], "jax.debug.print ('x is {}')"),
    ],
)
def test_callbacks_have_numbers_and_names(fun, name):
    program = compiled(placed(fun, LEFT, name="speaks"), X, name="prog")
    (computation,) = program.computations
    assert [callback.what for callback in program.callbacks.values()] == [name]
    assert computation.callbacks == tuple(program.callbacks)
    assert program.calls.count == 1 and program.calls.effects == (fun is not pure) and program.calls.last == -1
    assert not any(donated for node in program.nodes for donated in node.donates)


def test_ordered_callbacks_are_a_chain_through_the_program():
    def notes(x):
        io_callback(logger_callback, None, x, ordered=True)
        return x + 1

    left, right = placed(notes, LEFT), placed(notes, MeshSpec("right", (("x", 1),)))
    program = compiled(lambda x: (left(x), right(x), left(x))[1], X)
    assert program.calls == Calls(1, 1, 0) and len(program.arguments) == 2 and len(program.results) == 2
    at = program.arguments[1]
    for node in program.nodes:
        if program.calls.last >= 0 and at in node.inputs:
            at = node.outputs[-1]
    assert at == program.results[-1]


def test_traced_values_do_not_leak_unseen():
    f = placed(lambda x: x if x.sum() > 0 else -x, LEFT, name="f")
    with pytest.raises(jax.errors.TracerBoolConversionError):
        compiled(f, X)
    leaked = []
    g = placed(lambda x: leaked.append(x) or x, LEFT, name="g")
    with pytest.raises(errors.TraceError, match="side effect"):
        compiled(lambda x: g(x) + leaked[0], X)
    with pytest.raises(jax.errors.TracerArrayConversionError):
        compiled(lambda x: np.asarray(x), X)


def test_placed_calls_inside_placed_functions():
    right = MeshSpec("right", (("x", 2),))
    inner, far = placed(lambda x: x + 1, LEFT, name="inner"), placed(lambda x: x, right, name="far")
    assert len(compiled(placed(lambda x: inner(inner(x)), LEFT, name="outer"), X).nodes) == 1
    with pytest.raises(
        errors.ProgramError, match="'outer' on slice 'left' calls 'far', which is placed on slice 'right'"
    ):
        compiled(placed(lambda x: jax.lax.map(far, x), LEFT, name="outer"), X)
    with pytest.raises(errors.ProgramError, match="'outer' on slice 'left' calls device_put to slice 'right'"):
        compiled(placed(lambda x: device_put(x, right), LEFT, name="outer"), X)


def test_no_slice_and_two_slices_of_one_name():
    with pytest.raises(errors.PlacementError, match="runs nowhere"):
        compiled(lambda x: x + 1, np.ones(3))
    other = placed(lambda x: x, MeshSpec("left", (("x", 4),)), name="other")
    with pytest.raises(errors.PlacementError, match="two different slices named 'left'"):
        compiled(lambda x: other(unit()(x)), X)


def test_not_a_function():
    with pytest.raises(errors.ProgramError, match="expected a function"):
        placed(3, LEFT)


def test_the_tree_of_errors():
    for name, builtin in (
        ("ShardingError", ValueError),
        ("SliceError", ValueError),
        ("ProgramError", TypeError),
        ("ResourceExhaustedError", MemoryError),
        ("HostLostError", ConnectionError),
        ("ControllerLostError", ConnectionError),
        ("ConnectError", ConnectionError),
        ("ClusterClosedError", RuntimeError),
        ("ComputationError", RuntimeError),
        ("DeletedArrayError", RuntimeError),
        ("PlanError", ValueError),
        ("TraceError", TypeError),
        ("CallbackError", TypeError),
        ("CancelledError", RuntimeError),
        ("UnsupportedVersionError", RuntimeError),
    ):
        error = getattr(errors, name)
        assert issubclass(error, errors.PathwaysError) and issubclass(error, builtin) and error.__doc__
