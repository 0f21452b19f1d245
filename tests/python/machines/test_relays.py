"""Relays: agents that carry the links of other machines to the controller.

Map from label to test:
    CARRY-1  test_what_a_relay_changes, test_who_may_relay_and_be_carried
    CARRY-2  test_a_relay_that_ends, test_a_carried_machine_that_ends
    CERT-1   test_who_may_relay_and_be_carried
    ERR-2    test_a_relay_that_ends, test_a_carried_machine_that_ends
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from control_clusters import eventually
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from jax.sharding import PartitionSpec as P
from machines import MachineCluster
from test_machine_faults import X, agent_process, placed, works

import pathways as pw
from pathways import _native, errors
from pathways.agent import ways
from pathways.agent.link_door import FarLink
from pathways.agent.ways import OpenLink, Ways
from pathways.cluster.agent_launcher import AgentHandle
from pathways.controller.relays import FAN_OUT, Relay, Relays
from pathways.process.run_directory import authority_folder
from pathways.transport.links import Links
from pathways.transport.loop import Loop
from pathways.trust import Credentials, Identity, Role, Tokens, dial, dial_answered, join, new_seal_key, seal_cipher

#: The islands, by the machines that join in this order.
RELAY, FIRST, SECOND, DIRECT = range(4)
#: Frames of a link, as in `csrc/link/frames.h`.
HEADER = struct.Struct("<IHHIi")
PING, PONG, CARRIED = 7, 8, 16


def said_by(carrier: Any) -> bytes:
    """What a carrier has to say now."""
    buffer = bytearray(1 << 20)
    return bytes(buffer[: carrier.collect(memoryview(buffer))])


def sealed_in(said: bytes) -> list[bytes]:
    """The sealed messages of what a carrier says: see `csrc/link/frames.h`."""
    found, at = [], 0
    while at < len(said):
        count, kind, *_ = HEADER.unpack_from(said, at)
        at += HEADER.size
        if kind == CARRIED:
            found.append(said[at : at + count])
        at += (count + 7) // 8 * 8
    return found


class Ends:
    """The two ends of a carried link, and what lies between them."""

    def __init__(self, keys: tuple[str, str]) -> None:
        """`keys`: of what the first end sends, and of what it gets."""
        self.ends, self._kept = [], []
        for sends, gets, is_head in ((*keys, True), (*keys[::-1], False)):
            hub = _native.LinkHub()
            link, end = hub.open_link(is_head), _native.Carrier()
            end.add(7, link, seal_cipher(sends), seal_cipher(gets))
            end.start(7)
            self.ends.append(end)
            self._kept.append((hub, link))

    def bring(self, *messages: bytes) -> list[tuple[int, str]]:
        """The second end gets these messages; returns what is broken."""
        frames = (HEADER.pack(len(m), CARRIED, 0, 7, 0) + m + bytes(-len(m) % 8) for m in messages)
        self.ends[1].deliver(memoryview(b"".join(frames)))
        return list(self.ends[1].take_broken())


def test_what_a_relay_changes() -> None:
    """Links say that they live, and answer: each message by AES-256-GCM, whose nonce is the message's number."""
    keys = new_seal_key(), new_seal_key()
    honest = Ends(keys)
    (first,) = sealed_in(said_by(honest.ends[0]))
    assert honest.bring(first) == []
    (back,) = sealed_in(said_by(honest.ends[1]))  # it answers, so the first end answers, too
    honest.ends[0].deliver(memoryview(HEADER.pack(len(back), CARRIED, 0, 7, 0) + back + bytes(-len(back) % 8)))
    (second,) = sealed_in(said_by(honest.ends[0]))
    assert honest.bring(second) == []
    for key, number, message in ((keys[0], 0, first), (keys[0], 1, second), (keys[1], 0, back)):
        plain = AESGCM(bytes.fromhex(key)).decrypt(number.to_bytes(12, "little"), message, None)
        assert HEADER.unpack_from(plain)[1] in (PING, PONG)

    broken = [(7, "what the relay brought for it is not what its other end has said")]
    assert Ends(keys).bring(first, second) == []
    assert Ends(keys).bring(second) == broken  # one is left out
    assert Ends(keys).bring(second, first) == broken
    assert Ends(keys).bring(first, first) == broken
    assert Ends(keys).bring(back) == broken  # what this end says itself
    assert Ends((keys[1], keys[0])).bring(first) == broken
    assert Ends((new_seal_key(), keys[1])).bring(first) == broken
    for size in range(len(first)):
        assert Ends(keys).bring(first[:size]) == broken
    assert Ends(keys).bring(first + b"\0") == broken
    for at in range(len(first)):
        assert Ends(keys).bring(first[:at] + bytes([first[at] ^ 1 << at % 8]) + first[at + 1 :]) == broken


