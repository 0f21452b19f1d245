"""The variables of clients are named in `cluster.stats()` and listed by `pathways status`."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
import pytest

import pathways as pw
from pathways.protocol import control_pb2 as pb
from pathways.protocol import wire


def test_stats_name_them(embedded_cluster: Any) -> None:
    gc.collect()
    before = len(embedded_cluster.stats()["variables"])
    two = pw.make_virtual_device_set(embedded_cluster).add_slice(devices=2)
    big = pw.Variable(np.zeros((4 << 10, 8), np.float32), two, jax.P("x"), name="big")
    pw.Variable(np.float32(0), two, name="gone")
    (found, *_) = embedded_cluster.stats()["variables"]
    assert found == {
        "name": "big",
        "type": "float32[4096,8]",
        "slice": two.mesh_spec.name,
        "device_bytes": 4 << 14,
    }
    assert len(embedded_cluster.stats()["variables"]) == before + 1
    del big
    assert len(embedded_cluster.stats()["variables"]) == before


@pytest.mark.slow
def test_status_lists_those_of_all_clients(local_cluster: Any) -> None:
    one = pw.make_virtual_device_set(local_cluster).add_slice(devices=1)
    tree = [pw.Variable(np.zeros(n, np.int8), one, name=f"[red]v{n}") for n in range(1, 125)]
    deadline = time.monotonic() + 30
    while True:  # it is told a moment after
        command = [sys.executable, "-m", "pathways", "status", local_cluster.address]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        if "v124" in text:
            break
        assert time.monotonic() < deadline, text
    assert re.search(rf"{local_cluster.client_id} +\[red\]v124 +int8\[124\] +{one.mesh_spec.name} +124 B", text), text
    assert "[red]v104" not in text and re.search(r"and 10\d more variables", text), text
    (mine,) = (each for each in local_cluster.stats()["clients"] if each["client"] == local_cluster.client_id)
    assert len(mine["variables"]) == 100 and mine["variable_count"] >= 124
    assert mine["variables"][0]["name"] == "[red]v124"
    del tree


def test_a_list_is_cut_to_what_the_controller_keeps() -> None:
    many = [pb.Variable(name="n" * 1000, type="t" * 1000, slice="s" * 1000, device_bytes=1)] * 1000
    kept = wire.checked_variables(pb.VariablesRequest(variables=many, variable_count=1000))
    assert len(kept.variables) == wire.MOST_VARIABLES and kept.variable_count == 1000
    assert kept.variables[0] == pb.Variable(name="n" * 200, type="t" * 200, slice="s" * 200, device_bytes=1)
