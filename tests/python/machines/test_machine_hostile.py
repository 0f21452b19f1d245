"""Machines, callers and certificates that mean harm or know no better, at the ports of a real cluster with agents,
beside a client that trains all the time: each bad input is an error at whoever did it, a line in the log of the one who
refused it, and nothing for anybody else. At its end the file prints a table of what was tried.

The port alone, with doubles behind it: test_trust_hostile.py, test_trust_roles.py. One direction of a cable cut:
test_machine_namespaces.py. Mutated bytes: test_machine_fuzz.py.

Map from label to test:
    CERT-1  test_a_wrong_role, test_transfers_in_the_name_of_another_machine
    CERT-4  test_slow_and_silent_callers
    LINK-4  test_an_agent_that_breaks_the_protocol
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import struct
import time
from collections.abc import Iterator

import grpc
import numpy as np
import psutil
import pytest
from call_frames import call_of_no_text, call_until_message, padded_message
from chunks import chunk
from control_clusters import eventually
from false_hosts import FalseMachine
from hostile_cases import FalseAgent, Log, plain, raw_tls, refusal, says_hello
from hostile_scene import Scene, machine_of, send, stream_of, stream_port, tunnel
from machines import MachineCluster
from role_calls import client_is_refused, machine_is_refused
from stream_cases import StreamRefusedError, framed, say
from trust_cases import read_all

import pathways as pw
from pathways import errors
from pathways.agent.link_door import OPEN_TIMEOUT_S
from pathways.cluster.agent_launcher import AgentHandle
from pathways.cluster.launcher import Listening, start_local_cluster
from pathways.process.config import PROTOCOL_VERSION
from pathways.protocol import agent_pb2_grpc as agent_rpc
from pathways.protocol import control_pb2 as pb_control
from pathways.protocol import control_pb2_grpc as control_rpc
from pathways.protocol import wire
from pathways.trust import Credentials, Role, dial, dial_answered, join

pytestmark = pytest.mark.slow

#: Whom each purpose of the port is for; every other role is refused.
PURPOSES = {
    **dict.fromkeys(("link-up", "link-down", "control"), (Role.HOST,)),
    **dict.fromkeys(("client-up", "client-down", "session", "console"), (Role.CLIENT, Role.OPERATOR)),
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    scene = Scene(tmp_path_factory.mktemp("hostile"))
    yield scene
    scene.close()


@pytest.fixture
def scene(played: Scene) -> Iterator[Scene]:
    """Before and after each test the innocent client trains, and the hosts are the same."""
    pids = [host["pid"] for host in played.client.stats()["hosts"]]
    yield played
    played.innocent.goes_on()
    assert [host["pid"] for host in played.client.stats()["hosts"]] == pids
    for what in (None, "m0", "m1", 0, 1):
        text = Log(played.machines.handle.address, what).text()
        assert "Traceback" not in text, text[text.index("Traceback") - 500 :][:3000]


# Who comes in.


def test_no_certificate(scene: Scene) -> None:
    with scene.log.says("no certificate was shown", len(PURPOSES)):
        for purpose in PURPOSES:
            said = says_hello(scene.port, None, purpose)
            assert said.startswith("PermissionDeniedError: no certificate was shown: join with a token first"), said
    scene.counts.add("no certificate", len(PURPOSES), len(PURPOSES), len(PURPOSES))


def test_another_cluster_s_certificate(scene: Scene) -> None:
    """The caller finds out by itself. One that does not care is told by an alert of TLS."""
    for purpose in PURPOSES:
        with scene.log.says("does not accept this cluster's certificate"):
            said = refusal(lambda purpose=purpose: dial(scene.port, scene.foreign, purpose))
        assert "is not of this cluster: its certificate is another authority's" in said
        with scene.log.says("showed a certificate of another cluster's authority"):
            assert says_hello(scene.port, scene.foreign, purpose).startswith(("None: None", "no answer"))
    scene.counts.add("another cluster's certificate", 2 * len(PURPOSES), len(PURPOSES), 2 * len(PURPOSES))


def test_tokens_that_are_over(scene: Scene) -> None:
    expired, used = scene.tokens.make(Role.HOST, 0.01), scene.tokens.make(Role.HOST, 600)
    client = scene.tokens.make(Role.CLIENT, 600)
    join(scene.port, used, "first")
    time.sleep(0.05)
    for name, token, words in (
        ("late", expired, "has expired 1 s ago; make a new one with `pathways token`"),
        ("second", used, "was used 1 of 1 times; make a new one with `pathways token`"),
        ("guest", client, "guest has the role client, and 'link-up' is for host: make a token of that role"),
    ):
        with scene.log.says(words):
            assert words in refusal(lambda name=name, token=token: scene.agent(name, token))
        scene.counts.add(f"an agent with a token that {'is for clients' if name == 'guest' else words[4:16]}", 1, 1, 1)


def test_a_wrong_role(scene: Scene) -> None:
    """Each role for each purpose that is not its own."""
    for role in (Role.CLIENT, Role.OPERATOR, Role.HOST):
        own = join(scene.port, scene.tokens.make(role, 600), f"some-{role}")
        for purpose, allowed in PURPOSES.items():
            if role not in allowed:
                whom = " or ".join(sorted(allowed))
                words = f"some-{role} has the role {role}, and '{purpose}' is for {whom}: make a token of that role"
                with scene.log.says(words):
                    said = refusal(lambda own=own, purpose=purpose: dial(scene.port, own, purpose))
                assert said.startswith("PermissionDeniedError: " + words)
                scene.counts.add("a wrong role", 1, 1, 1)


def test_a_link_that_is_somebody_else_s(scene: Scene) -> None:
    """Nobody takes the second connection of another machine's link, nor its session, with whatever secret."""
    with scene.log.says("no link of this machine waits for its second connection", 2):
        for session in ("0" * 32, ""):
            said = refusal(lambda session=session: dial(scene.port, scene.host, "link-down", session=session))
            assert "no link of this machine waits for its second connection" in said
            scene.counts.add("the second connection of another's link", 1, 1, 1)
    with contextlib.ExitStack() as stack:
        channel = stack.enter_context(grpc.insecure_channel(f"unix:{tunnel(scene, stack)}"))
        for call in (
            lambda: list(agent_rpc.AgentsStub(channel).Session(iter([]), metadata=wire.bearer("0" * 32), timeout=20)),
            lambda: list(control_rpc.HostsStub(channel).Session(iter([]), metadata=wire.bearer("0" * 32), timeout=20)),
            lambda: control_rpc.ControllerStub(channel).Drain(pb_control.DrainRequest(machine="m0"), timeout=20),
        ):
            with pytest.raises(grpc.RpcError, match="the call came by no open connection to this cluster"):
                call()
            scene.counts.add("another's session, and what only clients may call", 1, 1)


