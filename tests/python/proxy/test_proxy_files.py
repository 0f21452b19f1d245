"""Persistence requests through a proxy: orbax's handler for Pathways, which sends what pathwaysutils sends.

SAVE-1 (whole or not there): `test_what_was_not_written_whole_is_not_there`, `test_a_host_that_is_lost_while_it_writes`.
"""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
import resource
import signal
import struct
from collections.abc import Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import psutil
import pytest
import tensorstore as ts
from control_clusters import eventually
from stock_clients import StockClient, serving

import pathways as pw
from pathways.cluster.operator import look
from pathways.host import plain_arrays

#: `save` and `read` send a request each; the handler is what `pathwaysutils.initialize()` registers. `tree` has arrays.
BEGIN = """
import datetime, json
import orbax.checkpoint as ocp
from orbax.checkpoint._src.metadata import array_metadata_store
from orbax.checkpoint._src.serialization import cloud_pathways_array_handler, cloud_pathways_helper as helper
from orbax.checkpoint._src.serialization import cloud_pathways_plugin_executable as plugin

minute = datetime.timedelta(minutes=1)
handler = cloud_pathways_array_handler.CloudPathwaysArrayHandler(minute, False, array_metadata_store.Store())
ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)
d = jax.devices()[:4]
mesh = Mesh(np.array(d).reshape(2, 2), ("a", "b"))

def put(x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))

def save(folder, names, arrays, timeout=minute):
    helper.write_arrays(str(folder), names, arrays, timeout).result()

def read(folder, name, dtype, shape, *spec):
    where = NamedSharding(mesh, P(*spec))
    arrays, done = helper.read_arrays(str(folder), [name], [np.dtype(dtype)], [shape], [where], mesh.devices, minute)
    done.result()
    return arrays[0]

def equal(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()

x = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
tree = {
    "a": {"w/1": put(x, "a", "b")},
    "rows": put(jnp.asarray(x, jnp.bfloat16), ("b", "a")),
    "all": put(np.arange(5)),
    "zeros": put(np.zeros((4, 4), np.int8), None, "b"),
    "scalar": put(np.float32(3)),
    "number": 5,
}
"""
X = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
TREE = {
    "a": {"w/1": X},
    "rows": X.astype(ml_dtypes.bfloat16),
    "all": np.arange(5, dtype=np.int32),
    "zeros": np.zeros((4, 4), np.int8),
    "scalar": np.float32(3),
    "number": 5,
}
CHUNKS = {"a.w/1": [4, 8], "rows": [2, 16], "all": [5], "zeros": [4, 2], "scalar": []}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with pw.connect(pw.LocalCluster(islands=1, hosts_per_island=2, devices_per_host=2)) as made:
        yield made


@pytest.fixture(scope="module")
def client(variables: dict[str, str]) -> Iterator[StockClient]:
    with StockClient(variables) as made:
        made.out(BEGIN)
        yield made


def same(found: Any, expected: Any) -> bool:
    return jax.tree.all(
        jax.tree.map(
            lambda a, b: np.asarray(a).dtype == np.asarray(b).dtype and np.asarray(a).tobytes() == b.tobytes(),
            {**found, "number": np.asarray(found["number"])},
            {**expected, "number": np.asarray(expected["number"])},
        )
    )


def stored(folder: pathlib.Path, name: str) -> np.ndarray[Any, Any]:
    """What tensorstore reads; a shard that is missing is an error."""
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": f"{folder}/{name}/"},
        "fill_missing_data_reads": False,
    }
    found: np.ndarray[Any, Any] = ts.open(spec).result().read().result()
    return found


