"""TRUST-1 by mutation, at each port of a cluster with agents: what an honest caller sends, recorded and then changed at
random, beside a client that trains all the time and whose every value is checked. Nobody dies, nothing is written to a
log that a fault of the cluster would write, and each port serves as before.

    the port           what comes before TLS and within it: first lines with and without tokens
    links              frames of a machine that has joined
    control            the tunnel to the controller's gRPC server: HTTP/2
    sessions           what an agent and its hosts say in their gRPC calls, in good protobuf and in bad
    streams            where hosts receive transfers: the two connections of a stream within TLS, frames, and transfers

PATHWAYS_FUZZ_EACH says for how many seconds each (2), PATHWAYS_SEED repeats what a run draws. The native half of the
same, under AddressSanitizer: `make fuzz-ports` runs both.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import psutil
import pytest
from chunks import chunk
from false_hosts import FalseMachine
from hostile_cases import FalseAgent, Log, plain, raw_tls
from hostile_scene import Scene, machine_of, stream_of, stream_port
from recorded_calls import recorded
from stream_cases import StreamRefusedError, framed, hello, say
from trust_cases import read_all

from pathways import errors
from pathways.protocol import agent_pb2 as pb_agent
from pathways.protocol import control_pb2 as pb
from pathways.trust import Credentials, Role, dial, first_line

SECONDS = float(os.environ.get("PATHWAYS_FUZZ_EACH", "2"))

#: A trace in a log. gRPC writes some of its own, about callers that make no sense; none may have a line of ours.
TRACE = re.compile(r"Traceback \(most recent call last\):\n(?:  .*\n)+.*")

pytestmark = [pytest.mark.slow, pytest.mark.watchdog(240 + 8 * SECONDS)]


class Mutator:
    """Seeded changes of byte streams."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def changed(self, text: bytes) -> bytes:
        """Some bytes are others, a part is missing, comes twice, or is new; or the stream ends early."""
        made = bytearray(text)
        for _ in range(self.random.randrange(1, 6)):
            at = self.random.randrange(len(made) + 1)
            match self.random.randrange(6):
                case 0:
                    made[at : at + 1] = self.random.randbytes(1)
                case 1:
                    del made[at : at + self.random.randrange(1, 20)]
                case 2:
                    made[at:at] = self.random.randbytes(self.random.randrange(1, 20))
                case 3:
                    made[at:at] = made[at : at + self.random.randrange(1, 100)]
                case 4:
                    number = self.random.choice((0, 1, 0x7F, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 63, (1 << 64) - 1))
                    made[at : at + 8] = number.to_bytes(8, self.random.choice(("little", "big")))
                case _:
                    if self.random.random() < 0.3:
                        del made[at:]
        return bytes(made)


