"""The fabrics of islands that lie on several machines: their hosts start when all machines reach each other (FAB-1).

When all places of an island are filled, each of its machines is told its neighbours, and calls them over the fabric
(pathways/agent/fabric_watch.py). The island starts when all have reached all. If one machine is not reached, it does
not fit into the island, and is told why. If it is silent later, it counts as lost, as with a link that is silent.

Owned by the controller's event loop thread.
"""

from __future__ import annotations

import asyncio
import collections
import ipaddress
import itertools
import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pathways import errors
from pathways.agent.fabric import LINK
from pathways.controller.agent_machine import AgentMachine
from pathways.controller.machines import Machine
from pathways.protocol import agent_pb2 as pb
from pathways.trust import Identity
from pathways.trust.identity import printable

_log = logging.getLogger(__name__)

#: When a machine falls silent, the others say so within this time, in seconds: the one that most of them mean is gone.
JUDGE_S = 0.5
#: All machines have said whether they reach each other within this time, in seconds (see `REACH_S` of the watch).
SAY_S = 25.0
#: A machine that does not fit leaves within this time, in seconds; else it counts as lost.
LEAVE_S = 2.0
_MOST_ERROR = 256  # characters of what a machine says


class _Watch:
    """The machines of an island, while none is lost and none comes."""

    def __init__(self, number: int, machines: Sequence[AgentMachine]) -> None:
        self.number = number
        self.machines = machines
        self.reached: set[tuple[str, str]] = set()
        self.faults: dict[tuple[str, str], str] = {}
        self.whole: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(self, why: str) -> None:
        """Who waits for it waits no longer."""
        if not self.whole.done():
            self.whole.set_exception(errors.HostLostError(why))
            self.whole.exception()  # somebody may have seen it, or nobody waits


class Fabrics:
    """Those of all islands."""

    def __init__(self) -> None:
        self._watches: dict[int, _Watch] = {}  # by island
        self._numbers = itertools.count(1)

    async def whole(self, there: Sequence[Machine]) -> None:
        """Returns when the machines of an island reach each other: at once, if it is one machine.

        Raises:
            HostLostError: one does not, or was lost meanwhile.
        """
        machines = [machine for machine in there if isinstance(machine, AgentMachine)]
        if len(machines) < 2:
            return
        island = machines[0].island
        watch = self._watches.get(island)
        if watch is None:
            watch = self._watches[island] = self._begin(machines)
        await asyncio.shield(watch.whole)

    def _begin(self, machines: Sequence[AgentMachine]) -> _Watch:
        watch = _Watch(next(self._numbers), machines)
        secret = secrets.token_hex(16)
        first = min(machines, key=lambda machine: machine.hosts).name
        for machine in machines:
            others = [other.neighbour for other in machines if other is not machine]
            told = pb.Neighbours(number=watch.number, secret=secret, first=first, others=others)
            machine.requests.put_nowait(pb.AgentRequest(neighbours=told))
        asyncio.get_running_loop().call_later(SAY_S, self._late, watch)
        return watch

    def _late(self, watch: _Watch) -> None:
        """Who has not said by now what it sees is no machine for an island."""
        if not watch.whole.done():
            pairs = itertools.permutations((machine.name for machine in watch.machines), 2)
            late = [pair for pair in pairs if pair not in watch.reached | watch.faults.keys()]
            watch.faults.update(dict.fromkeys(late, f"it did not say within {SAY_S:g} s whether it is there"))
            self._judge(watch)

    def lost(self, machine: AgentMachine, why: str) -> None:
        """A machine is lost."""
        watch = self._watches.get(machine.island)
        if watch is not None and machine in watch.machines:
            del self._watches[machine.island]
            watch.fail(f"machine {machine.name} is lost: {why}")

    def report(self, machine: AgentMachine, report: pb.FabricReport) -> None:
        """A machine says what it sees of the fabric to another one."""
        watch = self._watches.get(machine.island)
        names = () if watch is None else [each.name for each in watch.machines]
        if watch is None or watch.number != report.number or machine.name == report.machine:
            return
        if machine.name not in names or report.machine not in names:
            return
        pair = (machine.name, report.machine)
        if not report.error:
            watch.reached.add(pair)
            if len(watch.reached) == len(names) * (len(names) - 1) and not watch.whole.done():
                watch.whole.set_result(None)
            return
        if not watch.faults:
            asyncio.get_running_loop().call_later(JUDGE_S, self._judge, watch)
        watch.faults[pair] = "".join(filter(str.isprintable, report.error[:_MOST_ERROR]))

    def _judge(self, watch: _Watch) -> None:
        """Evicts the machine that is meant by most reports; of several, the one that came last."""
        if watch not in self._watches.values():
            return
        meant = collections.Counter(name for pair in watch.faults for name in pair)
        culprit = max(watch.machines, key=lambda machine: (meant[machine.name], machine.since))
        one, other = next(pair for pair in watch.faults if culprit.name in pair)
        why = f"the fabric from machine {one} to machine {other}: {watch.faults[one, other]}"
        if watch.whole.done():
            culprit.link.on_lost(why)
        else:
            _log.warning("the agent %s does not fit into its island: %s", culprit.name, why)
            culprit.let_go(f"this machine cannot be in its island: {why}. Does a firewall let the fabric through?")
            # The start fails when its place is free, and not before: it would fail again, and the others with it.
            asyncio.get_running_loop().call_later(LEAVE_S, lambda: culprit.link.on_lost(why))


def neighbour_of(identity: Identity, hello: Mapping[str, Any]) -> pb.Neighbours.Machine:
    """How other machines of its island find an agent.

    Raises:
        ConnectError: what it says of that makes no sense.
    """
    fabric = hello.get("fabric")
    if not fabric:
        return pb.Neighbours.Machine(name=identity.name)
    address, _, port = str(fabric).rpartition(":")
    is_link = address == str(LINK)
    try:
        if not 0 < int(port) < 1 << 16:
            raise ValueError(port)
        there = identity.peer.rpartition(":")[0] if is_link else ipaddress.IPv4Address(address)
        endpoint = f"{there}:{int(port)}"
    except ValueError:
        raise errors.ConnectError(f"the agent's fabric makes no sense: {printable(fabric)}") from None
    return pb.Neighbours.Machine(name=identity.name, fabric=endpoint, is_link=is_link)


def check_same_kind(new: pb.Neighbours.Machine, there: Iterable[pb.Neighbours.Machine]) -> None:
    """Raises `ConnectError`: of the machines of an island, some use the fabric `link`, and some a network."""
    for other in there:
        if other.is_link != new.is_link:
            theirs, ours = ("link", "a network") if other.is_link else ("a network", "link")
            raise errors.ConnectError(
                f"the fabric of machine {other.name}, which has a part of the island, is {theirs}, and the agent's is "
                f"{ours}: start it with {'--fabric link' if other.is_link else 'an address on that network'}"
            )
