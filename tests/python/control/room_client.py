"""A client of `test_auto_suspend.py`: does what the lines of its input say, and answers each with a line.

    python room_client.py ADDRESS [PRIORITY]

Lines and answers are JSON objects. "hold": puts so many MiB on device 0. "check": computes something of them, which
must be right. "work": steps of a computation on them for so many seconds; the answer has when it stopped.
"drop": gives them up.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

import pathways as pw

MIB = 1 << 18  # elements of float32


def main() -> None:
    terms = {"priority": int(sys.argv[2])} if len(sys.argv) > 2 else {}
    cluster = pw.connect(sys.argv[1], max_in_flight=16, **terms)  # so it always has work under way while it works
    slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=1)
    step = pw.jit(lambda x: x + 1, devices=slice_, donate_argnums=0)
    some = pw.jit(lambda x: x[::1000], devices=slice_)
    held: Any = None
    want: Any = None
    print(json.dumps({"client": cluster.client_id, "device": slice_.devices[0].id}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if order["do"] == "hold":
                held = None
                want = np.arange(order["mib"] * MIB, dtype=np.float32) % 1000 + order.get("seed", 0)
                held = pw.device_put(want, slice_)
                held.block_until_ready()
            elif order["do"] == "check":
                answer["right"] = bool((np.asarray(some(held)) == want[::1000]).all())
            elif order["do"] == "work":
                until, steps = time.monotonic() + order["seconds"], 0
                while time.monotonic() < until:
                    held = step(held)
                    steps += 1
                answer = {"steps": steps, "stopped": time.monotonic()}
                held.block_until_ready()
                want = want + steps
            elif order["do"] == "drop":
                held = None
        except pw.errors.PathwaysError as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
