"""The seams of the architecture, by the words that stand in the code: one clock, one loop of sockets, a machine per
host, each record in one room. Each check is also run on a small tree with a planted fault, to see that it can fail.
"""

from __future__ import annotations

import itertools
import pathlib
import re
from collections.abc import Iterator

CLOCK = re.compile(r"\b(?:monotonic_ns\s*\(|\w+_clock::now\b|clock_gettime\b|gettimeofday\b)")
CLOCK_FILES = ("csrc/sync/atomic.cc", "csrc/sync/atomic.h", "csrc/base/process.cc")  # the last one writes dates in logs
SOCKETS = re.compile(
    r"\bimport selectors\b|\bepoll\b|\brecv_into\b|\bSSLWant|\.sendall\(|(?<!socket)\.recv\(|\basyncio\.(?:open|start)_"
)
#: Where sockets may be waited for: the loop; while a connection is being opened; between processes of one machine.
SOCKET_ROOMS = (
    "pathways/transport/",
    "pathways/trust/",
    "pathways/process/",
    "pathways/bench/",
    "benchmarks/rivals/",
    "pathways/host/stream_sockets.py",  # opens streams
)
MODE = re.compile(r"\bagents is (?:not )?None\b")
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$|/_core\.cpp$")


def clock_readers(root: pathlib.Path) -> Iterator[str]:
    """Lines of the core that read the machine's clock themselves: everything else has its Clock from its owner, so a
    test can hand in a time of its own. What only measures (`simulate`, `bind`) is not in the core."""
    for path in sorted((root / "csrc").rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.suffix not in (".h", ".cc") or name in CLOCK_FILES or name.startswith(("csrc/simulate/", "csrc/bind/")):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if CLOCK.search(line.split("//")[0]):
                yield f"{name}:{number} reads the machine's clock: expected a Clock that its owner hands in"


def socket_waiters(root: pathlib.Path) -> Iterator[str]:
    """Lines that wait for the socket of another machine beside the process's one loop."""
    for path in sorted(itertools.chain((root / "pathways").rglob("*.py"), (root / "benchmarks").rglob("*.py"))):
        name = path.relative_to(root).as_posix()
        if name.startswith(SOCKET_ROOMS) or GENERATED.search(name):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if SOCKETS.search(line.split("#")[0]):
                yield f"{name}:{number} waits for a socket: expected a Connection of pathways/transport/connection.py"


def asked_modes(root: pathlib.Path) -> Iterator[str]:
    """Lines that ask whether a whole cluster has agents: where a host runs is the affair of its machine."""
    for path in sorted((root / "pathways").rglob("*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if MODE.search(line):
                yield (
                    f"{path.relative_to(root)}:{number} asks whether the cluster has agents: expected a method of the "
                    "host's machine (pathways/controller/machines.py)"
                )


def strewn_records(root: pathlib.Path) -> Iterator[str]:
    """Messages between processes that two rooms of the core define, or that lie in a room other than csrc/messages.

    The frames of a link are of one room, too: csrc/link.
    """
    rooms: dict[str, set[str]] = {}
    for path in sorted((root / "csrc").glob("*/*.h")):
        text, room = path.read_text(encoding="utf-8"), path.parent.name
        for name in re.findall(
            r"^(?:struct|enum class) (\w+(?:Record|Frame|Header|RecordKind|FrameKind))\b[^;]*\{", text, re.M
        ):
            rooms.setdefault(name, set()).add(room)
        if room != "messages" and re.search(r"^  RecordHeader header;", text, re.M):
            yield f"{path.relative_to(root)} defines a record: records of processes lie in csrc/messages"
    for name, found in rooms.items():
        if len(found) > 1:
            yield f"{name} is defined in csrc/{' and csrc/'.join(sorted(found))}"


def test_only_one_file_of_the_core_reads_the_clock(root: pathlib.Path) -> None:
    faults = list(clock_readers(root))
    assert not faults, "\n".join(faults)


def test_one_loop_serves_all_sockets(root: pathlib.Path) -> None:
    faults = list(socket_waiters(root))
    assert not faults, "\n".join(faults)


def test_nobody_asks_whether_a_cluster_has_agents(root: pathlib.Path) -> None:
    faults = list(asked_modes(root))
    assert not faults, "\n".join(faults)


def test_a_read_of_the_clock_is_found(tmp_path: pathlib.Path) -> None:
    (tmp_path / "csrc/sync").mkdir(parents=True)
    (tmp_path / "csrc/sync/atomic.cc").write_text("return monotonic_ns();\n")
    (tmp_path / "csrc/sync/ring.h").write_text("Clock clock = monotonic_ns;  // not monotonic_ns()\n")
    (tmp_path / "csrc/sync/ring.cc").write_text("clock();\nnow = monotonic_ns();\n")
    assert list(clock_readers(tmp_path)) == [
        "csrc/sync/ring.cc:2 reads the machine's clock: expected a Clock that its owner hands in"
    ]


def test_each_record_is_defined_in_one_room(root: pathlib.Path) -> None:
    faults = list(strewn_records(root))
    assert not faults, "\n".join(faults)


def test_a_record_of_two_rooms_is_found(tmp_path: pathlib.Path) -> None:
    for room in ("messages", "host"):
        (tmp_path / "csrc" / room).mkdir(parents=True)
        (tmp_path / "csrc" / room / "a.h").write_text("struct RunRecord {\n  RecordHeader header;\n};\n")
    assert list(strewn_records(tmp_path)) == [
        "csrc/host/a.h defines a record: records of processes lie in csrc/messages",
        "RunRecord is defined in csrc/host and csrc/messages",
    ]


def test_a_thread_that_waits_for_a_socket_is_found(tmp_path: pathlib.Path) -> None:
    for room in ("transport", "host"):
        (tmp_path / "pathways" / room).mkdir(parents=True)
        (tmp_path / "pathways" / room / "a.py").write_text("import selectors\n\nsock.recv_into(room)  # a thread\n")
    assert list(socket_waiters(tmp_path)) == [
        f"pathways/host/a.py:{line} waits for a socket: expected a Connection of pathways/transport/connection.py"
        for line in (1, 3)
    ]


def test_a_mode_of_a_cluster_is_found(tmp_path: pathlib.Path) -> None:
    (tmp_path / "pathways").mkdir()
    (tmp_path / "pathways/a.py").write_text("if self.agents is not None:\n    x = 1 if agents is None else 2\n")
    assert [fault.partition(" ")[0] for fault in asked_modes(tmp_path)] == ["pathways/a.py:1", "pathways/a.py:2"]
