"""What clients may have: quotas given at `connect`, what the operator allows, `cluster.limit`, `pathways clients` and
`pathways limit`, with real processes.

MEM-5: a quota bounds its client, and nobody else. SHARE-1: a new weight acts at once.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import pathways as pw
from pathways import cli
from pathways.cluster.launcher import start_local_cluster
from pathways.cluster.operator import limit as limit_client

MIB = 1 << 20

#: A client process: `python -c GUEST ADDRESS EXPRESSION`. It evaluates the expression with `cluster`, prints the result
#: or the error as JSON, then once more for each line that it reads.
GUEST = """
import json, os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
import numpy as np
import pathways as pw
cluster = pw.connect(sys.argv[1], name="guest", **json.loads(sys.argv[2]))
slice_ = pw.make_virtual_device_set(cluster).add_slice(devices=1)
double = pw.jit(lambda x: x * 2, devices=slice_)
print(cluster.client_id, flush=True)
for line in sys.stdin:
    try:
        found = eval(line)
    except pw.errors.PathwaysError as error:
        found = type(error).__name__ + ": " + str(error)
    print(json.dumps(found), flush=True)
"""


class Guest:
    """A client process of a cluster that this one has started."""

    def __init__(self, address: str, **terms: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", GUEST, address, json.dumps(terms)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.number = int(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the client ended with {self.process.wait()}"
        return line

    def ask(self, expression: str) -> Any:
        """The value of an expression there; of an error its class and text."""
        assert self.process.stdin is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        return json.loads(self._line())

    def end(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def owner() -> Iterator[pw.Cluster]:
    """This process's connection to a cluster of its own: one device, policy "priority"."""
    target = pw.LocalCluster(
        policy="priority",
        device_memory=64 * MIB,
        client_memory=32 * MIB,
        client_runs=100,
        max_weight=10,
        max_priority=5,
    )
    with pw.connect(target, weight=2) as cluster:
        yield cluster


@pytest.fixture
def guest(owner: pw.Cluster) -> Iterator[Guest]:
    """Another client, of another process."""
    made = Guest(str(owner.address), memory=4 * MIB)
    yield made
    made.end()


def limits_of(owner: pw.Cluster, number: int) -> dict[str, Any]:
    return next(each["limits"] for each in owner.stats()["clients"] if each["client"] == number)


def put(name: str, mib: int) -> str:
    """An expression that puts an array and keeps it by a name."""
    made = f"pw.device_put(np.ones({mib} << 18, np.float32), slice_)"
    return f"(globals().update({name}={made}), {name}.block_until_ready(), 1)[-1]"


@pytest.mark.slow
def test_a_quota_bounds_its_client_and_nobody_else(owner: pw.Cluster, guest: Guest) -> None:
    assert limits_of(owner, guest.number)["memory"] == 4 * MIB
    said = guest.ask(put("a", 5))
    assert "ResourceExhaustedError" in said and "this client's quota is 4.0 MiB" in said and "never fit" in said
    assert guest.ask(put("a", 3)) == 1
    said = guest.ask(put("b", 2))
    assert "ResourceExhaustedError" in said and "live arrays hold 3.0 MiB" in said
    # Beside it, one that has more room notices nothing.
    here = pw.make_virtual_device_set(owner).add_slice(devices=1)
    big = pw.device_put(np.arange(4 << 18, dtype=np.float32), here)
    np.testing.assert_array_equal(np.asarray(big), np.arange(4 << 18, dtype=np.float32))
    assert guest.ask("float(np.asarray(a)[7])") == 1.0
    assert guest.ask("(a.delete(), 1)[-1]") == 1
    assert guest.ask(put("b", 2)) == 1
    assert guest.ask("float(np.asarray(double(b))[3])") == 2.0


@pytest.mark.slow
def test_the_owner_changes_a_quota_while_its_client_runs(owner: pw.Cluster, guest: Guest) -> None:
    assert guest.ask(put("a", 3)) == 1
    made = owner.limit(guest.number, memory=12 * MIB, runs=7)
    assert made == limits_of(owner, guest.number)
    assert made["memory"] == 12 * MIB and made["runs"] == 7 and made["weight"] == 1
    assert guest.ask(put("b", 8)) == 1
    # Below what it holds: nothing is lost, and it gets no more before it has less.
    assert owner.limit(guest.number, memory=MIB)["memory"] == MIB
    assert "ResourceExhaustedError" in guest.ask(put("c", 1))
    assert guest.ask("float(np.asarray(b)[5] + np.asarray(a)[5])") == 2.0
    assert guest.ask("(a.delete(), b.delete(), 1)[-1]") == 1
    assert guest.ask(put("c", 1)) == 1
    assert owner.limit(guest.number, memory="none", runs="none")["memory"] == 0
    assert guest.ask(put("d", 20)) == 1


