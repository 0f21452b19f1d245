"""Checkpoints by orbax: what was saved comes back, on any slice and sharding, from and to plain JAX; each shard is
written and read where it lives."""

from __future__ import annotations

import json
import logging
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pathways as pw
from pathways.protocol import payloads

pw.checkpoint.register()


@pytest.fixture(autouse=True)
def no_log() -> Iterator[None]:
    """orbax logs errors, whose tracebacks know the arrays; pytest would keep them."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


DTYPES = ["bool", "int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
DTYPES += ["complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "int4"]


def values(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    bits = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 7, shape)
    return bits.astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))


def same(got: Any, expected: Any) -> None:
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert got.tobytes() == expected.tobytes()


def save(path: pathlib.Path, state: Any) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)


def restore(path: pathlib.Path, target: Any) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, target)


def on_jax(value: Any) -> Any:
    """A template that restores to plain JAX arrays, cut over four devices where that goes."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
    cut = P("d") if value.shape and value.shape[0] % 4 == 0 else P()
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=NamedSharding(mesh, cut))


def test_a_tree_comes_back_as_it_was(add: Any, tmp_path: pathlib.Path) -> None:
    grid, line = add((2, 2)), add(2)
    state = {
        "params": {
            "cut": pw.device_put(values((8, 4), "float32"), grid, P("x", "y")),
            "rows": pw.device_put(values((6, 3), "bfloat16"), line, P("x")),
            "whole": pw.device_put(values((5,), "int32"), grid),
            "both": pw.device_put(values((8,), "float32", 1), grid, P(("x", "y"))),
            "part": pw.device_put(values((4, 4), "float32", 2), grid, P(None, "y")),
        },
        "count": pw.device_put(np.int32(3), line),
        "mixed": [jnp.arange(4.0), np.arange(3), 7],
    }
    save(tmp_path / "c", state)
    back = restore(tmp_path / "c", state)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    for got, expected in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        assert type(got) is type(expected)
        same(got, expected)
        if isinstance(expected, pw.Array):
            assert got.layout is expected.layout


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_that_orbax_stores(add: Any, tmp_path: pathlib.Path, dtype: str) -> None:
    value = values((8, 4), dtype)
    with jax.enable_x64(True):
        state = {"a": pw.device_put(value, add(2), P("x")), "b": pw.device_put(value.reshape(-1)[0], add(2))}
        save(tmp_path / "c", state)
        back = restore(tmp_path / "c", state)
        same(back["a"], value)
        same(back["b"], value.reshape(-1)[0])
        assert back["a"].dtype == state["a"].dtype
        same(restore(tmp_path / "c", jax.tree.map(on_jax, state))["a"], value)


def test_a_dtype_that_orbax_does_not_store_is_refused(add: Any, tmp_path: pathlib.Path) -> None:
    state = {"good": pw.device_put(values((4,), "int8"), add(2)), "odd": pw.device_put(values((4,), "uint4"), add(2))}
    with pytest.raises(pw.errors.CheckpointError, match=r"saving 'odd'.*uint4"):
        save(tmp_path / "c", state)


def test_keys(add: Any, tmp_path: pathlib.Path) -> None:
    keys = jax.random.split(jax.random.key(7), 4)
    state = {"k": pw.device_put(keys, add(2), P("x")), "one": pw.device_put(jax.random.key(1, impl="rbg"), add(2))}
    save(tmp_path / "c", state)
    target = {**state, "k": jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=add(2).sharding(P("x")))}
    for back in (restore(tmp_path / "c", state), restore(tmp_path / "c", target)):
        assert back["k"].dtype == keys.dtype
        assert back["k"].shape == (4,)
        same(jax.random.key_data(back["k"]), jax.random.key_data(keys))
        assert back["one"].dtype == jax.random.key(1, impl="rbg").dtype
    same(jax.random.uniform(back["k"][0], (3,)), jax.random.uniform(keys[0], (3,)))