def test_what_a_role_may_call(scene: Scene) -> None:
    """Each method, by its description: a machine calls none of those for clients, and a client none of those for hosts
    and operators."""
    own = join(scene.port, scene.tokens.make(Role.CLIENT, 600), "curious")
    session, welcome = dial_answered(scene.port, own, "session")
    with contextlib.closing(FalseMachine(scene.port, scene.host)) as there, contextlib.ExitStack() as stack:
        stack.enter_context(session)
        machine = stack.enter_context(grpc.insecure_channel(f"unix:{tunnel(scene, stack)}"))
        client = stack.enter_context(grpc.insecure_channel(f"unix:{tunnel(scene, stack, own, 'console')}"))
        for secret in (there.agent.welcome["session"], there.next_start().token):
            scene.counts.add("a machine calls what is for clients", tried := machine_is_refused(machine, secret), tried)
        scene.counts.add("a client calls what is for others", tried := client_is_refused(client, welcome), tried)


def test_the_messages_of_calls_have_a_bound(scene: Scene) -> None:
    """LINK-4: the controller looks at what comes by the tunnels of machines and of clients (test_call_room.py). Of all
    that it refuses there, padding is what no server of gRPC would.
    """
    client = join(scene.port, scene.tokens.make(Role.CLIENT, 600), "padding")
    for own, purpose in ((scene.host, "control"), (client, "console")):
        with dial(scene.port, own, purpose) as sock:
            sock.settimeout(20)
            sock.sendall(call_until_message() + padded_message())
            with contextlib.suppress(ConnectionError):  # and no TimeoutError
                while sock.recv(1 << 16):
                    pass
        scene.counts.add("calls that the controller cannot count", 1, 1)