@pytest.mark.slow
def test_who_waits_at_its_quota_goes_on_when_it_has_room(owner: pw.Cluster) -> None:
    waiting = Guest(str(owner.address), memory=4 * MIB, at_limit="wait")
    try:
        assert waiting.ask(put("a", 3)) == 1
        ask = "(globals().update(b=pw.device_put(np.full(2 << 18, 5, np.float32), slice_), c=None), 1)[-1]"
        assert waiting.ask(ask) == 1
        time.sleep(0.6)  # longer than the grace after which it would fail
        (use,) = (each for each in owner.stats()["clients"] if each["client"] == waiting.number)
        assert use["held"] == 1 and use["memory"] == 3 * MIB
        owner.limit(waiting.number, memory=6 * MIB)
        assert waiting.ask("float(np.asarray(b)[9])") == 5.0
    finally:
        waiting.end()


@pytest.mark.slow
@pytest.mark.watchdog(60)
def test_who_waits_at_its_quota_may_read_first_and_delete_then(owner: pw.Cluster) -> None:
    """The read comes behind the work that waits, which waits until what is read is deleted."""
    waiting = Guest(str(owner.address), memory=4 * MIB, at_limit="wait")
    many = "[double(a) for _ in range(6)]"
    drain = "[(float(np.asarray(each)[5]), each.delete())[0] for each in made]"
    try:
        assert waiting.ask(put("a", 1)) == 1
        assert waiting.ask(f"(globals().update(made={many}), 1)[-1]") == 1
        assert waiting.ask(drain) == [2.0] * 6
    finally:
        waiting.end()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"memory": 33 * MIB}, "allows a client memory=3"),
        ({"runs": 101}, "allows a client runs=100 at most, got runs=101"),
        ({"weight": 11.0}, "allows a client weight=10 at most, got weight=11"),
        ({"priority": 6}, "allows a client priority=5 at most, got priority=6"),
    ],
)
def test_more_than_the_operator_allows(owner: pw.Cluster, terms: dict[str, Any], words: str) -> None:
    from pathways.cluster.remote import connect_unix
    from pathways.process.client_terms import ClientTerms

    with pytest.raises(pw.errors.OptionError, match=words):
        connect_unix(str(owner.address), terms=ClientTerms.checked(**terms)).close()


@pytest.mark.slow
def test_what_is_not_given_is_what_the_operator_allows(owner: pw.Cluster) -> None:
    mine = limits_of(owner, owner.client_id)
    assert (mine["weight"], mine["memory"], mine["runs"]) == (2.0, 32 * MIB, 100)


@pytest.mark.slow
def test_a_guest_may_change_nothing(owner: pw.Cluster, guest: Guest) -> None:
    for number in (guest.number, owner.client_id):
        said = guest.ask(f"cluster.limit({number}, weight=9)")
        assert "PermissionDeniedError" in said and "may not change the limits" in said
    assert limits_of(owner, guest.number)["weight"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"weight": 0}, "weight"),
        ({"weight": -1.0}, "weight"),
        ({"weight": float("nan")}, "weight"),
        ({"weight": float("inf")}, "weight"),
        ({"weight": "none"}, "range|weight"),
        ({"priority": 1.5}, "priority"),
        ({"memory": 0}, "memory"),
        ({"memory": -5}, "memory"),
        ({"memory": 1 << 70}, "memory"),
        ({"memory": "1GiB"}, "memory"),
        ({"runs": 0}, "runs"),
        ({"runs": 1 << 20}, "runs"),
        ({"bytes": 1000}, "bytes"),
        ({}, "no limit"),
    ],
)
def test_limits_that_make_no_sense(owner: pw.Cluster, given: dict[str, Any], words: str) -> None:
    before = limits_of(owner, owner.client_id)
    with pytest.raises(pw.errors.OptionError, match=words):
        owner.limit(**given)
    assert limits_of(owner, owner.client_id) == before