def test_onto_other_slices_and_shardings(add: Any, tmp_path: pathlib.Path) -> None:
    value = values((8, 12), "float32")
    grid, line, four = add((2, 2)), add(2), add(4)
    save(tmp_path / "c", {"a": pw.device_put(value, grid, P("x", "y"))})
    for slice_, spec in ((line, P(None, "x")), (four, P("x")), (grid, P("y", "x")), (four, P()), (grid, P(("y", "x")))):
        target = {"a": jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=slice_.sharding(spec))}
        back = restore(tmp_path / "c", target)["a"]
        assert back.slice is slice_
        assert back.sharding.is_equivalent_to(target["a"].sharding, 2)
        same(back, value)
        same(pw.jit(lambda x: x * 2, devices=slice_)(back), value * 2)


def test_to_and_from_plain_jax(add: Any, tmp_path: pathlib.Path) -> None:
    value, slice_ = values((8, 4), "float32"), add((2, 2))
    ours = {"a": pw.device_put(value, slice_, P("x", "y")), "s": pw.device_put(np.float32(3), slice_)}
    save(tmp_path / "ours", ours)
    theirs = restore(tmp_path / "ours", jax.tree.map(on_jax, ours))
    assert not isinstance(theirs["a"], pw.Array)
    same(theirs["a"], value)
    save(tmp_path / "theirs", theirs)
    back = restore(tmp_path / "theirs", ours)
    assert back["a"].layout is ours["a"].layout
    same(back["a"], value)
    same(back["s"], np.float32(3))


def test_the_other_dtype_and_the_other_shape_that_were_asked_for(add: Any, tmp_path: pathlib.Path) -> None:
    value, slice_ = values((6, 4), "float32"), add(2)
    save(tmp_path / "c", {"a": pw.device_put(value, slice_, P("x"))})

    def target(shape: tuple[int, ...], dtype: Any) -> Any:
        return {"a": jax.ShapeDtypeStruct(shape, dtype, sharding=slice_.sharding(P("x")))}

    same(restore(tmp_path / "c", target((6, 4), jnp.bfloat16))["a"], value.astype(ml_dtypes.bfloat16))
    with pytest.raises(ValueError, match=r"'a'.*\(6, 4\).*\(8, 4\)"):
        restore(tmp_path / "c", target((8, 4), np.float32))
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        for shape in ((8, 4), (4, 2), (8, 2)):
            args = ocp.args.StandardRestore(target(shape, np.float32), strict=False)
            expected = np.zeros(shape, np.float32)
            rows, columns = min(shape[0], 6), min(shape[1], 4)
            expected[:rows, :columns] = value[:rows, :columns]
            same(checkpointer.restore(tmp_path / "c", args=args)["a"], expected)


@pytest.mark.parametrize("use_ocdbt", [True, False])
@pytest.mark.parametrize("use_zarr3", [True, False])
def test_each_format_of_orbax(add: Any, tmp_path: pathlib.Path, use_ocdbt: bool, use_zarr3: bool) -> None:
    value = values((8, 4), "float32")
    state = {"a": pw.device_put(value, add((2, 2)), P("x", "y")), "b": pw.device_put(value, add(2))}
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt, use_zarr3=use_zarr3)
    with ocp.Checkpointer(handler) as checkpointer:
        save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=32, dtype=jnp.dtype("bfloat16")), state)
        checkpointer.save(tmp_path / "c", args=ocp.args.PyTreeSave(state, save_args=save_args))
        restore_args = ocp.checkpoint_utils.construct_restore_args(state)
        back = checkpointer.restore(tmp_path / "c", args=ocp.args.PyTreeRestore(state, restore_args=restore_args))
    same(back["a"], value)
    same(back["b"], value)


def on_devices(cluster: Any) -> int:
    """Bytes in use on all devices, by the hosts' ledgers."""
    return sum(device["bytes"] for host in cluster.stats()["hosts"] for device in host["memory"]["devices"])


