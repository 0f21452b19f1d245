"""Clients that come and go while the soak goes on: each connects, trains a little, and leaves in a way of its own.

    python tests/stress/soak_visitors.py ADDRESS

One process imports everything once and forks a visitor for each line `SEED` of its input, so that a visit takes less
than a second. It prints one line for each visitor that has left: `SEED ok`, or `SEED` and what was wrong. A visitor
checks every loss that it reads of a loop that donates its state (LOOK-1). What it leaves behind, in flight or in
memory, must be gone when the soak looks (OWN-1).
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import pathways as pw

LIMIT_S = 60.0
WAYS = ("close", "exit", "_exit", "kill", "exception")
#: What may happen to a visitor when a host dies, or when the small budgets of the soak are full.
EXCUSES = (pw.errors.HostLostError, pw.errors.ResourceExhaustedError)


def visit(address: str, seed: int) -> None:
    """One visitor's life, in its own process. Raises AssertionError for a wrong value."""
    draw = random.Random(seed)
    cluster = pw.connect(address)
    island = draw.randrange(len(cluster.islands))
    slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=1, island=island)
    in_front = draw.random() < 0.5

    def train(state: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss = jnp.max(state)
        return (state + 1, loss) if in_front else (loss, state + 1)

    step = pw.jit(train, devices=slice_, donate_argnums=0)
    try:
        state = pw.device_put(np.zeros((64, 64), np.float32), slice_)
        losses = []
        for _ in range(draw.randint(1, 60)):
            results = step(state)
            state, loss = results if in_front else results[::-1]
            losses.append(loss)
        for number in draw.sample(range(len(losses)), draw.randint(0, len(losses))):
            got = float(losses[number])
            if got != number:
                raise AssertionError(f"loss {number} of {len(losses)} is {got}")
        rest = [step(pw.device_put(np.zeros((64, 64), np.float32), slice_)) for _ in range(draw.randint(0, 20))]
    except EXCUSES:
        rest = []
    way = draw.choice(WAYS)
    if way == "close":
        cluster.close()
    elif way == "_exit":
        os._exit(0)
    elif way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif way == "exception":
        raise KeyboardInterrupt  # as by Ctrl-C: the interpreter ends with the cluster open
    del rest


def fork_visitor(address: str, seed: int) -> tuple[int, int]:
    """The visitor's process number, and where it writes what was wrong."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    os.close(reader)
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 0)
    os.dup2(devnull, 1)
    os.set_inheritable(writer, False)
    try:
        visit(address, seed)
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException as error:
        os.write(writer, f"{type(error).__name__}: {error}".replace("\n", " ")[:2000].encode())
    sys.exit(0)


def main() -> None:
    address = sys.argv[1]
    alive: dict[int, tuple[int, int, float]] = {}  # by pid: seed, pipe, when it came
    is_open, pending = True, b""
    while is_open or alive:
        readable, _, _ = select.select([0] if is_open else [], [], [], 0.05)
        if readable:
            data = os.read(0, 4096)
            is_open = bool(data)
            pending += data
            *lines, pending = pending.split(b"\n")
            for line in lines:
                pid, reader = fork_visitor(address, int(line))
                alive[pid] = int(line), reader, time.monotonic()
        for pid, (seed, reader, since) in list(alive.items()):
            ended, _ = os.waitpid(pid, os.WNOHANG)
            text = ""
            if not ended:
                if time.monotonic() - since < LIMIT_S:
                    continue
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                text = f"was still there after {LIMIT_S:g} s"
            text = text or os.read(reader, 4096).decode()
            os.close(reader)
            del alive[pid]
            print(seed, text or "ok", flush=True)


if __name__ == "__main__":
    main()
