"""Tokens: how often, how long and by whom they are taken, also by several processes at once; and `pathways token`.

CERT-2  test_a_secret_is_nowhere_but_in_its_text
CERT-3  test_one_of_many_takes_the_token, test_one_of_many_joins_with_the_token, test_processes_share_the_tokens
"""

from __future__ import annotations

import json
import os
import pathlib
import stat
import subprocess
import sys
import threading
import time

import click
import pytest
from click.testing import CliRunner
from trust_cases import SECRETS, Controller, at_once

from pathways import cli, errors
from pathways.cli.text import DURATION
from pathways.process import run_directory
from pathways.trust import Authority, Credentials, Role, Tokens, certificate_in, join, read_token
from pathways.trust.files import write_private
from pathways.trust.tokens import TokenText


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> str:
    return Authority.create(str(tmp_path / "authority")).folder


@pytest.fixture
def tokens(folder: str, clock: Clock) -> Tokens:
    return Tokens(folder, clock)


def test_a_host_s_token_is_taken_once_and_a_client_s_often(tokens: Tokens) -> None:
    host, client, three = tokens.make("host", 60), tokens.make("client", 60), tokens.make(Role.HOST, 60, uses=3)
    assert tokens.take(host) is Role.HOST
    with pytest.raises(errors.PermissionDeniedError, match="token 1 was used 1 of 1 times; make a new one"):
        tokens.take(host)
    assert [tokens.take(client) for _ in range(20)] == [Role.CLIENT] * 20
    assert [tokens.take(three, f"holder {n}") for n in (0, 1, 0, 1, 2, 2, 0)] == [Role.HOST] * 7
    with pytest.raises(errors.PermissionDeniedError, match="token 3 was used 3 of 3 times"):
        tokens.take(three, "holder 3")
    assert [(each.number, each.uses, each.used) for each in tokens.list()] == [(1, 1, 1), (2, None, 20), (3, 3, 3)]


def test_a_token_expires(tokens: Tokens, clock: Clock) -> None:
    token = tokens.make("client", 60)
    clock.now += 59.9
    assert tokens.take(token) is Role.CLIENT
    clock.now += 0.2
    with pytest.raises(errors.PermissionDeniedError, match="token 1 has expired 1 s ago"):
        tokens.take(token)
    assert tokens.list()[0].state(clock.now) == "expired"


def test_an_expired_token_does_not_serve_its_holder_either(tokens: Tokens, clock: Clock) -> None:
    token = tokens.make("host", 60)
    tokens.take(token, "me")
    clock.now += 61
    with pytest.raises(errors.PermissionDeniedError, match="expired"):
        tokens.take(token, "me")


def test_a_token_is_revoked(tokens: Tokens, folder: str) -> None:
    token, other = tokens.make("client", 60), tokens.make("host", 60)
    tokens.take(other, "me")
    for number in (1, 2, 2):
        tokens.revoke(number)
    for text in (token, other):
        with pytest.raises(errors.PermissionDeniedError, match=r"token \d was revoked"):
            tokens.take(text, "me")
    assert tokens.is_revoked(1) and Tokens(folder).is_revoked(2) and not tokens.is_revoked(None)
    for number in (0, -1, 3):
        with pytest.raises(errors.OptionError, match="there is no token"):
            tokens.revoke(number)


def test_what_left_the_list_stays_revoked_and_its_number_never_comes_again(tokens: Tokens, clock: Clock) -> None:
    for _ in range(3):
        tokens.make("host", 60)
    tokens.revoke(2)
    clock.now += 8 * 24 * 3600
    assert tokens.make("host", 60).split(".")[2] == "4"
    assert [each.number for each in tokens.list()] == [4]
    tokens.revoke(1)  # who came in with it is shut out, also after this long
    assert [tokens.is_revoked(number) for number in range(1, 5)] == [True, True, False, False]


def test_a_wrong_secret_role_number_or_cluster_is_refused(tokens: Tokens, tmp_path: pathlib.Path) -> None:
    token = tokens.make("client", 60)
    _, role, number, secret, fingerprint = token.split(".")
    other = Tokens(Authority.create(str(tmp_path / "other")).folder).make("client", 60).split(".")
    for changed, reason in (
        (f"pathways1.{role}.{number}.{other[3]}.{fingerprint}", "unknown"),
        (f"pathways1.operator.{number}.{secret}.{fingerprint}", "unknown"),
        (f"pathways1.{role}.7.{secret}.{fingerprint}", "unknown"),
        (".".join(other), "of another cluster"),
    ):
        with pytest.raises(errors.PermissionDeniedError, match=reason) as caught:
            tokens.take(changed)
        assert not SECRETS.search(str(caught.value)) and secret not in str(caught.value)
    assert tokens.list()[0].used == 0