def test_a_method_that_is_no_text(scene: Scene) -> None:
    """FAULT-1: it would end the server of gRPC for everybody (test_control_server.py). It ends its connection alone."""
    client = join(scene.port, scene.tokens.make(Role.CLIENT, 600), "no-text")
    for own, purpose in ((scene.host, "control"), (client, "console")):
        for _ in range(20):
            with dial(scene.port, own, purpose) as sock:
                sock.sendall(call_of_no_text("/pathways.Controller/Stats"))
                read_all(sock)
            assert scene.client.stats()["clients"]
        scene.counts.add("a method of gRPC that is no text", 20, 20)
    assert "begins anew" not in scene.log.text()


# What does not fit.


def test_versions_that_differ(scene: Scene) -> None:
    for changes, words in (
        ({"jaxlib": "0.0.1"}, "the agent has jaxlib '0.0.1', the cluster "),
        ({"jax": "99.0"}, "the agent has jax '99.0', the cluster "),
        ({"platform": "cuda"}, "the agent has platform 'cuda', the cluster 'cpu'"),
        ({"jaxlib": None}, "the agent has jaxlib 'None', the cluster "),
        ({"jaxlib": "x" * 60000}, "the agent has jaxlib 'xxxx"),
    ):
        with scene.log.says(words):
            said = refusal(lambda changes=changes: FalseAgent(scene.port, scene.host, **changes))
        assert said.startswith("UnsupportedVersionError") and words in said and "use the same on both sides" in said
        assert max(map(len, scene.log.text().splitlines())) < 1000, "a caller does not fill the log"
        scene.counts.add("another jax, jaxlib or platform", 1, 1, 1)
    line = b'{"purpose": "link-up", "protocol": %d}\n' % (PROTOCOL_VERSION + 1)
    words = f"the caller speaks protocol {PROTOCOL_VERSION + 1}, and the other end {PROTOCOL_VERSION}: install the same"
    with scene.log.says(words), raw_tls(scene.port, scene.host) as sock:
        sock.sendall(line)
        assert words in read_all(sock).decode()
    scene.counts.add("another version of the protocol", 1, 1, 1)


def test_what_an_agent_brings_makes_no_sense(scene: Scene) -> None:
    long = "x" * 50000
    for changes, words in (
        ({"hosts": 2, "ports": [9, 9]}, "an island of this cluster has 1 hosts of 1 devices: start the agent with"),
        ({"devices_per_host": 8}, "the agent brings 1 hosts of 8 devices, but an island of this cluster has 1 hosts"),
        ({"hosts": long}, "start the agent with --hosts 1 --devices-per-host 1"),
        ({"ports": long}, "the agent's ports make no sense"),
        ({"ports": [0]}, "the agent's ports make no sense"),
        ({"ports": [1 << 16]}, "the agent's ports make no sense"),
        ({"ports": []}, "the agent has 0 ports for 1 hosts"),
        ({"island": "0"}, "island '0' has places for 0 hosts, and the agent brings 1: the others are taken by 0: m"),
        ({"island": 0}, "is no name"),
        ({"island": long}, "is no name"),
        ({"island": [1]}, "the island '[1]' is no name"),
        ({"fabric": "10.1.2.3"}, "the agent's fabric makes no sense: '10.1.2.3'"),
        ({"fabric": "10.1.2.3:0"}, "the agent's fabric makes no sense"),
        ({"fabric": "host.example:7"}, "the agent's fabric makes no sense"),
        ({"fabric": long}, "the agent's fabric makes no sense"),
        ({"fabric": "link:"}, "the agent's fabric makes no sense"),
        ({"fabric": "link:65536"}, "the agent's fabric makes no sense"),
        ({"fabric": [1]}, "the agent's fabric makes no sense"),
    ):
        with scene.log.says(words):
            assert words in refusal(lambda changes=changes: FalseAgent(scene.port, scene.host, **changes))
        assert max(map(len, scene.log.text().splitlines())) < 1000, "a caller does not fill the log"
        scene.counts.add("hosts, devices, ports or a place that do not fit", 1, 1, 1)


def test_a_machine_without_the_asked_devices(scene: Scene) -> None:
    """It finds out before it calls anybody, so the controller hears nothing."""
    said = refusal(lambda: scene.agent("poor", scene.tokens.make(Role.HOST, 600), platform="cuda", devices_per_host=8))
    assert "need 8 cuda devices, but this machine shows 0; ask for fewer, or for platform='cpu'" in said
    scene.counts.add("a machine without the asked devices", 1, 1)


