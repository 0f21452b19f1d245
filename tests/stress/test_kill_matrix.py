"""`kill -9` of the client that owns a cluster, of a host, of the controller: each alone, each pair, all at once, during
start-up, compile and run. Where the owner, the controller or the start is hit, within ten seconds no process, no file
and no shared memory is left, and whoever is left alive, the owner or a second client, has a clear error.

ERR-2: where a host alone is hit, the cluster goes on: its island comes back, the owner's pending runs fail by name, its
next one is right, and a second client on the other island sees nothing.

Everything of a case carries a mark in its environment, by which its processes are found wherever they went, and keeps
its files in a folder of its own. The default is a sample drawn by chance, in which each set of victims, each phase and
each kind of cluster occurs; PATHWAYS_KILLS=all plays all 42 cases. The moment of the kill is drawn too. The seed is
printed, and taken from PATHWAYS_SEED. With doubles for devices and native core when `pathways._native` is not built,
else with JAX.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest

HERE = pathlib.Path(__file__).parent
CLIENT = HERE / "kill_matrix_client.py"
LIMIT_S = 10.0
IS_WHOLE = os.environ.get("PATHWAYS_KILLS") == "all"
PHASES = ("start-up", "compile", "run")
VICTIMS = (
    ("client",),
    ("host",),
    ("controller",),
    ("client", "host"),
    ("client", "controller"),
    ("host", "controller"),
    ("client", "host", "controller"),
)
CLEAR = {"HostLostError", "ControllerLostError", "ClusterClosedError", "ConnectError"}
HAS_NATIVE = importlib.util.find_spec("pathways._native") is not None
KINDS = [
    "doubles",
    pytest.param("jax", marks=pytest.mark.skipif(not HAS_NATIVE, reason="pathways._native is not built")),
]


class Case:
    """The processes of one case, and how to find them."""

    def __init__(self, kind: str) -> None:
        self.mark = f"PATHWAYS_KILL_MATRIX={os.getpid()}-{random.getrandbits(64):x}"
        self.folder = tempfile.mkdtemp(prefix="km", dir="/tmp")
        self.flags = ["--doubles"] if kind == "doubles" else []
        name, _, value = self.mark.partition("=")
        paths = [str(HERE.parent / "python"), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
        self.environ = {**os.environ, name: value, "TMPDIR": self.folder, "PYTHONPATH": os.pathsep.join(paths)}
        self.clients: list[Client] = []

    def processes(self) -> dict[int, str]:
        """Every process with the mark that is not a zombie: number to command line."""
        found = {}
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            try:
                environ = pathlib.Path(f"/proc/{entry}/environ").read_bytes()
                if self.mark.encode() in environ.split(b"\0"):
                    found[int(entry)] = pathlib.Path(f"/proc/{entry}/cmdline").read_text().replace("\0", " ")[:120]
            except OSError:
                continue
        return found

    def start(self, *arguments: str) -> Client:
        client = Client(self, arguments)
        self.clients.append(client)
        return client

    def files(self) -> list[str]:
        """What is left in the folder of the case."""
        return sorted(str(path.relative_to(self.folder)) for path in pathlib.Path(self.folder).rglob("*"))

    def clean(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for client in self.clients:
            client.process.wait()
            client.output.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Client:
    """A client process; `until` reads what it says."""

    def __init__(self, case: Case, arguments: tuple[str, ...]) -> None:
        self.output = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, str(CLIENT), *arguments, *case.flags],
            stdout=self.output,
            stderr=subprocess.DEVNULL,
            env=case.environ,
        )

    def said(self) -> list[dict[str, Any]]:
        lines = os.pread(self.output.fileno(), 1 << 20, 0).split(b"\n")[:-1]
        return [json.loads(line) for line in lines]

    def until(self, event: str, timeout_s: float = 60.0, **fields: Any) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for each in self.said():
                if each["event"] == event and all(each[name] == value for name, value in fields.items()):
                    return each
                if each["event"] == "end":
                    raise AssertionError(f"ended instead of reaching {event}: {each}")
            if self.process.poll() is not None:
                raise AssertionError(f"exited with {self.process.returncode} before {event}")
            time.sleep(0.005)
        raise AssertionError(f"no {event} in {timeout_s:g} s; it said {self.said()[-3:]}")

    def has_said(self, event: str) -> bool:
        return any(each["event"] == event for each in self.said())

    def ending(self) -> dict[str, Any] | None:
        said = self.said()
        return said[-1] if said and said[-1]["event"] == "end" else None


@pytest.fixture(scope="module")
def seed() -> int:
    return int(os.environ.get("PATHWAYS_SEED", "0")) or random.SystemRandom().getrandbits(32)


@pytest.fixture
def generator(seed: int) -> random.Random:
    print(f"PATHWAYS_SEED={seed}")
    return random.Random(seed)


@pytest.fixture(scope="module")
def drawn(seed: int) -> set[tuple[str, str, tuple[str, ...]]]:
    """The cases to play, if not all: one of each set of victims."""
    pairs = [(kind, phase) for phase in PHASES for kind in ("doubles", "jax")]
    random.Random(seed).shuffle(pairs)
    return {(*pairs[i % len(pairs)], victims) for i, victims in enumerate(VICTIMS)}


@pytest.fixture(params=KINDS)
def case(
    request: pytest.FixtureRequest, phase: str, victims: tuple[str, ...], drawn: set[tuple[str, str, tuple[str, ...]]]
) -> Iterator[Case]:
    if not IS_WHOLE and (request.param, phase, victims) not in drawn:
        pytest.skip("not drawn; PATHWAYS_KILLS=all plays all")
    case = Case(request.param)
    yield case
    case.clean()


@pytest.mark.slow
@pytest.mark.watchdog(150)
@pytest.mark.parametrize("victims", VICTIMS, ids="+".join)
@pytest.mark.parametrize("phase", PHASES)
def test_kill_9_leaves_nothing_and_tells_everybody(
    case: Case, phase: str, victims: tuple[str, ...], generator: random.Random
) -> None:
    owner = case.start("owner", phase)
    guest = None
    if phase == "start-up":
        stage = generator.choice((1, 2, 3))
        pids = bring_to_stage(case, owner, stage, generator)
        moment = f"at stage {stage} of the start"
    else:
        ready = owner.until("ready")
        pids = {"controller": ready["controller"], "host": generator.choice(ready["hosts"][:2])}
        guest = case.start("guest", ready["address"])
        guest.until("phase")
        owner.until("phase")
        delay = generator.uniform(0.0, 0.3)
        time.sleep(delay)
        moment = f"{delay:.2f} s into {phase}"
        assert owner.ending() is None, f"the owner ended before anything was killed: {owner.ending()}"
        assert phase != "compile" or not owner.has_said("compiled"), "the compilation was too quick to be disturbed"
    pids["client"] = owner.process.pid
    order = generator.sample(victims, len(victims))
    started = time.monotonic()
    for victim in order:
        with contextlib.suppress(ProcessLookupError):  # the death of the one before was quicker
            os.kill(pids[victim], signal.SIGKILL)
    print(f"killed {', then '.join(f'{victim} {pids[victim]}' for victim in order)}, {moment}")
    if victims == ("host",) and (phase != "start-up" or becomes_ready(owner)):
        assert_the_cluster_goes_on(case, owner, guest, phase, pids["host"])
        os.kill(pids["client"], signal.SIGKILL)
        victims, started = ("client",), time.monotonic()
    # Clients end by themselves once they have said what they were told.
    while time.monotonic() - started < LIMIT_S and (case.processes() or case.files()):
        time.sleep(0.02)
        owner.process.poll()
        if guest is not None:
            guest.process.poll()
    print(f"all gone after {time.monotonic() - started:.2f} s")
    assert case.processes() == {}, "processes left"
    assert case.files() == [], "files left"
    for name, client in (("owner", owner), ("second client", guest)):
        if client is None or (client is owner and "client" in victims):
            continue
        end = client.ending()
        assert end is not None, f"the {name} was told nothing"
        print(f"{name}: {end['error']}: {end['message'].splitlines()[0]}")
        assert end["error"] in CLEAR, end
        assert_names_what_happened(end, victims, pids)


def becomes_ready(owner: Client) -> bool:
    """Whether the start was over when it was hit."""
    while owner.ending() is None and not owner.has_said("ready"):
        time.sleep(0.01)
    return owner.ending() is None


def assert_the_cluster_goes_on(case: Case, owner: Client, guest: Client | None, phase: str, host: int) -> None:
    """ERR-2."""
    back = owner.until("back")
    assert host not in back["hosts"] and len(set(back["hosts"])) == 4
    if guest is not None and not case.flags:
        guest.until("right", count=2 + max((each["count"] for each in guest.said() if "count" in each), default=0))
    if phase == "run" and not case.flags:
        assert f"(pid {host}) was killed by SIGKILL" in owner.until("lost")["message"]
        owner.until("right")
    assert owner.ending() is None and (guest is None or guest.ending() is None)


def bring_to_stage(case: Case, owner: Client, stage: int, generator: random.Random) -> dict[str, int]:
    """Waits until a host is at a stage of its start; the numbers of its process and of the controller's."""
    first = owner.until("start", stage=stage)
    controllers = [pid for pid, command in case.processes().items() if "pathways.controller.main" in command
                   and "supervisor.py" not in command]  # fmt: skip
    assert len(controllers) == 1, case.processes()
    host = next(each for each in owner.said() if each["event"] == "start" and each["host"] == first["host"])
    time.sleep(generator.uniform(0.0, 0.05))
    return {"controller": controllers[0], "host": host["pid"]}


def assert_names_what_happened(end: dict[str, Any], victims: tuple[str, ...], pids: dict[str, int]) -> None:
    """The message names one of the lost by its number, and how it was lost where somebody saw that."""
    assert any(str(pids[victim]) in end["message"] for victim in victims), end