def via_of(cluster: pw.Cluster) -> dict[str, str]:
    return {machine["name"]: machine["via"] for machine in cluster.stats()["machines"]}


@contextlib.contextmanager
def tree() -> Iterator[tuple[MachineCluster, pw.Cluster]]:
    """A relay, two machines that it carries, and one that it does not carry: an island each."""
    with MachineCluster(4, 1, 2, agents=0) as machines:
        relay = machines.start_agent("relay", relay="0.0.0.0:0", island="0")
        relay.wait_joined()
        assert relay.relay.startswith("pathways://127.0.0.1:"), "others cannot call 0.0.0.0"
        machines.start_agent("first", via=relay.relay, island="1").wait_joined()
        machines.start_agent("second", via=relay.relay, island="2").wait_joined()
        machines.start_agent("direct", island="3").wait_joined()
        assert [agent.via for agent in machines.agents.values()] == ["", "relay", "relay", ""]
        with machines.connect() as cluster:
            yield machines, cluster


@pytest.mark.slow
def test_values_over_a_relay() -> None:
    """Small values and large ones, in and out, and between machines that are carried and that are not."""
    with tree() as (_, cluster):
        assert via_of(cluster) == {"relay": "", "first": "relay", "second": "relay", "direct": ""}
        everything = pw.make_virtual_device_set(cluster)
        slices = [everything.add_slice(devices=2, island=island) for island in range(4)]
        calls = [pw.jit(lambda x: x * 2 + 1, devices=where) for where in slices]
        for _ in range(20):
            for result in [call(X) for call in calls]:
                np.testing.assert_array_equal(np.asarray(result), X * 2 + 1)
        large = np.random.default_rng(0).standard_normal((1 << 21,)).astype(np.float32)
        for source in (FIRST, DIRECT):
            value = calls[source](large)
            for target in range(4):
                there = pw.device_put(value, slices[target].sharding(P()))
                np.testing.assert_array_equal(np.asarray(calls[target](there)), (large * 2 + 1) * 2 + 1)

        chain = pw.program(lambda x: calls[DIRECT](calls[SECOND](calls[FIRST](x))))
        np.testing.assert_array_equal(np.asarray(chain(X)), 8 * X + 7)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_relay_that_ends(how: signal.Signals) -> None:
    """What it carried is lost as by a cut link, and is back without it. Another island notices nothing."""
    with tree() as (machines, cluster):
        calls = [placed(cluster, island) for island in range(4)]
        assert all(works(call) for call in calls)
        assert via_of(cluster) == {"relay": "", "first": "relay", "second": "relay", "direct": ""}
        kept = calls[FIRST](X)
        kept.block_until_ready()
        is_over, wrong, right = threading.Event(), [], [0]

        def innocent() -> None:
            try:
                while not is_over.is_set():
                    np.testing.assert_array_equal(np.asarray(calls[DIRECT](X)), X * 2 + 1)
                    right[0] += 1
            except BaseException as error:
                wrong.append(error)

        thread = threading.Thread(target=innocent)
        thread.start()
        agent = agent_process(machines, "relay")
        try:
            begin = time.monotonic()
            agent.send_signal(how)
            eventually(lambda: via_of(cluster).get("first") == via_of(cluster).get("second") == "", "bypassed")
            print(f"{how.name}: both are back after {time.monotonic() - begin:.2f} s")
            eventually(lambda: works(calls[FIRST]) and works(calls[SECOND]), "work on both")
            why = "the relay relay, which carried it, is lost|it calls again|while the relay relay carried it"
            with pytest.raises(pw.errors.HostLostError, match=why):
                np.asarray(calls[FIRST](kept))
            so_far = right[0]
            eventually(lambda: right[0] > so_far + 10, "the other island goes on")
        finally:
            is_over.set()
            thread.join()
            if agent.is_running():
                agent.send_signal(signal.SIGCONT)
        assert not wrong, wrong[0]