def test_plain_orbax_reads_what_hosts_wrote(client: StockClient, tmp_path: pathlib.Path) -> None:
    client.out(
        f"""
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as c:
            c.save({str(tmp_path / "one")!r}, tree)
        """
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        how = jax.tree.map(
            lambda x: ocp.RestoreArgs() if isinstance(x, int) else ocp.ArrayRestoreArgs(sharding=here), TREE
        )
        found = checkpointer.restore(tmp_path / "one", ocp.args.PyTreeRestore(restore_args=how))
        assert same(found, TREE)
    for name, chunks in CHUNKS.items():
        assert json.loads((tmp_path / "one" / name / ".zarray").read_text())["chunks"] == chunks
    assert client.out(  # on other devices, cut otherwise
        f"""
        half = Mesh(np.array(d[1:3]), ("x",))
        specs = {{"rows": P(), "all": P(), "zeros": P("x"), "scalar": P(), "number": None}}
        specs["a"] = {{"w/1": P(None, "x")}}
        def like(x, spec):
            return x if spec is None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(half, spec))
        target = jax.tree.map(like, tree, specs)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as c:
            args = ocp.args.PyTreeRestore(item=target, restore_args=ocp.checkpoint_utils.construct_restore_args(target))
            back = c.restore({str(tmp_path / "one")!r}, args)
        out = [jax.tree.all(jax.tree.map(equal, tree, back)), back["a"]["w/1"].sharding == target["a"]["w/1"].sharding]
        """
    ) == [True, True]


@pytest.mark.parametrize("form", ["files", "ocdbt", "zarr3", "zarr3 in ocdbt"])
def test_hosts_read_what_plain_orbax_wrote(client: StockClient, tmp_path: pathlib.Path, form: str) -> None:
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt="ocdbt" in form, use_zarr3="zarr3" in form)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "one", {"w": jax.numpy.asarray(X), "z": jax.numpy.zeros((4, 4), np.int8)})
    assert client.out(
        f"""
        folder = {str(tmp_path / "one")!r}
        w, z = read(folder, "w", "float32", (8, 16), "a", "b"), read(folder, "z", "int8", (4, 4), "b")
        out = [equal(w, x), equal(z, np.zeros((4, 4), np.int8)), w.sharding.spec == P("a", "b")]
        """
    ) == [True, True, True]


def test_element_types(client: StockClient, tmp_path: pathlib.Path) -> None:
    """Those for which requests have names are read back; a write has no name of a type."""
    client.out("out = jax.config.update('jax_enable_x64', True)")
    try:
        found = client.out(
            f"""
            out = {{}}
            for name in ("bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16",
                         "uint32", "uint64", "bool", "float16", "complex64", "complex128", "int4", "float8_e4m3fn"):
                values = put(np.arange(8).astype(jnp.dtype(name)), "b")
                save({str(tmp_path)!r}, [name], [values])
                try:
                    helper.dtype_to_xla_primitive_type_str(np.dtype(name))
                except ValueError:
                    continue
                out[name] = equal(values, read({str(tmp_path)!r}, name, name, (8,), "a"))
            """
        )
    finally:
        client.out("out = jax.config.update('jax_enable_x64', False)")
    assert len(found) == 11 and all(found.values()), found
    for name in (*found, "bool", "float16", "complex64", "complex128", "int4", "float8_e4m3fn"):
        values = stored(tmp_path, name)
        assert values.dtype.name == name
        assert values.tobytes() == np.arange(8).astype(jax.numpy.dtype(name)).tobytes(), name


