"""What the lowered program looks like: merging, donation (MEM-4), part-axis shardings, text, signatures."""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from reference import Reference, run

from pathways.compiler import donation
from pathways.compiler.ir import ArrayType, Computation, LogicalProgram, MeshSpec, Node, NodeKind
from pathways.compiler.options import Options
from pathways.compiler.pipeline import compile_traced
from pathways.compiler.placed import TaggedFunction as placed
from pathways.compiler.printing import logical_text
from pathways.compiler.trace import Argument, device_put, trace

LEFT = MeshSpec("left", (("x", 2),))
RIGHT = MeshSpec("right", (("x", 2),))
X = Argument((8, 8), np.float32, False, LEFT, (("x",), ()))


def add(mesh=LEFT, by=1.0, **shardings):
    return placed(lambda x: x + by, mesh, name=f"add{by:g}", **shardings)


def kinds(program):
    return [node.kind.value for node in program.nodes]


def test_merging_only_on_request():
    f, g = add(), add(by=2.0)
    traced = trace(lambda x: g(f(g(f(x)))), [X])
    assert kinds(compile_traced(traced)) == ["call"] * 4
    merged = compile_traced(traced, {"merge": True})
    assert kinds(merged) == ["call"]
    assert {"add1", "add2"} <= set(merged.nodes[0].origin.split("+"))
    x = np.ones((8, 8), np.float32)
    np.testing.assert_array_equal(Reference(merged)(x)[0], x + 6)


def test_pipeline_of_16_stages_and_64_microbatches_compiles_in_seconds():
    meshes = [MeshSpec(f"s{n}", (("x", 4),)) for n in range(16)]
    stages = [
        placed(lambda x, w: jnp.tanh(x @ w), mesh, in_shardings=(P("x"), P()), out_shardings=P("x"), name="stage")
        for mesh in meshes
    ]

    def forward(ws, xs):
        for stage, w in zip(stages, ws, strict=True):
            xs = [stage(x, w) for x in xs]
        return xs

    ws = [Argument((8, 8), np.float32, False, mesh, ((), ())) for mesh in meshes]
    xs = [Argument((4, 8), np.float32, False, meshes[0], (("x",), ())) for _ in range(64)]
    start = time.perf_counter()
    program = compile_traced(trace(forward, [ws, xs]))
    seconds = time.perf_counter() - start
    assert kinds(program).count("call") == 1024 and kinds(program).count("transfer") == 960
    assert len(program.computations) == 16 and len({c.fingerprint for c in program.computations}) == 1
    print(f"1,024 calls in {seconds:.2f} s")


# ------------------------------------------------------------------------------------------ donation


def donations(program):
    return {node.name: node.donates for node in program.nodes if node.kind is NodeKind.CALL}


def test_kept_arguments_and_results_are_never_donated():
    f, g = add(in_shardings=P("x"), out_shardings=P("x")), add(by=2.0, in_shardings=P("x"), out_shardings=P("x"))
    program = compile_traced(trace(lambda x: g(f(x)), [X]))
    assert donations(program) == {"add1.0": (False,), "add2.1": (True,)}
    program = compile_traced(trace(lambda x: g(f(x)), [X], donate_argnums=0))
    assert donations(program) == {"add1.0": (True,), "add2.1": (True,)} and program.donated_arguments == (True,)
    program = compile_traced(trace(lambda x: (y := f(x), g(y)), [X], donate_argnums=0))
    assert donations(program) == {"add1.0": (True,), "add2.1": (False,)}


def test_only_the_last_reader_gets_the_buffer():
    f, g, h = (add(by=float(n), in_shardings=P("x"), out_shardings=P("x")) for n in (1, 2, 3))
    program = compile_traced(trace(lambda x: (lambda y: (g(y), h(y)))(f(x)), [X]))
    assert donations(program) == {"add1.0": (False,), "add2.1": (False,), "add3.2": (True,)}


def test_a_value_on_two_slices_of_one_device_stays_readable():
    f = add(in_shardings=P("x"), out_shardings=P("x"))
    g = add(RIGHT, 2.0, in_shardings=P("x"), out_shardings=P("x"))
    h = add(LEFT, 3.0, in_shardings=P("x"), out_shardings=P("x"))
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    devices = jax.devices()[:2]
    (a, b, c), program = run(
        lambda x: (lambda y: (g(y), h(y), y))(f(x)), x, at=[(LEFT, P("x"))], devices=[devices, devices]
    )
    for got, by in ((a, 3), (b, 4), (c, 1)):
        np.testing.assert_array_equal(got, x + by)
    assert not any(any(d) for d in donations(program).values())
    (a, b), program = run(lambda x: (lambda y: (g(y), h(y)))(f(x)), x, at=[(LEFT, P("x"))], devices=[devices, devices])
    np.testing.assert_array_equal(a, x + 3)
    np.testing.assert_array_equal(b, x + 4)
    assert donations(program)["add2.1"] == (False,) and donations(program)["add3.2"] == (True,)


