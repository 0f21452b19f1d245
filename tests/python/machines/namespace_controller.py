"""A program of test_machine_namespaces.py, which does what it is told on its standard input, a line each. On the
controller's machine, the namespace of the switch, it starts the cluster and is its client; on another machine it is a
client that comes in at the port.

    start ADDRESS FOLDER N    starts the cluster; prints its port, tokens for machines, and one for a client
    connect PORT TOKEN        connects to the cluster from another machine
    clients            prints the names of the clients
    gone               waits until a use of the cluster fails because it cannot be reached; prints for how long
    wait N             waits for N devices
    train STEPS        trains a small model over two islands; prints the last loss and a digest of the parameters
    trace FILE         trains while the cluster is traced; prints for how many seconds the trace goes, and how many
                       computations of the second machine begin before the first one sends what they need
    state              prints the states of the hosts
    alone STEPS        computes on island 0 alone, checks each value, and prints how many it were
    log                prints the controller's log
    lost               waits until a use of island 1 fails with HostLostError; prints for how long it had to wait
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pathways as pw
from pathways.cluster.launcher import Listening, start_local_cluster
from pathways.cluster.operator import logs
from pathways.process.run_directory import authority_folder
from pathways.trust import Role, Tokens

#: What the wire must not show.
SECRET = b"a known payload, in clear " * 64


def main() -> None:
    """Reads commands until the end of standard input."""
    session: dict[str, Any] = {}
    for line in sys.stdin:
        name, *arguments = line.split()
        answer = globals()[f"do_{name}"](session, *arguments)
        print(json.dumps(answer), flush=True)
    if "cluster" in session:
        session["cluster"].close()
    if "handle" in session:
        session["handle"].close()


def do_start(session: dict[str, Any], address: str, folder: str, machines: str) -> dict[str, Any]:
    listening = Listening(f"{address}:0", f"{folder}/authority")
    handle = session["handle"] = start_local_cluster(int(machines), 1, 1, platform="cpu", listen=listening)
    tokens = Tokens(authority_folder(handle.directory))
    session["cluster"] = pw.connect(handle.address.removesuffix("/control.sock"))
    return {
        "port": handle.port,
        "tokens": [tokens.make(Role.HOST, 600.0) for _ in range(int(machines) + 2)],
        "client_token": tokens.make(Role.CLIENT, 600.0),
    }


def do_connect(session: dict[str, Any], port: str, token: str) -> int:
    os.environ["PATHWAYS_TOKEN"] = token
    session.clear()
    began = time.monotonic()
    while "cluster" not in session:
        try:
            session["cluster"] = pw.connect(port, name="laptop")
        except pw.errors.ConnectError:  # a cable was plugged in just now, and the network does not know it yet
            if time.monotonic() - began > 20:
                raise
            time.sleep(0.5)
    return int(session["cluster"].client_id)


def do_clients(session: dict[str, Any]) -> list[str]:
    return [client["name"] for client in session["cluster"].stats()["clients"]]


def do_gone(session: dict[str, Any]) -> float:
    began = time.monotonic()
    while time.monotonic() - began < 30:
        try:
            float(session["step"](np.uint8(0), session["b"], np.frombuffer(SECRET, np.uint8))[0])
        except pw.errors.ControllerLostError:
            session["cluster"].close()
            return time.monotonic() - began
    raise AssertionError("the cluster can be reached")


def do_wait(session: dict[str, Any], devices: str) -> float:
    began = time.monotonic()
    session["cluster"].wait_for(int(devices), 90)
    return time.monotonic() - began


def do_train(session: dict[str, Any], steps: str) -> dict[str, Any]:
    """Two layers on two islands. The input has `SECRET` in it, and so has what travels between the islands."""
    devices = pw.make_virtual_device_set(session["cluster"])
    if "step" not in session:
        one, two = devices.add_slice(devices=1, island=0), devices.add_slice(devices=1, island=1)
        first = pw.jit(lambda w, x: x + w * 0, devices=one)
        second = pw.jit(lambda w, x: jnp.mean((x.astype(jnp.float32) / 255 - w) ** 2), devices=two)

        @pw.program
        def step(a: Any, b: Any, x: Any) -> Any:
            def loss(b: Any) -> Any:
                return second(b, first(a, x))

            value, gradient = jax.value_and_grad(loss)(b)
            return value, b - 0.1 * gradient

        session["step"] = step
        session["b"] = np.float32(0)
    x = np.frombuffer(SECRET, np.uint8)
    value = None
    for _ in range(int(steps)):
        value, session["b"] = session["step"](np.uint8(0), session["b"], x)
    b = np.asarray(session["b"])
    return {"loss": float(value), "digest": hashlib.sha256(b.tobytes()).hexdigest()}


def do_trace(session: dict[str, Any], path: str) -> dict[str, Any]:
    do_train(session, "2")
    with pw.trace(path, cluster=session["cluster"]):
        do_train(session, "5")
    with open(path, encoding="utf-8") as file:
        events = [each for each in json.load(file)["traceEvents"] if each.get("cat") in ("computation", "transfer")]
    transfers = {each["args"]["run"]: each["ts"] for each in events if each["cat"] == "transfer"}
    computations = [each for each in events if each["cat"] == "computation"]
    early = [each for each in computations if each["ts"] < transfers[each["args"]["run"]] - 500]
    return {
        "seconds": max(each["ts"] for each in events) / 1e6,
        "machines": len({each["pid"] for each in events}),
        "computations": len(computations),
        "early": len(early),
    }


def do_state(session: dict[str, Any]) -> list[str]:
    return [host["state"] for host in session["cluster"].stats()["hosts"]]


def do_alone(session: dict[str, Any], steps: str) -> int:
    if "alone" not in session:
        one = pw.make_virtual_device_set(session["cluster"]).add_slice(devices=1, island=0)
        session["alone"] = pw.jit(lambda x, n: x * 2 + n, devices=one)
    x = np.arange(8, dtype=np.float32)
    for number in range(int(steps)):
        np.testing.assert_array_equal(np.asarray(session["alone"](x, np.float32(number))), x * 2 + number)
    return int(steps)


def do_log(session: dict[str, Any]) -> str:
    parts = logs(session["handle"].address, None, lines=1000)
    return b"".join(part.text for part in parts).decode()


def do_lost(session: dict[str, Any]) -> float:
    began = time.monotonic()
    while time.monotonic() - began < 30:
        try:
            float(session["step"](np.uint8(0), session["b"], np.frombuffer(SECRET, np.uint8))[0])
        except pw.errors.HostLostError:
            session["b"] = np.float32(0)  # what lay there is lost
            return time.monotonic() - began
    raise AssertionError("no host was lost")


if __name__ == "__main__":
    main()
