"""Roles, names, and who a certificate says that a peer is. Values; pure.

How a certificate of the cluster says it: the subject has the name (common name), the role (organizational unit) and, if
the certificate was got with a token, the token's number (serial number). The only subject alternative name is
`server_name(role)`, so that the usual check of a server's name is a check of its role.

CERT-1 (role): the role and the name of a peer come from its certificate, never from what the peer says.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import hashlib
import re
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import NameOID

from pathways import errors

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
#: How a token begins: see pathways/trust/tokens.py.
TOKEN_PREFIX = "pathways1."
_MOST_SHOWN = 80


class Role(enum.StrEnum):
    """What a peer may do. A token gives one of the first three."""

    CLIENT = "client"  #: runs programs
    HOST = "host"  #: brings devices: a machine agent, and the hosts that it starts
    OPERATOR = "operator"  #: shows and changes what clients may have
    CONTROLLER = "controller"  #: the cluster's own end; never by a token

    @classmethod
    def parse(cls, text: Any) -> Role:
        """The role of this name. Raises `OptionError` when there is none."""
        try:
            return cls(text)
        except ValueError:
            names = ", ".join(cls)
            raise errors.OptionError(f"a role is one of {names}; got {printable(text)}") from None


@dataclasses.dataclass(frozen=True)
class Identity:
    """Who a peer is. `token`: the number of the token that it came in with; None: the authority gave it a certificate
    without one. `expires`: seconds since the epoch; None: a connection without encryption. `peer`: the address that it
    calls from. `key`: SHA-256 of the public key of its certificate, in hexadecimal digits; empty: there is none.
    """

    role: Role
    name: str
    token: int | None = None
    expires: float | None = None
    peer: str = ""
    key: str = ""

    @property
    def is_encrypted(self) -> bool:
        """Whether the connection is TLS, and the identity proved by a certificate."""
        return self.expires is not None

    def __str__(self) -> str:
        return f"{self.role} {self.name}"


def check_name(name: Any) -> str:
    """The name of a machine, a client or an operator, when it is one.

    Raises:
        OptionError: the name has other characters than letters, digits and `._-`, or not 1 to 64 of them.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in (".", "..") or name.startswith(TOKEN_PREFIX):
        raise errors.OptionError(f"a name is 1 to 64 letters, digits, '.', '_' or '-' of ASCII; got {printable(name)}")
    return name


def server_name(role: Role) -> str:
    """The server's name that certificates of a role carry. TLS clients expect it, whatever address they call."""
    return f"{role}.pathways"


def identity_of(certificate: bytes, peer: str = "") -> Identity:
    """Who the owner of a certificate (DER) is. TLS has checked that it is the authority's.

    Raises:
        PermissionDeniedError: it is not as the authority makes them.
    """
    try:
        parsed = x509.load_der_x509_certificate(certificate)
        role, name, token = _subject(parsed.subject)
        end, key = timestamp(parsed.not_valid_after_utc), digest_of(parsed.public_key())
        return Identity(role, name, token, end, peer, key)
    except (ValueError, errors.OptionError) as error:
        raise errors.PermissionDeniedError(f"the certificate of {peer or 'the peer'} names no role: {error}") from None


def digest_of(key: Any) -> str:
    """SHA-256 of a public key, in hexadecimal digits."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).hexdigest()


def subject_of(role: Role, name: str, token: int | None) -> x509.Name:
    """The subject that a certificate of this owner gets."""
    parts = [
        x509.NameAttribute(NameOID.COMMON_NAME, name),
        x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role.value),
    ]
    if token is not None:
        parts.append(x509.NameAttribute(NameOID.SERIAL_NUMBER, str(token)))
    return x509.Name(parts)


def _subject(subject: x509.Name) -> tuple[Role, str, int | None]:
    def values(oid: x509.ObjectIdentifier) -> list[str]:
        return [str(each.value) for each in subject.get_attributes_for_oid(oid)]

    names, roles, tokens = map(values, (NameOID.COMMON_NAME, NameOID.ORGANIZATIONAL_UNIT_NAME, NameOID.SERIAL_NUMBER))
    if len(names) != 1 or len(roles) != 1 or len(tokens) > 1:
        raise ValueError("its subject has not one name and one role")
    return Role.parse(roles[0]), check_name(names[0]), int(tokens[0]) if tokens else None


def timestamp(moment: datetime.datetime) -> float:
    """Seconds since the epoch of a moment in UTC."""
    return moment.timestamp()


def printable(text: Any) -> str:
    """A text of a peer or a user as it may stand in a log or an error: short, printable, and never a token."""
    plain = text if isinstance(text, str) else f"{text!r:.200}"
    if TOKEN_PREFIX in plain:
        return "(a token)"
    return ascii(plain) if len(plain) <= _MOST_SHOWN else f"{plain[:_MOST_SHOWN]!a}... ({len(plain)} characters)"