def test_call_sites_agree_unless_much_is_lost():
    f = add(in_shardings=P("x"), out_shardings=P("x"))
    small = compile_traced(trace(lambda x: f(f(f(x))), [X]))
    assert set(donations(small).values()) == {(False,)}
    big = Argument((1024, 1024), np.float32, False, LEFT, (("x",), ()))
    program = compile_traced(trace(lambda x: f(f(f(x))), [big]))
    assert list(donations(program).values()) == [(False,), (True,), (True,)]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_donation_is_safe_in_any_program(data):
    """A random flat program, run on names: no value is read after a node was given it or a copy of it."""
    type = ArrayType((1 << 20,), np.dtype(np.float32), 0, ((),))
    count = data.draw(st.integers(1, 3))
    values, nodes, computations = [type] * count, [], []
    for number in range(data.draw(st.integers(1, 8))):
        pick = st.integers(0, len(values) - 1)
        out = len(values)
        values.append(type)
        if data.draw(st.booleans()):
            nodes.append(Node(NodeKind.TRANSFER, f"t{number}", -1, (data.draw(pick),), (out,)))
        else:
            inputs = tuple(data.draw(st.lists(pick, min_size=1, max_size=2)))
            computations.append(Computation("c", b"%d" % number, 0, (type,) * len(inputs), (type,), ()))
            nodes.append(Node(NodeKind.CALL, f"c{number}", len(computations) - 1, inputs, (out,)))
    results = data.draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=3))
    donated = [data.draw(st.booleans()) for _ in range(count)]
    program = donation.finish(LogicalProgram("p", (LEFT,), values, computations, nodes, range(count), results, donated))
    buffer = {v: v for v in range(len(program.values))}  # a transfer may be no copy at all
    gone = set()
    for node in program.nodes:
        assert not {buffer[v] for v in node.inputs} & gone
        if node.kind is NodeKind.TRANSFER:
            buffer[node.outputs[0]] = buffer[node.inputs[0]]
        else:
            gone |= {buffer[v] for v, given_ in zip(node.inputs, node.donates, strict=True) if given_}
    kept = {*program.results, *(v for v, d in zip(program.arguments, donated, strict=True) if not d)}
    assert not {buffer[v] for v in kept} & gone


# ------------------------------------------------------------------------------------------ shardings


def test_part_of_an_axis_is_never_silently_replicated():
    wide = MeshSpec("wide", (("x", 4),))
    split = placed(lambda x: x.reshape(2, 4, 8), wide, in_shardings=P("x"), name="split")
    join = placed(lambda x: x.reshape(8, 8) * 2, wide, out_shardings=P("x"), name="join")
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    (y, z), program = run(lambda x: (lambda y: (y, join(y)))(split(x)), x, at=[(wide, P("x"))])
    np.testing.assert_array_equal(y, x.reshape(2, 4, 8))
    np.testing.assert_array_equal(z, x * 2)
    got, program = run(lambda x: join(split(x)), x, at=[(wide, P("x"))])
    np.testing.assert_array_equal(got, x * 2)
    for node in program.nodes:  # what the program says is what the executables take
        computation = program.computations[node.computation]
        assert computation.outputs == tuple(program.values[n] for n in node.outputs)


def test_out_shardings_are_kept():
    mesh = MeshSpec("m", (("a", 2), ("b", 2)))
    for spec in (P(), P("a"), P(None, "b"), P(("a", "b")), P("b", "a")):
        f = placed(lambda x: x + 1, mesh, in_shardings=P("a", "b"), out_shardings=spec, name="f")
        g = placed(lambda x: x.sum(), mesh, in_shardings=P("b"), name="g")
        both = functools.partial(lambda f, g, x: (y := f(x), g(y)), f, g)
        program = compile_traced(trace(both, [np.ones((8, 8), np.float32)], name="both"))
        got = program.values[program.results[0]].spec
        assert got == tuple(
            () if e is None else (e,) if isinstance(e, str) else tuple(e) for e in [*spec, None, None][:2]
        ), (spec, got)


# ------------------------------------------------------------------------------------------ text and keys


def test_no_two_steps_have_one_name():
    """The compiler tells steps apart by their names: constants that are put, constants that are results, and functions
    whose names are those of steps."""
    f = placed(lambda x: x + 1, LEFT, name="transfer")
    g = placed(lambda x: x * 2, RIGHT, name="constant")

    def both(x):
        puts = [device_put(np.float32(n), LEFT, P()) for n in (5, 6)]
        return g(f(x)), *puts, 7

    got = Reference(compile_traced(trace(both, [X])))(np.ones((8, 8), np.float32))
    np.testing.assert_array_equal(got[0], np.full((8, 8), 4, np.float32))
    assert got[1:] == [5, 6, 7]


def test_text_of_every_level():
    f = add(in_shardings=P("x"), out_shardings=P("x"))
    program = compile_traced(trace(lambda x: device_put(f(x), RIGHT, P("x")), [X], donate_argnums=0, name="prog"))
    assert 'mpmd.fragment_call<mesh="m0", origin=["add1.0"]>' in program.mpmd_text
    assert "ifrt.Call" in program.ifrt_text and "stablehlo.add" in program.ifrt_text
    text = logical_text(program)
    assert text.splitlines()[:3] == [
        "program prog",
        "  slice left [x=2] of 2 devices",
        "  slice right [x=2] of 2 devices",
    ]
    assert "%1 = call add1.0(%0 donated) on left #" in text and "%2 = transfer transfer.0(%1) from left" in text
    assert "float32[8,8]@right P('x', None)" in text


def test_options_are_values():
    assert Options.of({"platforms": "cpu"}) == Options.of(None) == Options()
    assert Options.of({"merge": True}) != Options() and hash(Options())
    assert Options.of({"mpmd_fragment_remat": True}).for_compiler()["mpmd_fragment_remat"] is True