def test_views_and_what_comes_after(client: StockClient, tmp_path: pathlib.Path) -> None:
    """What is written is the value at the call, even if it is then donated or deleted. Its shards may be of several
    arrays."""
    found = client.out(
        f"""
        folder = {str(tmp_path)!r}
        given = put(x, "a")
        pieces = [jax.device_put(np.full((2, 3), n, np.int32), each) for n, each in enumerate(d)]
        joined = jax.make_array_from_single_device_arrays((8, 3), NamedSharding(mesh, P(("a", "b"))), pieces)
        writes = helper.write_arrays(folder, ["given", "joined"], [given, joined], minute)
        made = jax.jit(lambda v: v + 1, donate_argnums=0)(given)
        joined.delete()
        writes.result()
        one = put(x[0], "b")
        request = json.loads(helper.get_bulk_write_request(folder, ["one"], [one], minute))
        request = {{"persistenceWriteRequest": request["bulk_persistence_write_request"]["write_requests"][0]}}
        for _ in range(2):
            plugin.PluginExecutable(json.dumps(request)).call([one])[1].result()
        request = json.loads(helper.get_bulk_read_request(
            folder, ["one"], [one.dtype], [one.shape], [one.sharding], mesh.devices, minute))
        request = {{"persistenceReadRequest": request["bulk_persistence_read_request"]["read_requests"][0]}}
        (back,), done = plugin.PluginExecutable(json.dumps(request)).call(
            out_shardings=[one.sharding], out_avals=[jax.core.ShapedArray(one.shape, one.dtype)])
        out = [equal(made, x + 1), equal(back, x[0])]
        """
    )
    assert found == [True, True]
    assert stored(tmp_path, "given").tobytes() == X.tobytes()
    assert stored(tmp_path, "joined").tolist() == [[n // 2] * 3 for n in range(8)]


def test_wrong_requests(client: StockClient, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("no folder")
    os.makedirs(tmp_path / "gap" / "x")
    client.out(f"import pathlib; t = pathlib.Path({str(tmp_path)!r}); a = put(x, 'a'); save(t, ['x'], [a])")
    client.out("save(t, ['gap/x'], [a]); (t / 'gap' / 'x' / '1.0').unlink()")
    client.out(
        """
        def sent(change, *arrays):
            request = json.loads(helper.get_bulk_write_request(str(t), ["y"], [a], minute))
            change(request["bulk_persistence_write_request"]["write_requests"][0])
            plugin.PluginExecutable(json.dumps(request)).call(arrays)[1].result()
        """
    )
    for code, words in (
        ("save(t / 'none', ['y'], [a])", "FAILED_PRECONDITION: writing 'y' at"),
        ("save(t / 'none', ['y'], [a])", "none is not there; save into a folder that"),
        ("save(t / 'file', ['y'], [a])", "is not there; save into"),
        ("save('gs://bucket/one', ['y'], [a])", "UNIMPLEMENTED: the folder 'gs://bucket/one'"),
        ("save('some/where', ['y'], [a])", "absolute path"),
        ("save(f'{t}/../up', ['y'], [a])", "absolute path"),
        ("save(t, ['../y'], [a])", "an array of the name '../y'"),
        ("save(t, ['y', 'y'], [a, a])", "two arrays to one place"),
        ("save(t, ['y'], [put(np.zeros((0, 4), np.float32))])", "without elements"),
        ("save(t, ['y'], [a], datetime.timedelta(0))", "malformed"),
        ("sent(lambda r: r.update(shape=[8, 8]), a)", "says shape (8, 8), and (8, 16) came"),
        ("sent(lambda r: None, put(x, 'b'))", "not cut as the request says"),
        ("sent(lambda r: r.update(shape='8'), a)", "malformed"),
        ("sent(lambda r: r.update(b64_location='%'), a)", "malformed"),
        ("sent(lambda r: r['devices'].update(device_ids=[0, 1, 2, 99]), a)", "99"),
        ("sent(lambda r: r.pop('b64_name'), a)", "malformed"),
        ('plugin.PluginExecutable(\'{"bulk_persistence_write_request": {"write_requests": []}}\')', "malformed"),
        ("read(t, 'none', 'float32', (8, 16))", "FAILED_PRECONDITION: opening 'none' at"),
        ("read(t, 'x', 'float32', (16, 8))", "it is stored with shape (8, 16), not (16, 8)"),
        ("read(t, 'gap/x', 'float32', (8, 16))", "gap/x/ failed on host"),
        ("read(t, 'x', 'float32', (8, 16), None, 'a').block_until_ready(); read(t, 'x', 'float32', (7, 16), 'a')", "7"),
    ):
        said = client.error(code)
        assert words in said, (code, said)
    assert not (tmp_path / "y").exists()
    assert client.out("out = equal(read(t, 'x', 'float32', (8, 16)), x)")


def host_pids(cluster: Any) -> list[int]:
    return [host["pid"] for host in cluster.stats()["hosts"]]


def test_what_was_not_written_whole_is_not_there(cluster: Any, client: StockClient, tmp_path: pathlib.Path) -> None:
    """The double of a full disk: files of one host may not grow. What was there before is gone then, too."""
    client.out(f"folder = {str(tmp_path)!r}; big = put(np.tile(x, (16, 64)), 'a'); save(folder, ['x'], [big])")
    assert stored(tmp_path, "x").shape == (128, 1024)
    victim = psutil.Process(host_pids(cluster)[1])
    limits = victim.rlimit(resource.RLIMIT_FSIZE)
    victim.rlimit(resource.RLIMIT_FSIZE, (1 << 8, limits[1]))
    try:
        said = client.error("save(folder, ['x', 'other'], [big + 1, put(x[0])])")
        assert "FAILED_PRECONDITION: writing 'x' at" in said and "failed on host 1: " in said
    finally:
        victim.rlimit(resource.RLIMIT_FSIZE, limits)
    assert "opening 'x' at" in client.error("read(folder, 'x', 'float32', (128, 1024))")
    assert not (tmp_path / "other" / ".zarray").exists()
    client.out("save(folder, ['x', 'other'], [big + 1, put(x[0])])")
    np.testing.assert_array_equal(stored(tmp_path, "x"), np.tile(X, (16, 64)) + 1)


def test_shards_that_the_lead_does_not_see(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts that do not share the folder have each written into their own."""
    monkeypatch.setattr(plain_arrays, "_APPEARS_S", 0.3)
    spec = {"kvstore": {"driver": "file", "path": f"{tmp_path}/x/"}, "metadata": {"shape": [4, 2], "chunks": [2, 2]}}
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "0.0").touch()
    with pytest.raises(pw.errors.CheckpointError, match=r"does not see 1 of 2 shards .* 1\.0; all hosts must share"):
        plain_arrays.check_shards([(0, "x", spec)], 3)
    (tmp_path / "x" / "1.0").touch()
    plain_arrays.check_shards([(0, "x", spec)], 3)


class Held:
    """Holds up who writes a file: tensorstore locks one beside it."""

    def __init__(self, path: pathlib.Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(f"{path}.__lock", os.O_RDWR | os.O_CREAT)
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))

    def release(self) -> None:
        os.close(self._file)


def test_a_deadline(client: StockClient, tmp_path: pathlib.Path) -> None:
    held = Held(tmp_path / "x" / "1")
    said = client.error(f"t = {str(tmp_path)!r}; save(t, ['x'], [put(x[0], 'a')], datetime.timedelta(seconds=0.5))")
    assert "DEADLINE_EXCEEDED: the save of 'x'" in said and "0.5 seconds" in said
    held.release()
    client.out("save(t, ['x'], [put(x[0], 'a')])")
    assert stored(tmp_path, "x").tobytes() == X[0].tobytes()


@pytest.mark.slow
def test_a_host_that_is_lost_while_it_writes(cluster: Any, variables: dict[str, str], tmp_path: pathlib.Path) -> None:
    with StockClient(variables) as client:
        client.out(BEGIN)
        client.out(f"t = {str(tmp_path)!r}; save(t, ['x'], [put(x[0], 'a')])")
        held = Held(tmp_path / "x" / "1")
        client.send("save(t, ['x'], [put(x[1], 'a')])")
        eventually(lambda: not (tmp_path / "x" / ".zarray").exists(), "it is about to be written")
        os.kill(host_pids(cluster)[1], signal.SIGKILL)
        said = client.answer_error()
        assert "DATA_LOSS" in said, said
        held.release()
        assert not (tmp_path / "x" / ".zarray").exists()
        eventually(lambda: all(host.state == "up" for host in look(cluster.address).hosts), "the island is back")
        client.out("save(t, ['x'], [put(x[1], 'a')])")
        assert stored(tmp_path, "x").tobytes() == X[1].tobytes()
    eventually(lambda: all(host["checkpoint_jobs"] == 0 for host in cluster.stats()["hosts"]), "no job is left")


def test_where_programs_of_others_may_write(cluster: Any, tmp_path: pathlib.Path) -> None:
    """A proxy that others can reach has no files, or those in one folder; links do not lead out of it."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (inside / "link").symlink_to(outside)
    code = BEGIN + f"\ninside, outside, a = {str(inside)!r}, {str(outside)!r}, put(x, 'a')"
    with serving(cluster.address, "--listen", "127.0.0.1:0") as variables, StockClient(variables) as client:
        client.out(code)
        for each in ("save(inside, ['x'], [a])", "read(inside, 'x', 'float32', (8, 16))"):
            assert "PERMISSION_DENIED: programs of this proxy" in client.error(each)
    options = ("--listen", "127.0.0.1:0", "--checkpoint-root", str(inside))
    with serving(cluster.address, *options) as variables, StockClient(variables) as client:
        client.out(code + "\nsave(inside, ['x'], [a])")
        assert client.out("out = equal(read(inside, 'x', 'float32', (8, 16), 'b'), x)")
        (outside / "x").symlink_to(inside / "x")
        for place in ("outside", "inside + '/link'"):
            for each in (f"save({place}, ['y'], [a])", f"read({place}, 'y', 'float32', (8, 16))"):
                assert f"checkpoints lie in {inside}" in client.error(each), each
    assert list(outside.iterdir()) == [outside / "x"]
