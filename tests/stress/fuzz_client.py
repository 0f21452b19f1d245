"""A client that sends mutations of everything a client can send, as a process of its own; see `test_fuzz.py`.

    fuzz_client.py ADDRESS SEED SECONDS

Prints one line of JSON: how many inputs it tried by target, and how often it was evicted.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import jax
import numpy as np
from google.protobuf.empty_pb2 import Empty

import pathways as pw
from pathways import errors
from pathways.api.arrays import host_transfer
from pathways.cluster.address import Address
from pathways.process import fd_passing
from pathways.protocol import control_pb2 as pb
from pathways.protocol import payloads, wire

VALUE = np.arange(4096, dtype=np.float32)
ODD = [0, 1, 7, 8, 63, 64, 255, 4096, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 47, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
#: What another client's process may ask, with no harm to others whatever it says.
METHODS: dict[str, Any] = {
    "Join": pb.JoinRequest(protocol=3, jax_version="0", jaxlib_version="0"),
    "AllocateSlice": pb.AllocateSliceRequest(shape=[2], axis_names=["x"], island=0),
    "ReleaseSlice": pb.ReleaseSliceRequest(slice_id=1),
    "RemapSlice": pb.RemapSliceRequest(slice_id=1, devices=[0, 1]),
    "Group": pb.GroupRequest(hosts=[0, 1]),
    "WaitCompiled": pb.ProgramRequest(program_id=1),
    "Analyze": pb.ProgramRequest(program_id=1),
    "ForgetPrograms": pb.ForgetProgramsRequest(program_ids=[1, 2, 3]),
    "Suspend": pb.SuspendRequest(client=1, disk=False),
    "Resume": pb.ResumeRequest(client=1),
    "Stats": pb.StatsRequest(),
    "Shutdown": Empty(),
}


class Mutator:
    """Seeded changes of bytes and numbers."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def bytes(self, data: bytes) -> bytes:
        """Some bytes of `data` changed, or its length."""
        out = bytearray(data)
        for _ in range(self.random.randint(1, 4)):
            what = self.random.randrange(6)
            at = self.random.randrange(len(out)) if out else 0
            if what == 0 and out:
                out[at] ^= 1 << self.random.randrange(8)
            elif what == 1 and out:
                out[at] = self.random.randrange(256)
            elif what == 2:
                width = self.random.choice((1, 4, 8))
                number = self.random.choice(ODD) & ((1 << 8 * width) - 1)
                out[at : at + width] = number.to_bytes(width, "little")
            elif what == 3:
                del out[at:]
            elif what == 4:
                out[at:at] = self.random.randbytes(self.random.randrange(1, 16))
            else:
                out += self.random.randbytes(self.random.randrange(1, 16))
        return bytes(out)

    def number(self, near: int) -> int:
        """`near`, close to it, or something odd; 64 bits."""
        number = self.random.choice((near, near + self.random.randint(-128, 128), self.random.choice(ODD)))
        return number % (1 << 64)


