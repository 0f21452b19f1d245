"""Who comes in and what it may do, against a real port: joining, roles, and ports of other clusters.

CERT-1  test_a_purpose_is_for_its_roles, test_what_a_caller_says_of_itself_counts_for_nothing,
        test_a_host_cannot_pose_as_the_controller, test_a_request_names_nobody
CERT-2  the fixture `controller` in every test
CERT-5  test_a_token_is_not_sent_to_another_cluster, test_a_stolen_authority_certificate_is_not_enough
"""

from __future__ import annotations

import dataclasses
import pathlib
import socket
import ssl
import time

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from trust_cases import Controller, forged, lines, read_exactly, until

from pathways import errors
from pathways.process.config import PROTOCOL_VERSION
from pathways.trust import (
    Authority,
    Port,
    Role,
    Tokens,
    ask,
    check_name,
    dial,
    dial_answered,
    first_line,
    join,
)
from pathways.trust.credentials import new_key, new_request
from pathways.trust.tokens import Taken

# Joining.


def test_a_token_is_traded_for_a_certificate_that_opens_a_link(controller: Controller) -> None:
    own = join(controller.address, controller.tokens.make(Role.HOST, 60), "machine-1")
    assert (own.role, own.name, own.identity.token) == (Role.HOST, "machine-1", 1)
    assert own.life_s == pytest.approx(24 * 3600, abs=2) and time.time() < own.expires
    sock, answer = dial_answered(controller.address, own, "link", shape=[2, 3])
    with sock:
        assert isinstance(sock, ssl.SSLSocket) and sock.version() == "TLSv1.3" and sock.gettimeout() is None
        sock.sendall(b"x" * 100_000)
        assert read_exactly(sock, 100_000) == b"x" * 100_000
        assert [(str(who), what) for who, what in controller.port.peers()] == [("host machine-1", "link")]
    assert answer == {"ok": True, "number": 1}
    identity, hello = controller.seen[0]
    assert identity.is_encrypted and identity.expires == own.expires and hello["shape"] == [2, 3]
    until(lambda: controller.port.peers() == [], "the link is gone")


@pytest.mark.parametrize("role", [Role.CLIENT, Role.HOST, Role.OPERATOR])
def test_a_token_gives_its_role(controller: Controller, role: Role) -> None:
    assert join(controller.address, controller.tokens.make(role, 60), "a").role is role


@pytest.mark.parametrize("name", ["", "a b", "ä", "a/b", "x" * 65, "a\n", "..", "a,CN=b", "pathways1.a"])
def test_an_odd_name_is_refused_on_both_sides(controller: Controller, name: str) -> None:
    token = controller.tokens.make(Role.HOST, 60)
    with pytest.raises(errors.OptionError, match="a name is 1 to 64"):
        join(controller.address, token, name)
    with pytest.raises(errors.OptionError, match="a name is 1 to 64"):
        ask(controller.address, controller.own, "join", token=token, name=name, request=new_request(new_key()))
    assert controller.tokens.list()[0].used == 0


def test_names_as_machines_have_them_are_taken() -> None:
    assert [check_name(name) for name in ("a", "Node-7.rack_2.example", "x" * 64, "-")] != []


def wrong_requests() -> dict[str, str]:
    def text(request: x509.CertificateSigningRequest) -> str:
        return request.public_bytes(serialization.Encoding.PEM).decode()

    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    good = new_request(new_key())
    middle = len(good) // 2
    swapped = "A" if good[middle] != "A" else "B"
    return {
        "rsa": text(builder.sign(rsa.generate_private_key(65537, 2048), hashes.SHA256())),
        "curve": text(builder.sign(ec.generate_private_key(ec.SECP384R1()), hashes.SHA256())),
        "changed": good[:middle] + swapped + good[middle + 1 :],
        "empty": "",
        "garbage": "-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n",
        "long": good + " " * 10000,
        "letters": "ä",
    }


@pytest.mark.parametrize("kind", ["rsa", "curve", "changed", "empty", "garbage", "long", "letters"])
def test_a_wrong_request_is_refused_and_spends_no_use(controller: Controller, kind: str) -> None:
    token = controller.tokens.make(Role.HOST, 60)
    with pytest.raises(errors.OptionError, match="request"):
        ask(controller.address, controller.own, "join", token=token, name="a", request=wrong_requests()[kind])
    assert controller.tokens.list()[0].used == 0
    assert join(controller.address, token, "a").role is Role.HOST


def test_a_request_names_nobody(controller: Controller) -> None:
    key = new_key()
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, "controller"),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, "controller"),
        ]
    )
    names = x509.SubjectAlternativeName([x509.DNSName("controller.pathways")])
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(subject)
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    text = request.public_bytes(serialization.Encoding.PEM).decode()
    token = controller.tokens.make(Role.CLIENT, 60)
    answer = ask(controller.address, controller.own, "join", token=token, name="me", request=text)
    certificate = x509.load_pem_x509_certificates(answer["certificate"].encode())[0]
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert found.get_values_for_type(x509.DNSName) == ["client.pathways"]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert {each.value for each in certificate.subject} == {"me", "client", "1"}