def test_each_distinct_shard_is_written_once_where_it_lives(add: Any, cluster: Any, tmp_path: pathlib.Path) -> None:
    """And of the arrays' bytes none goes through the client, neither way."""
    value = values((256, 256), "float32")  # 256 KiB
    grid = add((2, 2))
    state = {"cut": pw.device_put(value, grid, P("x", "y")), "whole": pw.device_put(value, grid)}
    jax.block_until_ready(state)
    held = on_devices(cluster)
    before, arena = [dict(host) for host in cluster.stats()["hosts"]], cluster.native.arena_stats()[1]
    save(tmp_path / "c", state)
    back = restore(tmp_path / "c", state)

    def grown(name: str) -> list[int]:
        return [host[name] - was[name] for host, was in zip(cluster.stats()["hosts"], before, strict=True)]

    hosts = sorted(grid.binding.hosts)
    written, read = grown("checkpoint_bytes_written"), grown("checkpoint_bytes_read")
    assert sum(written) == 2 * value.nbytes
    share = value.nbytes // len(hosts)
    assert [read[host] for host in hosts] == [value.nbytes + share] * len(hosts)  # its cells once, whatever its devices
    assert [written[host] for host in hosts] == [value.nbytes + share, share][: len(hosts)]
    assert sum(grown("bytes_moved")) == 0
    assert cluster.native.arena_stats()[1] == arena
    assert on_devices(cluster) - held == 5 * value.nbytes  # MEM-1: cut once, and whole on each of four devices
    same(back["cut"], value)


def test_what_is_saved_is_the_value_at_the_call(add: Any, cluster: Any, quiet: Any, tmp_path: pathlib.Path) -> None:
    """While orbax still writes, the caller goes on: donates the array, deletes it, computes."""
    slice_ = add(2)
    value = values((512, 64), "float32")
    step = pw.jit(lambda x: x + 1, devices=slice_, in_shardings=P("x"), out_shardings=P("x"), donate_argnums=0)
    state = step(step(value))
    kept = quiet()["kept"]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", {"a": state})
        for _ in range(5):
            state = step(state)
        same(state, value + 7)
        state = step(state)  # whose value has not been read
        other = pw.device_put(value, slice_, P("x"))
        checkpointer.save(tmp_path / "d", {"a": other})
        other.delete()
    target = {"a": jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=slice_.sharding(P("x")))}
    same(restore(tmp_path / "c", target)["a"], value + 2)
    same(restore(tmp_path / "d", target)["a"], value)
    quiet(back_to=kept)
    assert all(host["checkpoint_jobs"] == host["tasks"] == 0 for host in cluster.stats()["hosts"])


def test_the_manager_keeps_the_newest(add: Any, tmp_path: pathlib.Path) -> None:
    slice_ = add((2, 2))
    step = pw.jit(lambda x: x * 1.5, devices=slice_, out_shardings=P("x", "y"))
    state = pw.device_put(values((8, 8), "float32"), slice_, P("x", "y"))
    options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=2)
    expected = {}
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        for number in range(7):
            state = step(state)
            manager.save(number, args=ocp.args.StandardSave({"s": state}))
            expected[number] = state
        manager.wait_until_finished()
        assert list(manager.all_steps()) == [4, 6]
        for number in (4, 6):
            same(manager.restore(number, args=ocp.args.StandardRestore({"s": state}))["s"], expected[number])


def test_a_failed_array_is_not_saved_and_says_why(add: Any, cluster: Any, quiet: Any, tmp_path: pathlib.Path) -> None:
    slice_ = add(2)
    good = pw.device_put(values((4, 4), "float32"), slice_)
    save(tmp_path / "c", {"a": good, "b": good})
    kept = quiet()["kept"]
    layout = cluster.layout(good.layout.cache, slice_)
    bad = cluster.native.new_array(layout)  # a restore of something that is not there
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(tmp_path / "nothing/")}}
    placement = cluster.placement(layout).number
    command = payloads.task("read", 1 << 40, name="bad", spec=spec, context={}, placement=placement, dtype="float32")
    cluster.native.make(bad, command)
    with pytest.raises(pw.errors.CheckpointError, match=r"'bad' at .*/nothing failed on host \d.*"):
        save(tmp_path / "d", {"a": good, "b": bad})
    assert not (tmp_path / "d").exists()
    with pytest.raises(pw.errors.CheckpointError, match="nothing"):
        np.asarray(bad + 1)
    cluster.native.command(4, layout.group, 0, 0, payloads.end(1 << 40, False))
    del bad
    save(tmp_path / "d", {"a": good})
    quiet(back_to=kept)
    assert all(host["checkpoint_jobs"] == host["tasks"] == 0 for host in cluster.stats()["hosts"])