def test_two_agents_with_one_name(scene: Scene) -> None:
    """With a key of its own, and with a copy of the file of the one that is there."""
    words = "the name 'm1' belongs to another machine of this cluster"
    with scene.log.says(words):
        assert words in refusal(lambda: scene.agent("m1", scene.tokens.make(Role.HOST, 600)))
    Credentials.load(os.path.join(scene.machines.folder, "m1.pem")).save(str(scene.folder / "m1.pem"))
    words = "a machine called m1 is in this cluster already: give this one another --name"
    with scene.log.says(words):
        assert words in refusal(lambda: scene.agent("m1", ""))
    scene.counts.add("two agents with one name", 2, 2, 2)


@pytest.mark.parametrize("what", ["futures", "ring_bytes", "arena_bytes"])
def test_a_client_that_wants_the_heads_memory(scene: Scene, what: str) -> None:
    """Of what a client may keep at the head, its own word is the bound, so that has one."""
    own = join(scene.port, scene.tokens.make(Role.CLIENT, 600), "greedy")
    session, welcome = dial_answered(scene.port, own, "session")
    much = {"futures": 1 << 17, "ring_bytes": 1 << 21, "arena_bytes": psutil.virtual_memory().total // 4 + (1 << 30)}
    with session:
        sizes = {"futures": 64, "ring_bytes": 4096, "arena_bytes": 4096, what: much[what]}
        said = refusal(lambda: dial_answered(scene.port, own, "client-up", session=welcome["session"], **sizes))
    assert said.startswith(f"ConnectError: a client's {what} is from "), said
    scene.counts.add("a client with a huge block", 1, 1)


def test_addresses(scene: Scene) -> None:
    """Nobody hears of these but who gave the address."""
    token = scene.tokens.make(Role.HOST, 600)
    not_started = "ConnectError: the cluster did not start"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        listening = Listening(f"127.0.0.1:{number}", str(scene.folder / "another"))
        words = f"{not_started}: cannot listen at 127.0.0.1:{number}: another process has this port"
        assert refusal(lambda: start_local_cluster(1, 1, 1, platform="cpu", listen=listening)).startswith(words)
    nowhere = Listening("127.0.0.1:0", "/proc/authority")
    assert refusal(lambda: start_local_cluster(1, 1, 1, platform="cpu", listen=nowhere)) == (
        f"{not_started}: the authority cannot be kept in /proc/authority: No such file or directory"
    )
    for address, words in (
        ("pathways://nowhere.invalid:7400", "the name 'nowhere.invalid' has no address: look at its spelling"),
        (f"pathways://127.0.0.1:{number}", "nothing listens at 127.0.0.1"),
        ("nowhere", "expected pathways://"),
    ):
        assert words in refusal(
            lambda address=address: AgentHandle(address, token, str(scene.folder / "x.pem"), name="x", platform="cpu")
        )
    scene.counts.add("an address of nobody, a port in use, a folder that cannot be made", 5, 5)


# Bytes.


def test_garbage_on_the_port(scene: Scene) -> None:
    """Before TLS and within it. Whoever speaks no TLS gets no words, unless it is a browser."""
    generator = random.Random(12)
    with scene.log.says("the caller does not", 20):
        for _ in range(20):
            with plain(scene.port) as sock:
                sock.sendall(generator.randbytes(200))
                read_all(sock)
    with scene.log.says("broke off during the handshake", 20):
        for cut in range(1, 21):
            with plain(scene.port) as sock:
                sock.sendall((b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200))[: 5 * cut])
    with scene.log.says("a first line is JSON", 20):
        for _ in range(20):
            with raw_tls(scene.port, scene.host) as sock:
                sock.sendall(generator.randbytes(100).replace(b"\n", b"x") + b"\n")
                assert b"a first line is JSON in UTF-8" in read_all(sock)
    scene.counts.add("garbage and halves on the port", 60, 20, 60)