def test_who_lost_the_answer_comes_again_with_its_key(controller: Controller) -> None:
    token, request = controller.tokens.make(Role.HOST, 60), new_request(new_key())
    for _ in range(3):
        ask(controller.address, controller.own, "join", token=token, name="a", request=request)
    with pytest.raises(errors.PermissionDeniedError, match="used 1 of 1 times"):
        join(controller.address, token, "a")


# Roles.


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize(
    ("purpose", "allowed"), [("link", "host"), ("run", "client"), ("status", "client or operator"), ("nope", "")]
)
def test_a_purpose_is_for_its_roles(
    controller: Controller, role: Role, purpose: str, allowed: str, caplog: pytest.LogCaptureFixture
) -> None:
    own = controller.credentials(role, "me")
    if role in allowed.split(" or "):
        dial(controller.address, own, purpose).close()
        return
    expected = f"me has the role {role}, and '{purpose}' is for {allowed}" if allowed else "no purpose 'nope'"
    with pytest.raises(errors.PathwaysError, match=expected) as caught:
        dial(controller.address, own, purpose)
    assert isinstance(caught.value, errors.PermissionDeniedError if allowed else errors.OptionError)
    assert controller.seen == []
    (line,) = lines(caplog)
    assert line.startswith(f"{role} me at 127.0.0.1:") and expected in line


def test_what_a_caller_says_of_itself_counts_for_nothing(controller: Controller) -> None:
    own = controller.credentials(Role.CLIENT, "me")
    lies = {"role": "operator", "name": "you", "identity": {"role": "controller"}}
    dial(controller.address, own, "run", **lies).close()
    identity = controller.seen[0][0]
    assert (identity.role, identity.name) == (Role.CLIENT, "me")


