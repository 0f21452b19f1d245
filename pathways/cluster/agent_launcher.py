"""Starts the agent of this machine, and ends it: what `pathways agent` does."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from pathways import errors
from pathways.agent.fabric import LINK, find_fabric
from pathways.agent.main import AgentConfig
from pathways.process import environment, run_directory
from pathways.process.children import Deadline
from pathways.process.config import ClusterOptions
from pathways.process.supervised import Supervised
from pathways.quirks import quirks_of
from pathways.trust import Address, certificate_in, check_name

JOIN_TIMEOUT_S = 30.0


class AgentHandle:
    """The agent's process, which this process owns."""

    def __init__(
        self,
        address: str,
        token: str,
        credentials: str | None,
        *,
        name: str,
        hosts: int = 1,
        devices_per_host: int = 1,
        platform: str | None = None,
        island: str | None = None,
        island_hosts: int | None = None,
        fabric: str | None = None,
        trusted_fabric: bool = False,
        relay: str | None = None,
        via: str | None = None,
    ) -> None:
        """Joins the cluster: trades the token for a certificate, unless there is one that is still good, and starts.

        Args:
            address: of the cluster's port, `pathways://HOST:PORT`.
            token: its text; empty: the certificate in the file is good.
            credentials: the file with the certificate. None: nothing is encrypted, and the token says who calls.
            name: of this machine.
            hosts: how many host processes it runs.
            devices_per_host: how many devices each of them has.
            platform: see `start_local_cluster`.
            island: the island that it wants: a number, or a name, which it shares with other machines; None: any.
            island_hosts: how many hosts the island has, on all its machines; None: as its first agent said, or those
                that the agent brings.
            fabric: the network of collectives between the machines of an island: see `find_fabric`; None: there is
                none, and the island is on this machine.
            trusted_fabric: the fabric is private, although its address is a public one.
            relay: where it listens for machines that it carries, `HOST:PORT`; None: it carries nobody.
            via: the address of another machine's relay, which carries this one; None: the controller says which, if
                many machines have joined.

        Raises:
            ConnectError: the cluster cannot be reached, or has no place for it.
            OptionError: the fabric is not on this machine, or not private, or the name is none; or it is to be a relay
                and to be carried by one.
            PermissionDeniedError: the token is no good, or there is neither a token nor a certificate.
        """
        chosen = environment.choose_platform(platform, os.environ)
        environment.check_devices(ClusterOptions(1, hosts, devices_per_host), chosen, os.environ)
        if island is not None:
            check_name(island)
        if fabric is not None and credentials is None:
            raise errors.OptionError(
                "an island on several machines needs a cluster with encryption: the machines know each other by "
                "certificates. Leave out --fabric, or --insecure-plaintext"
            )
        if relay is not None and via is not None:
            raise errors.OptionError(
                "a relay has a link of its own to the controller, or relays could carry each other in a circle: leave "
                "out --via, or --relay"
            )
        if (relay or via) and credentials is None:
            raise errors.OptionError(
                "relays need a cluster with encryption: the machines know each other by certificates. Leave out "
                "--relay and --via, or --insecure-plaintext"
            )
        for where in (relay, via):
            if where is not None:
                Address.parse(where, listens=where is relay)
        place = None if fabric is None else find_fabric(fabric, trusted_fabric)
        if place == LINK and not quirks_of(chosen).collects_by_address:
            raise errors.OptionError(
                f"--fabric link carries the collectives of CPU devices, and this machine's are of {chosen}: name a "
                "network, such as one of WireGuard"
            )
        if credentials is not None:
            certificate_in(credentials, address, token, name, "host")
        run_directory.sweep()
        directory = run_directory.new_directory(of_agent=True)
        config: dict[str, Any] = {
            "address": address,
            "credentials": credentials or "",
            "directory": directory,
            "name": name,
            "hosts": hosts,
            "devices_per_host": devices_per_host,
            "platform": chosen,
            "island": island,
            "island_hosts": island_hosts,
            "fabric": place,
            "relay": relay,
            "via": via,
            "owner_pid": os.getpid(),
        }

        def command(owner_fd: int, report_fd: int) -> list[str]:
            whole = AgentConfig(**{**config, "owner_fd": owner_fd, "report_fd": report_fd})
            return [sys.executable, "-P", "-m", "pathways.agent.main", json.dumps(vars(whole))]

        self._supervised = Supervised(directory, command, "" if credentials else token)
        self._is_closed = False
        # Once it has joined: the name of its island, its own address as a relay, and the name of that which carries it.
        self.island = self.relay = self.via = ""

    def wait_joined(self, timeout_s: float = JOIN_TIMEOUT_S) -> int:
        """Waits until the agent has joined; returns the island that it has become.

        Raises:
            ConnectError: it could not join; the message says why.
        """
        deadline = Deadline(timeout_s)
        while not deadline.passed:
            for report in self._reports(deadline.left(0.5)):
                if report["event"] == "joined":
                    self.island, self.relay, self.via = (str(report[key]) for key in ("name", "relay", "via"))
                    return int(report["island"])
        raise errors.ConnectError(f"the agent has not joined within {timeout_s:g} s")

    def wait(self) -> None:
        """Waits for its end. Raises `ConnectError` when it ends by itself."""
        while True:
            self.check(3600.0)

    def check(self, timeout_s: float) -> None:
        """Waits so long, or less. Raises `ConnectError` when it has ended by itself."""
        self._reports(timeout_s)

    def _reports(self, timeout_s: float) -> list[dict[str, Any]]:
        found = self._supervised.reports(timeout_s)
        for report in found:
            if report["event"] == "error":
                raise errors.from_text(str(report["message"]), errors.ConnectError)
            if report["event"] == "left" and report["why"]:
                raise errors.ConnectError(str(report["why"]))
            if report["event"] == "left":
                raise errors.ClusterClosedError("the cluster has let this machine go (pathways drain)")
            if report["event"] == "ended":
                raise errors.ConnectError(f"the agent has ended. {self._supervised.described(report)}")
        if not found and self._supervised.is_over:
            raise errors.ConnectError("the agent has ended, and its supervisor with it")
        return found

    def close(self) -> None:
        """Ends the agent and its hosts. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._supervised.terminate()
        self._supervised.close()
        self._supervised.forget()