def test_what_cannot_be_restored_says_so(add: Any, tmp_path: pathlib.Path) -> None:
    slice_, twin = add((2, 2)), add((2, 2))
    state = {"a": pw.device_put(values((4, 4), "float32"), slice_)}
    save(tmp_path / "c", state)
    # The axes of both slices, and of none in particular.
    axes = jax.sharding.AbstractMesh((2, 2), ("x", "y"), axis_types=slice_.mesh.axis_types)
    plain = NamedSharding(axes, P("x"))
    with pytest.raises(pw.errors.SliceError, match=r"slice\.sharding"):
        restore(tmp_path / "c", {"a": jax.ShapeDtypeStruct((4, 4), np.float32, sharding=plain)})
    alone = {"a": jax.ShapeDtypeStruct((4, 4), np.float32, sharding=add(1).sharding())}
    same(restore(tmp_path / "c", alone)["a"], state["a"])
    with pytest.raises(ValueError, match="zero size"):
        save(tmp_path / "e", {"a": pw.device_put(np.zeros((0, 4), np.float32), slice_)})
    deleted = pw.device_put(values((4,), "float32"), twin)
    deleted.delete()
    with pytest.raises(pw.errors.DeletedArrayError):
        save(tmp_path / "f", {"a": deleted})
    (tmp_path / "c" / "manifest.ocdbt").unlink()
    with pytest.raises(Exception, match=r"manifest|NOT_FOUND|not found"):
        restore(tmp_path / "c", state)


def test_a_failed_restore_tells_one_error_and_leaves_no_unread_one(cluster: Any, add: Any, tmp_path: Any) -> None:
    slice_ = add(1)
    state = {name: pw.device_put(values((300, 1000), "float32", n), slice_) for n, name in enumerate("abc")}
    save(tmp_path / "c", state)
    for file in tmp_path.glob("c/*/d/*"):
        os.truncate(file, 1000)
    with pytest.raises(pw.errors.CheckpointError, match="reading 'a'"):
        restore(tmp_path / "c", state)
    told = [text for text, _ in cluster.native.take_unread(True) if "reading" in text]
    assert told == []


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("way", ["item", "args", "manager"])
def test_a_template_without_restore_args_says_where_arrays_go(
    add: Any, tmp_path: pathlib.Path, way: str, devices: int
) -> None:
    """Also where several slices have the template's mesh, and beside arrays of plain JAX and empty nodes."""
    slice_, _ = add(devices), add(devices)
    state = {"a": pw.device_put(values((4, 2), "float32"), slice_, P("x")), "none": None, "b": np.float32([1, 2])}
    state["key"] = pw.device_put(jax.random.key(3), slice_)
    handler = ocp.PyTreeCheckpointHandler()
    template = dict(state)
    if way == "manager":
        with ocp.CheckpointManager(tmp_path) as manager:
            manager.save(0, args=ocp.args.PyTreeSave(state))
            manager.wait_until_finished()
            template["a"] = jax.ShapeDtypeStruct((4, 2), np.float32, sharding=slice_.sharding(P("x")))
            back = manager.restore(0, args=ocp.args.PyTreeRestore(item=template))
    else:
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(tmp_path / "c", args=ocp.args.PyTreeSave(state))
            given = {"item": template} if way == "item" else {"args": ocp.args.PyTreeRestore(template)}
            back = checkpointer.restore(tmp_path / "c", **given)
    for name in ("a", "key"):
        assert isinstance(back[name], pw.Array) and back[name].slice is slice_, name
        assert back[name].sharding == state[name].sharding
    same(back["a"], state["a"])
    same(jax.random.key_data(back["key"]), jax.random.key_data(state["key"]))
    same(back["b"], state["b"])
    assert back["none"] is None


def test_restore_args_go_before_the_template(add: Any, tmp_path: pathlib.Path) -> None:
    slice_, other = add(2), add((2, 2))
    state = {"a": pw.device_put(values((4, 2), "float32"), slice_, P("x"))}
    state |= dict.fromkeys(("cast", "numpy", "elsewhere"), state["a"] + 1)
    args = {
        "a": ocp.RestoreArgs(),
        "cast": ocp.RestoreArgs(dtype=np.dtype("float64")),
        "numpy": ocp.RestoreArgs(restore_type=np.ndarray),
        "elsewhere": ocp.ArrayRestoreArgs(sharding=other.sharding(P(None, "y"))),
    }
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", state)
        back = checkpointer.restore(tmp_path / "c", item=state, restore_args=args)
    assert (back["a"].slice, back["cast"].slice, back["elsewhere"].slice) == (slice_, slice_, other)
    assert type(back["numpy"]) is np.ndarray
    same(back["cast"], np.asarray(state["cast"], "float64"))
    for name in ("numpy", "elsewhere"):
        same(back[name], state[name])


