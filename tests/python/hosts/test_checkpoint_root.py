"""The operator's `checkpoint_root`: hosts open nothing outside of it, by a path, a link, a URL or another driver."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

import pathways as pw
from pathways.host.checkpoint_root import CheckpointRoot


def spec(base: Any, **more: Any) -> dict[str, Any]:
    return {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": "a/"}, **more}


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "root"
    folder.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (folder / "inside").mkdir()
    (folder / "link_inside").symlink_to(folder / "inside")
    (folder / "link_out").symlink_to(tmp_path / "elsewhere")
    (folder / "deep").mkdir()
    (folder / "deep" / "d").symlink_to(tmp_path / "elsewhere")
    return folder


def test_what_lies_inside_is_allowed(root: pathlib.Path) -> None:
    check = CheckpointRoot(str(root)).check
    for base in (
        f"file://{root}/new/x/",
        f"file://{root}/inside/",
        {"driver": "file", "path": f"{root}/link_inside/n"},
    ):
        check("a", spec(base))
    check("a", {"driver": "zarr3", "kvstore": f"file://{root}/inside/|ocdbt:"})
    check("a", spec(f"file://{root}/inside/", path="params.layer:0/w|x/"))
    CheckpointRoot(None).check("a", spec("gs://bucket/x"))


@pytest.mark.parametrize(
    "make",
    [
        lambda root: spec(f"file://{root.parent}/elsewhere/"),
        lambda root: spec(f"file://{root}/link_out/x/"),
        lambda root: spec(f"file://{root}/deep/"),
        lambda root: spec(f"file://{root}/../elsewhere/"),
        lambda root: spec(f"file://{root}/%2e%2e/elsewhere/"),
        lambda root: spec(f"file://{root}2/"),
        lambda root: spec("file:///etc/"),
        lambda root: spec({"driver": "file", "path": "/etc/passwd"}),
        lambda root: spec({"driver": "file", "path": "inside"}),
        lambda root: spec({"driver": "file"}),
        lambda root: spec({"driver": "memory"}),
        lambda root: spec("gs://bucket/x/"),
        lambda root: spec("http://127.0.0.1/x/"),
        lambda root: spec(f"file://{root}/inside/|zip:"),
        lambda root: spec(f"file://{root}/inside/", path="../../elsewhere"),
        lambda root: {"driver": "stack", "layers": [spec(f"file://{root}/inside/")]},
        lambda root: {**spec(f"file://{root}/inside/"), "manifest": {"driver": "file", "path": "/etc/"}},
        lambda root: {"driver": "zarr"},
        lambda root: "file:///etc/|zarr:",
        lambda root: {"driver": "zarr", "kvstore": "s3://bucket/x/"},
    ],
)
def test_what_leads_out_is_refused(root: pathlib.Path, make: Any) -> None:
    with pytest.raises(pw.errors.CheckpointError, match=f"'a': this client's checkpoints lie in {root}"):
        CheckpointRoot(str(root)).check("a", make(root))


def test_no_such_folder_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(pw.errors.OptionError, match="expects a folder that exists"):
        pw.connect(pw.LocalCluster(checkpoint_root=tmp_path / "nowhere"))


@pytest.mark.slow
def test_a_cluster_saves_and_restores_inside_only(root: pathlib.Path) -> None:
    cluster = pw.connect(pw.LocalCluster(hosts_per_island=2, checkpoint_root=root))
    try:
        slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=2)
        value = np.arange(4096, dtype=np.float32)
        state = {"w": pw.device_put(value, slice_, P("x"))}
        pw.checkpoint.register()
        with ocp.StandardCheckpointer() as saver:
            saver.save(root / "inside" / "one", state)
            saver.wait_until_finished()
            again = saver.restore(root / "inside" / "one", state)
            np.testing.assert_array_equal(np.asarray(again["w"]), value)
            for place in (root.parent / "elsewhere" / "two", root / "link_out" / "three"):
                with pytest.raises(Exception, match="this client's checkpoints lie in"):
                    saver.save(place, state)
                    saver.wait_until_finished()
        np.testing.assert_array_equal(np.asarray(jax.block_until_ready(state["w"])), value)
        assert not [each for each in (root.parent / "elsewhere").rglob("*") if each.name.startswith("ocdbt")]
    finally:
        cluster.close()


def save(where: pathlib.Path, slice_: Any) -> None:
    with ocp.StandardCheckpointer() as saver:
        saver.save(where, {"w": pw.device_put(np.arange(64, dtype=np.float32), slice_)})
        saver.wait_until_finished()


def test_each_client_has_a_folder_of_its_name(root: pathlib.Path) -> None:
    (root / "by").mkdir()
    cluster = pw.connect(pw.LocalCluster(checkpoint_root=f"{root}/by/{{client}}"), name="a")
    try:
        pw.checkpoint.register()
        save(root / "by" / "a" / "one", pw.make_virtual_device_set(cluster).add_slice(devices=1))
        with pw.connect(cluster.address, name="b é") as other:
            slice_ = pw.make_virtual_device_set(other).add_slice(devices=1)
            save(root / "by" / "b é" / "one", slice_)
            for place in (root / "by" / "a" / "two", root / "by" / "b" / "two", root / "by" / "b é2" / "two"):
                with pytest.raises(Exception, match=f"checkpoints lie in {root}/by/b é"):
                    save(place, slice_)
                assert not [each for each in place.rglob("*") if each.name.startswith("ocdbt")]
        for name in (None, "", ".", "..", "../a", "a/b", "/etc"):
            with pytest.raises(pw.errors.OptionError, match="a client's name= that may be the name of a folder"):
                pw.connect(cluster.address, name=name)
    finally:
        cluster.close()


def test_a_folder_by_client_must_have_a_place(tmp_path: pathlib.Path) -> None:
    for path in ("{client}", f"{tmp_path}/nowhere/{{client}}", f"{tmp_path}/nowhere/x-{{client}}/y"):
        with pytest.raises(pw.errors.OptionError, match="expects a folder that exists"):
            pw.connect(pw.LocalCluster(checkpoint_root=path), name="a")