def test_slow_and_silent_callers(scene: Scene) -> None:
    """More than there are places, of all kinds at once, for 7 s: no training step and no good caller waits for them."""
    with scene.log.says("did not finish the handshake and its first line in time"), contextlib.ExitStack() as stack:
        callers = [stack.enter_context(plain(scene.port)) for _ in range(60)]
        for sock in callers[:20]:
            sock.sendall(b"\x16\x03\x01")
        slow = [stack.enter_context(raw_tls(scene.port, scene.host)) for _ in range(4)]
        line = iter(b'{"purpose": "' + b"x" * 1000)
        end = time.monotonic() + 7
        while time.monotonic() < end:
            byte = bytes([next(line)])
            for sock in slow:
                with contextlib.suppress(OSError):
                    sock.sendall(byte)
            scene.innocent.goes_on(1)
            time.sleep(0.1)
        join(scene.port, scene.tokens.make(Role.HOST, 600), "patient")
        assert all(read_all(sock) == b"" for sock in callers)
        assert all(b'"ok"' not in read_all(sock) for sock in slow)
    scene.counts.add("slow and silent callers of the port", 64, 0, 1)


def frame(count: int, kind: int, a: int, b: int, payload: bytes = b"") -> bytes:
    return struct.pack("<IHHIi", count, kind, 0, a, b) + payload


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (random.Random(5).randbytes(4096), "it broke the protocol: "),
        (frame(1 << 31, 7, 0, 0), "it broke the protocol: .* a frame of 2147483648 bytes"),
        (frame(64, 99, 2, 1, bytes(64)), "it broke the protocol: .* a frame of kind 99"),
        (frame(64, 2, 0, 1, bytes(64))[:30], "the other end closed the connection"),
        (frame(64, 1, 2, 1, bytes(64)), "it broke the protocol: .* kind 1, which this end does not take"),
        (b"", "nothing was heard of it for 4.5 s"),
    ],
    ids=["garbage", "too long", "no such kind", "half a frame", "the other end's", "silence"],
)
def test_an_agent_that_breaks_the_protocol(scene: Scene, sent: bytes, why: str) -> None:
    """It has a good certificate and a place. Its link breaks, its place is free again."""
    agent = FalseAgent(scene.port, scene.host).complete()
    assert agent.welcome["island"] == 2
    with contextlib.closing(agent):
        eventually(lambda: "evil" in machine_names(scene), "it has joined")
        with scene.log.says("the agent evil of island 2 is lost: "):
            agent.sending.sendall(sent)
            if "closed" in why:
                agent.close()
    line = re.findall("the agent evil of island 2 is lost: .*", scene.log.text())[-1]
    assert re.search(why, line), line
    assert "evil" not in machine_names(scene)
    scene.counts.add("an agent that breaks the protocol of the link", 1, 1, 1)


def machine_names(scene: Scene) -> list[str]:
    return [machine["name"] for machine in scene.client.stats()["machines"]]


def comes_and_goes(scene: Scene) -> bool:
    try:
        FalseAgent(scene.port, scene.host).close()
    except errors.ConnectError as error:
        assert "a machine called evil is in this cluster already" in str(error)
        return False
    return True


def test_half_a_link(scene: Scene) -> None:
    """An agent that opens no second connection loses its place after 5 s; one that leaves, at once."""
    with scene.log.says("the agent evil of island 2 is lost: it did not open the second connection of its link"):
        agent = FalseAgent(scene.port, scene.host)
    agent.close()
    with scene.log.says("the agent evil of island 2 is lost: it closed the first connection of its link", 2):
        for _ in range(2):
            began = time.monotonic()
            eventually(lambda: comes_and_goes(scene), "the place is free", 4)
            assert time.monotonic() - began < OPEN_TIMEOUT_S
    scene.counts.add("half a link", 3, 0, 3)


# The ports at which hosts receive transfers.


