"""Bad input: refused with an error that names the argument, what was expected and what came; nothing stays behind."""

from __future__ import annotations

import pathlib
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways as pw
from pathways import errors

pytestmark = pytest.mark.one_island

X = np.arange(8, dtype=np.float32)


def working(cluster: Any) -> Any:
    """A function that ran once on the cluster: what a cluster starts with its first run and read stays."""
    works = pw.jit(lambda x: x + 1, devices=pw.make_virtual_device_set(cluster).add_slice(devices=2))
    np.testing.assert_array_equal(np.asarray(works(X)), X + 1)
    return works


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest, cluster: Any, quiet: Any) -> Any:
    """No future, buffer, host program or thread outlives a refusal; and the cluster still works."""
    if "other" in request.fixturenames:
        working(request.getfixturevalue("other"))
    works = working(cluster)
    before, threads = quiet(), threading.active_count()
    yield
    np.testing.assert_array_equal(np.asarray(works(X)), X + 1)
    quiet(back_to=before["kept"])
    deadline = time.monotonic() + 30
    while threading.active_count() > threads:
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.02)


def refused(kind: type[Exception], *words: str) -> Any:
    """As pytest.raises, for a message with each of `words`."""
    return pytest.raises(
        kind,
        check=lambda error: (
            all(word in str(error) for word in words) or pytest.fail(f"{words} are not all in: {error}")
        ),
    )


def test_arguments_that_are_no_arrays(add: Any) -> None:
    f = pw.jit(lambda x, opts: x, devices=add(2), name="f")
    for leaf, word in (
        ("text", "'text'"),
        (object(), "object"),
        (np.array(["a"]), "<U1"),
        (b"raw", "bytes"),
        (np.array([{}], object), "object"),
    ):
        with refused(errors.ProgramError, "argument opts of 'f'", word):
            f(X, leaf)
        with refused(errors.ProgramError, "value of device_put", word):
            pw.device_put(leaf, f.slice)
    with refused(errors.ProgramError, "argument y of 'p'", "set"):
        pw.program(lambda x, y: x, name="p")(X, {1, 2})


def test_byte_order_and_overflow(add: Any) -> None:
    f = pw.jit(lambda x: x, devices=add(2), name="f")
    with refused(TypeError, ">f4"):
        f(X.astype(">f4"))
    with pytest.raises(OverflowError):
        f(1 << 70)


def test_another_signature_than_compiled(add: Any) -> None:
    compiled = pw.program(lambda x: x * 2, name="twice").lower(jax.ShapeDtypeStruct((8,), np.float32)).compile()
    np.testing.assert_array_equal(np.asarray(compiled(X)), X * 2)
    with refused(errors.ProgramError, "argument x", "float32[8]", "float32[4]"):
        compiled(X[:4])
    with refused(errors.ProgramError, "argument x", "float32", "int32"):
        compiled(X.astype(np.int32))
    with refused(errors.ProgramError, "argument x", "float32[8]", "float32[4]"):
        compiled(pw.device_put(X[:4], add(2)))
    slice_ = add(2)
    placed = pw.jit(lambda x: x * 2, devices=slice_).lower(jax.ShapeDtypeStruct((8,), np.float32)).compile()
    with refused(errors.ProgramError, "argument x", "with spec=((),)", "spec=(('x',),)", "pw.device_put"):
        placed(pw.device_put(X, slice_, P("x")))
    with refused(errors.ProgramError, "structure"):
        compiled([X])


