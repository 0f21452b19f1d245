"""The cluster's authority: the one key by which all its certificates are signed. `pathways up --listen` makes it, in a
folder of its own, and only the controller opens it.

Any thread may call. The folder has `authority.pem` (the certificate, public), `authority.key`, and what
pathways/trust/tokens.py keeps there. All of it is private to its user (CERT-2).
"""

from __future__ import annotations

import datetime
import os

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pathways import errors
from pathways.trust.credentials import SKEW_S, Credentials, key_pem, new_key, new_request
from pathways.trust.files import check_private_folder, locked, make_private_folder, read_private, write_private
from pathways.trust.identity import Identity, Role, check_name, digest_of, server_name, subject_of

#: The life of a certificate; its owner renews it after two thirds.
DAY_S = 24 * 3600.0
_LIFE_OF_AUTHORITY_S = 10 * 365 * DAY_S
_LONGEST_REQUEST = 8192
_CERTIFICATE, _KEY, _LOCK = "authority.pem", "authority.key", "authority.lock"


class Authority:
    """Signs certificates. Make it with `create`, `open` or `open_or_create`."""

    def __init__(self, folder: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.folder = folder
        self._certificate = certificate
        self._key = key

    @classmethod
    def create(cls, folder: str) -> Authority:
        """Makes a new authority in a folder, which is made with mode 0700.

        Raises:
            OptionError: there is one already, or the folder cannot be made.
            PermissionDeniedError: the folder is there, and others may open it.
        """
        make_private_folder(folder)
        with locked(os.path.join(folder, _LOCK)):
            if os.path.exists(os.path.join(folder, _CERTIFICATE)):
                raise errors.OptionError(f"{folder} has an authority already: open it, or name another folder")
            key = new_key()
            certificate = _self_signed(key)
            write_private(os.path.join(folder, _KEY), key_pem(key))
            write_private(os.path.join(folder, _CERTIFICATE), certificate.public_bytes(serialization.Encoding.PEM))
        return cls(folder, certificate, key)

    @classmethod
    def open(cls, folder: str) -> Authority:
        """The authority in a folder.

        Raises:
            OptionError: there is none, its files make no sense, or it has expired.
            PermissionDeniedError: others may read its key.
        """
        check_private_folder(folder)
        certificate = load_certificate(folder)
        try:
            key = serialization.load_pem_private_key(read_private(os.path.join(folder, _KEY)), None)
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            if isinstance(error, errors.PathwaysError):
                raise
            raise errors.OptionError(f"the authority's key in {folder} cannot be read: {error}") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise errors.OptionError(f"the authority's key in {folder} is not that of its certificate")
        if certificate.not_valid_after_utc < _now():
            raise errors.OptionError(f"the authority in {folder} has expired: make a new one in another folder")
        return cls(folder, certificate, key)

    @classmethod
    def open_or_create(cls, folder: str) -> Authority:
        """The authority in a folder; a new one when there is none. Raises as `open` and `create`."""
        if not os.path.exists(os.path.join(folder, _CERTIFICATE)):
            try:
                return cls.create(folder)
            except errors.OptionError:
                if not os.path.exists(os.path.join(folder, _CERTIFICATE)):  # else another process was quicker
                    raise
        return cls.open(folder)

    @property
    def pem(self) -> str:
        """The authority's certificate, which is public."""
        return self._certificate.public_bytes(serialization.Encoding.PEM).decode("ascii")

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the authority's certificate, in hexadecimal digits. Tokens carry it."""
        return fingerprint_of(self._certificate)

    def issue(self, role: Role | str, name: str, csr_pem: str, valid_s: float = DAY_S, token: int | None = None) -> str:
        """A certificate for the key of a request (PKCS #10), with the authority's own behind it; PEM.

        Of the request only the key is taken: role and name are the caller's to decide.

        Raises:
            OptionError: the request makes no sense, has another kind of key, or the name has odd characters.
        """
        request = check_request(csr_pem)
        now, end = _now(), self._certificate.not_valid_after_utc
        own = self._certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
        role = Role.parse(role)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject_of(role, check_name(name), token))
            .issuer_name(self._certificate.subject)
            .public_key(request)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(seconds=SKEW_S))
            .not_valid_after(min(now + datetime.timedelta(seconds=valid_s), end))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(server_name(role))]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(request), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own.value), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM).decode("ascii") + self.pem

    def credentials(self, role: Role | str, name: str, valid_s: float = DAY_S, token: int | None = None) -> Credentials:
        """A new key with a certificate: for the controller itself, and for who shares its machine."""
        key = new_key()
        return Credentials.of(self.issue(role, name, new_request(key), valid_s, token), key_pem(key).decode("ascii"))

    def renewed(self, credentials: Credentials) -> Credentials:
        """The same identity with a new key and a new life, without a connection: for the controller's own `Renewal`."""
        return self.credentials(credentials.role, credentials.name, credentials.life_s, credentials.identity.token)

    def renew(self, identity: Identity, csr_pem: str, valid_s: float = DAY_S) -> str:
        """A new certificate for a peer that has shown a valid one; its identity stays. Raises as `issue`."""
        return self.issue(identity.role, identity.name, csr_pem, valid_s, identity.token)


def load_certificate(folder: str) -> x509.Certificate:
    """The certificate of the authority in a folder. Raises `OptionError` when there is none."""
    path = os.path.join(folder, _CERTIFICATE)
    try:
        with open(path, "rb") as file:
            return x509.load_pem_x509_certificate(file.read())
    except FileNotFoundError:
        raise errors.OptionError(
            f"{folder} has no authority: `pathways up --listen` makes one; name its folder by --authority"
        ) from None
    except (OSError, ValueError) as error:
        raise errors.OptionError(f"the authority's certificate {path} cannot be read: {error}") from None


def fingerprint_of(certificate: x509.Certificate) -> str:
    """SHA-256 of a certificate, in hexadecimal digits."""
    return certificate.fingerprint(hashes.SHA256()).hex()


def check_request(csr_pem: str) -> ec.EllipticCurvePublicKey:
    """The key of a request whose sender holds the private half.

    Raises:
        OptionError: it makes no sense, or has another kind of key.
    """
    try:
        if not isinstance(csr_pem, str) or len(csr_pem) > _LONGEST_REQUEST:
            raise ValueError(f"expected a text of at most {_LONGEST_REQUEST} characters")
        request = x509.load_pem_x509_csr(csr_pem.encode("ascii"))
        key = request.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise ValueError("expected a key of the curve P-256")
        if not request.is_signature_valid:
            raise ValueError("its signature is wrong")
    except (ValueError, UnsupportedAlgorithm, InvalidSignature) as error:
        raise errors.OptionError(f"the request for a certificate makes no sense: {error}") from None
    return key


def holder_of(request: str) -> str:
    """Who holds the key of a request for a certificate. Raises `OptionError` when the request makes no sense."""
    return digest_of(check_request(request))


def _self_signed(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"pathways authority {identifier.digest.hex()[:16]}")])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - datetime.timedelta(seconds=SKEW_S))
        .not_valid_after(_now() + datetime.timedelta(seconds=_LIFE_OF_AUTHORITY_S))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(key, hashes.SHA256())
    )


def _usage(**allowed: bool) -> x509.KeyUsage:
    names = [
        "digital_signature",
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "key_cert_sign",
        "crl_sign",
        "encipher_only",
        "decipher_only",
    ]
    return x509.KeyUsage(**{name: allowed.get(name, False) for name in names})


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