def test_without_encryption_only_introduced_hosts_send_transfers() -> None:
    """Who can only connect forges nothing; the hosts' own transfers go on."""
    with MachineCluster(2, 1, 1, insecure_plaintext=True) as machines, machines.connect() as client:
        devices = pw.make_virtual_device_set(client)
        one, two = (devices.add_slice(devices=1, island=island) for island in (0, 1))
        double, add = pw.jit(lambda x: x * 2, devices=one), pw.jit(lambda x: x + 1, devices=two)
        x = np.arange(64, dtype=np.uint32)
        assert (np.asarray(add(double(x))) == x * 2 + 1).all()
        process = psutil.Process(client.stats()["hosts"][1]["pid"])
        (port,) = {each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
        with pytest.raises(errors.PermissionDeniedError, match="only hosts that the controller has introduced"):
            say(f"127.0.0.1:{port}", None, [framed(chunk(1 << 40, 1, 0, b"12345678"))])
        assert (np.asarray(add(double(x + 1))) == x * 2 + 3).all()


def test_transfers_in_the_name_of_another_machine(scene: Scene) -> None:
    """CERT-1: a certificate counts for the hosts of its own machine."""
    receiver = 1
    where, log = stream_of(scene, receiver), Log(scene.machines.handle.address, receiver)
    own = Credentials.load(os.path.join(scene.machines.folder, f"{machine_of(scene, 0)}.pem"))
    secret = scene.secrets[0]
    assert send(where, own, 0, secret) == ["nobody waits for it there"], "the true sender is heard"
    theirs = Credentials.load(os.path.join(scene.machines.folder, f"{machine_of(scene, 1)}.pem"))
    client = join(scene.port, scene.tokens.make(Role.CLIENT, 600), "some-client")
    unknown = "only hosts that the controller has introduced send transfers, and machine {} is none of them"
    for sender, caller, shown, words in (
        (0, scene.host, secret, unknown.format("evil")),
        (0, own, "", unknown.format(own.name)),
        (0, own, scene.secrets[1], unknown.format(own.name)),
        (2, own, secret, f"machine {own.name} sends a transfer of host 2, which is not on that machine"),
        (1 << 30, own, secret, f"machine {own.name} sends a transfer of host {1 << 30}, which is not on that machine"),
        (0, theirs, secret, unknown.format(theirs.name)),
        (0, client, secret, f"only hosts send transfers, and client {client.name} is none"),
    ):
        with log.says(f"is refused: {words}"):
            assert send(where, caller, sender, shown) == f"refused: {words}"
        scene.counts.add("transfers in another's name, at a host", 1, 1, 1)
    with pytest.raises(OSError):
        send(where, scene.foreign, 0, secret)
    scene.counts.add("transfers with another cluster's certificate, at a host", 1, 1)


def test_a_machine_that_has_left_sends_no_more(scene: Scene) -> None:
    """CERT-1: what a machine was told when it joined counts until it, or another one, has its place anew."""
    where, log = stream_of(scene, 1), Log(scene.machines.handle.address, 1)
    before = ""
    for _ in range(2):
        with contextlib.closing(FalseMachine(scene.port, scene.host)) as there:
            assert there.next_start().host == 2
            secret = there.agent.welcome["secret"]
            eventually(
                lambda secret=secret: send(where, scene.host, 2, secret) == ["nobody waits for it there"],
                "host 1 was told of the machine",
            )
            if before:
                with log.says("and machine evil is none of them"):
                    assert "is none of them" in send(where, scene.host, 2, before)
                scene.counts.add("transfers of a machine that has left, at a host", 1, 1, 1)
        before = secret


def test_garbage_and_silence_at_a_host(scene: Scene) -> None:
    """Without a certificate, and with the right one."""
    generator = random.Random(13)
    for host in (0, 1):
        where = stream_port(scene, host)
        with contextlib.ExitStack() as stack:
            for _ in range(40):  # silent, for as long as the others are tried
                stack.enter_context(plain(where))
            for _ in range(20):
                half = stack.enter_context(plain(where))
                half.sendall(b"\x16\x03\x01\x02\x00\x01")
            for _ in range(20):
                with plain(where) as sock:
                    sock.sendall(generator.randbytes(300))
                    read_all(sock)
                with plain(where) as sock:
                    sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + generator.randbytes(100))
                    read_all(sock)
            scene.innocent.goes_on(5)
        scene.counts.add("garbage, halves and silence, at a host", 100)
        own = Credentials.load(os.path.join(scene.machines.folder, f"{machine_of(scene, 1 - host)}.pem"))
        log = Log(scene.machines.handle.address, host)
        with log.says("is refused: a", 20):
            for _ in range(20):
                with pytest.raises(StreamRefusedError, match="network transfers"):
                    say(stream_of(scene, host), own, [framed(generator.randbytes(64))], scene.secrets[1 - host])
        scene.counts.add("garbage with a good certificate, at a host", 20, 20, 20)
