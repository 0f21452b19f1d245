"""FAULT-1, SPEAK-1: records of a machine's served host that make no sense end that machine's part in the cluster, and
nothing else. A real agent with a real host says what the test makes up; an innocent client works on another machine.

Map from label to test:
    FAULT-1  test_one_record_ends_its_machine_alone, test_random_records, test_changed_records_of_real_runs
    TRUST-1  test_changed_records_of_a_far_client
    GANG-1   test_a_wrong_count_of_gangs
    SPEAK-1  test_a_host_fails_no_values_of_others
    LINK-2   test_a_host_completes_no_values_of_others
    LINK-4   test_what_one_machine_says_to_another
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np
import pytest
from control_clusters import eventually
from machines import MachineCluster

import pathways as pw
from pathways.trust import Role

FRAMES = pathlib.Path(__file__).parent / "frames_of_an_agent"
TO_CONTROLLER, PEER = 2, 3  # FrameKind
RUN_DONE = 5  # RecordKind
X = np.arange(8, dtype=np.float32)

SEED = int(os.environ.get("PATHWAYS_SEED", random.randrange(1 << 32)))
SECONDS = float(os.environ.get("PATHWAYS_FUZZ_EACH", 8))

pytestmark = [pytest.mark.slow, pytest.mark.watchdog(240 + 2 * SECONDS)]


def frame(host: int, incarnation: int, record: bytes, kind: int = TO_CONTROLLER) -> bytes:
    """A record of a host to the controller, as its link carries it; or to a host."""
    return struct.pack("<IHHIi", len(record), kind, 0, host, incarnation) + record + bytes(-len(record) % 8)


class Scene:
    """Machine m0 with an innocent client, and machine m1, whose agent says what it is told."""

    def __init__(self, machines: MachineCluster, cluster: pw.Cluster, frames: pathlib.Path) -> None:
        self.machines, self.cluster, self.frames = machines, cluster, frames
        islands = {machine["name"]: machine["island"] for machine in cluster.stats()["machines"]}
        self.host = islands["m1"]
        here = pw.make_virtual_device_set(cluster).add_slice(devices=1, island=islands["m0"])
        self._call = pw.jit(lambda x: x * 2 + 1, devices=here)
        self.island = islands["m0"]
        self.checked = 0

    def log(self) -> str:
        directory = os.path.dirname(self.machines.handle.address.removeprefix("unix:"))
        return pathlib.Path(directory, "logs", "controller.log").read_text()

    def losses(self) -> int:
        """How often m1 was lost."""
        return self.log().count("the agent m1 of")

    def say(self, record: bytes, incarnations: range = range(64)) -> None:
        """As the host of m1, in whatever incarnation it is."""
        self.send(b"".join(frame(self.host, number, record) for number in incarnations))

    def send(self, frames: bytes) -> None:
        """Over the link of m1."""
        temporary = self.frames.with_suffix(".new")
        temporary.write_bytes(frames)
        temporary.rename(self.frames)
        eventually(lambda: not self.frames.exists(), "the agent has sent it")

    def change(self, **what: object) -> None:
        """Has m1 change frames of its own: see frames_of_an_agent."""
        pathlib.Path(f"{self.frames}.new").write_text(json.dumps({"seed": 0, "count": 1, **what}))
        os.rename(f"{self.frames}.new", f"{self.frames}.change")
        # (An agent that dials again takes it later.)

    def changed(self) -> int:
        """How many frames it has changed."""
        with contextlib.suppress(FileNotFoundError):
            return pathlib.Path(f"{self.frames}.changed").read_text().count("\n")
        return 0

    def send_of_all_handles(self, record: Callable[[int, int], bytes]) -> None:
        """A record for each handle that a client may have."""
        for generation, first in itertools.product(range(1, 4), range(0, 1 << 10, 64)):
            records = [record(client, generation << 32 | n) for n in range(first, first + 64) for client in (1, 2)]
            self.send(b"".join(frame(self.host, number, each) for number in (0, 1) for each in records))

    def everybody_else(self) -> dict[str, int]:
        """The processes that nothing may end."""
        stats = self.cluster.stats()
        return {"controller": stats["controller"]["pid"], "m0": stats["hosts"][self.island]["pid"]}

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
        machines = stack.enter_context(MachineCluster(2, 1, 2, agents=1))
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
    scene.send_of_all_handles(lambda client, handle: struct.pack("<HHIQII", 6, 0, client, handle, len(text), 0) + text)
    np.testing.assert_array_equal(np.asarray(pending), want)
    assert not [text for text in scene.log().splitlines() if "forged" in text]


def test_a_host_completes_no_values_of_others(scene: Scene) -> None:
    """It says of each handle that a client may have that it is done, with a value of its own."""
    where = pw.make_virtual_device_set(scene.cluster).add_slice(devices=1, island=scene.island)
    slow = pw.jit(lambda n, x: jax.lax.fori_loop(0, n, lambda _, v: jax.numpy.sin(v) + 1, x).sum(), devices=where)
    x = np.ones(1 << 14, np.float32)
    want = np.asarray(slow(np.int32(20000), x))
    for _ in range(20):
        np.asarray(slow(np.int32(1), x))  # it learns that the value is read each time
    value = struct.pack("<IIf", 0, 4, 666.0) + bytes(4)
    began = time.monotonic()
    np.asarray(slow(np.int32(20000), x))
    pending = slow(np.int32(int(20000 * 8 / (time.monotonic() - began))), x)
    scene.send_of_all_handles(lambda client, handle: struct.pack("<HHIQII", 17, 0, client, handle, 1, 0) + value)
    assert not pending.is_ready(), "the slow call must be slower"
    assert np.asarray(pending) != 666
    np.testing.assert_array_equal(np.asarray(slow(np.int32(20000), x)), want)
    assert scene.served()


@pytest.mark.parametrize(
    ("record", "what"),
    [
        (struct.pack("<HHIQII", 7, 0, 0, 1, 0, 600_000) + bytes(600_000), "a record of 600032 bytes to a host"),
        (struct.pack("<HHIQII", 7, 0, 0, 1, 0, 64), "a receive-ready record has 24 bytes"),
        (struct.pack("<HHIQII", 1, 0, 0, 1, 0, 0), "a record is of kind 1"),
    ],
    ids=["long", "short", "kind"],
)
def test_what_one_machine_says_to_another(scene: Scene, record: bytes, what: str) -> None:
    """It is checked before it goes on: the link that brings it breaks, and no other."""
    others = scene.everybody_else()
    numbers = range(3)  # incarnations
    scene.send(
        b"".join(
            frame(scene.island, there, struct.pack("<Ii", scene.host, here) + record, PEER)
            for here in numbers
            for there in numbers
        )
    )
    eventually(lambda: what in scene.log(), "the machine's link is broken")
    scene.check()
    eventually(scene.served, "its agent has dialled again")
    assert scene.everybody_else() == others
    assert "the agent m0 of" not in scene.log()


def test_a_wrong_count_of_gangs(scene: Scene) -> None:
    """GANG-1: the machine that says so is evicted, and nobody else."""
    others = scene.everybody_else()
    there = pw.make_virtual_device_set(scene.cluster).add_slice(devices=1, island=scene.host)
    call = pw.jit(lambda x: x + 1, devices=there)
    np.testing.assert_array_equal(np.asarray(call(X)), X + 1)
    scene.change(kind=RUN_DONE, at=16, bytes=struct.pack("<II", 1, 2).hex())
    eventually(lambda: not os.path.exists(f"{scene.frames}.change"), "the agent has read what to change")
    call(X)
    eventually(lambda: f"host {scene.host} launched 1 of the 2 gangs" in scene.log(), "the machine is evicted")
    scene.check()
    eventually(scene.served, "its agent has dialled again")
    assert scene.everybody_else() == others


def test_random_records(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    """For a while; the seed is printed, PATHWAYS_SEED repeats it. PATHWAYS_FUZZ_EACH: for so many seconds."""
    draw = random.Random(SEED)
    until = time.monotonic() + SECONDS
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
        print(f"\nPATHWAYS_SEED={SEED}: {said} records, {scene.checked} values right, {losses} lines of losses")
    assert said > 1


def play(scene: Scene, address: str, environment: dict[str, str], is_client: bool) -> str:
    """A client with real runs, some of whose frames, or of m1's, are changed. Returns counts.

    A machine that does not say what it should say keeps those waiting who share devices with the runs that wait for it:
    so the innocent client has a device of its own, and m1 is evicted then.
    """
    arguments = [sys.executable, str(FRAMES.parent / "real_runs.py"), address, str(scene.island), str(scene.host)]
    rounds = clients = done = stalls = 0
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        clients += 1
        with subprocess.Popen(
            arguments, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as client:
            assert client.stdout is not None
            while time.monotonic() < until and select.select([client.stdout], [], [], 10 if rounds else 60)[0]:
                line = client.stdout.readline()
                rounds, done = rounds + 1, done + (line == "done\n")
                if not line or (is_client and line != "done\n"):
                    break
                scene.change(seed=SEED + rounds, count=1 + rounds % 3)
                scene.check()
                if not scene.served():
                    eventually(scene.served, "both machines are there again", 120)
            client.kill()
        scene.check()
        if not is_client:
            stalls += 1
            losses = scene.losses()
            scene.say(struct.pack("<HHI", 99, 0, 0) + bytes(8))
            eventually(lambda losses=losses: scene.losses() > losses, "m1 is evicted")
            eventually(scene.served, "both machines are there again", 120)
    eventually(scene.served, "both machines are there again", 120)
    return (
        f"\nPATHWAYS_SEED={SEED}: {scene.changed()} changed frames in {rounds} rounds of {clients} clients, {done} of "
        f"them without an error; {scene.checked} values right, {scene.losses()} losses of m1, "
        f"{stalls} of them at its silence"
    )


def test_changed_records_of_real_runs(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    """m1 changes what its host says in real runs: of their ends, values, transfers, decisions and exchanges."""
    others = scene.everybody_else()
    counts = play(scene, scene.machines.address, {}, False)
    with capsys.disabled():
        print(counts)
    assert scene.everybody_else() == others
    assert "the agent m0 of" not in scene.log()
    assert scene.changed() > 1


def test_changed_records_of_a_far_client(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    """A client on another machine changes what it says: runs, commands, blocks and their bytes, cancels."""
    hosts = [host["pid"] for host in scene.cluster.stats()["hosts"]]
    scene.frames = scene.frames.with_suffix(".client")
    with scene.machines.way_in(Role.CLIENT):
        way_in = {name: os.environ[name] for name in ("PATHWAYS_TOKEN", "XDG_STATE_HOME")}
    path = os.pathsep.join([str(FRAMES), os.environ.get("PYTHONPATH", "")])
    environment = {**way_in, "PATHWAYS_TEST_FRAMES": str(scene.frames), "PYTHONPATH": path}
    counts = play(scene, scene.machines.port, environment, True)
    with capsys.disabled():
        print(counts)
    assert [host["pid"] for host in scene.cluster.stats()["hosts"]] == hosts
    assert scene.changed() > 1
