"""A key with its certificate: what a process shows to its peers, and the TLS contexts that check theirs.

`pathways.trust.join` and `Authority.credentials` make them; ports and connections use them. Immutable; any thread
may call. A peer is checked by the cluster's authority and by its role, never by a host name: see `server_name`.
"""

from __future__ import annotations

import dataclasses
import os
import re
import ssl
import time
from typing import Protocol

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from pathways import errors
from pathways.trust.files import read_private, write_hideable
from pathways.trust.identity import Identity, Role, identity_of, timestamp

#: How far another machine's clock may be behind: certificates are valid from this long before they are made.
SKEW_S = 300.0
_BLOCK = re.compile(r"-----BEGIN (?P<what>[A-Z ]+)-----\s.*?-----END (?P=what)-----\n?", re.DOTALL)


class HasCredentials(Protocol):
    """`Credentials`, or a `Renewal` of them."""

    def current(self) -> Credentials:
        """Those that are valid now."""
        ...


@dataclasses.dataclass(frozen=True)
class Credentials:
    """A certificate, its private key and the authority's certificate, as PEM. Make them with `of` or `load`.

    Args:
        certificate: the owner's.
        key: the private key of it (CERT-2: in no repr).
        authority: the certificate by which peers are checked.
        identity: who the owner is.
        issued: when the certificate was made, seconds since the epoch.
        expires: when it ends, seconds since the epoch.
    """

    certificate: str = dataclasses.field(repr=False)
    key: str = dataclasses.field(repr=False)
    authority: str = dataclasses.field(repr=False)
    identity: Identity
    issued: float
    expires: float

    @classmethod
    def of(cls, chain: str, key: str) -> Credentials:
        """The credentials of a chain (the certificate, then the authority's) and a key, all PEM.

        Raises:
            OptionError: they do not belong together.
        """
        try:
            owner, authority = x509.load_pem_x509_certificates(chain.encode("ascii"))
            private = serialization.load_pem_private_key(key.encode("ascii"), None)
            owner.verify_directly_issued_by(authority)
            if private.public_key() != owner.public_key():
                raise ValueError("the key is not that of the certificate")
        except (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature) as error:
            raise errors.OptionError(
                f"a certificate and its key do not belong together: {error or 'signature'}"
            ) from None
        pem = serialization.Encoding.PEM
        return cls(
            owner.public_bytes(pem).decode("ascii"),
            key,
            authority.public_bytes(pem).decode("ascii"),
            identity_of(owner.public_bytes(serialization.Encoding.DER)),
            timestamp(owner.not_valid_before_utc) + SKEW_S,
            timestamp(owner.not_valid_after_utc),
        )

    @classmethod
    def load(cls, path: str) -> Credentials:
        """Those that `save` wrote.

        Raises:
            OptionError: the file is not there or has something else in it.
            PermissionDeniedError: others may read the file.
        """
        try:
            text = read_private(path).decode("ascii")
        except errors.PathwaysError:
            raise
        except (OSError, ValueError) as error:
            raise errors.OptionError(f"the certificate file {path} cannot be read: {error}") from None
        blocks = [(match["what"], match[0]) for match in _BLOCK.finditer(text)]
        chain = "".join(block for what, block in blocks if what == "CERTIFICATE")
        keys = [block for what, block in blocks if what == "PRIVATE KEY"]
        if len(keys) != 1:
            raise errors.OptionError(f"{path} is no certificate file of Pathways: expected one private key in it")
        return cls.of(chain, keys[0])

    def save(self, path: str) -> None:
        """Writes all three into one file of mode 0600, which is replaced as a whole, in a folder of its own."""
        write_hideable(path, (self.certificate + self.key + self.authority).encode("ascii"))

    @property
    def role(self) -> Role:
        """The role of the owner."""
        return self.identity.role

    @property
    def name(self) -> str:
        """The name of the owner."""
        return self.identity.name

    @property
    def life_s(self) -> float:
        """Seconds from the making of the certificate to its end."""
        return self.expires - self.issued

    @property
    def fingerprint(self) -> str:
        """That of the authority, as tokens carry it."""
        return x509.load_pem_x509_certificate(self.authority.encode("ascii")).fingerprint(hashes.SHA256()).hex()

    @property
    def is_expired(self) -> bool:
        """Whether the certificate has ended, by the clock of this machine."""
        return time.time() >= self.expires

    def current(self) -> Credentials:
        """Themselves: who takes a `Renewal` takes plain credentials as well."""
        return self

    def server_context(self, wants_peer: bool = True) -> ssl.SSLContext:
        """For the listening end. `wants_peer`: a peer without a certificate is refused; else it is let in without one,
        and one with a wrong certificate is refused all the same.
        """
        context = _context(ssl.PROTOCOL_TLS_SERVER, self.authority)
        context.verify_mode = ssl.CERT_REQUIRED if wants_peer else ssl.CERT_OPTIONAL
        # A resumed session would keep the rights of a certificate that has ended since.
        context.num_tickets = 0
        _load_pair(context, self.certificate, self.key)
        return context

    def client_context(self) -> ssl.SSLContext:
        """For the calling end. `wrap_socket` needs `server_hostname=server_name(role)`, of the role that it expects."""
        context = anonymous_context(self.authority)
        _load_pair(context, self.certificate, self.key)
        return context


def anonymous_context(authority: str) -> ssl.SSLContext:
    """For a caller that has no certificate yet, and knows the authority (PEM)."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, authority)
    context.check_hostname = True
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def unverified_context() -> ssl.SSLContext:
    """For a caller that knows nothing yet: only to ask for the authority's certificate, which a token's fingerprint
    then proves (pathways/trust/joining.py). Nothing secret may be sent on such a connection.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def new_key() -> ec.EllipticCurvePrivateKey:
    """A new private key of the curve P-256."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A private key as PEM (PKCS #8), not encrypted."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def load_key(pem: str) -> ec.EllipticCurvePrivateKey:
    """The private key that `key_pem` wrote."""
    key = serialization.load_pem_private_key(pem.encode("ascii"), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def new_request(key: ec.EllipticCurvePrivateKey) -> str:
    """A request (PKCS #10, PEM) that proves that its sender holds the key. It names nobody: the authority decides."""
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM).decode("ascii")


def _context(protocol: int, authority: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_verify_locations(cadata=authority)
    return context


def _load_pair(context: ssl.SSLContext, certificate: str, key: str) -> None:
    """`ssl` takes a key from a file only. This one is in memory, and no other process finds it.

    Raises:
        ConnectError: this machine has no /proc, where such a file has a name.
    """
    fd = os.memfd_create("pathways-credentials", os.MFD_CLOEXEC)
    with open(fd, "wb") as file:
        file.write((key + certificate).encode("ascii"))
        file.flush()
        path = f"/proc/self/fd/{fd}"
        try:
            context.load_cert_chain(path, path, password=lambda: "")  # without one, ssl would ask at the terminal
        except FileNotFoundError:
            raise errors.ConnectError(
                "/proc is not mounted here, and TLS needs it to take a key from memory: mount it (mount -t proc proc "
                "/proc)"
            ) from None
