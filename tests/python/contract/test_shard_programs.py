"""Computations that XLA's own clients have made, on shards of arrays: raw modules, views, tilings. Values are those of
plain JAX; a view copies nothing and gives nothing away (MEM-4). What a client says of them is checked (TRUST-1)."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compiler
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib import _jax

import pathways as pw
from pathways import _jaxlib
from pathways.api.arrays.host_values import put_leaf
from pathways.compiler.ir import Tiling, View
from pathways.proxy.behind import Module, Part
from pathways.proxy.cluster_executables import ClusterExecutable
from pathways.proxy.cluster_kinds import Kind, Places
from pathways.proxy.shard_programs import Builder

F32 = np.dtype(np.float32)
X = np.arange(8, dtype=np.float32)
W = np.arange(4, dtype=np.float32) + 1


def raw(
    function: Callable[..., Any], specs: Sequence[Any], *values: Any, donate: Sequence[int] = ()
) -> tuple[bytes, bytes]:
    """A module for four devices, as a client of XLA sends it: its bytes, and its options."""
    mesh = Mesh(np.array(jax.devices()[:4]), "x")
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
    jitted = jax.jit(function, in_shardings=shardings, donate_argnums=tuple(donate))
    module = jitted.lower(*values).compiler_ir("stablehlo")
    options = compiler.get_compile_options(1, 4, device_assignment=np.arange(4).reshape(1, 4))
    options.executable_build_options.use_shardy_partitioner = True
    return _jaxlib.portable_bytecode(module), options.SerializeAsString()


def step(x: Any, w: Any) -> Any:
    return x * 2 + w.sum(), x.sum()


STEP = (PartitionSpec("x"), PartitionSpec())


@pytest.fixture
def places(cluster: Any) -> Places:
    return Places(cluster)


@pytest.fixture
def order(cluster: Any, add: Any) -> tuple[int, ...]:
    """Four devices of one island, in no order of numbers."""
    try:
        devices = [device.id for device in add(4).devices]
    except pw.errors.SliceError:
        pytest.skip("no island has four devices")
    return (devices[2], devices[0], devices[3], devices[1])


def cut(order: tuple[int, ...]) -> Kind:
    return Kind((8,), F32, order, Tiling((4,), (0, 1, 2, 3)))


def replicated(shape: tuple[int, ...], order: tuple[int, ...]) -> Kind:
    return Kind(shape, F32, order, Tiling((1,) * len(shape), (0,) * len(order)))


def signed(module: bytes) -> Module:
    """A module with its types."""
    name, parameters, results = _jaxlib.signature_of(module)
    return Module(name, module, parameters, results)


def put(places: Places, kind: Kind, value: np.ndarray) -> Any:
    return put_leaf(value, places.layout(kind), "a test")


def test_a_raw_module(places: Places, order: tuple[int, ...]) -> None:
    module, options = raw(step, STEP, X, W, donate=[0])
    expected = step(X, W)
    kinds = [cut(order), replicated((4,), order)]
    for given in ([], [0]):
        builder = Builder(places, "main")
        inputs = [builder.argument(kind) for kind in kinds]
        outputs = builder.call(
            order,
            inputs,
            [cut(order), replicated((), order)],
            module=module,
            options=options,
            donates=[bool(given), False],
        )
        program = builder.build(outputs, given)
        x, w = put(places, kinds[0], X), put(places, kinds[1], W)
        y, total = program([x, w])
        assert x.is_deleted() == bool(given)
        np.testing.assert_array_equal(np.asarray(y), expected[0])
        np.testing.assert_array_equal(np.asarray(total), expected[1])
        if not given:  # the module donates it, and the program did not let it: a copy was donated
            np.testing.assert_array_equal(np.asarray(x), X)
    assert program.analyze().form.donated == [0]


def test_views_of_shards(places: Places, order: tuple[int, ...]) -> None:
    """Arrays of one device each become one array, and a shard of that one of another array; no byte goes anywhere."""
    alone = [Kind((2,), F32, (device,), Tiling((1,), (0,))) for device in order]
    builder = Builder(places, "join")
    parts = [builder.argument(kind) for kind in alone]
    (made,) = builder.call(order, parts, [cut(order)], views=(View((0, 1, 2, 3), (0, 0, 0, 0)),))
    join = builder.build([made], is_view=True)
    pieces = [put(places, kind, X[2 * n : 2 * n + 2]) for n, kind in enumerate(alone)]
    (joined,) = join(pieces)
    np.testing.assert_array_equal(np.asarray(joined), X)
    for number in range(4):
        builder = Builder(places, "pick")
        whole = builder.argument(cut(order))
        shown = builder.call((order[number],), [whole], [alone[number]], views=(View((0,), (number,)),))
        pick = builder.build(shown, is_view=True)
        (picked,) = pick([joined])
        np.testing.assert_array_equal(np.asarray(picked), X[2 * number : 2 * number + 2])
    del pieces, joined  # what they show stays as long as somebody shows it
    np.testing.assert_array_equal(np.asarray(picked), X[6:])


def test_what_a_view_shows_is_not_given_away(places: Places, order: tuple[int, ...]) -> None:
    module, options = raw(step, STEP, X, W, donate=[0])
    kinds = [cut(order), replicated((4,), order)]
    builder = Builder(places, "again")
    again = builder.call(order, [builder.argument(cut(order))], [cut(order)], views=(View((0,) * 4, (0, 1, 2, 3)),))
    view = builder.build(again, is_view=True)
    builder = Builder(places, "main")
    inputs = [builder.argument(kind) for kind in kinds]
    outputs = builder.call(
        order, inputs, [cut(order), replicated((), order)], module=module, options=options, donates=[True, False]
    )
    program = builder.build(outputs, [0])
    x, w = put(places, kinds[0], X), put(places, kinds[1], W)
    (other,) = view([x])
    for shared in (x, other):
        assert program([shared, w]) is pw._core.Refusal.SHARED
    np.testing.assert_array_equal(np.asarray(other), X)


def test_moves_between_tilings(places: Places, order: tuple[int, ...]) -> None:
    value = np.arange(32, dtype=np.float32).reshape(8, 4)
    kinds = [
        Kind((8, 4), F32, order, Tiling((4, 1), (0, 1, 2, 3))),
        Kind((8, 4), F32, order[::-1], Tiling((2, 2), (3, 0, 2, 1))),
        Kind((8, 4), F32, order[1:3], Tiling((1, 2), (1, 0))),
        Kind((8, 4), F32, order, Tiling((2, 1), (1, 0, 0, 1))),
        Kind((8, 4), F32, order[:1], Tiling((1, 1), (0,))),
    ]
    for source in kinds:
        array = put(places, source, value)
        for target in kinds:
            builder = Builder(places, "move")
            program = builder.build([builder.move(builder.argument(source), target)], is_view=True)
            (moved,) = program([array])
            np.testing.assert_array_equal(np.asarray(moved), value)


def test_an_executable_says_what_xla_says(places: Places, order: tuple[int, ...]) -> None:
    module, options = raw(step, STEP, X, W, donate=[0])
    made = ClusterExecutable(places, None, Part(signed(module), options, order))  # type: ignore[arg-type]
    said = made.metadata
    assert said.name == "jit_step" and said.donated == (0,) and said.cost["flops"] > 0 and "HloModule" in said.text
    assert [(each.shape, each.dtype, each.shard_shape) for each in said.results] == [
        ((8,), "float32", (2,)),
        ((), "float32", ()),
    ]
    assert [each.layout for each in said.parameters] == ["{0}", "{0}"]


def test_a_module_that_xla_refuses(places: Places, order: tuple[int, ...]) -> None:
    module, options = raw(lambda x: jnp.sin(x), STEP[:1], X)
    whole = signed(module)
    broken = dataclasses.replace(whole, data=b"ML" + module)
    for wrong, words in (
        (Part(broken, options, order), "could not compile"),
        (Part(whole, options, order[:2]), "4 devices, and 2 were given"),
    ):
        with pytest.raises(pw.errors.ComputationError, match=words):
            ClusterExecutable(places, None, wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot be read"):
        _jaxlib.signature_of(b"nonsense")
    again = ClusterExecutable(places, None, Part(whole, options, order))  # type: ignore[arg-type]
    assert len(again.metadata.results) == 1


def test_arrays_that_are_not_what_the_program_says(places: Places, order: tuple[int, ...]) -> None:
    """Their bytes would be read by the program's sizes, from memory that is not theirs (TRUST-1)."""
    module, options = raw(lambda x: x + 3, STEP[:1], X)
    halves = Kind((16,), F32, order, Tiling((4,), (0, 1, 2, 3)))
    doubles = Kind((8,), np.dtype(np.float64), order, Tiling((4,), (0, 1, 2, 3)))
    for wrong in ([halves], [doubles], [replicated((8,), order)], [cut(order)] * 2):
        builder = Builder(places, "main")
        made = builder.call(order, [builder.argument(cut(order))], wrong, module=module, options=options)
        with pytest.raises(pw.errors.PathwaysError, match="and its program says"):
            builder.build(made)
    for wrong in ([halves], [doubles], [cut(order)] * 2, []):
        builder = Builder(places, "main")
        inputs = [builder.argument(kind) for kind in wrong]
        made = builder.call(order, inputs, [cut(order)], module=module, options=options)
        with pytest.raises(pw.errors.PathwaysError, match="takes shards"):
            builder.build(made)
    for wrong_view in (halves, doubles):
        builder = Builder(places, "view")
        whole = builder.argument(cut(order))
        shown = builder.call(order, [whole], [wrong_view], views=(View((0,) * 4, (0, 1, 2, 3)),))
        with pytest.raises(pw.errors.PathwaysError, match="shows shards of"):
            builder.build(shown)


def test_options_that_name_files(places: Places, order: tuple[int, ...], tmp_path: Path) -> None:
    """A client's options are XLA's, which can write files on the hosts: not here."""
    module, options = raw(lambda x: jnp.cos(x), STEP[:1], X)
    parsed = _jax.CompileOptions.ParseFromString(options)
    parsed.executable_build_options.debug_options.xla_dump_to = str(tmp_path)
    parsed.executable_build_options.debug_options.xla_dump_hlo_as_text = True
    parsed.env_option_overrides = [("xla_dump_to", str(tmp_path))]
    described = Part(signed(module), parsed.SerializeAsString(), order)
    assert ClusterExecutable(places, None, described).metadata.results  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_devices_that_are_named(cluster: Any, places: Places) -> None:
    control = cluster.control()
    with pytest.raises(pw.errors.SliceError, match="distinct devices"):
        control.allocate_slice((2,), ("d",), devices=(0, 0))
    with pytest.raises(pw.errors.SliceError, match="no device 100000"):
        control.allocate_slice((1,), ("d",), devices=(100_000,))
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(places.slice_of((0,)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1 and [device.id for device in found[0].devices] == [0]
