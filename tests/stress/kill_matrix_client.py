"""A client of the kill matrix, in a process of its own: says how far it is on stdout, one JSON object per line.

    python kill_matrix_client.py owner PHASE [--doubles]       starts the cluster, brings it to PHASE, waits for its end
    python kill_matrix_client.py guest ADDRESS [--doubles]     joins it, waits for its end

The last line says what became of it: `{"event": "end", "error": class, "message": text}`. Before that the owner says
"back" when an island that was lost is up again; in phase "run" it says "lost", with the message, when a run failed, and
"right" when one after that gave what it should. A guest on JAX runs on the other island and says "right" as it goes.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from typing import Any

ISLANDS, HOSTS, DEVICES = 2, 2, 1


def say(event: str, **fields: Any) -> None:
    os.write(1, json.dumps({"event": event, **fields}).encode() + b"\n")


def options(doubles: bool) -> dict[str, Any]:
    if not doubles:
        return {}
    import control_doubles

    return {**control_doubles.OPTIONS, "transfer_memory": 4096}


def owner(phase: str, doubles: bool) -> None:
    from pathways import errors
    from pathways.cluster.launcher import start_local_cluster

    def tell(event: Any) -> None:
        say("start", stage=int(event.stage), host=event.host, pid=event.pid)

    handle = start_local_cluster(ISLANDS, HOSTS, DEVICES, progress=tell, platform="cpu", **options(doubles))
    control = handle.control
    say("ready", address=handle.address, controller=control.controller_pid, hosts=list(control.host_pids))
    threading.Thread(target=say_back, args=(control,), daemon=True).start()
    if phase == "compile":
        number = control.register_program(slow_program(doubles), (tuple(range(HOSTS * DEVICES)),))
        say("phase")
        while True:
            try:
                control.wait_compiled(number)
                break
            except errors.HostLostError:  # END-1: what waited is told; its successor compiles anew
                continue
        say("compiled")
    elif phase == "run" and not doubles:
        run_for_ever(handle)
    else:
        say("phase")
    wait_for_the_end(control)


def guest(address: str, doubles: bool) -> None:
    from pathways.cluster.remote import connect_unix
    from pathways.process.config import ClientSizes

    if not doubles:
        go_on_for_ever(address)
    control = connect_unix(address, sizes=ClientSizes(1024, 1 << 16, 1 << 20), native="control_doubles")
    say("phase")
    wait_for_the_end(control)


def say_back(control: Any) -> None:
    """Says once that an island was started anew, and is up."""
    with contextlib.suppress(Exception):  # the main thread says what becomes of the cluster
        while True:
            hosts = control.cluster_stats()["hosts"]
            if any(host["restarts"] for host in hosts) and all(host["state"] == "up" for host in hosts):
                say("back", hosts=[host["pid"] for host in hosts])
                return
            time.sleep(0.05)


def wait_for_the_end(control: Any) -> None:
    while True:
        control.check()
        time.sleep(0.02)


def slow_program(doubles: bool) -> Any:
    """A program that a compiler has work with for a while; for the doubles, one whose name says so."""
    import numpy as np

    from pathways.compiler.ir import ArrayType, Computation, LogicalProgram, MeshSpec, Node, NodeKind

    mesh = MeshSpec("m", (("x", HOSTS * DEVICES),))
    value = ArrayType((HOSTS * DEVICES, 64, 64), np.dtype("float32"), 0, (("x",), (), ()))
    if doubles:
        return LogicalProgram("slow", (mesh,), (value,), (), (), (0,), (0,), (False,))
    import jax
    import jax.numpy as jnp
    from jax import export

    def body(x: Any) -> Any:
        for number in range(3000):
            x = jnp.sin(x @ jnp.swapaxes(x, 1, 2) + float(number))
        return x

    axes, sizes = zip(*mesh.axes, strict=True)
    sharding = jax.sharding.NamedSharding(jax.sharding.AbstractMesh(sizes, axes), jax.sharding.PartitionSpec("x"))
    struct = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
    module = export.export(jax.jit(body, out_shardings=sharding), platforms=["cpu"])(struct)
    computation = Computation("slow", module.mlir_module_serialized, 0, (value,), (value,), (False,))
    node = Node(NodeKind.CALL, "slow", 0, (0,), (1,), "slow", 0, (False,))
    return LogicalProgram("slow", (mesh,), (value, value), (computation,), (node,), (0,), (1,), (False,))


def run_for_ever(handle: Any) -> None:
    """Calls a program with a collective, again and again, many calls ahead of their results; anew after a loss."""
    import jax
    import numpy as np

    import pathways as pw

    with pw.connect(handle.address):
        part = pw.make_virtual_device_set().add_slice(devices=HOSTS * DEVICES, island=0)
        spec = jax.sharding.PartitionSpec(part.mesh.axis_names[0])
        step = pw.jit(lambda x: x + x.sum() * 0.0, devices=part, in_shardings=spec, out_shardings=spec)
        ones = np.ones((HOSTS * DEVICES, 64), np.float32)
        x = step(pw.device_put(ones, part, spec))
        jax.block_until_ready(x)
        say("phase")
        is_told = True
        while True:
            try:
                for _ in range(32):
                    x = step(x)
                assert (np.asarray(x) == 1).all()
                if not is_told:
                    say("right")
                is_told = True
            except pw.errors.HostLostError as error:
                if pw.errors.HostLostError is type(handle.control.failure()):
                    raise
                say("lost", message=str(error)[:2000])
                is_told = False
                x = step(pw.device_put(ones, part, spec))


def go_on_for_ever(address: str) -> None:
    """Works on the other island, whose results nothing may disturb."""
    import jax
    import numpy as np

    import pathways as pw

    with pw.connect(address):
        part = pw.make_virtual_device_set().add_slice(devices=HOSTS * DEVICES, island=1)
        spec = jax.sharding.PartitionSpec(part.mesh.axis_names[0])
        step = pw.jit(lambda x: x + x.sum() / x.size, devices=part, in_shardings=spec, out_shardings=spec)
        count = 0
        while True:
            x = pw.device_put(np.ones((HOSTS * DEVICES, 64), np.float32), part, spec)
            for _ in range(8):
                x = step(x)
            assert (np.asarray(x) == 2**8).all()
            if count == 0:
                say("phase")
            count += 1
            say("right", count=count)
            time.sleep(0.05)


def main() -> None:
    role, where, doubles = sys.argv[1], sys.argv[2], "--doubles" in sys.argv
    timer = threading.Timer(90.0, os._exit, (99,))  # bounded, whatever happens
    timer.daemon = True
    timer.start()
    try:
        (owner if role == "owner" else guest)(where, doubles)
    except BaseException as error:
        say("end", error=type(error).__name__, message=str(error)[:2000])


if __name__ == "__main__":
    main()
