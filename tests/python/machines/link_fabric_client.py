"""A program of test_link_fabric.py: a client on a machine of its own. It does what it is told on its standard input, a
line each, with an island of four devices on several machines.

    connect PORT TOKEN   connects, when all devices are there
    gather BYTES         gathers a known payload, sums numbers and turns them around, of about so many bytes per device;
                         prints what is right
    reduce BYTES TIMES   prints the seconds of each of so many sums over all devices
    machines             prints the fabrics of the machines, by name
    lost                 waits until a use of the island fails with HostLostError; prints the error
    back                 waits until it works again
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import pathways as pw

#: What the wire must not show.
PAYLOAD = b"all machines say "


def main() -> None:
    """Reads commands until the end of standard input."""
    session: dict[str, Any] = {}
    for line in sys.stdin:
        name, *arguments = line.split()
        print(json.dumps(globals()[f"do_{name}"](session, *arguments)), flush=True)
    session["cluster"].close()


def do_connect(session: dict[str, Any], port: str, token: str) -> int:
    os.environ["PATHWAYS_TOKEN"] = token
    session["cluster"] = cluster = pw.connect(port)
    cluster.wait_for(4, 120)
    session["devices"] = pw.make_virtual_device_set(cluster).add_slice(shape=(4,), axis_names=("x",))
    return 4


def _over(session: dict[str, Any], function: Any, out: Any) -> Any:
    mapped = jax.shard_map(function, mesh=session["devices"].mesh, in_specs=P("x"), out_specs=out, check_vma=False)
    return pw.jit(mapped, devices=session["devices"])


def do_gather(session: dict[str, Any], nbytes: str) -> dict[str, bool]:
    size = int(nbytes)
    payload = np.frombuffer((PAYLOAD * (4 * size // len(PAYLOAD) + 1))[: 4 * size], np.uint8)
    numbers = np.arange(4 * (size // 4 + 1), dtype=np.float32) % 1024

    def both(payload: Any, numbers: Any) -> Any:
        turned = jax.lax.ppermute(numbers, "x", [(n, (n + 1) % 4) for n in range(4)])
        return jax.lax.all_gather(payload, "x", tiled=True), jax.lax.psum(numbers, "x"), turned

    gathered, summed, turned = map(np.asarray, _over(session, both, (P(), P(), P("x")))(payload, numbers))
    parts = numbers.reshape(4, -1)
    return {
        "gathered": bool((gathered == payload).all()) and gathered.size == payload.size,
        "summed": bool((summed == parts.sum(axis=0)).all()),
        "turned": bool((turned.reshape(4, -1) == np.roll(parts, 1, axis=0)).all()),
    }


def do_reduce(session: dict[str, Any], nbytes: str, times: str) -> list[float]:
    ones = np.ones(int(nbytes), np.float32)  # of which each device gets a quarter, so that it has so many bytes
    array = pw.device_put(ones, session["devices"], P("x"))
    add = _over(session, lambda x: jax.lax.psum(x, "x"), P())
    first = _over(session, lambda x: x[:1], P("x"))
    found = []
    for _ in range(int(times) + 1):
        began = time.perf_counter()
        assert (np.asarray(first(add(array))) == 4).all()
        found.append(time.perf_counter() - began)
    return found[1:]


def do_machines(session: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["fabric"] for each in session["cluster"].stats()["machines"]}


def do_lost(session: dict[str, Any]) -> str:
    add = _over(session, lambda x: jax.lax.psum(x, "x"), P())
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            np.asarray(add(np.ones(4, np.float32)))
        except pw.errors.HostLostError as error:
            return str(error)
    raise AssertionError("no host was lost")


def do_back(session: dict[str, Any]) -> bool:
    add = _over(session, lambda x: jax.lax.psum(x, "x"), P())
    until = time.monotonic() + 90
    while time.monotonic() < until:
        try:
            return bool((np.asarray(add(np.ones(4, np.float32))) == 4).all())
        except pw.errors.HostLostError:
            time.sleep(0.2)
    raise AssertionError("the island does not come back")


if __name__ == "__main__":
    main()