def test_who_shows_no_certificate_gets_nothing_but_a_certificate(
    controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    for purpose in ("link", "run", "status", "nope", "renew"):
        with controller.secure() as sock:
            sock.sendall(first_line.hello(purpose, {"name": "me", "token": controller.tokens.make(Role.HOST, 60)}))
            with pytest.raises(errors.PermissionDeniedError, match="certificate"):
                first_line.read_answer(sock, time.monotonic() + 30)
    assert controller.seen == [] and len(lines(caplog)) == controller.port.refused == 5


def test_a_host_cannot_pose_as_the_controller(controller: Controller) -> None:
    host = controller.credentials(Role.HOST, "rogue")
    with Port("127.0.0.1:0", host) as rogue:
        seen: list[object] = []
        rogue.on("run", list(Role), lambda sock, identity, hello: seen.append(hello))
        with pytest.raises(errors.ConnectError, match="has another role"):
            dial(rogue.address, controller.credentials(Role.CLIENT), "run")
        dial(rogue.address, controller.credentials(Role.HOST), "run", expects=Role.HOST).close()
        until(lambda: len(seen) == 1, "the call that expects a host")
        with pytest.raises(errors.PermissionDeniedError, match="makes no certificates"):
            ask(rogue.address, host, "renew", expects=Role.HOST, request=new_request(new_key()))


def test_a_purpose_may_refuse_with_an_error_of_its_own(controller: Controller) -> None:
    def no(identity: object, hello: object) -> dict[str, object]:
        raise errors.SliceError("there is no free place")

    controller.port.on("full", [Role.HOST], lambda *_: None, no)
    with pytest.raises(errors.SliceError, match="no free place"):
        dial(controller.address, controller.credentials(Role.HOST), "full")
    controller.innocent()


def test_a_handler_that_fails_ends_its_connection_only(
    controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(sock: socket.socket, identity: object, hello: object) -> None:
        raise ZeroDivisionError

    controller.port.on("fail", [Role.HOST], fails)
    with dial(controller.address, controller.credentials(Role.HOST), "fail") as sock:
        assert sock.recv(1) == b""
    assert "ZeroDivisionError" in caplog.text
    controller.innocent()


def test_a_handler_has_its_connection_until_it_lets_it_go(controller: Controller) -> None:
    kept: list[socket.socket] = []
    controller.port.on("keep", [Role.HOST], lambda sock, identity, hello: kept.append(sock))
    with dial(controller.address, controller.credentials(Role.HOST), "keep") as sock:
        until(lambda: kept, "the handler has run")
        kept[0].sendall(b"x")
        assert sock.recv(1) == b"x"
        assert [purpose for _, purpose in controller.port.peers()] == ["keep"]
        controller.port.let_go(kept[0])
        controller.port.let_go(kept[0])  # does nothing
        assert sock.recv(1) == b""
    assert not controller.port.peers() and kept[0].fileno() == -1
    controller.innocent()


# Other clusters, ends and clocks.


def test_a_certificate_of_another_cluster_is_refused_on_both_sides(
    controller: Controller, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Authority.create(str(tmp_path / "other")).credentials(Role.HOST, "stranger")
    with pytest.raises(errors.ConnectError, match="not of this cluster"):
        dial(controller.address, other, "link")
    until(lambda: "does not accept this cluster's certificate" in caplog.text, "the line of the port")
    with pytest.raises(errors.PermissionDeniedError, match="another authority's; join again"):
        dial(controller.address, forged(other, controller.own), "link")
    until(lambda: "showed a certificate of another cluster's authority" in caplog.text, "the line of the port")
    assert controller.seen == [] and controller.port.refused == 2
    controller.innocent()


def test_a_certificate_that_signs_itself_is_refused(controller: Controller, tmp_path: pathlib.Path) -> None:
    # The stranger's authority has the same name, and a key identifier of its own.
    other = Authority.create(str(tmp_path / "other"))
    alone = dataclasses.replace(other.credentials(Role.HOST, "x"), certificate=other.pem)
    key = pathlib.Path(other.folder, "authority.key").read_text()
    with pytest.raises(errors.PermissionDeniedError, match="join again"):
        dial(controller.address, forged(dataclasses.replace(alone, key=key), controller.own), "link")


def test_a_host_s_certificate_signs_no_others(controller: Controller, caplog: pytest.LogCaptureFixture) -> None:
    host = controller.credentials(Role.HOST, "rogue")
    issuer = x509.load_pem_x509_certificate(host.certificate.encode())
    signer = serialization.load_pem_private_key(host.key.encode(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = new_key()
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, "boss"),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, "operator"),
        ]
    )
    made = (
        x509.CertificateBuilder(issuer.subject, subject, key.public_key(), 7)
        .not_valid_before(issuer.not_valid_before_utc)
        .not_valid_after(issuer.not_valid_after_utc)
        .sign(signer, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    text = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()).decode()
    chain = made.public_bytes(pem).decode() + host.certificate
    with pytest.raises(errors.PermissionDeniedError):
        dial(
            controller.address, forged(dataclasses.replace(host, certificate=chain, key=text), controller.own), "status"
        )
    assert controller.seen == []
    until(lambda: "showed a certificate that does not hold" in caplog.text, "the line of the port")


def test_an_expired_certificate_is_refused_on_both_sides(
    controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    old = controller.credentials(Role.HOST, "old", valid_s=-5)
    assert old.is_expired
    with pytest.raises(errors.PermissionDeniedError, match=r"has expired .* s ago: join again"):
        dial(controller.address, old, "link")
    assert controller.port.refused == 0
    with pytest.raises(errors.PermissionDeniedError, match="finds this certificate expired: join again"):
        dial(controller.address, forged(old, controller.own), "link")
    until(lambda: "showed a certificate that has expired" in caplog.text, "the line of the port")


def test_a_port_with_an_expired_certificate_is_refused(controller: Controller) -> None:
    expired = controller.credentials(Role.CONTROLLER, valid_s=-5)
    with (
        Port("127.0.0.1:0", expired, controller.authority) as port,
        pytest.raises(errors.ConnectError, match="look at the clocks"),
    ):
        dial(port.address, controller.credentials(Role.HOST), "link")


def test_a_clock_may_be_five_minutes_behind(controller: Controller) -> None:
    own = controller.credentials(Role.HOST)
    for pem in (own.certificate, own.authority):
        begins = x509.load_pem_x509_certificate(pem.encode()).not_valid_before_utc.timestamp()
        assert begins <= time.time() - 299


def test_a_token_is_not_sent_to_another_cluster(controller: Controller, tmp_path: pathlib.Path) -> None:
    other = Controller(tmp_path / "other")
    token = controller.tokens.make(Role.HOST, 60)
    with other.port, pytest.raises(errors.ConnectError, match="not the one that token 1 is for; nothing was sent"):
        join(other.address, token, "a")
    with pytest.raises(errors.PermissionDeniedError, match="of another cluster"):
        other.tokens.take(token)
    assert other.port.refused == 0


def test_a_stolen_authority_certificate_is_not_enough(controller: Controller, tmp_path: pathlib.Path) -> None:
    """The authority's certificate is public: who shows it must still have a certificate signed by it."""
    other = Authority.create(str(tmp_path / "other"))
    heard: list[str] = []

    class Listening(Tokens):
        def take_for(self, text: str, holder: str, name: str = "", key: str = "") -> Taken:
            heard.append(text)
            return super().take_for(text, holder, name, key)

    tokens = Listening(controller.authority.folder)
    foreign, host = other.credentials("controller", "x"), controller.credentials(Role.HOST, "rogue")
    for shown, expected in ((foreign, "not of this cluster"), (host, "has another role")):
        with (
            Port("127.0.0.1:0", shown, controller.authority, tokens) as impostor,
            pytest.raises(errors.ConnectError, match=expected),
        ):
            join(impostor.address, controller.tokens.make(Role.HOST, 60), "a")
    assert heard == []


def test_versions_that_differ_are_named(controller: Controller) -> None:
    for version in (PROTOCOL_VERSION + 1, 10**40):
        with controller.secure(controller.credentials(Role.HOST)) as sock:
            sock.sendall(first_line.encode({"purpose": "link", "protocol": version}))
            with pytest.raises(errors.UnsupportedVersionError, match="install the same version"):
                first_line.read_answer(sock, time.monotonic() + 30)