@pytest.mark.slow
def test_a_carried_machine_that_ends() -> None:
    """Stopped or killed: it is lost, not its relay, nor the other one that the relay carries."""
    with tree() as (machines, cluster):
        calls = [placed(cluster, island) for island in range(4)]
        assert all(works(call) for call in calls)
        kept = calls[SECOND](X)
        stopped = agent_process(machines, "first")
        stopped.send_signal(signal.SIGSTOP)
        try:
            eventually(lambda: "first" not in via_of(cluster), "the stopped one is lost")
        finally:
            stopped.send_signal(signal.SIGCONT)
        eventually(lambda: works(calls[FIRST]), "it is back")
        os.kill(agent_process(machines, "first").pid, signal.SIGKILL)
        eventually(lambda: "first" not in via_of(cluster), "the killed one is lost")
        np.testing.assert_array_equal(np.asarray(kept), X * 2 + 1)
        assert via_of(cluster) == {"relay": "", "second": "relay", "direct": ""}


@pytest.mark.slow
def test_who_may_relay_and_be_carried() -> None:
    """Certificates decide, and the controller's word; a circle is told at both ends."""
    with MachineCluster(3, 1, 1, agents=0) as machines:
        relay = machines.start_agent("relay", relay="127.0.0.1:0")
        relay.wait_joined()
        port, tokens = machines.handle.port, Tokens(authority_folder(machines.handle.directory))
        owner = Credentials.load(os.path.join(machines.folder, "relay.pem"))
        client = join(port, tokens.make(Role.CLIENT, 600.0), "someone")
        stranger = join(port, tokens.make(Role.HOST, 600.0), "stranger")

        def refused(why: str, address: str, own: Credentials, purpose: str, **fields: Any) -> None:
            expects = Role.CONTROLLER if address == port else Role.HOST
            with pytest.raises(errors.PathwaysError, match=why):
                dial(address, own, purpose, expects=expects, **fields)

        refused("has the role client", port, client, "trunk-up", port=1)
        refused("has the role client", relay.relay, client, "carry-up")
        refused("stranger cannot be a relay: it has no link", port, stranger, "trunk-up", port=1)
        refused("has not asked the relay relay to carry stranger", relay.relay, stranger, "carry-up")
        refused("no relay of this cluster now", port, stranger, "link-up", via="nobody")
        refused("relay dials its own relay, in a circle", relay.relay, owner, "carry-up")
        refused("relay dials its own relay, in a circle", port, owner, "link-up", via="relay")
        refused("neither a name nor an IP address", port, owner, "trunk-up", host="a b", port=1)
        refused("a port is a number from 1", port, owner, "trunk-up", port="many")
        with pytest.raises(errors.OptionError, match="carry each other in a circle"):
            machines.start_agent("both", relay="127.0.0.1:0", via=relay.relay)
        with pytest.raises(errors.OptionError, match="a cluster with encryption"):
            AgentHandle(port, "token", None, name="m", via=relay.relay)
        plain = machines.start_agent("plain")
        plain.wait_joined()
        lost = machines.start_agent("lost", via="pathways://127.0.0.1:9")
        with pytest.raises(errors.ConnectError, match=r"nothing listens at 127.0.0.1:9"):
            lost.wait_joined()
        machines.agents.pop("lost").close()
        with machines.connect() as cluster:
            assert via_of(cluster) == {"relay": "", "plain": ""}
        # It may listen at another address than that by which it calls.
        again, answer = dial_answered(port, owner, "trunk-up", host="127.0.0.9", port=7)
        again.close()
        assert answer["address"] == "pathways://127.0.0.9:7"