@pytest.mark.parametrize("kind", ["role", "version", "short", "long", "end", "letters", "none", "number", "bytes"])
def test_what_is_no_token(tokens: Tokens, kind: str) -> None:
    token = tokens.make("client", 60)
    changed = {
        "role": token.replace("client", "controller"),
        "version": token.replace("pathways1", "pathways2"),
        "short": token[:-1],
        "long": token + "0",
        "end": token + "\n",
        "letters": token.replace(".client.1.", ".client.١."),
        "none": None,
        "number": 7,
        "bytes": token.encode(),
    }[kind]
    with pytest.raises(errors.PermissionDeniedError, match="this is no token: expected pathways1") as caught:
        tokens.take(changed)  # type: ignore[arg-type]
    assert token.split(".")[3] not in str(caught.value)


@pytest.mark.parametrize(
    ("role", "ttl_s", "uses"),
    [("controller", 60, 1), ("root", 60, 1), ("host", 0, 1), ("host", -1, 1), ("host", float("nan"), 1),
     ("host", float("inf"), 1), ("host", 1e9, 1), ("host", "60", 1), ("host", True, 1), ("host", 60, 0),
     ("host", 60, -2), ("host", 60, 1 << 21), ("host", 60, 1.5), ("host", 60, True)],
)  # fmt: skip
def test_a_token_that_makes_no_sense_is_not_made(tokens: Tokens, role: str, ttl_s: float, uses: int) -> None:
    with pytest.raises(errors.OptionError):
        tokens.make(role, ttl_s, uses)
    assert tokens.list() == []


def test_a_secret_is_nowhere_but_in_its_text(tokens: Tokens, folder: str) -> None:
    text = tokens.make("host", 60)
    secret = text.split(".")[3]
    assert len(secret) == 43
    tokens.take(text)
    written = b"".join(path.read_bytes() for path in pathlib.Path(folder).iterdir())
    assert secret.encode() not in written
    assert secret not in repr(TokenText.parse(text)) + repr(tokens.list())


# Several at once.


def test_one_of_many_takes_the_token(tokens: Tokens) -> None:
    token, clients = tokens.make("host", 60), tokens.make("client", 60)
    results = at_once(20, lambda n: tokens.take(token, f"holder {n}"))
    assert results.count(Role.HOST) == 1
    assert sum(isinstance(each, errors.PermissionDeniedError) for each in results) == 19
    assert at_once(20, lambda n: tokens.take(clients)) == [Role.CLIENT] * 20
    assert [each.used for each in tokens.list()] == [1, 20]


def test_one_of_many_joins_with_the_token(controller: Controller) -> None:
    token = controller.tokens.make("host", 60)
    results = at_once(20, lambda n: join(controller.address, token, f"machine-{n}", timeout_s=60))
    assert sum(isinstance(each, Credentials) for each in results) == 1
    assert sum(isinstance(each, errors.PermissionDeniedError) for each in results) == 19
    assert controller.port.refused == 19


WORKER = """
import sys
from pathways import errors
from pathways.trust import Tokens
tokens = Tokens(sys.argv[1])
print("ready", flush=True)
shared = sys.stdin.readline().split()
won = 0
for n in range(20):
    tokens.take(tokens.make("host", 60))
    if n % 4 == 0:
        text = tokens.make("client", 60)
        tokens.revoke(int(text.split(".")[2]))
for text in shared:
    try:
        tokens.take(text)
        won += 1
    except errors.PermissionDeniedError:
        pass
print(won)
"""


