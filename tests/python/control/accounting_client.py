"""A client of `test_accounting.py` whose library does what no correct one does.

    python accounting_client.py ADDRESS MODE

MODE "early": it never waits until its program is compiled. MODE "dropped": it drops its program, and goes on to run it.
MODE "replaced": it asks for a token in the place of an array that lives (MEM-7).
It prints a JSON object with the error that its results fail with; none: they came.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

import pathways as pw
from pathways.protocol import payloads


def main() -> None:
    cluster: Any = pw.connect(sys.argv[1])
    slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=1)
    value = pw.device_put(np.zeros(1 << 18, np.float32), slice_)
    grow = pw.jit(lambda x: x + 1, devices=slice_)
    control = cluster.control()
    register = control.register_program
    numbers: list[int] = []

    def remember(*arguments: Any) -> int:
        numbers.append(int(register(*arguments)))
        if sys.argv[2] == "early":
            time.sleep(2)  # it is compiled by now, and would run
        return numbers[-1]

    control.register_program = remember
    if sys.argv[2] == "early":
        control.wait_compiled = lambda number, timeout=None: None
    results = []
    error = ""
    try:
        results.append(grow(value).block_until_ready())
        if sys.argv[2] == "dropped":
            (number,) = numbers
            cluster.native.command(payloads.BACKEND, value.layout.group, 0, number, b"")
        if sys.argv[2] == "replaced":
            cluster.native.command(2, value.layout.group, value.raw_handle, value.raw_handle + (1 << 32), b"")
        if sys.argv[2] in ("dropped", "replaced"):
            results += [grow(value) for _ in range(64)]
            for result in results:
                result.block_until_ready()
    except pw.errors.PathwaysError as problem:
        error = f"{type(problem).__name__}: {problem}"
    print(json.dumps({"error": error}), flush=True)


if __name__ == "__main__":
    main()