def test_where_machines_are_sent() -> None:
    """Above the fan-out, to the relay that carries the fewest."""

    async def choose() -> None:
        loop = Loop()
        links = Links(loop, _native)
        relays = Relays(_native, links, lambda name: True)
        assert relays.choose(10 * FAN_OUT) == ""
        trunks = []
        for name, carried in (("full", FAN_OUT), ("some", 5), ("more", 6)):
            trunk = FarLink(None, Identity(Role.HOST, name, 0, None, "127.0.0.1:1"), lambda why: None)
            relay = Relay(name, f"pathways://{name}:1", trunk)
            relay.carried = dict.fromkeys(range(carried))  # type: ignore[arg-type]
            relays._by_name[name] = relay
            trunks.append(trunk)
        assert relays.choose(FAN_OUT) == ""  # none is open
        for trunk in trunks:
            trunk.carrier = object()  # type: ignore[assignment]
        assert relays.choose(FAN_OUT - 1) == ""
        assert relays.choose(FAN_OUT) == "pathways://some:1"
        links.close()
        loop.close()

    asyncio.run(choose())


def test_a_machine_goes_where_it_is_sent(caplog: pytest.LogCaptureFixture) -> None:
    """When the relay is not there, it has a link of its own at once."""

    class Sock:
        def close(self) -> None:
            said.append("close")

    said: list[Any] = []

    def dialled(purpose: str, **fields: Any) -> tuple[Any, dict[str, Any]]:
        said.append((purpose, fields))
        if fields.get("may_go_via"):
            return Sock(), {"go_via": "pathways://127.0.0.1:9"}
        return Sock(), {"session": "s"}

    own: Any = type("Own", (), {"current": lambda self: self, "is_expired": False, "client_context": lambda self: None})
    opened = Ways(dialled, own(), None, False).open(hosts=1)
    assert opened.relay == ""
    assert said == [
        ("link-up", {"may_go_via": True, "hosts": 1}),
        "close",
        ("link-up", {"hosts": 1}),
        ("link-down", {"session": "s"}),
    ]
    assert "nothing listens at 127.0.0.1:9" in caplog.text
    said.clear()
    Ways(dialled, own(), None, True).open(hosts=1)  # a relay is never sent anywhere
    assert said[0] == ("link-up", {"hosts": 1})


def test_a_relay_that_is_gone_for_good(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A machine that has joined by --via goes on without its relay, also when its link breaks once more."""
    said: list[Any] = []

    def dialled(purpose: str, **fields: Any) -> tuple[Any, dict[str, Any]]:
        said.append((purpose, fields))
        return None, {"session": "s"}

    own: Any = type("Own", (), {"current": lambda self: self, "is_expired": False, "client_context": lambda self: None})
    found, gone = Ways(dialled, own(), "pathways://127.0.0.1:9", False), "no relay at .*9: nothing listens at .*9$"
    with pytest.raises(errors.ConnectError, match=gone):
        found.open()  # who starts the agent hears of it
    carried: Any = OpenLink({}, None, None, "relay")  # type: ignore[arg-type]
    assert found.broke(carried)
    link = found.open()
    assert not found.broke(link)
    with pytest.raises(errors.ConnectError, match=gone):
        found.open()  # the relay may come back
    monkeypatch.setattr(ways, "PATIENCE_S", 0.0)
    assert not found.broke(link)
    assert found.open().relay == ""
    assert said == [("link-up", {}), ("link-down", {"session": "s"})] * 2
    assert "no relay at pathways://127.0.0.1:9: nothing listens" in caplog.text
