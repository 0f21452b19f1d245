"""What every Python test stands on: eight CPU devices, a watchdog, a check that nothing is left, and clusters.

* JAX sees eight CPU devices and nothing else; that is settled here, before anything imports JAX.
* XLA compiles without its optimizations, unless XLA_FLAGS says how: the tests compile thousands of small programs, and
  compare with what JAX computes under the same flags. CI runs a part of them with XLA's own flags as well.
* The watchdog ends the whole run, with every thread's stack, when one test takes longer than its limit: a deadlock
  must fail, not hang. `@pytest.mark.watchdog(seconds)` changes the limit of one test. It is a thread of the
  interpreter's own (faulthandler), so it also works while the GIL is held for ever.
* When the session is over, no process that it started may be left.
* A session may play a part of the tests, drawn by chance: `sampling.py`. The first lines have the seed; the last ones
  say how many were played.
* `PATHWAYS_KIND` plays `cluster`'s tests on one kind alone: `agents`, hosts that machine agents bring; `far`, the same
  with this process as a client on another machine; `spread`, the same with each host on a machine of its own; or
  `namespaces`, the same as `far` on machines that are network namespaces; `two_machines` and `four_machines`, one
  island over so many of these. Where nobody can make namespaces, these three are `far`.
* `cluster` is a connected cluster: embedded, and two islands of host processes on this machine, in turn; `make stress`
  adds one island. So a test that takes it holds for each. `embedded_cluster`, `local_cluster`, `islands_cluster` are
  one of them; `machines_cluster` is as if its hosts were on two machines, for what travels between them.
"""

from __future__ import annotations

import os

DEVICES = 8
os.environ["JAX_PLATFORMS"] = "cpu"
QUICK_XLA = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', QUICK_XLA)} --xla_force_host_platform_device_count={DEVICES}".strip()
)

os.environ["PATHWAYS_COMPILE_CACHE"] = "0"  # what a test compiles does not depend on earlier sessions

import collections  # noqa: E402
import faulthandler  # noqa: E402
import gc  # noqa: E402
import pathlib  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from typing import Any  # noqa: E402

import hypothesis  # noqa: E402
import psutil  # noqa: E402
import pytest  # noqa: E402
import sampling  # noqa: E402

pytest.register_assert_rewrite(
    "control_clusters", "memory_ledgers", "trace_cases", "trust_cases"
)  # helpers that assert tell values, as tests do

ROOT = pathlib.Path(__file__).parents[1]
WATCHDOG_S = 180.0
LEAK_GRACE_S = 10.0
LONG_SESSION_S, SLOWEST_FILES = 300.0, 40

