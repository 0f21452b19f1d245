"""FAULT-1, SPEAK-1: records of a machine's served host that make no sense end that machine's part in the cluster, and
nothing else. A real agent with a real host says what the test makes up; an innocent client works on another machine."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import struct
import time
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from control_clusters import eventually
from machines import MachineCluster

import pathways as pw

pytestmark = pytest.mark.slow

FRAMES = pathlib.Path(__file__).parent / "frames_of_an_agent"
TO_CONTROLLER = 2  # FrameKind::kToController
X = np.arange(8, dtype=np.float32)


def frame(host: int, incarnation: int, record: bytes) -> bytes:
    """A record of a host to the controller, as its link carries it."""
    return struct.pack("<IHHIi", len(record), TO_CONTROLLER, 0, host, incarnation) + record + bytes(-len(record) % 8)


class Scene:
    """Machine m0 with an innocent client, and machine m1, whose agent says what it is told."""

    def __init__(self, machines: MachineCluster, cluster: pw.Cluster, frames: pathlib.Path) -> None:
        self.machines, self.cluster, self._frames = machines, cluster, frames
        islands = {machine["name"]: machine["island"] for machine in cluster.stats()["machines"]}
        self.host = islands["m1"]
        here = pw.make_virtual_device_set(cluster).add_slice(devices=1, island=islands["m0"])
        self._call = pw.jit(lambda x: x * 2 + 1, devices=here)
        self.island = islands["m0"]
        self.checked = 0

    def log(self) -> str:
        directory = os.path.dirname(self.machines.handle.address.removeprefix("unix:"))
        return pathlib.Path(directory, "logs", "controller.log").read_text()

    def say(self, record: bytes, incarnations: range = range(64)) -> None:
        """As the host of m1, in whatever incarnation it is."""
        temporary = self._frames.with_suffix(".new")
        temporary.write_bytes(b"".join(frame(self.host, number, record) for number in incarnations))
        temporary.rename(self._frames)
        eventually(lambda: not self._frames.exists(), "the agent has sent it")

    def check(self) -> None:
        """The innocent client's values."""
        value = np.float32(self.checked)
        np.testing.assert_array_equal(np.asarray(self._call(X + value)), (X + value) * 2 + 1)
        self.checked += 1

    def served(self) -> bool:
        return all(host["state"] == "up" for host in self.cluster.stats()["hosts"])


@pytest.fixture
def scene(tmp_path: pathlib.Path) -> Iterator[Scene]:
    frames = tmp_path / "frames"
    with contextlib.ExitStack() as stack:
        machines = stack.enter_context(MachineCluster(2, 1, 1, agents=1))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATHWAYS_TEST_FRAMES", str(frames))
            patch.setenv("PYTHONPATH", os.pathsep.join([str(FRAMES), os.environ.get("PYTHONPATH", "")]))
            machines.start_agent("m1").wait_joined(60)
        cluster = stack.enter_context(machines.connect())
        made = Scene(machines, cluster, frames)
        eventually(made.served, "both machines are there")
        yield made
        made.check()


@pytest.mark.parametrize(
    ("record", "what"),
    [
        (struct.pack("<HHI", 6, 0, 2) + bytes(8), "sent a short record"),
        (struct.pack("<HHI", 99, 0, 0) + bytes(8), "sent a record of a kind that hosts do not send"),
        (struct.pack("<HHIQIIIIqQQ", 5, 0, 0, 12345, 0, 0, 1, 0, 0, 0, 0), "sent a completion of"),
        (struct.pack("<HHIQ", 12, 0, 0, 777), "sent the end of a hold that it has not"),
    ],
    ids=["short", "unknown", "done", "hold"],
)
def test_one_record_ends_its_machine_alone(scene: Scene, record: bytes, what: str) -> None:
    scene.check()
    scene.say(record)
    eventually(lambda: f"host {scene.host} {what}" in scene.log(), "the machine is evicted")
    assert f"the agent m1 of island {scene.host} is lost" in scene.log()
    scene.check()
    eventually(scene.served, "its agent has dialled again")


def test_a_host_fails_no_values_of_others(scene: Scene) -> None:
    """It says of each handle that a client may have that its value has failed."""
    where = pw.make_virtual_device_set(scene.cluster).add_slice(devices=1, island=scene.island)
    slow = pw.jit(lambda n, x: jax.lax.fori_loop(0, n, lambda _, v: jax.numpy.sin(v) + 1, x).sum(), devices=where)
    x = np.ones(1 << 14, np.float32)
    want = np.asarray(slow(np.int32(20000), x))
    text = b"HostLostError: forged by another machine"
    pending = slow(np.int32(20000), x)
    for generation in range(1, 4):
        for first in range(0, 1 << 10, 256):
            handles = range(first, first + 256)
            records = [
                struct.pack("<HHIQII", 6, 0, client, generation << 32 | handle, len(text), 0) + text
                for handle in handles
                for client in (1, 2)
            ]
            scene.say(records[0])
            for each in range(0, len(records), 128):
                scene._frames.with_suffix(".new").write_bytes(
                    b"".join(
                        frame(scene.host, number, record) for number in (0, 1) for record in records[each : each + 128]
                    )
                )
                scene._frames.with_suffix(".new").rename(scene._frames)
                eventually(lambda: not scene._frames.exists(), "the agent has sent it")
    np.testing.assert_array_equal(np.asarray(pending), want)
    assert not [text for text in scene.log().splitlines() if "forged" in text]


def test_random_records(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    """For a while; the seed is printed, PATHWAYS_SEED repeats it. PATHWAYS_FUZZ_EACH: for so many seconds."""
    seed = int(os.environ.get("PATHWAYS_SEED", random.randrange(1 << 32)))
    draw = random.Random(seed)
    until = time.monotonic() + float(os.environ.get("PATHWAYS_FUZZ_EACH", 8))
    said = 0

    def word() -> int:
        bits = draw.choice((0, 1, 2, draw.getrandbits(6), draw.getrandbits(32), draw.getrandbits(64)))
        return draw.choice((bits, draw.randrange(8) << 32 | draw.randrange(64)))

    while time.monotonic() < until:
        kind = draw.choice((5, 5, 6, 6, 12, 13, 13, 14, 14, 10, 19, 1, 2, 7))
        head = struct.pack("<HHI", kind, draw.choice((0, 1, 2, 4)), draw.randrange(4))
        scene.say(head + b"".join(struct.pack("<Q", word()) for _ in range(draw.choice((1, 2, 2, 3, 7)))))
        scene.check()
        eventually(scene.served, "both machines are there again", 120)
        said += 1
    losses = scene.log().count("the agent m1 ")
    with capsys.disabled():
        print(f"\nPATHWAYS_SEED={seed}: {said} records, {scene.checked} values right, {losses} lines of losses")
    assert said > 1