@pytest.mark.slow
def test_a_client_that_is_gone(owner: pw.Cluster, guest: Guest) -> None:
    guest.end()
    deadline = time.monotonic() + 60
    while any(each["client"] == guest.number for each in owner.stats()["clients"]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(pw.errors.ClusterClosedError, match=f"client {guest.number} is not"):
        owner.limit(guest.number, weight=2)
    with pytest.raises(pw.errors.ClusterClosedError):
        limit_client(str(owner.address), 4711, {"weight": 2})


@pytest.mark.slow
def test_the_commands(owner: pw.Cluster, guest: Guest) -> None:
    address = str(owner.address)
    run = CliRunner()
    number = str(guest.number)
    done = run.invoke(
        cli.main, ["limit", address, number, "--weight", "3", "--priority", "2", "--memory", "16MiB", "--runs", "5"]
    )
    assert done.exit_code == 0, done.output
    assert "weight 3, priority 2; quotas: memory 16 MiB, runs 5, bytes none" in done.output
    assert guest.ask(put("a", 6)) == 1
    assert guest.ask("float(np.asarray(double(a))[1])") == 2.0
    shown = run.invoke(cli.main, ["clients", address, "--seconds", "0.1"])
    assert shown.exit_code == 0, shown.output
    (line,) = (each for each in shown.output.splitlines() if "guest" in each)
    assert all(word in line for word in (number, "3", "2", "6 MiB", "16 MiB", "of 5")), line
    data = json.loads(run.invoke(cli.main, ["clients", address, "--seconds", "0.1", "--json"]).output)
    (row,) = (each for each in data["clients"] if each["client"] == guest.number)
    assert row["memory"] == 6 * MIB and row["limits"]["memory"] == 16 * MIB and row["suspended"] is False
    assert run.invoke(cli.main, ["limit", address, number, "--memory", "none"]).exit_code == 0
    assert limits_of(owner, guest.number)["memory"] == 0
    for arguments, words in (
        ([number], "nothing to change"),
        ([number, "--memory", "lots"], "expected a size"),
        ([number, "--weight", "nan"], "weight"),
        (["4711", "--weight", "2"], "client 4711 is not"),
    ):
        refused = run.invoke(cli.main, ["limit", address, *arguments])
        assert refused.exit_code != 0 and words in refused.output, refused.output


@pytest.mark.slow
def test_shares_are_measured_and_a_new_weight_acts_at_once(owner: pw.Cluster) -> None:
    guests = [Guest(str(owner.address), weight=1.0) for _ in range(2)]
    setup = (
        "(exec('''from pathways.testing import stand_in\\nimport threading, jax\\n"
        "f = pw.jit(lambda x: stand_in.step(x + 1, 2000), devices=slice_)\\nx = f(np.zeros(4, np.float32))\\n"
        "x.block_until_ready()\\ncount = 1\\nstop = False\\n"
        "def loop():\\n  global x, count\\n  while not stop:\\n    for _ in range(16):\\n      x = f(x); count += 1\\n"
        "    x.block_until_ready() if count % 64 == 1 else None\\n"
        "thread = threading.Thread(target=loop); thread.start()''', globals()), 1)[-1]"
    )
    try:
        for guest in guests:
            assert guest.ask(setup) == 1

        def shares() -> list[float]:
            done = CliRunner().invoke(cli.main, ["clients", str(owner.address), "--seconds", "1.5", "--json"])
            assert done.exit_code == 0, done.output
            rows = {each["client"]: each for each in json.loads(done.output)["clients"]}
            return [rows[guest.number]["share"] for guest in guests]

        def become(*wanted: float) -> None:
            """Shares that are wrong stay wrong; on a busy machine they are off in some measurements."""
            found = [shares()]
            while found[-1] != pytest.approx(wanted, abs=0.1):
                assert len(found) < 8, found
                found.append(shares())

        become(0.5, 0.5)
        owner.limit(guests[0].number, weight=4)
        become(0.8, 0.2)
        for guest in guests:
            stop = "(globals().update(stop=True), thread.join(), bool((np.asarray(x) == count).all()))[-1]"
            assert guest.ask(stop) is True
    finally:
        for guest in guests:
            guest.end()


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"memory": 0}, "memory"),
        ({"memory": True}, "memory"),
        ({"memory": 1.5}, "memory"),
        ({"runs": 0}, "runs"),
        ({"bytes": 5}, "bytes"),
        ({"at_limit": "queue"}, '"error" or "wait"'),
    ],
)
def test_terms_that_make_no_sense(terms: dict[str, Any], words: str) -> None:
    with pytest.raises(pw.errors.OptionError, match=words):
        pw.connect(**terms)


@pytest.mark.slow
def test_an_allowance_that_makes_no_sense() -> None:
    with pytest.raises(pw.errors.OptionError, match="weight"):
        start_local_cluster(platform="cpu", max_weight=0)


EMBEDDED = """
import numpy as np, pytest
import pathways as pw
with pw.connect(memory=1 << 20) as cluster:
    here = pw.make_virtual_device_set(cluster).add_slice(devices=1)
    with pytest.raises(pw.errors.ResourceExhaustedError, match=r"quota is 1\\.0 MiB"):
        pw.device_put(np.ones(1 << 19, np.float32), here).block_until_ready()
    small = pw.device_put(np.ones(1 << 17, np.float32), here)
    assert cluster.limit(memory="none")["memory"] == 0
    big = pw.device_put(np.ones(1 << 19, np.float32), here)
    assert float(np.asarray(big)[-1]) == float(np.asarray(small)[0]) == 1.0
    with pytest.raises(pw.errors.ClusterClosedError):
        cluster.limit(3, memory=1 << 20)
"""


def test_an_embedded_cluster_has_quotas_too() -> None:
    """In a process of its own: this one may be connected to an embedded cluster without."""
    subprocess.run([sys.executable, "-c", EMBEDDED], check=True, timeout=120)