class Campaign:
    """The cluster, its innocent client, and how many inputs each port got."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.seed = int(os.environ.get("PATHWAYS_SEED", random.SystemRandom().randrange(1 << 32)))
        print(f"PATHWAYS_SEED={self.seed}")
        self.counts: dict[str, int] = {}
        controller = psutil.Process(scene.client.stats()["controller"]["pid"])
        self.processes = [controller, *(psutil.Process(scene.client.stats()["hosts"][n]["pid"]) for n in (0, 1))]

    def play(self, port: str, attempts: Callable[[Mutator], Iterator[int]]) -> None:
        """Makes attempts for so many seconds. Each yields how many inputs it made."""
        mutator, count, began = Mutator(self.seed ^ zlib.crc32(port.encode())), 0, time.monotonic()
        before = [process.memory_info().rss for process in self.processes]
        steps = self.scene.innocent.steps
        for made in attempts(mutator):
            count += made
            if time.monotonic() - began > SECONDS:
                break
        self.scene.innocent.goes_on()
        grown = [(process.memory_info().rss - old) >> 10 for process, old in zip(self.processes, before, strict=True)]
        took = time.monotonic() - began
        print(
            f"{port}: {count} inputs in {took:.1f} s beside {self.scene.innocent.steps - steps} steps; KiB that the "
            f"controller and two hosts have grown: {grown}"
        )
        self.counts[port] = count
        assert count > 0
        self.check()

    def check(self) -> None:
        """Everybody lives, and no log has the trace of a fault."""
        assert all(process.is_running() for process in self.processes)
        for what in (None, "m0", "m1", 0, 1):
            traces = TRACE.findall(Log(self.scene.machines.handle.address, what).text())
            assert not [trace for trace in traces if "/pathways/" in trace]


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    scene = Scene(tmp_path_factory.mktemp("fuzz"))
    made = Campaign(scene)
    yield made
    scene.close()
    print(f"seed {made.seed}: {made.counts}")


def send(sock: socket.socket, data: bytes) -> None:
    """Sends it, ends the stream, and reads what the other end says to it."""
    with contextlib.suppress(OSError):
        sock.sendall(data)
        socket.socket.shutdown(sock, socket.SHUT_WR)
    read_all(sock)


def test_the_port(campaign: Campaign) -> None:
    scene = campaign.scene
    token = scene.tokens.make(Role.HOST, 3600)
    lines = [
        first_line.hello("join", {"token": token, "name": "fuzz", "request": "x" * 300}),
        first_line.hello("renew", {"request": "x" * 300}),
        first_line.hello("authority", {}),
        first_line.hello("link-down", {"session": "0" * 32}),
        first_line.hello("link-up", {"hosts": 1, "devices_per_host": 1, "platform": "cpu", "jax": "0", "ports": [1]}),
        first_line.hello("control", {}),
    ]
    handshake = recorded_handshake(scene)

    def attempts(mutator: Mutator) -> Iterator[int]:
        while True:
            if mutator.random.random() < 0.4:
                with plain(scene.port) as sock:
                    send(sock, mutator.changed(mutator.random.choice([handshake, *lines])))
            else:
                own = mutator.random.choice([None, scene.host])
                with raw_tls(scene.port, own) as secure:
                    send(secure, mutator.changed(mutator.random.choice(lines)))
            yield 1

    campaign.play("the port", attempts)


def recorded_handshake(scene: Scene) -> bytes:
    """The first bytes of an honest caller."""
    import ssl

    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = scene.host.client_context()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="controller.pathways").do_handshake()
    return outgoing.read()


def frames_of(generator: random.Random, incarnation: int) -> list[bytes]:
    """What an agent may send, of each kind: see csrc/link/frames.h. Its host is 2, and others are named, too."""

    def frame(kind: int, a: int, b: int, payload: bytes) -> bytes:
        return struct.pack("<IHHIi", len(payload), kind, 0, a, b) + payload + bytes(-len(payload) % 8)

    def record() -> bytes:
        header = struct.pack("<HHI", generator.randrange(1, 40), 0, generator.randrange(3))
        return header + generator.randbytes(8 * generator.randrange(12))

    host = generator.choice((2, 2, 2, 0, 1, 3))
    return [
        frame(2, host, incarnation, record()),
        frame(3, host, incarnation, struct.pack("<II", 2, incarnation) + record()),
        frame(5, 1, 0, struct.pack("<QQQ", 64, 0, 1) + generator.randbytes(64)),
        frame(6, 1, host, struct.pack("<QQ", 64, 1)),
        frame(7, 0, 0, struct.pack("<q", 12345)),
        frame(8, 0, 0, struct.pack("<q", time.monotonic_ns())),
    ]


def test_links(campaign: Campaign) -> None:
    """A machine that has joined with a good certificate. Most of what it sends breaks its link; then it joins again."""
    scene = campaign.scene

    def attempts(mutator: Mutator) -> Iterator[int]:
        while True:
            try:
                agent = FalseAgent(scene.port, scene.host).complete()
            except errors.PathwaysError as error:  # its last link is not over yet
                assert "is in this cluster already" in str(error) or "no link of this machine" in str(error), error
                time.sleep(0.02)
                yield 0
                continue
            with contextlib.closing(agent):
                agent.read()
                count = 0
                with contextlib.suppress(OSError):
                    incarnation = scene.client.stats()["hosts"][2]["restarts"]
                    for _ in range(200):
                        stream = b"".join(mutator.random.sample(frames_of(mutator.random, incarnation), 3))
                        agent.sending.sendall(mutator.changed(stream) if mutator.random.random() < 0.2 else stream)
                        count += 1
            yield count

    campaign.play("links", attempts)


def test_control(campaign: Campaign) -> None:
    scene = campaign.scene
    streams = [recorded(f"/pathways.{name}/Session", [b"\x0a\x04\x08\x02\x10\x01"]) for name in ("Agents", "Hosts")]

    def attempts(mutator: Mutator) -> Iterator[int]:
        while True:
            with dial(scene.port, scene.host, "control") as sock:
                sock.settimeout(0.1)  # some wait for an answer
                text = mutator.changed(mutator.random.choice(streams))
                if mutator.random.random() < 0.2:
                    with contextlib.suppress(OSError):
                        sock.sendall(text)
                    read_all(sock)
                else:
                    send(sock, text)
            yield 1

    campaign.play("control", attempts)


def reports_of(generator: random.Random, incarnation: int) -> tuple[list[bytes], list[bytes]]:
    """What an agent may say of its host 2, and what that host may say."""
    number = generator.choice((0, 0, 1, 2, 3, 1 << 20, -1, (1 << 31) - 1))
    error = pb.Error(type=generator.choice(("ProgramError", "", "x")), message="m" * generator.choice((0, 9, 70_000)))
    there = {"host": generator.choice((2, 2, 2, 0, 1, number)), "incarnation": generator.choice((incarnation, number))}
    of_agent: list[Any] = [
        pb_agent.AgentReport(started=pb_agent.FarHostStarted(**there, pid=number)),
        pb_agent.AgentReport(ended=pb_agent.FarHostEnded(**there, returncode=number, log_tail="tail")),
        pb_agent.AgentReport(log_piece=pb_agent.LogPiece(request=number, data=b"a log", end=number, size=number)),
    ]
    memory = pb.ProgramMemory(
        devices=[pb.ProgramMemory.DeviceNeed(device=number, peak=number, eager=number)],
        results=[pb.ProgramMemory.Result(mesh=number, bytes=number, same_as=number)],
        donated=[number],
    )
    answers: list[dict[str, Any]] = [
        {"stage": pb.HostStage(stage=generator.randrange(7), detail="d", device_bytes=number)},
        {"client_attached": error},
        {"program_stored": pb.Answer(number=number, error=error)},
        {"program_compiled": pb.ProgramCompiled(program_id=number, error="", memory=memory)},
        {"stats": pb.HostCounts(runs=1 << 60, oldest_runs=["x"])},
        {"analysis": pb.Analysis(error="e")},
        {"peers_replaced": pb.PeersReplaced(refused=[pb.Answer(number=number, error=error)])},
        {"client_offloaded": pb.ClientOffloaded(error="e", bytes=number)},
        {"callback": pb.CallbackPart(client=number, host=number, incarnation=incarnation, call=number, data=b"d")},
        {"traced": pb.TracePart(host=number, records=b"r" * 17, now_ns=number)},
    ]
    of_host = [pb.HostReport(request=generator.choice((0, number, 1, 2)), **answer) for answer in answers]
    return [each.SerializeToString() for each in of_agent], [each.SerializeToString() for each in of_host]


def test_sessions(campaign: Campaign) -> None:
    """By a machine that has joined with a good certificate, and knows its secrets."""
    scene = campaign.scene

    def said(mutator: Mutator, of_host: bool, incarnation: int, most: int) -> list[bytes]:
        found = [mutator.random.choice(reports_of(mutator.random, incarnation)[of_host]) for _ in range(most)]
        return [mutator.changed(text) if mutator.random.random() < 0.2 else text for text in found]

    def attempts(mutator: Mutator) -> Iterator[int]:
        while True:
            count = 0
            try:
                with contextlib.closing(FalseMachine(scene.port, scene.host)) as there:
                    start = there.next_start()
                    of_host = said(mutator, True, start.incarnation, mutator.random.choice((5, 50)))
                    of_agent = said(mutator, False, start.incarnation, 50)
                    count = len(of_host) + len(of_agent)
                    with contextlib.suppress(grpc.RpcError):
                        for _ in there.say_as_host(start, iter(of_host), 10):
                            pass
                    for report in of_agent:
                        there.say(report)
                    there.over.wait(1)
            except (errors.PathwaysError, LookupError) as error:  # its last link is not over yet
                assert re.search("already|no link of this machine|the session is over", str(error)), error
                time.sleep(0.02)
            yield count

    campaign.play("sessions", attempts)


def messages_of_transfers(generator: random.Random) -> list[bytes]:
    """Messages as hosts send them, for runs that the innocent client never reaches. A run that it reaches would fail:
    the attacker has the certificate of the sender's machine, and a host keeps what that machine sends early."""
    words = [0, 1, 5, 1, 5, 1, 0, 0, 0, 0, 5, 0]  # a copy plan
    chunks = [chunk(generator.randrange(1 << 30, 1 << 31), 1, host, b"hello", copy_plan=words) for host in (0, 1)]
    return [chunks[0], b"".join(chunks)]


