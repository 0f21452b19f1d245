"""A Ray cluster of several nodes on this machine, in a process of its own: Ray forks, which a process with JAX may not.

The process takes commands as lines on its standard input, `add {"resources": ...}` or `remove NUMBER`, and answers
each with a line. At the end of the input it ends all nodes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

NODE = {"num_cpus": 4, "num_gpus": 4, "object_store_memory": 80 << 20, "include_dashboard": False}


class RayNodes:
    """The process, from outside. It starts with one node. A context manager."""

    def __init__(self) -> None:
        # The second variable is for tasks without GPUs, of which Ray would warn.
        quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **quiet},
        )
        self.address = self._answer()

    def add(self, **what: Any) -> int:
        """Adds a node with further arguments of `add_node`; returns its number."""
        self._say(f"add {json.dumps(what)}")
        return int(self._answer())

    def remove(self, number: int) -> None:
        """Kills a node."""
        self._say(f"remove {number}")
        self._answer()

    def close(self) -> None:
        """Ends all nodes."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._process.wait()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the Ray cluster has ended: {self._process.wait(10)}"
        return line.strip()

    def __enter__(self) -> RayNodes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve() -> None:
    """The process."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints is no answer
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    nodes: list[Any] = []
    try:
        print(cluster.address, file=answers, flush=True)
        for line in sys.stdin:
            what, _, argument = line.strip().partition(" ")
            if what == "add":
                nodes.append(cluster.add_node(**NODE, **json.loads(argument)))
                print(len(nodes) - 1, file=answers, flush=True)
            else:
                cluster.remove_node(nodes[int(argument)], allow_graceful=False)
                print("removed", file=answers, flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    serve()