def test_shardings_that_do_not_fit(add: Any) -> None:
    slice_ = add((2, 2))
    for spec, words in (
        (P("z"), ("'z'", "['x', 'y']")),
        (P("x", "y"), ("2 entries", "1 dimensions")),
        (P(("x", "x")), ("twice",)),
        ("x", ("PartitionSpec", "'x'")),
    ):
        with refused(errors.ShardingError, "value of device_put", *words):
            pw.device_put(X, slice_, spec)
        with refused(errors.ShardingError, "argument x", "'f'", *words):
            pw.jit(lambda x: x, devices=slice_, in_shardings=spec, name="f")(X)
    with refused(errors.ShardingError, "value of device_put", "dimension 0 of size 7", "2 parts"):
        pw.device_put(X[:7], slice_, P("x"))
    with refused(errors.ShardingError, "dimension 0 of size 6", "4 parts"):
        pw.program(lambda x: pw.device_put(x, slice_, P(("x", "y"))))(X[:6])
    with refused(errors.ShardingError, "prefix"):
        pw.device_put({"a": X}, slice_, {"b": P()})


def test_slices_that_there_are_not(cluster: Any) -> None:
    devices = pw.make_virtual_device_set(cluster)
    most = len(cluster.devices) // len(cluster.islands)
    with refused(errors.SliceError, f"{most + 1} devices", f"biggest has {most}"):
        devices.add_slice(devices=most + 1)
    with refused(errors.SliceError, "-1"):
        devices.add_slice(devices=-1)
    with refused(errors.SliceError, "'2'"):
        devices.add_slice(devices="2")  # type: ignore[arg-type]
    with refused(errors.SliceError, "either"):
        devices.add_slice()
    with refused(errors.SliceError, "either"):
        devices.add_slice(devices=2, shape=(2,))
    with pytest.raises(errors.SliceError):
        devices.add_slice(shape=(2, 2), axis_names=("x",))
    with pytest.raises(errors.SliceError):
        devices.add_slice(shape=(2, 2), axis_names=("x", "x"))
    with pytest.raises(errors.SliceError):
        devices.add_slice(shape=(1, 1, 1, 1))
    with refused(errors.SliceError, "99"):
        devices.add_slice(devices=1, island=99)
    with refused(errors.SliceError, "slice", "int"):
        pw.device_put(X, 3)  # type: ignore[arg-type]
    with refused(errors.SliceError, "devices=", "None"):
        pw.jit(lambda x: x)


@pytest.fixture
def other(cluster: Any, sessions: Any) -> Any:
    """Another cluster."""
    return sessions("local" if cluster.is_embedded else "embedded")


def test_values_of_another_cluster(cluster: Any, other: Any, add: Any) -> None:
    theirs = pw.make_virtual_device_set(other).add_slice(devices=1)
    mine = pw.jit(lambda x: x + 1, devices=add(2), name="mine")
    foreign = pw.device_put(X, theirs)
    with refused(errors.PlacementError, "argument x of 'mine'", "another cluster"):
        mine(foreign)
    with refused(errors.PlacementError, "'device_put'", "another cluster"):
        pw.device_put(foreign, mine.slice)
    with refused(errors.PlacementError, "'both'", "another cluster"):
        pw.program(lambda x: pw.jit(lambda x: x, devices=theirs)(mine(x)), name="both")(pw.device_put(X, mine.slice))
    np.testing.assert_array_equal(np.asarray(pw.device_put(np.asarray(foreign), mine.slice)), X)
    pw.make_virtual_device_set(cluster)


