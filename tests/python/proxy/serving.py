"""A proxy over `LocalDevices` in a process of its own: `python serving.py`. It says its ports, and answers questions.

Each line of its standard input is a word; it answers with a line of JSON. "stats": what it holds. It ends with its
standard input.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import threading
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"


def main() -> None:
    options = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}

    from local_devices import LocalDevices

    from pathways import errors
    from pathways.proxy.limits import Limits
    from pathways.proxy.server import Server
    from pathways.proxy.service import Client, Service
    from pathways.proxy.shared_directory import SharedDirectory

    opened: list[LocalDevices] = []
    clients: list[dict[str, Any]] = []

    def open_devices(client: Client) -> LocalDevices:
        clients.append({"peer": client.peer, "said": dict(client.initialization_data)})
        if "refuse" in client.initialization_data:
            raise errors.PermissionDeniedError(str(client.initialization_data["refuse"]))
        opened.append(LocalDevices(options.get("room")))
        return opened[-1]

    shared = SharedDirectory(options["shared"]) if "shared" in options else None
    service = Service(open_devices, Limits(**options.get("limits", {})), shared)
    with tempfile.TemporaryDirectory(prefix="pwp", dir="/tmp") as folder:
        unix = f"unix:{folder}/door"
        server = Server(service, ["127.0.0.1:0", unix])
        print(json.dumps({"port": server.ports[0], "unix": unix}), flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(line.strip(), service, opened) | {"clients": clients}), flush=True)
        server.close()


def answer(word: str, service: Any, opened: list[Any]) -> Any:
    if word == "stats":
        gc.collect()
        return {
            "sessions": service.session_count,
            "alive": sum(devices.alive for devices in opened),
            "open": sum(not devices.is_closed for devices in opened),
            "calls": opened[-1].calls if opened else [],
            "copies": sum(devices.calls.count("copy") for devices in opened),
            "host_bytes": sum(session.buffers.used_bytes for session in service._sessions.values() if session),
            "waiting": sum(len(session._waiting) for session in service._sessions.values() if session),
            "threads": threading.active_count(),
        }
    raise ValueError(word)


if __name__ == "__main__":
    main()