def test_without_a_template_it_says_what_is_needed(add: Any, tmp_path: pathlib.Path) -> None:
    save(tmp_path / "c", {"a": pw.device_put(values((4, 4), "float32"), add((2, 2)), P("x"))})
    warned, raised = (
        pytest.warns(UserWarning, match="not provided"),
        pytest.raises(ValueError, match=r"slice\.sharding"),
    )
    with ocp.PyTreeCheckpointer() as checkpointer, warned, raised:
        checkpointer.restore(tmp_path / "c")


def test_parameters_made_by_a_program_never_pass_the_client(add: Any, cluster: Any, tmp_path: pathlib.Path) -> None:
    """An initialiser that is placed writes straight into shards: what goes to the hosts is a key."""
    optax = pytest.importorskip("optax")
    slice_ = add((2, 2))
    specs = {"w": P("x", "y"), "b": P("y")}
    optimizer = optax.adam(1e-3)

    def init(key: Any) -> Any:
        return {"w": jax.random.normal(key, (512, 512)), "b": jnp.zeros((512,))}

    make = pw.jit(init, devices=slice_, out_shardings=specs, name="init")
    cut = (optax.ScaleByAdamState(P(), specs, specs), optax.EmptyState())
    make_state = pw.jit(optimizer.init, devices=slice_, in_shardings=(specs,), out_shardings=cut, name="init_state")

    @pw.program
    def start(key: Any) -> Any:
        params = make(key)
        return params, make_state(params)

    with jax.threefry_partitionable(True):
        arena = cluster.native.arena_stats()[1]
        moved = cluster.stats()["bytes_moved"]
        params, state = start(jax.random.key(0))
        again = make(jax.random.key(0))
        jax.block_until_ready((params, state, again))
        assert params["w"].sharding == slice_.sharding(P("x", "y"))
        assert state[0].mu["w"].sharding == slice_.sharding(P("x", "y"))
        assert cluster.native.arena_stats()[1] == arena  # of the client's memory nothing was used
        assert cluster.stats()["bytes_moved"] == moved
        expected = jax.jit(init)(jax.random.key(0))
        same(again["w"], params["w"])
        np.testing.assert_allclose(np.asarray(params["w"]), np.asarray(expected["w"]), rtol=1e-6)


def test_notes_are_what_they_were() -> None:
    command = payloads.task("write", 3, arrays=[[0, "a", {}]], lead=0)
    assert payloads.parse_task(command) == {"op": "write", "job": 3, "arrays": [[0, "a", {}]], "lead": 0}
    assert payloads.parse_end(payloads.end(7, True)) == (7, True)
    assert json.loads(command[1:])["job"] == 3


def test_without_orbax_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"pathways-jax\[checkpoint\]"):
        pw.checkpoint.register.__wrapped__()


IMPORTS_LATE = """
import sys, tempfile
import jax, numpy as np
import pathways as pw

with pw.connect():
    assert "orbax.checkpoint" not in sys.modules
    with pw.connect():  # two clusters, one registration
        pass
    slice_ = pw.make_virtual_device_set().add_slice(devices=1)
    state = {"a": pw.device_put(np.arange(3.0), slice_)}
    import orbax.checkpoint as ocp

    assert ocp.__spec__.loader is ocp.__loader__ and "Registering" not in type(ocp.__loader__).__name__
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tempfile.mkdtemp() + "/c", state)
print("saved")
"""


@pytest.mark.parametrize("breaks", [False, True])
def test_orbax_may_be_imported_after_the_connection(breaks: bool) -> None:
    """A notebook's habit. If the handler does not fit this orbax, the import goes on, with a warning."""
    program = IMPORTS_LATE
    if breaks:
        program = program.replace(
            "    state =", "    sys.modules['pathways.api.checkpoints.orbax_handler'] = None\n    state ="
        )
    ran = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, timeout=120, check=False)
    if breaks:
        assert "this orbax cannot save arrays of slices" in ran.stderr
        assert "TypeHandler lookup failed" in ran.stderr
    else:
        assert ran.stdout == "saved\n", ran.stderr
