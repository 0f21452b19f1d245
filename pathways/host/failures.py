"""The error texts of one host: what failed, where, and XLA's own text (ERR-1). Any thread of the host may ask."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from pathways import errors
from pathways.host.devices import HostDevices
from pathways.host.programs import Program

#: When an error looks as if a peer was lost, the host waits so long for the controller before it reports the error.
PEER_LOST_GRACE_S = 1.0
_PEER_LOST = re.compile(r"gloo|nccl|connection (was )?(reset|closed|refused)|socket closed", re.IGNORECASE)


class Failures:
    """Describes the failures of one host to its clients."""

    def __init__(self, devices: HostDevices, programs: Mapping[int, Program]) -> None:
        """`programs` are the host's, by number."""
        self._devices = devices
        self._programs = programs

    def describe(self, doing: str, error: BaseException | None, plan: int, node: int) -> str:
        """One line of error text for the client: what failed, where, and XLA's own text (ERR-1).

        The error loses its traceback. On an embedded cluster the frames know the client's call, and so its results.
        """
        if error is not None:
            error.__traceback__ = None
        name = ""
        if plan in self._programs and node > 0:
            program = self._programs[plan].bound.program
            name = self._programs[plan].node_name(node)
            name = f" of computation {name!r} of program {program.name!r}" if name else f" of program {program.name!r}"
        if self._devices.has_peers and _PEER_LOST.search(str(error)):
            # The collective library often notices a peer's death before the controller does. But the controller knows
            # which host was lost, and ends this process. Wait, so that the controller can report the loss first.
            time.sleep(PEER_LOST_GRACE_S)
        devices = ", ".join(str(device) for device in self._devices.local)
        kind = type(error).__name__ if isinstance(error, errors.PathwaysError) else "ComputationError"
        return f"{kind}: {doing}{name} failed on host {self._devices.host} ({devices}): {type(error).__name__}: {error}"