class Culprit:
    """One connection, until it is evicted."""

    def __init__(self, address: str, mutator: Mutator) -> None:
        self.mutator = mutator
        self.cluster = pw.connect(address)
        self.slice = pw.make_virtual_device_set(self.cluster).add_slice(devices=2)
        self.good = pw.device_put(VALUE, self.slice).block_until_ready()
        self.placement = self.cluster.placement(self.good.layout).number
        self.native: Any = self.cluster.native
        self.channel = grpc.insecure_channel(Address.parse(address).control)
        self.descriptors = Address.parse(address).descriptors

    def settle(self, raw: int) -> None:
        """Waits for a future; how it ends is the culprit's own affair."""
        if self.native.wait_raw(raw, 20.0) == "pending":
            raise AssertionError("a put or fetch is neither done nor refused")

    def puts(self) -> None:
        """A put of a mutated payload."""
        array = self.native.new_array(self.good.layout)
        block, span, choice = None, None, self.mutator.random.randrange(3)
        if choice == 0:
            payload = payloads.put_inline(self.placement, VALUE.tobytes()[: self.mutator.random.randrange(64)])
        else:
            block = host_transfer.allocate(self.native, VALUE.nbytes, "a mutation")
            span = self.mutator.number(block.offset), self.mutator.number(VALUE.nbytes)
            payload = payloads.put_leased(self.placement)
        if choice != 1:
            payload = self.mutator.bytes(payload)
        self.native.put(array, payload, block, span)
        self.settle(array.raw_handle)

    def fetches(self) -> None:
        """A fetch to somewhere else."""
        block = host_transfer.allocate(self.native, VALUE.nbytes, "a mutation")
        span = self.mutator.number(block.offset), self.mutator.number(VALUE.nbytes)
        payload = payloads.fetch_leased()
        if self.mutator.random.randrange(2):
            payload = self.mutator.bytes(payload)
        token = self.native.new_token(self.good.layout.parts)
        self.native.fetch(self.good, token, payload, block, span)
        self.settle(token)
        self.native.forget_token(token)

    def commands(self) -> None:
        """A mutated description of a placement, or the end of a save; then a put that may use it."""
        number = self.mutator.random.randrange(100, 110)
        define = payloads.define(number, self.slice.placed(self.good.layout.cache))
        payload = self.mutator.random.choice((define, payloads.end(number, True)))
        self.native.command(payloads.BACKEND, self.good.layout.group, 0, 0, self.mutator.bytes(payload))
        array = self.native.new_array(self.good.layout)
        self.native.put(array, payloads.put_inline(number, VALUE.tobytes()))
        self.settle(array.raw_handle)

    def tasks(self) -> None:
        """A mutated step of a save."""
        payload = payloads.task("stage", 1 << 40, number=1)
        token = self.native.new_token(self.good.layout.parts)
        self.native.command(5, self.good.layout.group, self.good.raw_handle, token, self.mutator.bytes(payload))
        self.settle(token)
        self.native.forget_token(token)

    def calls(self) -> None:
        """A mutated protobuf message, or a good one in somebody else's name."""
        name = self.mutator.random.choice(list(METHODS))
        message = METHODS[name].SerializeToString()
        if name not in ("Suspend", "Resume", "Shutdown"):
            message = self.mutator.bytes(message)
        tokens = [self.cluster.control()._token, "", self.mutator.random.randbytes(16).hex()]
        self.call(name, message, self.mutator.random.choice(tokens))

    def call(self, name: str, message: bytes, token: str) -> None:
        """One call of the control plane."""
        method = self.channel.unary_unary(f"/pathways.Controller/{name}", lambda data: data, lambda data: data)
        with contextlib.suppress(grpc.RpcError):
            method(message, timeout=5.0, metadata=wire.bearer(token))

    def packets(self) -> None:
        """A packet on the descriptor socket that is no segment, or no segment of ours."""
        with contextlib.closing(fd_passing.connect(self.descriptors)) as stranger:
            _, fds = fd_passing.receive(stranger, 10.0)
            for fd in fds:
                os.close(fd)
            packet = self.mutator.bytes(json.dumps({"kind": "segment"}).encode())
            given = [os.memfd_create("x") for _ in range(self.mutator.random.randrange(3))]
            with contextlib.suppress(OSError):
                socket.send_fds(stranger, [packet or b"{}"], given)
            for fd in given:
                os.close(fd)

    def close(self) -> None:
        """Leaves."""
        self.channel.close()
        self.cluster.close()


TARGETS: tuple[Callable[[Culprit], None], ...] = (
    Culprit.puts,
    Culprit.fetches,
    Culprit.commands,
    Culprit.tasks,
    Culprit.calls,
    Culprit.packets,
)


def culprits(address: str, mutator: Mutator, counts: dict[str, int]) -> Iterator[Culprit]:
    """The same one as long as it is in."""
    while True:
        culprit = Culprit(address, mutator)
        with contextlib.suppress(errors.HostLostError, errors.ClusterClosedError):  # evicted, and told so
            while True:
                yield culprit
                culprit.native.check_alive()
        counts["evicted"] += 1
        culprit.close()


def main() -> None:
    """Tries inputs until the time is over."""
    address, seed, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    jax.config.update("jax_platforms", "cpu")
    mutator = Mutator(seed)
    counts = {target.__name__: 0 for target in TARGETS} | {"evicted": 0}
    end = time.monotonic() + seconds
    for culprit in culprits(address, mutator, counts):
        target = mutator.random.choice(TARGETS)
        target(culprit)
        counts[target.__name__] += 1
        if time.monotonic() > end:
            break
        if counts[target.__name__] % 64 == 0:
            gc.collect()
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