def test_programs_that_are_none(add: Any) -> None:
    f = pw.jit(lambda x: x + 1, devices=add(2), name="f")
    with refused(errors.ProgramError, "result", "'p'", "'text'"):
        pw.program(lambda x: (f(x), "text"), name="p")(X)
    with refused(errors.ProgramError, "int"):
        pw.program(3)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        pw.program(lambda x, y: f(x))(X)
    for bad in (lambda x: f(x) if f(x)[0] > 0 else x, lambda x: float(x[0]), lambda x: np.asarray(f(x))):
        with pytest.raises(
            (
                jax.errors.TracerBoolConversionError,
                jax.errors.ConcretizationTypeError,
                jax.errors.TracerArrayConversionError,
            )
        ):
            pw.program(bad)(X)
    with pytest.raises(ZeroDivisionError):
        pw.program(lambda x: 1 // 0)(X)
    with pytest.raises(TypeError, match="incompatible shapes"):
        pw.program(lambda x: f(x) + jnp.ones(3))(X)


def test_traced_values_that_escape(add: Any) -> None:
    f = pw.jit(lambda x: x + 1, devices=add(2))
    seen = []
    pw.program(lambda x: seen.append(f(x)) or x)(X)
    with refused(errors.TraceError, "escaped", "float32[8]"):
        pw.program(lambda x: f(x) + seen[0])(X)
    seen.clear()


def test_options_and_static_arguments(add: Any) -> None:
    f = pw.jit(lambda x: x, devices=add(2))
    for options, words in (
        ({"shedule": "1F1B"}, ("'shedule'", "did you mean 'schedule'")),
        ({"schedule": "2F2B"}, ("'2F2B'", "1F1B")),
        ({"merge": 1}, ("'merge'", "1")),
    ):
        with refused(errors.OptionError, *words):
            pw.program(lambda x: f(x), **options)
    with refused(errors.ProgramError, "not hashable"):
        pw.program(lambda x, n: f(x), static_argnums=1)(X, [1])
    with refused(errors.ProgramError, "argnums 3", "1 positional"):
        pw.program(lambda x: f(x), donate_argnums=3)(X)
    with refused(errors.ProgramError, '"plan"', "'asm'"):
        pw.program(lambda x: f(x)).lower(X).as_text("asm")


def test_deleted_arrays(add: Any) -> None:
    f = pw.jit(lambda x, y: x + y, devices=add(2))
    x = pw.device_put(X, f.slice)
    x.delete()
    x.delete()
    for use in (
        lambda: f(X, x),
        lambda: f(x, X),
        lambda: pw.program(lambda a: f(a, a))(x),
        lambda: x + 1,
        lambda: np.asarray(x),
        lambda: pw.device_put(x, f.slice),
    ):
        with pytest.raises(errors.DeletedArrayError, match="deleted"):
            use()


def test_huge_argument_lists(add: Any) -> None:
    slice_ = add(2)
    first = pw.jit(lambda xs: xs[0] + xs[-1], devices=slice_)
    many = [pw.device_put(np.float32(n), slice_) for n in range(2000)]
    assert float(pw.program(lambda xs: first([xs[0], xs[-1]]))(many)) == 1999
    spread = pw.jit(lambda x: [x + n for n in range(500)], devices=slice_)
    assert float(spread(np.float32(1))[-1]) == 500


def test_connect_where_nobody_is(tmp_path: pathlib.Path) -> None:
    for address, word in ((f"unix:{tmp_path}/none.sock", "none.sock"), ("unix:", "unix:"), ("nonsense", "nonsense")):
        with refused(errors.ConnectError, word):
            pw.connect(address)
    with refused(errors.ConnectError, "int"):
        pw.connect(3)  # type: ignore[arg-type]
    for shape in ((0, 1, 1), (1, -1, 1), (1, 1, 0)):
        with refused(ValueError, "positive int"):
            pw.connect(pw.LocalCluster(*shape))


def test_an_argument_is_named_by_its_path(add: Any) -> None:
    slice_ = add(2)
    f = pw.jit(lambda params, *rest, **named: params["a"]["w"] + 1, devices=slice_, name="f")
    good = pw.device_put(X, slice_)
    gone = pw.device_put(X, slice_)
    gone.delete()
    f({"a": {"w": good}}, x={"k": good})
    for call, path in (
        (lambda leaf: f({"a": {"w": leaf}}), "params['a']['w']"),
        (lambda leaf: f({"a": {"w": good}}, good, [leaf]), "rest[1][0]"),
        (lambda leaf: f({"a": {"w": good}}, x={"k": leaf}), "x['k']"),
        (lambda leaf: pw.program(f, name="f")({"a": {"w": leaf}}), "params['a']['w']"),
    ):
        with refused(errors.ProgramError, f"argument {path} of 'f'", "'text'"):
            call("text")
        with refused(errors.DeletedArrayError, f"argument {path}"):
            call(gone)
    with refused(errors.ProgramError, "value['a'][1] of device_put", "'text'"):
        pw.device_put({"a": [X, "text"]}, slice_)


def test_a_lambda_is_named_by_file_and_line(add: Any) -> None:
    here = "test_bad_input.py"
    with refused(errors.ProgramError, "argument o of '<lambda> at", here):
        pw.jit(lambda x, o: x, devices=add(2))(X, "text")
    with refused(errors.ProgramError, "<lambda> at", here):
        pw.program(lambda x: "text")(X)
    assert here in repr(pw.jit(lambda x: x, devices=add(2)))


def test_messages_of_jax_speak_of_the_users_code(add: Any) -> None:
    slice_ = add(2)

    def choose(x: Any, opts: Any) -> Any:
        return x if opts["on"] > 0 else -x

    for make in (pw.program, lambda fun: pw.jit(fun, devices=slice_)):
        with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
            make(choose)(X, {"on": np.float32(1)})
        said = str(caught.value)
        assert "choose at" in said and "test_bad_input.py" in said and "opts['on']" in said, said
        assert "pathways/" not in said.replace(str(pathlib.Path(__file__).parents[3]), ""), said
    with refused(errors.ShardingError, "slice.sharding(spec)", "pw.jit"):
        pw.program(lambda x: jax.lax.with_sharding_constraint(x, P("x")))(X)

    per_device = jax.shard_map(lambda x: pw.device_put(x, slice_), mesh=slice_.mesh, in_specs=P(), out_specs=P())
    with pytest.raises(errors.ProgramError) as refusal:
        pw.program(lambda x: per_device(x))(X)
    assert "is called inside jax.shard_map" in str(refusal.value)


def test_names_and_numbers_of_arguments(add: Any) -> None:
    slice_ = add(2)
    for make in (pw.program, lambda fun, **options: pw.jit(fun, devices=slice_, name="f", **options)):
        for option in ("donate_argnames", "static_argnames"):
            with refused(errors.ProgramError, option, "'stat'", "did you mean 'state'"):
                make(lambda state, x: x, **{option: "stat"})
        for options in (
            {"donate_argnums": 0, "static_argnums": 0},
            {"donate_argnames": "state", "static_argnums": 0},
            {"donate_argnums": (1, 0), "static_argnames": ("state",)},
            {"donate_argnames": ("state",), "static_argnames": ("x", "state")},
        ):
            with refused(errors.ProgramError, "static and donated"):
                make(lambda state, x: x, **options)
        make(lambda state, **rest: state, donate_argnames="any")
        make(lambda *rest, flag: rest, static_argnames="flag", donate_argnums=(0, 1))


def test_what_is_no_value(add: Any) -> None:
    f = pw.jit(lambda x: x, devices=add(2))
    struct = jax.ShapeDtypeStruct((8,), np.float32)
    for use in (lambda: f(struct), lambda: pw.device_put(struct, f.slice)):
        with refused(errors.ProgramError, "ShapeDtypeStruct", "no value"):
            use()
    with refused(TypeError, "pw.device_put"):
        pw.Array()
    for target in ([1], {"a": 1}, 3):
        with refused(errors.ConnectError, "LocalCluster", type(target).__name__):
            pw.connect(target)  # type: ignore[arg-type]


def test_a_transformed_lambda_is_named_by_where_it_stands(add: Any) -> None:
    """Not by where `jax.vmap` has its wrapper."""
    double = pw.jit(lambda x: x * 2, devices=add(1))

    def reduced(x: Any) -> Any:
        return jax.lax.reduce(x, np.float32(0), lambda a, b: double(a) + b, (0,))

    program = pw.program(jax.vmap(lambda x: reduced(x)))
    with pytest.raises(errors.ProgramError, match=r"'<lambda> at test_bad_input\.py:\d+': .*, or put the whole"):
        program(np.ones((2, 3), np.float32))
