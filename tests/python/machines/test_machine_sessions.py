"""FAULT-1: what a machine's host says in its session with the controller concerns nobody else: a host that refuses
clients and other hosts, that says nothing, or that speaks for programs of others, is evicted, and everybody else goes
on. The hosts are the test itself (`false_hosts.py`); so is the honest one, which has nothing to do.

Map from label to test:
    FAULT-1  test_a_host_that_refuses_everybody, test_a_host_that_does_not_take_clients_keeps_none_out,
             test_a_host_that_does_not_take_others_keeps_none_out, test_what_no_host_says
    TRUST-1  test_a_host_speaks_for_its_own_programs
"""

from __future__ import annotations

import contextlib
import pathlib
import threading
from collections.abc import Iterator

import pytest
from control_clusters import eventually
from false_hosts import Answer, FalseHost, willing
from machines import MachineCluster

import pathways as pw
from pathways.process.run_directory import authority_folder
from pathways.protocol import control_pb2 as pb
from pathways.protocol import wire
from pathways.trust import Role, Tokens, join

pytestmark = pytest.mark.slow


def refusing(request: pb.HostRequest) -> pb.HostReport | None:
    error = pb.Error(type="RuntimeError", message="no")
    match request.WhichOneof("what"):
        case "attach_client":
            return pb.HostReport(client_attached=error)
        case "replace_peers":
            refused = [pb.Answer(number=each.host, error=error) for each in request.replace_peers.successors]
            return pb.HostReport(peers_replaced=pb.PeersReplaced(refused=refused))
    return willing(request)


class Scene:
    """Three places; an honest host has one of them, and an innocent client is there."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.machines = stack.enter_context(MachineCluster(3, 1, 1, agents=0))
        self._tokens = Tokens(authority_folder(self.machines.handle.directory))
        self._stack = stack
        # First: a test that imports JAX sends no pings.
        self.client = stack.enter_context(pw.connect(self.machines.address))
        self.honest = self.host("honest")

    def connect(self) -> pw.Cluster:
        """Another client."""
        return pw.connect(self.machines.handle.address)

    def host(self, name: str) -> FalseHost:
        port = self.machines.handle.port
        made = FalseHost(port, join(port, self._tokens.make(Role.HOST, 600), name))
        self._stack.callback(made.close)
        return made

    def states(self) -> list[str]:
        return [host["state"] for host in self.client.stats()["hosts"]]

    def is_up(self, host: FalseHost) -> bool:
        return self.states()[host.number] == "up"

    def log(self) -> str:
        return pathlib.Path(self.machines.handle.directory, "logs", "controller.log").read_text()


@pytest.fixture
def scene() -> Iterator[Scene]:
    with contextlib.ExitStack() as stack:
        made = Scene(stack)
        eventually(lambda: made.is_up(made.honest), "the honest host is there")
        yield made
        assert made.is_up(made.honest) and "the agent honest of" not in made.log()


@pytest.mark.parametrize("comes_refusing", [True, False])
def test_a_host_that_refuses_everybody(scene: Scene, comes_refusing: bool) -> None:
    """When it joins it is asked to take the clients; later each client that joins, and each host that starts."""
    evil = scene.host("evil") if not comes_refusing else None
    if evil is not None:
        eventually(lambda: scene.is_up(evil), "it is there")
        evil.answer = refusing
        third = scene.host("third")
    else:
        evil = scene.host("evil")
        evil.answer = refusing
        third = scene.host("third")
    eventually(lambda: "the agent evil of island 1 is lost" in scene.log(), "it is evicted")
    eventually(lambda: scene.is_up(third), "another machine joins")
    assert "is evicted" not in scene.log().replace("the agent", "")
    with contextlib.closing(scene.connect()) as second:
        assert second.stats()["clients"]


def silent_to(what: str) -> Answer:
    return lambda request: None if request.WhichOneof("what") == what else willing(request)


def test_a_host_that_does_not_take_others_keeps_none_out(scene: Scene) -> None:
    """It has half a minute; a host here has as long as it takes to start."""
    evil = scene.host("evil")
    eventually(lambda: scene.is_up(evil), "it is there")
    evil.answer = silent_to("replace_peers")
    third = scene.host("third")
    eventually(lambda: scene.is_up(third), "another machine joins", 100.0)
    eventually(lambda: "the agent evil of island 1 is lost" in scene.log(), "it is evicted")


def test_a_host_that_does_not_take_clients_keeps_none_out(scene: Scene) -> None:
    """It may be slow, so it has two minutes. Meanwhile clients come in; only their slices there wait."""
    evil = scene.host("evil")
    eventually(lambda: scene.is_up(evil), "it is there")
    evil.answer = silent_to("attach_client")
    taken = threading.Event()
    with contextlib.closing(scene.connect()) as second:
        devices = pw.make_virtual_device_set(second)
        assert devices.add_slice(devices=1, island=scene.honest.number).devices

        def take_slice() -> None:
            with contextlib.suppress(pw.errors.PathwaysError):
                devices.add_slice(devices=1, island=evil.number)
            taken.set()

        waiting = threading.Thread(target=take_slice)
        waiting.start()
        assert not taken.wait(1.0), "the host does not know the client"
        assert scene.is_up(evil)
        evil.close()
        waiting.join()


@pytest.mark.parametrize(
    "report",
    [
        pb.HostReport(stage=pb.HostStage(stage=wire.Stage.FAILED)),
        pb.HostReport(stage=pb.HostStage(stage=wire.Stage.CLUSTER_READY)),
        pb.HostReport(stage=pb.HostStage(stage=wire.Stage.HOST_READY, device_bytes=-1)),
    ],
    ids=["failed", "ready", "bytes"],
)
def test_what_no_host_says(scene: Scene, report: pb.HostReport) -> None:
    evil = scene.host("evil")
    eventually(lambda: scene.is_up(evil), "it is there")
    evil.reports.put(report)
    eventually(lambda: "the agent evil of island 1 is lost" in scene.log(), "it is evicted")
    with contextlib.closing(scene.connect()) as second:
        assert second.stats()["clients"]
