"""A host's part in a profile of the cluster: XLA's profiler of this process, on and off. `pathways/host/main.py` calls.

A profile is gathered and compressed on a thread of its own, because that may take a second, and the control thread has
other requests.
"""

from __future__ import annotations

import gzip
import threading
import traceback
from collections.abc import Callable

from pathways import _jaxlib
from pathways.protocol import control_pb2 as pb

#: A message from another machine has at most 64 MiB.
MOST_BYTES = 48 << 20


def answer(host: int, request: pb.HostProfile, report: Callable[[pb.ProfilePart], None]) -> None:
    """Starts a profile, or ends it; `report` gets the answer. A profile that nobody has taken is forgotten."""
    if request.is_on:
        part = pb.ProfilePart(host=host)
        try:
            _jaxlib.stop_profile()
            _jaxlib.start_profile(python=False)
        except Exception as failure:
            traceback.print_exc()
            part.remark = f"host {host} could not begin a profile: {failure}"
        report(part)
        return
    threading.Thread(target=lambda: report(_gathered(host)), name="pw-profile", daemon=True).start()


def _gathered(host: int) -> pb.ProfilePart:
    part = pb.ProfilePart(host=host)
    try:
        planes = gzip.compress(_jaxlib.stop_profile(), compresslevel=1)
        if len(planes) > MOST_BYTES:
            part.remark = (
                f"the profile of host {host} is left out: it has {len(planes) >> 20} MiB when compressed, at most "
                f"{MOST_BYTES >> 20} MiB are sent; profile a shorter time"
            )
        else:
            part.planes = planes
    except Exception as failure:
        traceback.print_exc()
        part.remark = f"host {host} could not end its profile: {failure}"
    return part