# Examples are drawn the same way in every run, so that a red test is red again; no deadline, as time is not a result.
hypothesis.settings.register_profile("pathways", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("pathways")

_stderr_fd = -1
_no_namespaces = ""  # why machines are not namespaces, though that was asked for
KIND = "PATHWAYS_KIND"
NAMESPACES = ("namespaces", "two_machines", "four_machines")
MACHINES: pytest.StashKey[Any] = pytest.StashKey()
#: How many tests this process plays, and of how many.
COUNTS: pytest.StashKey[tuple[int, int]] = pytest.StashKey()


def pytest_configure(config: pytest.Config) -> None:
    """Keep the terminal's stderr for the watchdog: during a test, file descriptor 2 is pytest's capture."""
    global _stderr_fd
    _stderr_fd = os.dup(sys.__stderr__.fileno() if sys.__stderr__ else 2)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell that starts us in the background says so
        signal.signal(signal.SIGINT, signal.default_int_handler)  # and Ctrl-C is tested
    sampling.set_up()
    if os.environ.get(KIND) in NAMESPACES:
        _move_to_a_machine(config)


def _move_to_a_machine(config: pytest.Config) -> None:
    """Moves this process to a machine of a network of namespaces, if it is one that plays tests."""
    global _no_namespaces
    sys.path.insert(0, str(ROOT / "tests" / "python"))
    import namespaces

    _no_namespaces = namespaces.why_not() or ""
    if _no_namespaces:
        return
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        from namespace_cluster import Machines

        machines = Machines()
        config.stash[MACHINES] = machines
        config.add_cleanup(machines.close)


def pytest_report_header() -> list[str]:
    """Says how to draw the same tests again, and where machines are not what was asked for."""
    lines = [sampling.header()]
    if _no_namespaces:
        lines.append(f"{KIND}={os.environ[KIND]}: {_no_namespaces}, so machines are addresses of 127.0.0.0/8")
    return lines


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Learns of a process of pytest-xdist how many tests the session plays: each of them collects all."""
    if "counts" in getattr(node, "workeroutput", {}):
        node.config.stash[COUNTS] = tuple(node.workeroutput["counts"])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Says where a long session's time went: seconds per file, with the set-up and tear-down of its tests. Says how
    many tests were left out."""
    seconds: collections.Counter[str] = collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    total = sum(seconds.values())
    if total > LONG_SESSION_S:
        terminalreporter.section(f"slowest files, of {total:.0f} s in all processes")
        for name, spent in seconds.most_common(SLOWEST_FILES):
            terminalreporter.write_line(f"{spent:6.0f} s  {name}")
    played, found = config.stash.get(COUNTS, (0, 0))
    if played < found:
        terminalreporter.section("share")
        terminalreporter.write_line(f"{played} of {found} tests were played; `make test-all` plays all")
        terminalreporter.write_line(f"the same ones again: {sampling.header()}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The kinds of clusters for a test that takes `cluster`: embedded and two islands; with the mark `one_island`
    embedded and one island; with `one_process` embedded alone. `make stress` adds one island to each."""
    if "kind_of_cluster" not in metafunc.fixturenames:
        return
    has_mark = metafunc.definition.get_closest_marker
    kinds = ["embedded"]
    if has_mark("one_island") or os.environ.get("PATHWAYS_THOROUGHNESS", "1") != "1":
        kinds.append("local")
    if not has_mark("one_island") and not has_mark("one_process"):
        kinds.append("islands")
    if only := os.environ.get(KIND):
        kinds = ["far" if only in NAMESPACES and _no_namespaces else only]
    values = [pytest.param(kind, marks=() if kind == "embedded" else pytest.mark.slow) for kind in kinds]
    metafunc.parametrize("kind_of_cluster", values, scope="function")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not drawn: see `tests/sampling.py`."""
    absent = sampling.left_out(items)
    config.stash[COUNTS] = counts = (len(items) - len(absent), len(items))
    if hasattr(config, "workeroutput"):
        config.workeroutput["counts"] = counts
    if absent:
        items[:] = [item for item in items if item not in absent]
        config.hook.pytest_deselected(items=sorted(absent, key=lambda item: item.nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Arm the watchdog around set-up, call and tear-down of one test."""
    mark = item.get_closest_marker("watchdog")
    faulthandler.dump_traceback_later(mark.args[0] if mark else WATCHDOG_S, exit=True, file=_stderr_fd)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def garbage_of_this_test() -> None:
    """What earlier tests left, such as JAX's caches, is no garbage of this test: `gc.collect` need not look at it. In a
    process that has run many tests each look at all takes about a second."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_process_left() -> Iterator[None]:
    """Fail the session when a process that it started outlives it by `LEAK_GRACE_S`."""
    yield
    deadline = time.monotonic() + LEAK_GRACE_S
    left = [child for child in psutil.Process().children(recursive=True) if "resource_tracker" not in _command(child)]
    _, alive = psutil.wait_procs(left, timeout=max(0.0, deadline - time.monotonic()))
    assert not alive, f"processes left after the tests: {[(child.pid, _command(child)) for child in alive]}"


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.fixture(scope="session")
def root() -> pathlib.Path:
    """The repository's folder."""
    return ROOT


#: The clusters that a contract holds on: islands, hosts per island, devices per host, and so on; None for embedded.
CLUSTERS: dict[str, dict[str, int] | None] = {
    "embedded": None,
    "local": {"islands": 1, "hosts_per_island": 2, "devices_per_host": 2},
    "islands": {"islands": 2, "hosts_per_island": 2, "devices_per_host": 2},
    "machines": {"islands": 1, "hosts_per_island": 4, "devices_per_host": 1, "machines": 2},
    "agents": {"islands": 2, "hosts_per_island": 2, "devices_per_host": 2},
    "far": {"islands": 2, "hosts_per_island": 2, "devices_per_host": 2},
    "spread": {"islands": 2, "hosts_per_island": 2, "devices_per_host": 2, "machines_per_island": 2},
    "namespaces": {"islands": 2, "hosts_per_island": 2, "devices_per_host": 2},
    "two_machines": {"islands": 1, "hosts_per_island": 4, "devices_per_host": 2, "machines_per_island": 2},
    "four_machines": {"islands": 1, "hosts_per_island": 4, "devices_per_host": 2, "machines_per_island": 4},
}


@pytest.fixture(scope="session")
def sessions(pytestconfig: pytest.Config) -> Iterator[Callable[[str], Any]]:
    """Connects to a cluster of `CLUSTERS` by name, once for all tests; starts it anew if a test closed or lost it."""
    import pathways as pw

    opened: dict[str, Any] = {}
    machines: list[Any] = []

    def start(name: str, shape: Any) -> Any:
        if name in NAMESPACES:
            from namespace_cluster import NamespaceCluster

            return NamespaceCluster(pytestconfig.stash[MACHINES].network, **shape)
        from machines import MachineCluster

        return MachineCluster(**shape)

    def connect(name: str) -> Any:
        shape = CLUSTERS[name]
        if name in ("agents", "far", "spread", *NAMESPACES):
            if not machines or not machines[0].is_alive():
                for each in machines:
                    each.close()
                machines[:] = [start(name, shape)]
            opened[name] = machines[0].connect_far() if name in ("far", "spread") else machines[0].connect()
            return opened[name]
        opened[name] = pw.connect(None if shape is None else pw.LocalCluster(**shape))
        return opened[name]

    yield connect
    for cluster in opened.values():
        cluster.close()
    for each in machines:
        each.close()


@pytest.fixture(scope="session")
def network(pytestconfig: pytest.Config) -> Any:
    """The machines that are namespaces, with `PATHWAYS_KIND=namespaces` only; else None."""
    machines = pytestconfig.stash.get(MACHINES, None)
    return machines and machines.network


@pytest.fixture
def embedded_cluster(sessions: Callable[[str], Any]) -> Any:
    """This process's own eight CPU devices."""
    return sessions("embedded")


@pytest.fixture
def local_cluster(sessions: Callable[[str], Any]) -> Any:
    """Host processes on this machine: one island, two hosts, two devices each."""
    return sessions("local")


@pytest.fixture
def islands_cluster(sessions: Callable[[str], Any]) -> Any:
    """Host processes on this machine: two islands, two hosts each, two devices each."""
    return sessions("islands")


@pytest.fixture
def machines_cluster(sessions: Callable[[str], Any]) -> Any:
    """Host processes as if on two machines: one island, two hosts on each, one device each."""
    return sessions("machines")


@pytest.fixture
def cluster(sessions: Callable[[str], Any], kind_of_cluster: str) -> Any:
    """A connected cluster, of each kind in turn: see `pytest_generate_tests`."""
    return sessions(kind_of_cluster)