@pytest.mark.parametrize("host", [0, 1])
def test_streams(campaign: Campaign, host: int) -> None:
    """By a machine whose hosts may send there."""
    scene = campaign.scene
    where, named = stream_port(scene, host), stream_of(scene, host)
    own = Credentials.load(os.path.join(scene.machines.folder, f"{machine_of(scene, 1 - host)}.pem"))
    secret = scene.secrets[1 - host]
    begins = [hello(bytes(16), which, secret.encode()) for which in (0, 1)]
    stream = b"".join([*begins, *map(framed, messages_of_transfers(random.Random(1)))])
    handshake = recorded_handshake(scene)

    def attempts(mutator: Mutator) -> Iterator[int]:
        while True:
            messages = [mutator.random.choice(messages_of_transfers(mutator.random)) for _ in range(8)]
            for sent in (
                [framed(mutator.changed(message)) for message in messages],
                [mutator.changed(b"".join(map(framed, messages)))],
            ):
                with contextlib.suppress(OSError, StreamRefusedError):
                    say(named, own, sent, secret)
            with raw_tls(where, own) as secure:
                secure.settimeout(0.1)
                with contextlib.suppress(OSError):
                    secure.sendall(mutator.changed(stream))
                read_all(secure)
            with plain(where) as sock:
                send(sock, mutator.changed(handshake))
            yield 18

    campaign.play(f"streams of host {host}", attempts)
