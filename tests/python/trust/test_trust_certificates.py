"""Certificates over time and on disk: renewal, revoked tokens, files; and the addresses of ports.

CERT-2  test_credentials_are_kept_private, and the fixture `controller` in every test
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import ssl
import stat
import subprocess
import sys
import threading
import time

import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID
from namespaces import why_not
from trust_cases import Controller, lines, read_exactly, until

from pathways import errors
from pathways.trust import (
    Address,
    Authority,
    Credentials,
    Port,
    Renewal,
    Role,
    Tokens,
    dial,
    join,
    renewed_at,
)

# Renewing and revoking.


def test_a_renewed_certificate_has_the_same_owner_and_a_new_key(controller: Controller) -> None:
    token = controller.tokens.make(Role.OPERATOR, 60)
    own = join(controller.address, token, "me")
    renewed = renewed_at(controller.address, own)
    assert renewed.identity == dataclasses.replace(own.identity, expires=renewed.expires, key=renewed.identity.key)
    assert renewed.key != own.key and renewed.certificate != own.certificate
    dial(controller.address, renewed, "status").close()
    again = controller.authority.renewed(renewed)
    assert again.identity.token == 1 and again.key != renewed.key


def test_a_revoked_token_shuts_out_who_came_in_with_it(
    controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (join(controller.address, controller.tokens.make(Role.HOST, 60), name) for name in "mn")
    with dial(controller.address, first, "link") as sock:
        controller.tokens.revoke(1)
        sock.sendall(b"still here")  # what is open stays open
        assert read_exactly(sock, 10) == b"still here"
    for call in (lambda: dial(controller.address, first, "link"), lambda: renewed_at(controller.address, first)):
        with pytest.raises(errors.PermissionDeniedError, match="token 1, by which m came in, was revoked"):
            call()
    dial(controller.address, second, "link").close()
    assert len(lines(caplog)) == 2


def test_a_certificate_renews_by_itself(controller: Controller, tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "own.pem")
    first = controller.credentials(Role.HOST, "m", valid_s=3)
    with Renewal(first, lambda old: renewed_at(controller.address, old), path) as renewal:
        assert renewal.current() is first
        until(lambda: renewal.current() is not first, "a new certificate")
        assert time.time() >= first.issued + first.life_s * 2 / 3 - 0.01
        assert renewal.current().life_s > 3600
        dial(controller.address, renewal, "link").close()
        until(lambda: os.path.exists(path), "the file")
    assert Credentials.load(path) == renewal.current()
    assert not any(thread.name == "pathways-renewal" for thread in threading.enumerate())


def test_a_renewal_that_fails_is_tried_again(controller: Controller, caplog: pytest.LogCaptureFixture) -> None:
    tries: list[float] = []
    old, new = controller.credentials(Role.HOST, "m", valid_s=-5), controller.credentials(Role.HOST, "m")

    def renew(credentials: Credentials) -> Credentials:
        tries.append(time.monotonic())
        if len(tries) == 1:
            raise errors.ConnectError("nobody is there")
        return new

    with Renewal(old, renew) as renewal:
        until(lambda: renewal.current() is new, "the second try")
    assert len(tries) == 2 and tries[1] - tries[0] >= 0.9
    assert "the certificate of host m is not renewed yet" in caplog.text and "nobody is there" in caplog.text


def test_a_certificate_that_a_wrong_clock_got_is_renewed_when_the_clock_is_right(controller: Controller) -> None:
    """It is not valid yet then, and nobody takes it."""
    right, ahead = controller.credentials(Role.HOST, "m"), 30 * 3600.0
    wrong = dataclasses.replace(right, issued=right.issued + ahead, expires=right.expires + ahead)
    renewed = controller.credentials(Role.HOST, "m")
    with Renewal(wrong, lambda old: renewed) as renewal:
        until(lambda: renewal.current() is renewed, "a certificate that is valid now")


def test_a_port_shows_its_renewed_certificate(controller: Controller) -> None:
    first, second = (controller.credentials(Role.CONTROLLER, name) for name in ("first", "second"))
    turn = threading.Event()

    class Renewed:
        def current(self) -> Credentials:
            return second if turn.is_set() else first

    port = controller.serve(Port("127.0.0.1:0", Renewed(), controller.authority, controller.tokens))
    with port:
        names = []
        for _ in range(2):
            with dial(port.address, controller.credentials(Role.HOST), "link") as sock:
                assert isinstance(sock, ssl.SSLSocket)
                der = sock.getpeercert(binary_form=True)
                assert der is not None
                subject = x509.load_der_x509_certificate(der).subject
                names += [each.value for each in subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
            turn.set()
    assert names == ["first", "second"]


# Files.


def test_credentials_are_kept_private(controller: Controller, tmp_path: pathlib.Path) -> None:
    own, path = controller.credentials(Role.CLIENT, "me"), str(tmp_path / "own.pem")
    own.save(path)
    assert Credentials.load(path) == own
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert "PRIVATE" not in repr(own) + str(own)
    folder = controller.authority.folder
    controller.tokens.make(Role.HOST, 60)
    modes = {name: stat.S_IMODE(os.stat(os.path.join(folder, name)).st_mode) for name in os.listdir(folder)}
    assert set(modes.values()) == {0o600} and stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    os.chmod(path, 0o640)
    with pytest.raises(errors.PermissionDeniedError, match=r"others may open .*chmod 600"):
        Credentials.load(path)
    os.chmod(os.path.join(folder, "authority.key"), 0o644)
    with pytest.raises(errors.PermissionDeniedError, match=r"others may open .*chmod 600"):
        Authority.open(folder)
    os.chmod(folder, 0o755)
    for opens in (Authority.open, Tokens):
        with pytest.raises(errors.PermissionDeniedError, match=r"others may open .*chmod 700"):
            opens(folder)


def test_an_authority_is_not_made_where_others_may_look(tmp_path: pathlib.Path) -> None:
    open_to_all = tmp_path / "shared"
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    with pytest.raises(errors.PermissionDeniedError, match="name a folder that is not there yet") as caught:
        Authority.open_or_create(str(open_to_all))
    assert "chmod" not in str(caught.value)  # it may be a folder of the system
    assert not list(open_to_all.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(errors.OptionError, match="is no folder"):
        Authority.open_or_create(str(tmp_path / "file"))


def test_an_authority_is_found_again(controller: Controller, tmp_path: pathlib.Path) -> None:
    again = Authority.open(controller.authority.folder)
    assert again.fingerprint == controller.authority.fingerprint == controller.own.fingerprint
    dial(controller.address, again.credentials(Role.HOST, "m"), "link").close()
    with pytest.raises(errors.OptionError, match="has an authority already"):
        Authority.create(controller.authority.folder)
    with pytest.raises(errors.OptionError, match="cannot be opened"):
        Authority.open(str(tmp_path / "nowhere"))
    empty = str(tmp_path / "new" / "deep")
    assert Authority.open_or_create(empty).fingerprint == Authority.open_or_create(empty).fingerprint
    key = pathlib.Path(empty, "authority.key")
    key.write_bytes(pathlib.Path(controller.authority.folder, "authority.key").read_bytes())
    with pytest.raises(errors.OptionError, match="not that of its certificate"):
        Authority.open(empty)
    key.write_bytes(b"nothing")
    with pytest.raises(errors.OptionError, match="cannot be read"):
        Authority.open(empty)


def test_files_that_are_no_credentials_are_refused(controller: Controller, tmp_path: pathlib.Path) -> None:
    own, other = controller.credentials(Role.CLIENT), controller.credentials(Role.CLIENT)
    path = tmp_path / "own.pem"
    path.touch(0o600)
    with pytest.raises(errors.OptionError, match="cannot be read"):
        Credentials.load(str(tmp_path / "nowhere"))
    for text in ("", "nothing", own.certificate + own.authority, own.key, own.certificate + own.key + own.key):
        path.write_text(text)
        with pytest.raises(errors.OptionError):
            Credentials.load(str(path))
    path.write_text(own.certificate + other.key + own.authority)
    with pytest.raises(errors.OptionError, match="not that of the certificate"):
        Credentials.load(str(path))


# Addresses.


def test_addresses() -> None:
    cases = {
        "pathways://node7:7400": ("node7", 7400),
        "node7.example.org.:1": ("node7.example.org.", 1),
        "pathways://10.0.0.7:65535/": ("10.0.0.7", 65535),
        "pathways://[::1]:7400": ("::1", 7400),
        "[fe80::1%eth0]:7400": ("fe80::1%eth0", 7400),
        "a_b-c:80": ("a_b-c", 80),
    }
    for text, (host, port) in cases.items():
        address = Address.parse(text)
        assert (address.host, address.port) == (host, port) and Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "text",
    ["", "node7", "node7:", "node7:0", "node7:65536", "node7:-1", "node7:+1", "node7:١", ":7400", "::1:7400", "[::1]",
     "[node7]:1", "[::1", "1.2.3:4", "256.0.0.1:1", "a b:1", "a..b:1", "-a:1", "a/b:1", "u@h:1", "http://h:1", "ä:1",
     f"{'x' * 64}:1", f"{'x.' * 127}xx:1", "h:1/x", 7, None],
)  # fmt: skip
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(errors.OptionError, match="expected pathways://HOST:PORT"):
        Address.parse(text)


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_machine_without_proc_is_told(controller: Controller, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "own.pem"
    controller.credentials(Role.HOST).save(str(path))
    program = (
        "import sys; from pathways.trust import Credentials, dial\n"
        "try: dial(sys.argv[1], Credentials.load(sys.argv[2]), 'link')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    command = [sys.executable, "-c", program, controller.address, str(path)]
    hidden = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /proc && exec "$@"', "sh", *command]
    done = subprocess.run(hidden, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("ConnectError /proc is not mounted here, and TLS needs it"), done
