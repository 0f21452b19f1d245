"""The process of one system: ``python -m pathways.bench.driver <fd> <system>``.

It is the system's client. Each system has its own, so that no client shares an interpreter, a GIL or an import
with another, and a system that hangs is ended with its whole tree.
"""

from __future__ import annotations

import sys
from typing import Any

from pathways.bench import processes, systems
from pathways.bench.systems.base import Run
from pathways.bench.workloads import Workload, check_value


def main() -> None:
    """Answers the harness until it says stop."""
    system = systems.load(sys.argv[2])()

    def throughput(workload: Workload, steps: int) -> Run:
        run = system.throughput(workload, steps)
        check_value(system.name, workload, run.steps, run.value)
        return run

    verbs: dict[str, Any] = {
        "start": system.start,
        "throughput": throughput,
        "latency": system.latency,
        "cpu_seconds": system.cpu_seconds,
        "stop": system.stop,
    }
    processes.serve(lambda verb, *arguments: verbs[verb](*arguments))


if __name__ == "__main__":
    main()