def test_processes_share_the_tokens(tokens: Tokens, folder: str) -> None:
    """No token and no use is lost when four processes make, take and revoke; a reader beside them sees whole files."""
    shared = [Tokens(folder).make("host", 600) for _ in range(20)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen([sys.executable, "-c", WORKER, folder], **pipes) for _ in range(4)]  # type: ignore[call-overload]
    stop, seen = threading.Event(), [0]

    def read() -> None:
        while not stop.is_set():
            tokens.list()
            tokens.is_revoked(3)
            seen[0] += 1

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert [worker.stdout.readline() for worker in workers] == ["ready\n"] * 4
        for worker in workers:
            worker.stdin.write(" ".join(shared) + "\n")
            worker.stdin.flush()
        won = [int(worker.communicate()[0]) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        stop.set()
        reader.join()
    assert sum(won) == len(shared) and seen[0] > 0
    records = tokens.list()
    assert [each.number for each in records] == list(range(1, 20 + 4 * 25 + 1))
    assert sum(each.used for each in records) == 20 + 4 * 20
    assert sum(each.is_revoked for each in records) == 4 * 5


def test_a_file_is_old_or_new_when_writing_it_fails(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    write_private(str(path), b"old")

    def fails(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="No space"):
        write_private(str(path), b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["secret"]


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"version": 2}', '{"version": 1}', "[" * 100_000])
def test_a_damaged_file_lets_nobody_in(tokens: Tokens, folder: str, text: str) -> None:
    token = tokens.make("client", 60)
    pathlib.Path(folder, "tokens.json").write_text(text)
    for call in (lambda: tokens.take(token), tokens.list, lambda: tokens.is_revoked(1), lambda: tokens.make("host", 1)):
        with pytest.raises(errors.OptionError, match="is damaged"):
            call()


def test_a_full_disk_spends_nothing_and_gives_nothing(
    controller: Controller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    token = controller.tokens.make("host", 60)
    with monkeypatch.context() as patch:
        patch.setattr("pathways.trust.tokens.write_private", lambda *_: (_ for _ in ()).throw(OSError(28, "No space")))
        with pytest.raises(errors.ConnectError, match="cannot take tokens now: see the controller's log"):
            join(controller.address, token, "a")
        assert "No space" in caplog.text
    assert join(controller.address, token, "a").name == "a"


# The command.


def run(*arguments: str) -> str:
    done = CliRunner().invoke(cli.main, ["token", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def fails(*arguments: str) -> str:
    done = CliRunner().invoke(cli.main, ["token", *arguments])
    assert done.exit_code != 0, done.output
    return done.output


def test_a_certificate_that_cannot_be_kept_costs_no_token(controller: Controller, tmp_path: pathlib.Path) -> None:
    text, number = controller.tokens.make(Role.HOST, 60), 1
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "none" / "own.pem", tmp_path / "folder", pathlib.Path("/proc/own.pem")):
        with pytest.raises(errors.OptionError, match=r"cannot be written|cannot be read"):
            certificate_in(str(path), controller.address, text, "m", "host")
    assert [(record.number, record.used) for record in controller.tokens.list()] == [(number, 0)]
    kept = certificate_in(str(tmp_path / "own.pem"), controller.address, text, "m", "host")
    assert Credentials.load(str(tmp_path / "own.pem")) == kept
    assert os.listdir(tmp_path / "folder") == []


def test_a_home_that_is_read_only_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/proc/none")
    with pytest.raises(errors.OptionError, match=r"certificates are kept in /proc/none/.*XDG_STATE_HOME"):
        run_directory.state_folder()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert os.path.isdir(run_directory.state_folder())


def test_the_command_makes_lists_and_revokes(controller: Controller, tmp_path: pathlib.Path) -> None:
    at = ("--authority", controller.authority.folder)
    text = run("--role", "host", "--ttl", "90s", *at)
    own = join(controller.address, text.strip(), "m")
    assert own.role is Role.HOST and text == text.strip() + "\n"
    path = tmp_path / "token"
    assert run("--role", "client", "--uses", "2", "--file", str(path), *at) == ""
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert join(controller.address, read_token(str(path)), "c").role is Role.CLIENT
    run("--role", "operator", "--uses", "any", *at)
    rows = json.loads(run("list", "--json", *at))
    assert [(row["number"], row["role"], row["state"], row["uses"], row["used"]) for row in rows] == [
        (1, "host", "used", 1, 1),
        (2, "client", "valid", 2, 1),
        (3, "operator", "valid", None, 0),
    ]
    assert rows[0]["expires"] == pytest.approx(time.time() + 90, abs=60)
    assert run(*at, "revoke", "1", "2") == "token 1 is revoked\ntoken 2 is revoked\n"
    table = run("list", *at)
    assert table.split()[:6] == ["token", "role", "state", "expires", "in", "used"] and table.count("revoked") == 2
    with pytest.raises(errors.PermissionDeniedError, match="was revoked"):
        controller.tokens.take(read_token(str(path)))


def test_the_command_finds_the_folder_of_the_live_cluster(
    folder: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    monkeypatch.setattr(run_directory, "_bases", lambda: [str(tmp_path)])
    assert "no cluster of yours on this machine listens" in fails("--role", "host")
    locks = []
    try:
        for n in range(3):
            directory = tmp_path / f"pathways-{os.getuid()}-{n}"
            directory.mkdir()
            locks.append(open(directory / "lock", "w"))  # noqa: SIM115
            fcntl.flock(locks[-1], fcntl.LOCK_EX)
            if n == 1:
                os.symlink(folder, run_directory.authority_folder(str(directory)))
                assert json.loads(run("list", "--json")) == []
                assert run("--role", "host") and len(json.loads(run("list", "--json"))) == 1
        Authority.create(run_directory.authority_folder(str(tmp_path / f"pathways-{os.getuid()}-2")))
        assert "2 of your clusters listen" in (refused := fails("list")) and "by --authority" in refused
        assert all(
            run_directory.authority_folder(str(tmp_path / f"pathways-{os.getuid()}-{n}")) in refused for n in (1, 2)
        )
        address = f"unix:{tmp_path}/pathways-{os.getuid()}"
        monkeypatch.setenv("PATHWAYS_ADDRESS", f"{address}-1/control.sock")
        assert len(json.loads(run("list", "--json"))) == 1
        monkeypatch.setenv("PATHWAYS_ADDRESS", f"{address}-2/control.sock")
        assert json.loads(run("list", "--json")) == []
        for other in (f"{address}-0/control.sock", "pathways://10.0.0.1:7400"):
            monkeypatch.setenv("PATHWAYS_ADDRESS", other)
            assert f"PATHWAYS_ADDRESS={other} is no cluster of yours on this machine that listens" in fails("list")
    finally:
        for lock in locks:
            lock.close()


def test_the_command_refuses_what_makes_no_sense(folder: str, tmp_path: pathlib.Path) -> None:
    at = ("--authority", folder)
    assert "expected --role" in fails(*at)
    assert "controller" in fails("--role", "controller", *at)
    assert "they are not for 'list'" in fails("--role", "host", "list", *at)
    assert "expected a time like" in fails("--role", "host", "--ttl", "soon", *at)
    assert "at most 366 days" in fails("--role", "host", "--ttl", "400d", *at)
    assert "expected a positive number or any" in fails("--role", "host", "--uses", "0", *at)
    assert "there is no token 7" in fails("revoke", "7", *at)
    assert "cannot be opened" in fails("--role", "host", "--authority", str(tmp_path / "x"))
    (tmp_path / "empty").mkdir(0o700)
    assert "has no authority" in fails("--role", "host", "--authority", str(tmp_path / "empty"))
    nowhere = str(tmp_path / "no" / "token")
    assert "cannot be written" in fails("--role", "host", "--file", nowhere, *at)
    assert [each.is_revoked for each in Tokens(folder).list()] == [True]


def test_times_as_people_write_them() -> None:
    assert [DURATION.convert(text, None, None) for text in ("90", "90s", "1.5m", "1h", " 7d ")] == [
        90, 90, 90, 3600, 604800,
    ]  # fmt: skip
    for text in ("", "0", "h", "1 year", "-1h", "1e3", "inf", "١h"):
        with pytest.raises(click.BadParameter):
            DURATION.convert(text, None, None)


def test_a_token_file(tmp_path: pathlib.Path, tokens: Tokens) -> None:
    path, token = tmp_path / "token", tokens.make("host", 60)
    path.write_text(f"  {token}\r\n\n")
    assert read_token(str(path)) == token
    with pytest.raises(errors.OptionError, match="cannot be read: No such file"):
        read_token(str(tmp_path / "nowhere"))
    for content in (b"", b"\xff\xfe", token.encode()[:50], token.encode() * 2, b"x" * 100_000):
        path.write_bytes(content)
        with pytest.raises(errors.PermissionDeniedError, match="this is no token") as caught:
            read_token(str(path))
        assert str(path) in str(caught.value) and not SECRETS.search(str(caught.value))
